"""The event loop of the simulator: one placement, exact, without allocation.

An op that becomes ready joins its device's queue; a device that finishes takes the next. Channels
are first come first served, so a transfer's arrival is known when it is requested: there are no
arrival events, each lane (pair of devices) is a queue of arrivals in order of time (where copies
do not queue a new one goes before those that it overtakes), and a device
merges its lanes when it is about to start an op. Events are therefore one time per device, its
finish or, while idle, its next arrival. O((N + E) D).

Order at one instant: finishes by op id, arrivals, requests by (op, tensor, destination), starts.
What a start or a request of zero seconds causes at the same instant happens in a round of its own,
after all starts: so a device looks at its lanes before the requests of the round are made.

Two arrays hold the state of all devices and lanes, in sections of D or D * D (see below): fewer
arrays mean fewer registers. Indices are unsigned, which spares numba's test for negative ones; both
together made the loop 1.6 times as fast.
"""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.ticks import send_time
from gdp.sim.engine import CHUNK, MAX_DEVICES, PAYS, PENDING, EngineArrays, Workspace
from gdp.sim.kernels.bits import add_bit, clear_bits, pop_bit

as_struct(EngineArrays, Workspace)

transfer_time = numba.njit(**INNER_INLINE)(send_time)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def sending_s(a, t, source, to):
    """Seconds of a tensor on the link from one device to another."""
    return transfer_time(
        a.latency_s[source, to], a.sent_bytes[t], a.bytes_per_s[source, to], a.round_to
    )


U0, U1, U2 = np.uint64(0), np.uint64(1), np.uint64(2)
PLACED = np.uint64(2 * MAX_DEVICES - 1)  # in an op's state: 2 * device + opens
PAYS_SHIFT = np.uint64(PAYS.bit_length() - 1)
ONE_INPUT = np.uint64(PENDING)
CHUNK_SIZE = np.uint64(CHUNK)
CHUNK_MASK = np.uint64(CHUNK - 1)
NONE = np.uint64(0xFFFFFFFF)

# Sections of Workspace.clock_s, in units of D: next event; inf while busy; the instant that the
# newest op of the queue became ready at; arrival of the tensor last sent there; next arrival on the
# lanes into a device ([to, from]); when each channel is free, and last a zero for links on which
# nothing queues.
WHILE_BUSY, LAST_READY, SENT, HEAD = (np.uint64(k) for k in range(1, 5))
# Sections of Workspace.mark: the running op; the queue's next, its end, and the first op of its
# last instant; tensor last sent there; lanes: next entry, next to fill.
NEXT, END, TIE, TENSOR, LANE = (np.uint64(k) for k in range(1, 6))


@numba.njit(**INNER)
@typing.no_type_check
def run_events(a, w, device, by_rank, record):
    """The latency in seconds of one placement; see `gdp.sim.engine` for the arguments."""
    reset(a, w, device, by_rank, record)
    return run_until(a, w, by_rank, record, np.uint64(len(device)))


@numba.njit(**BARE)
@typing.no_type_check
def set_order(w, order):
    """Make an order of the ops (int64 [N]) the priorities of runs with `by_rank`: first runs first.

    Of ranks, that is `np.argsort(rank, kind="stable")`: the smallest first, ties by op.
    """
    for k in range(len(order)):
        w.by_position[k] = order[k]
        w.position[order[k]] = k


@numba.njit(**INNER)
@typing.no_type_check
def run_until(a, w, by_rank, record, stop):
    """Continue from the state in `w` until at least `stop` ops (uint64) are done; the time."""
    clock_s, mark = w.clock_s, w.mark
    d = np.uint64(len(w.busy_s))
    latency_s = 0.0
    done = np.uint64(w.num_done[0])
    while done < stop:
        now_s = clock_s[U0]
        for i in range(U1, d):
            now_s = min(now_s, clock_s[i])
        if now_s == np.inf:
            return np.inf  # an op that its device cannot run never ends
        same, which = U0, U0
        for i in range(d):
            hit = np.uint64(clock_s[i] == now_s)
            same += hit
            which += i * hit
        first, last = which, which + U1
        if same > U1:
            first, last = U0, d
        for i in range(first, last):
            if clock_s[i] == now_s:
                _arrivals(w, i, now_s, by_rank)
        for _ in range(first, last):
            # Finishes by op id; with one device at this instant that is the one.
            op, which = NONE, first
            for i in range(first, last):
                if clock_s[i] == now_s and mark[i] < op:
                    op, which = mark[i], i
            if op == NONE:
                break
            mark[which] = NONE
            if record:
                w.done_op[done] = op
            done += U1
            latency_s = now_s
            _finish(a, w, op, which, now_s, by_rank, record)
        # A zero-second request may by now have woken an idle device at this instant. It has not
        # looked at its lanes, so it finds nothing to start and wakes again in the next round.
        for i in range(first, last):
            if clock_s[i] == now_s:
                _start(a, w, i, now_s, by_rank, record)
    w.num_done[0] = done
    return latency_s


@numba.njit(**INNER)
@typing.no_type_check
def reset(a, w, device, by_rank, record):
    """Make `w` the state before the first event."""
    n, d = np.uint64(len(a.state)), np.uint64(len(w.busy_s))
    for op in range(n):
        w.state[op] = a.state[op] | np.uint32(device[op] << 1)
    w.clock_s[:] = 0.0  # every device looks once whether it can start
    w.clock_s[HEAD * d : (HEAD + d) * d] = np.inf
    w.clock_s[LAST_READY * d : SENT * d] = -1.0
    w.mark[:] = U0
    w.mark[:d] = NONE
    w.mark[TENSOR * d : LANE * d] = NONE
    clear_lanes(w)
    w.num_sent[0] = 0
    w.num_done[0] = 0
    if by_rank:
        clear_bits(w.ready_bits)
    if record:
        w.busy_s[:] = 0.0
        w.start_s[:] = np.inf
        w.finish_s[:] = np.inf
    for k in range(len(a.source_op)):
        op = np.uint64(a.source_op[k])
        _make_ready(w, op, np.uint64(device[op]), 0.0, by_rank)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def clear_lanes(w):
    """Empty all lanes: each has one chunk, and those beyond the first D * D are free."""
    mark, next_chunk, d = w.mark, w.next_chunk, np.uint64(len(w.busy_s))
    for lane in range(d * d):
        mark[LANE * d + U2 * lane] = lane * CHUNK_SIZE
        mark[LANE * d + U2 * lane + U1] = lane * CHUNK_SIZE
    # The free chunks are a list that starts at the last entry.
    chunks = np.uint64(len(next_chunk)) >> U1
    for k in range(d * d, chunks):
        next_chunk[k] = k + U1
    next_chunk[chunks - U1] = d * d


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _make_ready(w, op, i, now_s, by_rank):
    """Put an op into the queue of device i: by (instant, op), or by rank."""
    n, d = np.uint64(len(w.state)), np.uint64(len(w.busy_s))
    if by_rank:
        add_bit(w.ready_bits, i, n, np.uint64(w.position[op]))
        return
    queue_op, clock_s, mark = w.queue_op, w.clock_s, w.mark
    end = mark[END * d + i]
    base = i * n
    if now_s > clock_s[LAST_READY * d + i]:
        clock_s[LAST_READY * d + i] = now_s
        mark[TIE * d + i] = end
        queue_op[base + end] = op
    else:
        k = end
        first = max(mark[TIE * d + i], mark[NEXT * d + i])
        while k > first and queue_op[base + k - U1] > op:
            queue_op[base + k] = queue_op[base + k - U1]
            k -= U1
        queue_op[base + k] = op
    mark[END * d + i] = end + U1


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _arrivals(w, i, now_s, by_rank):
    """Make arrived tensors present on device i, in the order of arrival."""
    state, clock_s, mark, next_chunk = w.state, w.clock_s, w.mark, w.next_chunk
    d = np.uint64(len(w.busy_s))
    heads = HEAD * d + i * d
    while True:
        first_s, source = clock_s[heads], U0
        for j in range(U1, d):
            head_s = clock_s[heads + j]
            source = j if head_s < first_s else source
            first_s = min(first_s, head_s)
        if first_s > now_s or first_s == np.inf:
            return
        arrive = LANE * d + U2 * (i * d + source)
        entry = mark[arrive]
        op = np.uint64(w.entry_op[entry])
        after = entry + U1
        if after & CHUNK_MASK == U0:
            # The chunk is used up and becomes free.
            chunk, last = entry // CHUNK_SIZE, (np.uint64(len(next_chunk)) >> U1) - U1
            after = np.uint64(next_chunk[chunk]) * CHUNK_SIZE
            next_chunk[chunk] = next_chunk[last]
            next_chunk[last] = chunk
        mark[arrive] = after
        clock_s[heads + source] = np.inf if after == mark[arrive + U1] else w.entry_s[after]
        left = np.uint64(state[op]) - ONE_INPUT
        left |= (left >> PAYS_SHIFT) & U1
        state[op] = left
        if left < ONE_INPUT:
            _make_ready(w, op, i, first_s, by_rank)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def push(w, lane, arrive_s, op):
    """Put an arrival into a lane, behind those that are as early."""
    mark, entry_s, entry_op, next_chunk = w.mark, w.entry_s, w.entry_op, w.next_chunk
    d = np.uint64(len(w.busy_s))
    fill = LANE * d + U2 * lane + U1
    entry, chunks = mark[fill], np.uint64(len(next_chunk)) >> U1
    place = entry
    while place != mark[fill - U1]:
        # Only what does not queue overtakes, so elsewhere the first look is the last.
        before = place - U1
        if place & CHUNK_MASK == U0:
            before = np.uint64(next_chunk[chunks + place // CHUNK_SIZE]) * CHUNK_SIZE + CHUNK_MASK
        if entry_s[before] <= arrive_s:
            break
        entry_s[place], entry_op[place] = entry_s[before], entry_op[before]
        place = before
    entry_s[place] = arrive_s
    entry_op[place] = op
    after = entry + U1
    if after & CHUNK_MASK == U0:
        last = chunks - U1
        chunk = np.uint64(next_chunk[last])
        next_chunk[last] = next_chunk[chunk]
        next_chunk[entry // CHUNK_SIZE] = chunk
        next_chunk[chunks + chunk] = entry // CHUNK_SIZE
        after = chunk * CHUNK_SIZE
    mark[fill] = after


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def send(a, w, tensor, source, to, now_s, record):
    """Request a transfer; its arrival is left in section SENT."""
    clock_s, d = w.clock_s, np.uint64(len(w.busy_s))
    link = source * d + to
    free = (HEAD + d) * d + np.uint64(a.channel_flat[link])
    seconds = transfer_time(
        a.link_pairs[U2 * link], a.sent_bytes[tensor], a.link_pairs[U2 * link + U1], a.round_to
    )
    start_s = max(clock_s[free], now_s)
    arrive_s = start_s + seconds
    clock_s[free] = arrive_s
    clock_s[np.uint64(len(clock_s)) - U1] = 0.0
    clock_s[SENT * d + to] = arrive_s
    w.mark[TENSOR * d + to] = tensor
    if record:
        k = w.num_sent[0]
        w.sent_tensor[k] = tensor
        w.sent_lane[k] = to * d + source
        w.sent_start_s[k] = start_s
        w.sent_arrive_s[k] = arrive_s
        w.num_sent[0] = k + 1


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _finish(a, w, op, i, now_s, by_rank, record):
    """End an op of device i: its tensors are present here and requested elsewhere."""
    state, clock_s, mark = w.state, w.clock_s, w.mark
    d = np.uint64(len(w.busy_s))
    for u in range(np.uint64(a.op_first_use[op]), np.uint64(a.op_first_use[op + U1])):
        reader, tensor = np.uint64(a.use_pairs[U2 * u]), np.uint64(a.use_pairs[U2 * u + U1])
        at = np.uint64(state[reader])
        to = (at & PLACED) >> U1
        if to == i:
            state[reader] = at - ONE_INPUT
            if at - ONE_INPUT < ONE_INPUT:
                _make_ready(w, reader, i, now_s, by_rank)
            continue
        if mark[TENSOR * d + to] != tensor:
            send(a, w, tensor, i, to, now_s, record)
        arrive_s = clock_s[SENT * d + to]
        push(w, to * d + i, arrive_s, reader)
        head = HEAD * d + to * d + i
        clock_s[head] = min(clock_s[head], arrive_s)
        clock_s[to] = min(clock_s[to], arrive_s + clock_s[WHILE_BUSY * d + to])


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def _start(a, w, i, now_s, by_rank, record):
    """Start the next ready op of device i, or wait for its next arrival."""
    clock_s, mark, queue_op = w.clock_s, w.mark, w.queue_op
    n, d = np.uint64(len(w.state)), np.uint64(len(w.busy_s))
    op = NONE
    next_op = mark[NEXT * d + i]
    if by_rank:
        place = pop_bit(w.ready_bits, i, n)
        if place != NONE:
            op = np.uint64(w.by_position[place])
            queue_op[i * n + next_op] = op
            mark[NEXT * d + i] = next_op + U1
    elif next_op < mark[END * d + i]:
        op = np.uint64(queue_op[i * n + next_op])
        mark[NEXT * d + i] = next_op + U1
    mark[i] = op
    if op == NONE:
        heads = HEAD * d + i * d
        next_s = clock_s[heads]
        for j in range(U1, d):
            next_s = min(next_s, clock_s[heads + j])
        clock_s[i] = next_s
        clock_s[WHILE_BUSY * d + i] = 0.0
        return
    seconds = a.op_s_flat[op * d + i] + a.segment_pairs_s[np.uint64(w.state[op]) & PLACED]
    clock_s[i] = now_s + seconds
    clock_s[WHILE_BUSY * d + i] = np.inf
    if record:
        w.start_s[op] = now_s
        w.finish_s[op] = now_s + seconds
        w.busy_s[i] += seconds
