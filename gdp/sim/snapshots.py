"""States of one simulation at several points, from which runs of changed placements go on.

After a move, everything up to the end of the first op that sends to, or is, a moved op is as it
was: the simulation goes on from the last state before it. See `gdp.sim.kernels.resume`.

This module loads no numba, so that it may be imported anywhere.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.problem.problem import Problem
from gdp.sim.engine import Workspace


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
    queue_op: UInt[np.ndarray, "K N"]  # the ops that wait, device by device
    ready_bits: UInt[np.ndarray, "K B"]
    lane_count: Int[np.ndarray, "K L"]  # arrivals under way
    entry_s: Float[np.ndarray, "K V"]  # those arrivals, lane by lane
    entry_op: UInt[np.ndarray, "K V"]


class Tails(NamedTuple):
    """What follows an event in one schedule, in seconds: the longest chain to its end.

    A chain goes on with what had to wait: the next op on the device, the next transfer on the
    channel, the readers of a tensor.
    """

    start_s: Float[np.ndarray, "N"]  # from the start of an op
    finish_s: Float[np.ndarray, "N"]  # from its end
    channel_s: Float[np.ndarray, "K C+1"]  # from the next transfer that is requested after state k
    device_s: Float[np.ndarray, "D"]  # scratch
    next_s: Float[np.ndarray, "C+1"]  # scratch


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
        queue_op=np.zeros((count, n), np.uint32),
        ready_bits=np.zeros((count, len(work.ready_bits)), np.uint64),
        lane_count=np.zeros((count, d * d), np.int64),
        entry_s=np.zeros((count, room)),
        entry_op=np.zeros((count, room), np.uint32),
    )


def new_tails(work: Workspace, states: Snapshots) -> Tails:
    """Empty tails; `gdp.sim.kernels.resume.find_tails` fills them."""
    n, d, channels = len(work.state), len(work.busy_s), len(work.channel_s)
    return Tails(
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        channel_s=np.zeros((len(states.goal), channels)),
        device_s=np.zeros(d),
        next_s=np.zeros(channels),
    )
