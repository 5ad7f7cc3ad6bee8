"""Simulations that go on from a kept state, exact to the last bit, and what they can be stopped at.

`record_run` simulates one placement and keeps states of it. A placement that differs from it in ops
that nothing was sent to by then goes on from there by `go_on`: the rest is the full simulation's,
event by event. `expected_end` says where a run that was stopped would end, were the rest to follow
the recorded schedule: heads and tails, as job shop neighbourhoods are judged (Taillard 1994,
doi 10.1287/ijoc.6.2.108).
"""

import typing

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.sim.kernels.bits import add_bit, pop_bit
from gdp.sim.kernels.engine import (
    CHUNK_MASK,
    CHUNK_SIZE,
    END,
    HEAD,
    LANE,
    NEXT,
    NONE,
    PLACED,
    U0,
    U1,
    U2,
    clear_lanes,
    push,
    reset,
    run_until,
)
from gdp.sim.snapshots import Snapshots, Tails

as_struct(Snapshots, Tails)

DEVICE_BITS = np.uint32(PLACED & ~np.uint64(1))
OTHER_BITS = np.uint32(~DEVICE_BITS)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def copy(to, source):
    """An assignment of slices would allocate."""
    for i in range(len(source)):
        to[i] = source[i]


@numba.njit(**INNER)
@typing.no_type_check
def save(w, s, k, by_rank):
    """Make the state in `w` state k."""
    d = np.uint64(len(w.busy_s))
    n = np.uint64(len(w.state))
    s.done[k] = w.num_done[0]
    s.sent[k] = w.num_sent[0]
    copy(s.state[k], w.state)
    copy(s.clock_s[k], w.clock_s)
    copy(s.mark[k], w.mark)
    if by_rank:
        copy(s.ready_bits[k], w.ready_bits)
    else:
        fill = U0
        for i in range(d):
            for x in range(w.mark[NEXT * d + i], w.mark[END * d + i]):
                s.queue_op[k, fill] = w.queue_op[i * n + x]
                fill += U1
    s.kept[k] = _save_lanes(w, s, k, d)


@numba.njit(**INNER)
@typing.no_type_check
def _save_lanes(w, s, k, d):
    """Keep the arrivals under way; False where there is no room for them."""
    fill, room = U0, np.uint64(s.entry_s.shape[1])
    for lane in range(d * d):
        first = fill
        entry, last = w.mark[LANE * d + U2 * lane], w.mark[LANE * d + U2 * lane + U1]
        while entry != last:
            if fill == room:
                return False
            s.entry_s[k, fill] = w.entry_s[entry]
            s.entry_op[k, fill] = w.entry_op[entry]
            fill += U1
            after = entry + U1
            if after & CHUNK_MASK == U0:
                after = np.uint64(w.next_chunk[entry // CHUNK_SIZE]) * CHUNK_SIZE
            entry = after
        s.lane_count[k, lane] = fill - first
    return True


@numba.njit(**INNER)
@typing.no_type_check
def restore(w, s, k, by_rank):
    """Make state k the state in `w`. What was recorded since is left as it is."""
    d = np.uint64(len(w.busy_s))
    n = np.uint64(len(w.state))
    w.num_done[0] = s.done[k]
    w.num_sent[0] = s.sent[k]
    copy(w.state, s.state[k])
    copy(w.clock_s, s.clock_s[k])
    copy(w.mark, s.mark[k])
    if by_rank:
        copy(w.ready_bits, s.ready_bits[k])
    else:
        fill = U0
        for i in range(d):
            for x in range(w.mark[NEXT * d + i], w.mark[END * d + i]):
                w.queue_op[i * n + x] = s.queue_op[k, fill]
                fill += U1
    clear_lanes(w.mark, w.next_chunk, d)
    fill = U0
    for lane in range(d * d):
        for _ in range(s.lane_count[k, lane]):
            push(
                w.mark, w.entry_s, w.entry_op, w.next_chunk, d, lane, s.entry_s[k, fill],
                np.uint64(s.entry_op[k, fill]),
            )  # fmt: skip
            fill += U1


@numba.njit(**INNER)
@typing.no_type_check
def place(w, op, device):
    """Move an op to which nothing was sent yet, in the state in `w`."""
    w.state[op] = (w.state[op] & OTHER_BITS) | np.uint32(device << 1)


@numba.njit(**INNER)
@typing.no_type_check
def place_at(s, k, op, device):
    """The same in state k."""
    s.state[k, op] = (s.state[k, op] & OTHER_BITS) | np.uint32(device << 1)


@numba.njit(**INNER)
@typing.no_type_check
def begin(a, w, s, device, by_rank, k, ops):
    """Make `w` state k of the run of `device`, which differs from the recorded one in `ops`."""
    if k == 0:
        reset(a, w, device, by_rank, False)
        return
    restore(w, s, k, by_rank)
    for x in range(len(ops)):
        place(w, ops[x], device[ops[x]])


@numba.njit(**BARE)
@typing.no_type_check
def record_run(a, w, s, device, by_rank, k):
    """Simulate from state k (0: all), keeping times, transfers and all later states; the latency.

    From k > 0: `w` holds what the run that kept state k recorded, and `begin` has just been called.
    """
    record = np.bool_(True)
    if k == 0:
        reset(a, w, device, by_rank, record)
    latency_s = 0.0
    for j in range(k, len(s.goal) + 1):
        stop = len(device)
        if j < len(s.goal):
            stop = s.goal[j]
        # 0 where several ops that end at one instant passed this goal with the last one.
        latency_s = max(latency_s, run_until(a, w, by_rank, record, np.uint64(stop)))
        if latency_s == np.inf:
            for never in range(j, len(s.goal)):
                s.kept[never] = False
            break
        if j < len(s.goal):
            save(w, s, j, by_rank)
    return latency_s


@numba.njit(**INNER)
@typing.no_type_check
def state_before(s, first):
    """The last state in which at most `first` ops are done."""
    k = len(s.goal) - 1
    while k > 0 and (s.done[k] > first or not s.kept[k]):
        k -= 1
    return k


@numba.njit(**BARE)
@typing.no_type_check
def go_on(a, w, s, device, by_rank, first, ops):
    """The latency of `device`, which differs from the recorded placement in `ops` alone.

    `first`: how many ops were done when the first op ended that sends to one of them; 0 where one
    of them reads nothing. Priorities may differ as well, between ops that were not ready by then.
    """
    begin(a, w, s, device, by_rank, state_before(s, first), ops)
    return run_until(a, w, by_rank, np.bool_(False), np.uint64(len(device)))


@numba.njit(**BARE)
@typing.no_type_check
def find_tails(a, w, s, t, device):
    """Fill the tails of the run that `w` recorded. O(N + E)."""
    d = a.op_s.shape[1]
    t.device_s[:] = 0.0
    t.next_s[:] = 0.0
    sent, state = w.num_sent[0], len(s.goal) - 1
    for x in range(len(device) - 1, -1, -1):
        while state >= 0 and s.done[state] > x:
            copy(t.channel_s[state], t.next_s)
            state -= 1
        op = w.done_op[x]
        i = np.int64(device[op])
        tail_s = t.device_s[i]
        while sent > 0 and a.producer[w.sent_tensor[sent - 1]] == op:
            sent -= 1
            tensor, to = w.sent_tensor[sent], w.sent_lane[sent] // d
            channel = a.channel[i, to]
            after_s = t.next_s[channel]
            for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
                if device[a.use_op[u]] == to:
                    after_s = max(after_s, t.start_s[a.use_op[u]])
            after_s += w.sent_arrive_s[sent] - w.sent_start_s[sent]
            if channel < len(t.next_s) - 1:  # on the last one nothing queues
                t.next_s[channel] = after_s
            tail_s = max(tail_s, after_s)
        for u in range(a.op_first_use[op], a.op_first_use[op + 1]):
            if device[a.use_op[u]] == i:
                tail_s = max(tail_s, t.start_s[a.use_op[u]])
        t.finish_s[op] = tail_s
        t.start_s[op] = tail_s + (w.finish_s[op] - w.start_s[op])
        t.device_s[i] = t.start_s[op]
    while state >= 0:
        copy(t.channel_s[state], t.next_s)
        state -= 1


@numba.njit(**INNER)
@typing.no_type_check
def expected_end(w, t, k, now_s, by_rank):
    """When the run in `w`, stopped at state k's number of ops, would end by the recorded tails.

    Exact for the recorded placement, and where all that follows keeps its order.
    """
    d, n = np.uint64(len(w.busy_s)), np.uint64(len(w.state))
    end_s = now_s
    for i in range(d):
        op, free_s = w.mark[i], now_s
        if op != NONE:
            free_s = w.clock_s[i]
            end_s = max(end_s, free_s + t.finish_s[op])
        waits = NONE
        if by_rank:
            position = pop_bit(w.ready_bits, i, n)
            if position != NONE:
                add_bit(w.ready_bits, i, n, position)
                waits = np.uint64(w.by_position[position])
        elif w.mark[NEXT * d + i] < w.mark[END * d + i]:
            waits = np.uint64(w.queue_op[i * n + w.mark[NEXT * d + i]])
        if waits != NONE:
            end_s = max(end_s, free_s + t.start_s[waits])
    for lane in range(d * d):
        entry, last = w.mark[LANE * d + U2 * lane], w.mark[LANE * d + U2 * lane + U1]
        while entry != last:
            end_s = max(end_s, w.entry_s[entry] + t.start_s[w.entry_op[entry]])
            after = entry + U1
            if after & CHUNK_MASK == U0:
                after = np.uint64(w.next_chunk[entry // CHUNK_SIZE]) * CHUNK_SIZE
            entry = after
    for c in range(t.channel_s.shape[1]):
        free_s = w.clock_s[(HEAD + d) * d + np.uint64(c)]
        end_s = max(end_s, free_s + t.channel_s[k, c])
    return end_s
