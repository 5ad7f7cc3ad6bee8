"""The event simulator: one placement, exact, without allocation.

An op that becomes ready joins its device's queue; a device that finishes takes the next. Channels
are first come first served, so a transfer's arrival is known when it is requested: there are no
arrival events, each lane (pair of devices) is a queue of arrivals in order of time, and a device
merges its lanes when it is about to start an op. Events are therefore one time per device, its
finish or, while idle, its next arrival. O((N + E) D).

Order at one instant: finishes by op id, arrivals, requests by (op, tensor, destination), starts.
What a start or a request of zero seconds causes at the same instant happens in a round of its own,
after all starts: so a device looks at its lanes before the requests of the round are made.
"""

import typing

import numba
import numpy as np

from gdp.sim.bits_kernels import add_bit, clear_bits, pop_bit
from gdp.sim.engine import CHUNK, DEVICE_MASK, OPENS, PENDING

# Columns of Workspace.mark
RUNNING, NEXT, END, TIE = 0, 1, 2, 3  # op or -1; bounds of the queue; first op of the last instant
# Columns of Workspace.clock_s
EVENT, WHILE_BUSY, LAST_READY, SENT = 0, 1, 2, 3  # inf while busy; arrival of Workspace.sent
TO_ARRIVE, TO_FILL = 0, 1  # columns of Workspace.lane


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def run_events(a, w, device, by_rank, record):
    """The latency in seconds of one placement; see `gdp.sim.engine` for the arguments."""
    n, d = a.op_s.shape
    _reset(a, w, device, by_rank, record)
    latency_s = 0.0
    done = 0
    while done < n:
        now_s = np.inf
        for i in range(d):
            now_s = min(now_s, w.clock_s[i, EVENT])
        if now_s == np.inf:
            return np.inf  # an op that its device cannot run never ends
        same, which = 0, 0
        for i in range(d):
            hit = w.clock_s[i, EVENT] == now_s
            same += hit
            which += i * hit
        if same == 1:
            _arrivals(a, w, which, now_s, by_rank)
            if w.mark[which, RUNNING] >= 0:
                _finish(a, w, which, now_s, by_rank, record)
                done += 1
                latency_s = now_s
            _start(a, w, which, now_s, by_rank, record)
        else:
            finished = _round(a, w, now_s, by_rank, record)
            if finished > 0:
                latency_s = now_s
            done += finished
    return latency_s


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _round(a, w, now_s, by_rank, record):
    """Run an instant that several devices share; the number of ops that finished."""
    d = a.op_s.shape[1]
    for i in range(d):
        if w.clock_s[i, EVENT] == now_s:
            _arrivals(a, w, i, now_s, by_rank)
    finished = 0
    while True:
        first, which = a.op_s.shape[0], -1
        for i in range(d):
            op = w.mark[i, RUNNING]
            if w.clock_s[i, EVENT] == now_s and 0 <= op < first:
                first, which = op, i
        if which < 0:
            break
        _finish(a, w, which, now_s, by_rank, record)
        finished += 1
    # A zero-second request may by now have woken an idle device at this instant. It has not looked
    # at its lanes, so it finds nothing to start and wakes again in the next round.
    for i in range(d):
        if w.clock_s[i, EVENT] == now_s:
            _start(a, w, i, now_s, by_rank, record)
    return finished


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def set_rank(w, rank):
    """Make `rank` (int [N]) the priorities of runs with `by_rank`: smallest first, ties by op.

    False where all are equal, which stands for first ready first.
    """
    order = np.argsort(rank, kind="mergesort")
    for k in range(len(order)):
        w.by_position[k] = order[k]
        w.position[order[k]] = k
    return rank[order[0]] != rank[order[-1]]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _reset(a, w, device, by_rank, record):
    n, d = a.op_s.shape
    for i in range(n):
        w.state[i] = a.state[i] | device[i]
    for i in range(d):
        w.mark[i, RUNNING] = -1
        w.mark[i, NEXT] = 0
        w.mark[i, END] = 0
        w.mark[i, TIE] = 0
        w.clock_s[i, EVENT] = 0.0  # every device looks once whether it can start
        w.clock_s[i, WHILE_BUSY] = 0.0
        w.clock_s[i, LAST_READY] = -1.0
        w.sent[i, 0] = -1
        w.sent[i, 1] = -1
        w.busy_s[i] = 0.0
        for j in range(d):
            w.head_s[i, j] = np.inf
            lane = i * d + j
            w.lane[lane, TO_ARRIVE] = lane * CHUNK
            w.lane[lane, TO_FILL] = lane * CHUNK
    # Chunks beyond the first D * D are free, as a list that starts at the last entry.
    chunks = len(w.next_chunk)
    for k in range(d * d, chunks - 1):
        w.next_chunk[k] = k + 1
    w.next_chunk[chunks - 1] = d * d
    w.channel_free_s[:] = 0.0
    w.num_sent[0] = 0
    if record:
        w.start_s[:] = np.inf
        w.finish_s[:] = np.inf
    if by_rank:
        clear_bits(w.ready_bits)
    for k in range(len(a.source_op)):
        op = a.source_op[k]
        _make_ready(w, op, device[op], 0.0, by_rank)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _make_ready(w, op, i, now_s, by_rank):
    """Put an op into the queue of device i: by (instant, op), or by rank."""
    if by_rank:
        add_bit(w.ready_bits, i, len(w.position), w.position[op])
        return
    end = w.mark[i, END]
    if now_s > w.clock_s[i, LAST_READY]:
        w.clock_s[i, LAST_READY] = now_s
        w.mark[i, TIE] = end
        w.queue_op[i, end] = op
    else:
        first = max(w.mark[i, TIE], w.mark[i, NEXT])
        k = end
        while k > first and w.queue_op[i, k - 1] > op:
            w.queue_op[i, k] = w.queue_op[i, k - 1]
            k -= 1
        w.queue_op[i, k] = op
    w.mark[i, END] = end + 1


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _arrivals(a, w, i, now_s, by_rank):
    """Make present on device i what has arrived by now, in the order of arrival."""
    d = a.op_s.shape[1]
    while True:
        first_s = np.inf
        source = 0
        for j in range(d):
            head_s = w.head_s[i, j]
            if head_s < first_s:
                first_s, source = head_s, j
        if first_s > now_s or first_s == np.inf:
            return
        lane = i * d + source
        entry = w.lane[lane, TO_ARRIVE]
        op = w.entry_op[entry]
        _next_entry(w, i, source, lane, entry)
        state = (w.state[op] - PENDING) | OPENS
        w.state[op] = state
        if state < PENDING:
            _make_ready(w, op, i, first_s, by_rank)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _next_entry(w, i, source, lane, entry):
    """Advance a lane past its first entry; a chunk that is used up becomes free."""
    after = entry + 1
    if after & (CHUNK - 1) == 0:
        chunk = entry // CHUNK
        after = w.next_chunk[chunk] * CHUNK
        last = len(w.next_chunk) - 1
        w.next_chunk[chunk] = w.next_chunk[last]
        w.next_chunk[last] = chunk
    w.lane[lane, TO_ARRIVE] = after
    w.head_s[i, source] = np.inf if after == w.lane[lane, TO_FILL] else w.entry_s[after]


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _append(w, i, source, d, arrive_s, op):
    """Queue that op on device i gets an input from device `source` at a time."""
    lane = i * d + source
    entry = w.lane[lane, TO_FILL]
    w.entry_s[entry] = arrive_s
    w.entry_op[entry] = op
    after = entry + 1
    if after & (CHUNK - 1) == 0:
        last = len(w.next_chunk) - 1
        chunk = w.next_chunk[last]
        w.next_chunk[last] = w.next_chunk[chunk]
        w.next_chunk[entry // CHUNK] = chunk
        after = chunk * CHUNK
    w.lane[lane, TO_FILL] = after
    w.head_s[i, source] = min(w.head_s[i, source], arrive_s)
    w.clock_s[i, EVENT] = min(w.clock_s[i, EVENT], arrive_s + w.clock_s[i, WHILE_BUSY])


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _send(a, w, tensor, source, to, now_s, record):
    """Request a transfer; its arrival is left in clock_s[to, SENT]."""
    channel = a.channel[source, to]
    start_s = max(w.channel_free_s[channel], now_s)
    arrive_s = start_s + (
        a.latency_s[source, to] + a.tensor_bytes[tensor] / a.bytes_per_s[source, to]
    )
    w.channel_free_s[channel] = arrive_s
    w.clock_s[to, SENT] = arrive_s
    w.sent[to, 0] = tensor
    if record:
        k = w.num_sent[0]
        w.sent_tensor[k] = tensor
        w.sent_lane[k] = to * a.op_s.shape[1] + source
        w.sent_start_s[k] = start_s
        w.sent_arrive_s[k] = arrive_s
        w.num_sent[0] = k + 1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _send_in_order(a, w, tensor, source, now_s, record):
    """Request a tensor's transfers by destination, where links share a channel."""
    for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
        w.sent[w.state[a.use_op[u]] & DEVICE_MASK, 1] = tensor
    for to in range(a.op_s.shape[1]):
        if to != source and w.sent[to, 1] == tensor:
            _send(a, w, tensor, source, to, now_s, record)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _finish(a, w, i, now_s, by_rank, record):
    """End the op of device i: its tensors are present here and requested elsewhere."""
    d = a.op_s.shape[1]
    op = w.mark[i, RUNNING]
    w.mark[i, RUNNING] = -1
    for u in range(a.op_first_use[op], a.op_first_use[op + 1]):
        reader = a.use_op[u]
        state = w.state[reader]
        to = state & DEVICE_MASK
        if to == i:
            w.state[reader] = state - PENDING
            if state - PENDING < PENDING:
                _make_ready(w, reader, i, now_s, by_rank)
            continue
        tensor = np.int64(a.use_tensor[u])
        if w.sent[to, 0] != tensor:
            # Elsewhere the order does not matter to any time, only to the record.
            if a.ordered[i] or record:
                _send_in_order(a, w, tensor, i, now_s, record)
            else:
                _send(a, w, tensor, i, to, now_s, record)
        _append(w, to, i, d, w.clock_s[to, SENT], reader)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def _start(a, w, i, now_s, by_rank, record):
    """Start the next ready op of device i, or wait for its next arrival."""
    if by_rank:
        position = pop_bit(w.ready_bits, i, len(w.position))
        op = w.by_position[position] if position >= 0 else -1
        if record and op >= 0:
            w.queue_op[i, w.mark[i, NEXT]] = op
            w.mark[i, NEXT] += 1
    elif w.mark[i, NEXT] < w.mark[i, END]:
        op = np.int64(w.queue_op[i, w.mark[i, NEXT]])
        w.mark[i, NEXT] += 1
    else:
        op = -1
    w.mark[i, RUNNING] = op
    if op < 0:
        next_s = np.inf
        for j in range(a.op_s.shape[1]):
            next_s = min(next_s, w.head_s[i, j])
        w.clock_s[i, EVENT] = next_s
        w.clock_s[i, WHILE_BUSY] = 0.0
        return
    seconds = a.op_s[op, i]
    if a.has_segments and w.state[op] & OPENS and not a.is_io[op]:
        seconds += a.segment_s[i]
    w.clock_s[i, EVENT] = now_s + seconds
    w.clock_s[i, WHILE_BUSY] = np.inf
    if record:
        w.start_s[op] = now_s
        w.finish_s[op] = now_s + seconds
        w.busy_s[i] += seconds
