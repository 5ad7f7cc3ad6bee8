"""The direct loop of the simulator: one step per op, with the times of the event loop.

It goes without the events of `gdp.sim.kernels.events`: it finds an op's finish and its tensors'
arrivals as the op starts. The device that decides next is the one whose next start is earliest.
What it takes is known: every op that has not started yet starts no earlier, so what it sends
arrives later. The finish follows, and so does each arrival, where the channel serves this device
alone: its requests come in the order of its finishes. So one step per op replaces its events, with
the same times to the last bit.

It holds where no two devices share a channel and every transfer takes time (`EngineArrays.direct`);
where a transfer is too short for the clock, the run is given up and goes by events. Arrivals are
not in one order over all devices, so `simulate`, which lists transfers, goes by events too.

A device's ops that are ready, or will be at an instant that is known, wait in a heap by (instant,
op). Those that are ready when the device is free are, by rank, in a set of positions; without ranks
in a queue, if that is nearly in order, as it mostly is. O(N (D + log N) + E).
"""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import INNER, INNER_INLINE
from gdp.sim.kernels.bits import add_bit, clear_bits, pop_bit
from gdp.sim.kernels.events import (
    END,
    LANE,
    NEXT,
    NONE,
    ONE_INPUT,
    PAYS_SHIFT,
    PLACED,
    SENT,
    TENSOR,
    U0,
    U1,
    U2,
    run_events,
    send,
)

# Sections in place of those of the event loop. Of Workspace.clock_s: the next start of each device;
# when it is free. Of Workspace.mark: where its heap is, whose section ends with the queue, back to
# front; NEXT: ops started; END: ops that came to the queue or set; ops in the heap; and in place of
# lanes, ops that the queue or set gave. SENT, TENSOR and the channels are as there, for `send`.
FREE = np.uint64(1)
COUNT = np.uint64(3)
TAKEN = LANE
NEAR = np.uint64(32)  # places from the newest of the queue that an op is sorted in by


@numba.njit(**INNER)
@typing.no_type_check
def run_latency(a, w, device, by_rank, record):
    """Latency as of `run_events`, faster; it records in another order."""
    if a.direct:
        latency_s = _run_direct(a, w, device, by_rank, record)
        if latency_s == latency_s:
            return latency_s
    return run_events(a, w, device, by_rank, record)


@numba.njit(**INNER)
@typing.no_type_check
def _run_direct(a, w, device, by_rank, record):
    """The latency in seconds; not a number where a transfer takes none."""
    state, clock_s, mark, heap_s, ready_s = w.state, w.clock_s, w.mark, w.entry_s, w.ready_s
    n, d = np.uint64(len(state)), np.uint64(len(w.busy_s))
    _reset_direct(a, w, device, by_rank, record)
    latency_s = 0.0
    for _ in range(n):
        now_s, i = clock_s[U0], U0
        for j in range(U1, d):
            at_s = clock_s[j]
            i = j if at_s < now_s else i
            now_s = min(now_s, at_s)
        if now_s == np.inf:
            return np.inf  # of an op that its device cannot run
        op = _take(w, i, now_s, by_rank, record)
        seconds = a.op_s_flat[op * d + i] + a.segment_pairs_s[np.uint64(state[op]) & PLACED]
        end_s = now_s + seconds
        latency_s = max(latency_s, end_s)
        if record:
            w.start_s[op] = now_s
            w.finish_s[op] = end_s
            w.busy_s[i] += seconds
        clock_s[FREE * d + i] = end_s
        next_s = heap_s[mark[i]] if mark[COUNT * d + i] > U0 else np.inf
        next_s = 0.0 if mark[END * d + i] > mark[TAKEN * d + i] else next_s
        clock_s[i] = max(next_s, end_s)
        for u in range(np.uint64(a.op_first_use[op]), np.uint64(a.op_first_use[op + U1])):
            reader, tensor = np.uint64(a.use_pairs[U2 * u]), np.uint64(a.use_pairs[U2 * u + U1])
            at = np.uint64(state[reader])
            to = (at & PLACED) >> U1
            arrive_s = end_s
            left = at - ONE_INPUT
            if to != i:
                if mark[TENSOR * d + to] != tensor:
                    send(a, w, tensor, i, to, end_s, record)
                arrive_s = clock_s[SENT * d + to]
                if arrive_s == end_s:
                    return np.nan
                left |= (left >> PAYS_SHIFT) & U1
            state[reader] = left
            arrive_s = max(arrive_s, ready_s[reader])
            ready_s[reader] = arrive_s
            if left < ONE_INPUT:
                _make_ready_from(w, to, arrive_s, reader, by_rank)
    return latency_s


@numba.njit(**INNER)
@typing.no_type_check
def _reset_direct(a, w, device, by_rank, record):
    """Make `w` the state before the first start."""
    n, d = np.uint64(len(w.state)), np.uint64(len(w.busy_s))
    w.mark[: (TAKEN + U1) * d] = U0
    w.mark[TENSOR * d : TAKEN * d] = NONE
    for op in range(n):
        i = np.uint64(device[op])
        w.state[op] = a.state[op] | np.uint32(i << U1)
        w.mark[COUNT * d + i] += U1
    w.ready_s[:] = 0.0
    start = U0
    for i in range(d):
        w.mark[i] = start
        start += w.mark[COUNT * d + i]
        w.mark[COUNT * d + i] = U0
    w.clock_s[:] = 0.0
    w.clock_s[:d] = np.inf
    w.num_sent[0] = 0
    if by_rank:
        clear_bits(w.ready_bits)
    if record:
        w.busy_s[:] = 0.0
        w.start_s[:] = np.inf
        w.finish_s[:] = np.inf
    for k in range(len(a.source_op)):
        op = np.uint64(a.source_op[k])
        _make_ready_from(w, np.uint64(device[op]), 0.0, op, by_rank)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _make_ready_from(w, i, now_s, op, by_rank):
    """Queue an op of device i that is ready from an instant on."""
    clock_s, mark, heap_op = w.clock_s, w.mark, w.entry_op
    n, d = np.uint64(len(w.state)), np.uint64(len(w.busy_s))
    free_s = clock_s[FREE * d + i]
    clock_s[i] = min(clock_s[i], max(now_s, free_s))
    if now_s <= free_s:
        count = mark[END * d + i]
        if by_rank:
            mark[END * d + i] = count + U1
            add_bit(w.ready_bits, i, n, np.uint64(w.position[op]))
            return
        # Back to front: the newest is at `end - count`, the oldest that waits at `end - taken - 1`.
        new = _end(mark, n, d, i) - count - U1
        place = new
        last = min(new + count - mark[TAKEN * d + i], new + NEAR)
        while place < last and _is_later(heap_op[place + U1], now_s, op, w.ready_s):
            place += U1
        if place - new < NEAR:
            mark[END * d + i] = count + U1
            for k in range(new, place):
                heap_op[k] = heap_op[k + U1]
            heap_op[place] = op
            return
    size = mark[COUNT * d + i]
    _rise(w.entry_s, heap_op, mark[i], size, now_s, op)
    mark[COUNT * d + i] = size + U1


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _end(mark, n, d, i):
    """End of the section of device i in the arrays of the heaps."""
    return mark[i + U1] if i + U1 < d else n


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _is_later(other, now_s, op, ready_s):
    """True if another op runs after one that is ready from `now_s` on."""
    other_s = ready_s[other]
    return (other_s > now_s) | ((other_s == now_s) & (other > op))


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _take(w, i, now_s, by_rank, record):
    """Take out of its queues the op that device i starts now."""
    mark, heap_s, heap_op, ready_s = w.mark, w.entry_s, w.entry_op, w.ready_s
    n, d = np.uint64(len(w.state)), np.uint64(len(w.busy_s))
    base, size = mark[i], mark[COUNT * d + i]
    started = mark[NEXT * d + i]
    mark[NEXT * d + i] = started + U1
    taken = mark[TAKEN * d + i]
    if by_rank:
        while size > U0 and heap_s[base] <= now_s:
            mark[END * d + i] += U1
            add_bit(w.ready_bits, i, n, np.uint64(w.position[heap_op[base]]))
            size -= U1
            _sink(heap_s, heap_op, base, size)
        mark[COUNT * d + i] = size
        mark[TAKEN * d + i] = taken + U1
        op = np.uint64(w.by_position[pop_bit(w.ready_bits, i, n)])
    else:
        queued = mark[END * d + i] > taken
        op = np.uint64(heap_op[_end(mark, n, d, i) - taken - U1 if queued else base])
        if queued and size > U0 and heap_s[base] <= ready_s[op]:
            queued = (heap_s[base] == ready_s[op]) & (op < heap_op[base])
            op = op if queued else np.uint64(heap_op[base])
        if queued:
            mark[TAKEN * d + i] = taken + U1
        else:
            size -= U1
            _sink(heap_s, heap_op, base, size)
            mark[COUNT * d + i] = size
    if record:
        w.queue_op[i * n + started] = op
    return op


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _rise(heap_s, heap_op, base, k, now_s, op):
    """Put an op at place k of a heap, or above, where it belongs."""
    while k > U0:
        up = (k - U1) >> U1
        up_s = heap_s[base + up]
        if (up_s < now_s) | ((up_s == now_s) & (heap_op[base + up] < op)):
            break
        heap_s[base + k] = up_s
        heap_op[base + k] = heap_op[base + up]
        k = up
    heap_s[base + k] = now_s
    heap_op[base + k] = op


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _sink(heap_s, heap_op, base, last):
    """Remove the first entry of a heap and sift its last entry, at place `last`, down."""
    k, child = U0, U1
    while child + U1 < last:
        left_s, right_s = heap_s[base + child], heap_s[base + child + U1]
        later = heap_op[base + child] > heap_op[base + child + U1]
        child += np.uint64((right_s < left_s) | ((right_s == left_s) & later))
        heap_s[base + k] = min(left_s, right_s)
        heap_op[base + k] = heap_op[base + child]
        k = child
        child = (k << U1) + U1
    if child < last:
        heap_s[base + k] = heap_s[base + child]
        heap_op[base + k] = heap_op[base + child]
        k = child
    _rise(heap_s, heap_op, base, k, heap_s[base + last], heap_op[base + last])
