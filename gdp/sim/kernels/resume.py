"""Snapshots of a simulation by priorities, and runs of changed placements that go on from them.

`record_run` simulates one placement and keeps states of it. After a move, everything up to the end
of the first op that sends to, or is, a moved op is as it was: a changed placement goes on from the
last state before it (`go_on`), and the rest is the full simulation's, event by event, to the last
bit. `expected_end` estimates the end of a run that was stopped, were the rest to follow the
recorded schedule: heads and tails, as job shop neighbourhoods are judged (Taillard 1994,
doi 10.1287/ijoc.6.2.108). All runs follow the order that `set_order` left in the workspace.
"""

import typing
from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.problem import Problem
from gdp.sim.engine import Workspace
from gdp.sim.kernels.bits import add_bit, pop_bit
from gdp.sim.kernels.events import (
    CHUNK_MASK,
    CHUNK_SIZE,
    HEAD,
    LANE,
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


class Snapshots(NamedTuple):
    """States of one run. Axes: K states, L = D * D lanes, V arrivals under way at most, rest as in
    `gdp.sim.engine.Workspace`. State 0 is the one before the first event."""

    goal: Int[np.ndarray, "K"]  # state k is the first with at least so many ops done, ascending
    kept: Bool[np.ndarray, "K"]  # False: more arrivals were under way than there is room for
    done: Int[np.ndarray, "K"]  # ops that have ended
    sent: Int[np.ndarray, "K"]  # transfers requested
    state: UInt[np.ndarray, "K N"]
    clock_s: Float[np.ndarray, "K X"]
    mark: UInt[np.ndarray, "K Y"]
    ready_bits: UInt[np.ndarray, "K B"]
    lane_count: Int[np.ndarray, "K L"]  # arrivals under way
    entry_s: Float[np.ndarray, "K V"]  # those arrivals, lane by lane
    entry_op: UInt[np.ndarray, "K V"]


class Tails(NamedTuple):
    """Seconds of the longest chain from each event of one schedule to its end.

    A chain goes on with all that had to wait: the next op on the device, the next transfer on the
    channel, the readers of a tensor.
    """

    start_s: Float[np.ndarray, "N"]  # from the start of an op
    finish_s: Float[np.ndarray, "N"]  # from its end
    channel_s: Float[np.ndarray, "K C+1"]  # from the next transfer that is requested after state k
    device_s: Float[np.ndarray, "D"]  # scratch
    next_s: Float[np.ndarray, "C+1"]  # scratch


as_struct(Snapshots, Tails)

DEVICE_BITS = np.uint32(PLACED & ~np.uint64(1))
OTHER_BITS = np.uint32(~DEVICE_BITS)


def snapshots(problem: Problem, work: Workspace, count: int) -> Snapshots:
    """Room for `count` states (N at most) of runs in this workspace, at equal shares of the ops.

    O(K (N + E)) bytes.
    """
    n, d = problem.num_ops, problem.num_devices
    count = min(count, n)
    room = min(problem.graph.num_uses, max(4096, n // 4))
    return Snapshots(
        goal=np.arange(count) * n // count,
        kept=np.zeros(count, bool),
        done=np.zeros(count, np.int64),
        sent=np.zeros(count, np.int64),
        state=np.zeros((count, n), np.uint32),
        clock_s=np.zeros((count, len(work.clock_s))),
        mark=np.zeros((count, len(work.mark)), np.uint64),
        ready_bits=np.zeros((count, len(work.ready_bits)), np.uint64),
        lane_count=np.zeros((count, d * d), np.int64),
        entry_s=np.zeros((count, room)),
        entry_op=np.zeros((count, room), np.uint32),
    )


def new_tails(work: Workspace, states: Snapshots) -> Tails:
    """Empty tails; `find_tails` fills them."""
    n, d, channels = len(work.state), len(work.busy_s), len(work.channel_s)
    return Tails(
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        channel_s=np.zeros((len(states.goal), channels)),
        device_s=np.zeros(d),
        next_s=np.zeros(channels),
    )


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def copy(to, source):
    """An assignment of slices would allocate."""
    for i in range(len(source)):
        to[i] = source[i]


@numba.njit(**INNER)
@typing.no_type_check
def save(w, s, k):
    """Make the state in `w` state k."""
    s.done[k] = w.num_done[0]
    s.sent[k] = w.num_sent[0]
    copy(s.state[k], w.state)
    copy(s.clock_s[k], w.clock_s)
    copy(s.mark[k], w.mark)
    copy(s.ready_bits[k], w.ready_bits)
    s.kept[k] = _save_lanes(w, s, k, np.uint64(len(w.busy_s)))


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
def restore(w, s, k):
    """Make state k the state in `w`; later records stay."""
    d = np.uint64(len(w.busy_s))
    w.num_done[0] = s.done[k]
    w.num_sent[0] = s.sent[k]
    copy(w.state, s.state[k])
    copy(w.clock_s, s.clock_s[k])
    copy(w.mark, s.mark[k])
    copy(w.ready_bits, s.ready_bits[k])
    clear_lanes(w)
    fill = U0
    for lane in range(d * d):
        for _ in range(s.lane_count[k, lane]):
            push(w, lane, s.entry_s[k, fill], np.uint64(s.entry_op[k, fill]))
            fill += U1


@numba.njit(**INNER)
@typing.no_type_check
def place(state, op, device):
    """Move an op to which nothing was sent yet, in the `state` of a workspace or a snapshot."""
    state[op] = (state[op] & OTHER_BITS) | np.uint32(device << 1)


@numba.njit(**INNER)
@typing.no_type_check
def begin(a, w, s, device, k, ops):
    """Make `w` state k of the run of `device`, which differs from the recorded one in `ops`."""
    if k == 0:
        reset(a, w, device, np.bool_(True), np.bool_(False))
        return
    restore(w, s, k)
    for x in range(len(ops)):
        place(w.state, ops[x], device[ops[x]])


@numba.njit(**BARE)
@typing.no_type_check
def record_run(a, w, s, device, k):
    """Simulate from state k (0: all), keeping times, transfers and all later states; the latency.

    From k > 0: `w` holds what the run that kept state k recorded, and `begin` has just been called.
    """
    by_rank = record = np.bool_(True)
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
            save(w, s, j)
    return latency_s


@numba.njit(**BARE)
@typing.no_type_check
def go_on(a, w, s, device, k, ops):
    """The latency of `device`, which differs from the recorded placement in `ops` alone.

    `k` is a kept state, before the end of any op that sends to one of them; 0 where one of them
    reads nothing. Priorities may differ as well, between ops that were not ready by then.
    """
    begin(a, w, s, device, k, ops)
    return run_until(a, w, np.bool_(True), np.bool_(False), np.uint64(len(device)))


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
def expected_end(w, t, k, now_s):
    """End of the run in `w`, stopped at state k's number of ops, by the recorded tails.

    Exact for the recorded placement, and where all that follows keeps its order.
    """
    d, n = np.uint64(len(w.busy_s)), np.uint64(len(w.state))
    end_s = now_s
    for i in range(d):
        op, free_s = w.mark[i], now_s
        if op != NONE:
            free_s = w.clock_s[i]
            end_s = max(end_s, free_s + t.finish_s[op])
        position = pop_bit(w.ready_bits, i, n)
        if position != NONE:
            add_bit(w.ready_bits, i, n, position)
            end_s = max(end_s, free_s + t.start_s[w.by_position[position]])
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
