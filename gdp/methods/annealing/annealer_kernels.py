"""Simulated annealing in numba: one loop for latency, one for throughput, a step for any other.

The energy of a placement is `weight_s * value / value0 + weight_bytes * overflow / bytes0`: what
does not fit may be passed through, at a price. The best placement is the one that fits best, then
the fastest. A kernel does a number of steps and returns; all state lives in arrays, so that where
the caller cuts the steps into calls changes nothing.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.methods.annealing.moves_kernels import NUM_KINDS, any_group, below, propose, uniform
from gdp.methods.annealing.period_moves_kernels import (
    make_loads,
    may_overflow,
    move_op,
    restore_loads,
    save_loads,
)
from gdp.sim.kernels.evaluate import evaluate, overflow, pipeline_peaks

RANK_SWAP = NUM_KINDS  # the kind of step that exchanges two priorities
NUM_STEPS = NUM_KINDS + 1

# Rows of AnnealState.value
NOW_S, NOW_BYTES, BEST_S, BEST_BYTES = 0, 1, 2, 3
# Rows of AnnealState.count
STEP, EVALUATIONS, IMPROVED = 0, 1, 2
REBUILD = 1 << 17  # steps after which sums of floats are made anew


class CoolingSchedule(NamedTuple):
    """Temperature by step, and the terms of an energy."""

    hot: float
    cold: float
    steps: int  # of the round: the temperature falls from hot to cold over it
    value0_s: float
    bytes0: float
    weight_s: float
    weight_bytes: float
    until_fits: bool  # stop at the first placement that fits


class AnnealState(NamedTuple):
    """One annealing run. Axes: N ops, G groups, M groups with a choice."""

    device: np.ndarray  # [N] int32, now
    best_device: np.ndarray  # [N] int32
    order: np.ndarray  # [N] the ops by priority, best so far
    movable: np.ndarray  # [M]
    undo: np.ndarray  # [G] int32, where the groups of the proposal were
    value: np.ndarray  # [4]
    count: np.ndarray  # pyright: ignore[reportIncompatibleMethodOverride] # [3]
    kind_share: np.ndarray  # [NUM_STEPS] cumulative probabilities
    tried: np.ndarray  # [NUM_STEPS]
    gained: np.ndarray  # [NUM_STEPS] improvements of the best


as_struct(CoolingSchedule, AnnealState)


@numba.njit(**INNER_INLINE)
@no_type_check
def energy(plan, value_s, over_bytes):
    return plan.weight_s * value_s / plan.value0_s + plan.weight_bytes * over_bytes / plan.bytes0


@numba.njit(**INNER_INLINE)
@no_type_check
def temperature(plan, step):
    return plan.hot * (plan.cold / plan.hot) ** (step / plan.steps)


@numba.njit(**INNER_INLINE)
@no_type_check
def draw_kind(c, random):
    u = uniform(random)
    kind = 0
    while kind < NUM_STEPS - 1 and u >= c.kind_share[kind]:
        kind += 1
    return kind


@numba.njit(**INNER)
@no_type_check
def put(m, c, p):
    """Move the groups of the proposal; where they were is left in `undo`."""
    for k in range(p.size[0]):
        g = p.group[k]
        c.undo[k] = c.device[m.group_op[m.group_start[g]]]
        for x in range(m.group_start[g], m.group_start[g + 1]):
            c.device[m.group_op[x]] = p.device[k]


@numba.njit(**INNER)
@no_type_check
def take_back(m, c, p):
    for k in range(p.size[0]):
        g = p.group[k]
        for x in range(m.group_start[g], m.group_start[g + 1]):
            c.device[m.group_op[x]] = c.undo[k]


@numba.njit(**INNER_INLINE)
@no_type_check
def swap_places(w, j, k):
    """Exchange the priorities at places j and k."""
    a, b = w.by_position[j], w.by_position[k]
    w.by_position[j], w.by_position[k] = b, a
    w.position[a], w.position[b] = k, j


@numba.njit(**INNER)
@no_type_check
def propose_swap(c, p, w):
    """Two places of the priorities whose ops share a device; equal places where none was found."""
    num_ops = c.device.shape[0]
    j = below(p.random, num_ops)
    for _ in range(8):
        k = min(num_ops - 1, j + 1 + below(p.random, np.int64(64)))
        if c.device[w.by_position[j]] == c.device[w.by_position[k]]:
            return j, k
    return j, j


@numba.njit(**INNER_INLINE)
@no_type_check
def accept(c, plan, p, value_s, over_bytes):
    """Metropolis, Rosenbluth et al. 1953: downhill always, uphill with exp(-rise / temperature)."""
    rise = energy(plan, value_s, over_bytes) - energy(plan, c.value[NOW_S], c.value[NOW_BYTES])
    if rise > 0.0 and uniform(p.random) >= np.exp(-rise / temperature(plan, c.count[STEP])):
        return False
    c.value[NOW_S], c.value[NOW_BYTES] = value_s, over_bytes
    return True


@numba.njit(**INNER)
@no_type_check
def is_best(c):
    if c.value[NOW_BYTES] != c.value[BEST_BYTES]:
        return c.value[NOW_BYTES] < c.value[BEST_BYTES]
    return c.value[NOW_S] < c.value[BEST_S]


@numba.njit(**INNER)
@no_type_check
def keep_best(c, kind):
    for i in range(c.device.shape[0]):
        c.best_device[i] = c.device[i]
    c.value[BEST_S], c.value[BEST_BYTES] = c.value[NOW_S], c.value[NOW_BYTES]
    c.gained[kind] += 1
    c.count[IMPROVED] = c.count[EVALUATIONS]


@numba.njit(**BARE)
@no_type_check
def anneal_latency(m, a, w, c, p, plan, by_rank, steps):
    """Do steps with one exact simulation each. `w` holds the priorities. True: stop, it fits."""
    last = min(c.count[STEP] + steps, plan.steps)
    while c.count[STEP] < last:
        if plan.until_fits and c.value[BEST_BYTES] == 0.0:
            return True
        c.count[STEP] += 1
        kind = draw_kind(c, p.random)
        j, k = 0, 0
        p.size[0] = 0
        if kind == RANK_SWAP and by_rank:
            j, k = propose_swap(c, p, w)
            swap_places(w, j, k)
        elif c.movable.shape[0] > 0:
            g = any_group(p, c.movable)
            propose(
                m, p, c.device, w.by_position, w.position, min(kind, NUM_KINDS - 1), g,
                c.device.shape[0],
            )  # fmt: skip
            put(m, c, p)
        if p.size[0] == 0 and j == k:
            continue
        c.tried[kind] += 1
        c.count[EVALUATIONS] += 1
        value_s, over_bytes = evaluate(a, w, c.device, by_rank)
        if accept(c, plan, p, value_s, np.float64(over_bytes)):
            if is_best(c):
                keep_best(c, kind)
                for i in range(c.order.shape[0]):
                    c.order[i] = w.by_position[i]
        elif p.size[0] > 0:
            take_back(m, c, p)
        else:
            swap_places(w, j, k)
    return False


@numba.njit(**BARE)
@no_type_check
def propose_step(m, c, p, plan, order):
    """Make one move, for a caller that evaluates it; its kind, or -1 where there was none."""
    if c.count[STEP] >= plan.steps:
        return -1
    c.count[STEP] += 1
    kind = min(draw_kind(c, p.random), NUM_KINDS - 1)
    p.size[0] = 0
    if c.movable.shape[0] > 0:
        propose(m, p, c.device, order, order, kind, any_group(p, c.movable), c.device.shape[0])
        put(m, c, p)
    if p.size[0] == 0:
        return -1
    c.tried[kind] += 1
    c.count[EVALUATIONS] += 1
    return kind


@numba.njit(**BARE)
@no_type_check
def settle_step(m, c, p, plan, kind, value_s, over_bytes):
    """Keep the move of `propose_step` or take it back, now that its value is known."""
    if not accept(c, plan, p, value_s, over_bytes):
        take_back(m, c, p)
    elif is_best(c):
        keep_best(c, kind)


@numba.njit(**INNER)
@no_type_check
def busiest(loads):
    """(device, destination) of the busiest device, or of a link of the busiest channel."""
    device = 0
    for d in range(loads.busy_s.shape[0]):
        if loads.busy_s[d] > loads.busy_s[device]:
            device = d
    return device


@numba.njit(**INNER)
@no_type_check
def smoothed_period(loads, plan):
    """(period, guide): the largest load, and the mean of squares, which all loads move."""
    longest, total = 0.0, 0.0
    for d in range(loads.busy_s.shape[0]):
        longest = max(longest, loads.busy_s[d])
        total += loads.busy_s[d] * loads.busy_s[d]
    for x in range(loads.channel_s.shape[0]):
        longest = max(longest, loads.channel_s[x])
        total += loads.channel_s[x] * loads.channel_s[x]
    return longest, total / (plan.value0_s * loads.busy_s.shape[0])


@numba.njit(**INNER)
@no_type_check
def move_groups(m, loads, c, p, back):
    """Move the groups of the proposal, or back again, with the loads kept up: O(degrees)."""
    for k in range(p.size[0]):
        g = p.group[k]
        to = c.undo[k] if back else p.device[k]
        if not back:
            c.undo[k] = c.device[m.group_op[m.group_start[g]]]
        for x in range(m.group_start[g], m.group_start[g + 1]):
            move_op(m, loads, c.device, m.group_op[x], np.int64(to))


@numba.njit(**INNER)
@no_type_check
def pick_group(m, c, p, loads):
    """A random group with a choice; half of the time one on the busiest device, if soon found."""
    g = any_group(p, c.movable)
    if uniform(p.random) < 0.5:
        busy = busiest(loads)
        for _ in range(12):
            if c.device[m.group_op[m.group_start[g]]] == busy:
                break
            g = any_group(p, c.movable)
    return g


@numba.njit(**INNER)
@no_type_check
def pipeline_overflow(a, m, w, c, loads):
    """Bytes over memory: zero at once where even the upper bound of each device fits."""
    if not a.pipeline_memory_binds or not may_overflow(m, loads):
        return 0.0
    pipeline_peaks(a, w, c.device)
    return np.float64(overflow(a, w))


@numba.njit(**BARE)
@no_type_check
def anneal_period(m, a, w, c, p, loads, guides, plan, order, place, guide_weight, steps):
    """Anneal the period by what each move changes. True: stop, it fits.

    `guides` is the current and the best mean square of the loads: the period alone is flat, as most
    moves leave the busiest device alone.
    """
    if c.movable.shape[0] == 0:
        c.count[STEP] = plan.steps
    last = min(c.count[STEP] + steps, plan.steps)
    while c.count[STEP] < last:
        if plan.until_fits and c.value[BEST_BYTES] == 0.0:
            return True
        c.count[STEP] += 1
        if c.count[STEP] % REBUILD == 0:
            make_loads(m, loads, c.device)
        kind = min(draw_kind(c, p.random), NUM_KINDS - 1)
        propose(m, p, c.device, order, place, kind, pick_group(m, c, p, loads), c.device.shape[0])
        if p.size[0] == 0:
            continue
        c.tried[kind] += 1
        c.count[EVALUATIONS] += 1
        save_loads(loads)
        move_groups(m, loads, c, p, False)
        value_s, guide_s = smoothed_period(loads, plan)
        # The memory is looked at last: it is the one part that can cost O(N).
        limit = -np.log(max(uniform(p.random), 1e-300)) * temperature(plan, c.count[STEP])
        now = energy(plan, c.value[NOW_S] + guide_weight * guides[0], c.value[NOW_BYTES])
        new_s = value_s + guide_weight * guide_s
        taken = energy(plan, new_s, 0.0) - now <= limit
        if taken:
            over_bytes = pipeline_overflow(a, m, w, c, loads)
            taken = energy(plan, new_s, over_bytes) - now <= limit
        if not taken:
            move_groups(m, loads, c, p, True)
            restore_loads(loads)
            continue
        c.value[NOW_S], c.value[NOW_BYTES] = value_s, over_bytes
        guides[0] = guide_s
        if is_best(c):
            keep_best(c, kind)
            guides[1] = guide_s
    return False
