"""Simulated annealing in numba: one loop for latency, one for throughput, a step for any other.

The energy of a placement is `weight_s * value / value0 + weight_bytes * overflow / bytes0`: what
does not fit may be passed through, at a price. The best placement is the one that fits best, then
the fastest. A kernel does a number of steps and returns; all state lives in arrays, so that where
the caller cuts the steps into calls changes nothing.

For the period, `Loads` follows a placement: what one op's move changes takes O(degree of the op *
D). After any moves it equals what `make_loads` computes from scratch, up to the rounding of sums.
A processor that devices share is one more channel: their ops, and the copies between them, take it
one after the other; so is a thread that launches the ops of several devices. Axes as in
`gdp.problem.arrays`; C channels, Q processors and threads.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.methods.annealing.move_score_kernels import (
    ACCEPTED,
    RENEW,
    begin_step,
    consider,
    read_schedule,
    remember,
    take_best,
)
from gdp.methods.annealing.moves_kernels import NUM_KINDS, any_group, below, propose, uniform
from gdp.problem.arrays import Arrays
from gdp.problem.weights_kernels import hold_weights
from gdp.sim.kernels.evaluate import evaluate, evaluate_with, overflow, pipeline_peaks
from gdp.sim.kernels.events import sending_s


class Loads(NamedTuple):
    """Busy seconds per sample and what they follow from."""

    busy_s: np.ndarray  # [D]
    channel_s: np.ndarray  # [C + Q], then of serial resources
    readers: np.ndarray  # [T, D] ops of a device that read a tensor
    foreign: np.ndarray  # [N] uses of tensors made on other devices
    held: np.ndarray  # [W, D] groups of a device that hold a weight
    room_bytes: np.ndarray  # [D] upper bound of the memory used
    kept: np.ndarray  # [T] copies of a tensor that later samples may need beside the first
    saved_s: np.ndarray  # [D + C + Q], see save_loads
    saved_bytes: np.ndarray  # [D]


as_struct(Arrays, Loads)


def new_loads(m):
    """Empty loads; fill them by `make_loads`."""
    num_tensors, num_devices = len(m.producer), m.compute_s.shape[1]
    num_channels = int(m.channel.max()) + 1 + int(m.serial.max()) + 1
    reader = m.use_op
    tensor = np.repeat(np.arange(num_tensors), np.diff(m.use_start))
    # Sets of activations are kept for backward ops; a device can wait for all the others.
    kept = np.zeros(num_tensors, np.int64)
    kept[tensor[m.is_backward[reader] & ~m.is_backward[m.producer[tensor]]]] = num_devices - 1
    return Loads(
        busy_s=np.zeros(num_devices),
        channel_s=np.zeros(num_channels),
        readers=np.zeros((num_tensors, num_devices), np.int64),
        foreign=np.zeros(len(m.compute_s), np.int64),
        held=np.zeros((len(m.weight_bytes), num_devices), np.int64),
        room_bytes=np.zeros(num_devices, np.int64),
        kept=kept,
        saved_s=np.zeros(num_devices + num_channels),
        saved_bytes=np.zeros(num_devices, np.int64),
    )


@numba.njit(**INNER_INLINE)
@no_type_check
def save_loads(loads):
    """Remember the sums, so that a rejected move leaves no rounding behind."""
    num_devices = loads.busy_s.shape[0]
    for d in range(num_devices):
        loads.saved_s[d] = loads.busy_s[d]
        loads.saved_bytes[d] = loads.room_bytes[d]
    for c in range(loads.channel_s.shape[0]):
        loads.saved_s[num_devices + c] = loads.channel_s[c]


@numba.njit(**INNER_INLINE)
@no_type_check
def restore_loads(loads):
    num_devices = loads.busy_s.shape[0]
    for d in range(num_devices):
        loads.busy_s[d] = loads.saved_s[d]
        loads.room_bytes[d] = loads.saved_bytes[d]
    for c in range(loads.channel_s.shape[0]):
        loads.channel_s[c] = loads.saved_s[num_devices + c]


@numba.njit(**INNER_INLINE)
@no_type_check
def pays_segment(m, loads, op):
    """True if an op opens a segment, for which its device may charge."""
    return m.opens[op] or (loads.foreign[op] > 0 and not m.is_io[op])


@numba.njit(**INNER_INLINE)
@no_type_check
def add_busy(m, loads, d, seconds, serial_s):
    """Count seconds of a device, and `serial_s` of its serial resource."""
    loads.busy_s[d] += seconds
    if m.serial[d] >= 0:
        loads.channel_s[serial_at(m, loads, d)] += serial_s


@numba.njit(**INNER_INLINE)
@no_type_check
def serial_at(m, loads, d):
    """Place of a device's serial resource in `channel_s`: the last ones, in order."""
    return loads.channel_s.shape[0] - 1 - m.serial[d]


@numba.njit(**INNER_INLINE)
@no_type_check
def add_send(m, loads, t, source, to, sign):
    """Count (or, with sign -1, no longer count) a transfer and its two buffers."""
    seconds = sending_s(m, t, source, to)
    if m.channel[source, to] >= 0:
        loads.channel_s[m.channel[source, to]] += sign * seconds
    if m.processor[source] >= 0 and m.processor[source] == m.processor[to]:
        loads.channel_s[serial_at(m, loads, to)] += sign * seconds
    loads.room_bytes[to] += sign * (2 + loads.kept[t]) * m.held_bytes[t]


@numba.njit(**INNER_INLINE)
@no_type_check
def hold_group(m, loads, op, d, sign):
    """Count the weights of an op's group on a device, with its first op."""
    g = m.group[op]
    if m.group_op[m.group_start[g]] == op:
        hold_weights(m, loads.held, loads.room_bytes, g, d, sign)


@numba.njit(**BARE)
@no_type_check
def make_loads(m, loads, device):
    """Fill `loads` from scratch. O(N + E + T D)."""
    num_ops, num_devices = m.compute_s.shape
    loads.busy_s[:] = 0.0
    loads.channel_s[:] = 0.0
    loads.readers[:] = 0
    loads.foreign[:] = 0
    loads.held[:] = 0
    loads.room_bytes[:] = 0
    for op in range(num_ops):
        d = np.int64(device[op])
        for k in range(m.in_start[op], m.in_start[op + 1]):
            t = m.in_tensor[k]
            loads.readers[t, d] += 1
            loads.foreign[op] += device[m.producer[t]] != d
        add_busy(m, loads, d, m.compute_s[op, d], m.serial_s[op, d])
        if pays_segment(m, loads, op):
            add_busy(m, loads, d, m.segment_s[d], m.segment_s[d])
        hold_group(m, loads, op, d, 1)
    for t in range(m.producer.shape[0]):
        home = np.int64(device[m.producer[t]])
        loads.room_bytes[home] += (1 + loads.kept[t]) * m.held_bytes[t]
        for d in range(num_devices):
            if d != home and loads.readers[t, d] > 0:
                add_send(m, loads, t, home, d, 1)


@numba.njit(**INNER)
@no_type_check
def move_inputs(m, loads, device, op, old, new):
    foreign = 0
    for k in range(m.in_start[op], m.in_start[op + 1]):
        t = m.in_tensor[k]
        source = np.int64(device[m.producer[t]])
        loads.readers[t, old] -= 1
        if loads.readers[t, old] == 0 and source != old:
            add_send(m, loads, t, source, old, -1)
        if loads.readers[t, new] == 0 and source != new:
            add_send(m, loads, t, source, new, 1)
        loads.readers[t, new] += 1
        foreign += source != new
    loads.foreign[op] = foreign


@numba.njit(**INNER)
@no_type_check
def move_readers(m, loads, device, t, old, new):
    """The readers of a tensor on its old and its new device: who reads from afar has changed."""
    for u in range(m.use_start[t], m.use_start[t + 1]):
        reader = m.use_op[u]
        there = np.int64(device[reader])
        if there != old and there != new:
            continue
        before = pays_segment(m, loads, reader)
        loads.foreign[reader] += 1 if there == old else -1
        after = pays_segment(m, loads, reader)
        if after and not before:
            add_busy(m, loads, there, m.segment_s[there], m.segment_s[there])
        elif before and not after:
            add_busy(m, loads, there, -m.segment_s[there], -m.segment_s[there])


@numba.njit(**INNER)
@no_type_check
def move_outputs(m, loads, device, op, old, new):
    for x in range(m.out_start[op], m.out_start[op + 1]):
        t = m.out_tensor[x]
        for d in range(m.compute_s.shape[1]):
            if loads.readers[t, d] > 0:
                if d != old:
                    add_send(m, loads, t, old, d, -1)
                if d != new:
                    add_send(m, loads, t, new, d, 1)
        held = (1 + loads.kept[t]) * m.held_bytes[t]
        loads.room_bytes[old] -= held
        loads.room_bytes[new] += held
        move_readers(m, loads, device, t, old, new)


@numba.njit(**INNER)
@no_type_check
def move_op(m, loads, device, op, new):
    """Move one op to device `new`; everything in `loads` and `device` follows."""
    old = np.int64(device[op])
    if old == new:
        return
    add_busy(m, loads, old, -m.compute_s[op, old], -m.serial_s[op, old])
    add_busy(m, loads, new, m.compute_s[op, new], m.serial_s[op, new])
    if pays_segment(m, loads, op):
        add_busy(m, loads, old, -m.segment_s[old], -m.segment_s[old])
    move_inputs(m, loads, device, op, old, new)
    if pays_segment(m, loads, op):
        add_busy(m, loads, new, m.segment_s[new], m.segment_s[new])
    move_outputs(m, loads, device, op, old, new)
    hold_group(m, loads, op, old, -1)
    hold_group(m, loads, op, new, 1)
    device[op] = new


@numba.njit(**INNER_INLINE)
@no_type_check
def may_overflow(m, loads):
    """True if the upper bound of the memory used is over that of some device, or of a pool."""
    for d in range(loads.room_bytes.shape[0]):
        if loads.room_bytes[d] > m.memory_bytes[d]:
            return True
    for k in range(m.pool_bytes.shape[0]):
        held = 0
        for d in range(loads.room_bytes.shape[0]):
            if m.pool[d] == k:
                held += loads.room_bytes[d]
        if held > m.pool_bytes[k]:
            return True
    return False


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
    price_rise: float  # the price of overflow at the round's end over that at its start: throughput


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


@numba.njit(**INNER)
@no_type_check
def draw_move(m, w, c, p, q, kind):
    """Leave a move of the kind in `p`, or the best of several of any kind by score; its kind."""
    kind = min(kind, NUM_KINDS - 1)
    num_ops = c.device.shape[0]
    if not begin_step(q, p):
        g = any_group(p, c.movable)
        propose(m, p, c.device, w.by_position, w.position, kind, g, num_ops)
        return kind
    for draw in range(q.draws):
        if draw > 0:
            kind = min(draw_kind(c, p.random), NUM_KINDS - 1)
        g = any_group(p, c.movable)
        propose(m, p, c.device, w.by_position, w.position, kind, g, num_ops)
        consider(m, p, q, c.device, kind)
    return take_best(p, q)


@numba.njit(**BARE)
@no_type_check
def anneal_latency(m, a, w, c, p, q, plan, by_rank, steps):
    """Do steps with one exact simulation each. `w` holds the priorities. True: stop, it fits."""
    last = min(c.count[STEP] + steps, plan.steps)
    while c.count[STEP] < last:
        if plan.until_fits and c.value[BEST_BYTES] == 0.0:
            return True
        c.count[STEP] += 1
        # Where nothing moves no score is read, and a round that only renews would never end.
        renews = q.draws > 1 and not plan.until_fits and c.movable.shape[0] > 0
        if renews and q.number[ACCEPTED] >= RENEW:
            c.count[EVALUATIONS] += 1
            value_s, over_bytes = evaluate_with(a, w, c.device, by_rank, np.bool_(True))
            read_schedule(m, w, q, c.device, value_s)
            continue
        kind = draw_kind(c, p.random)
        j, k = 0, 0
        p.size[0] = 0
        if kind == RANK_SWAP and by_rank:
            begin_step(q, p)
            j, k = propose_swap(c, p, w)
            swap_places(w, j, k)
        elif c.movable.shape[0] > 0:
            kind = draw_move(m, w, c, p, q, kind)
            put(m, c, p)
        if p.size[0] == 0 and j == k:
            continue
        c.tried[kind] += 1
        c.count[EVALUATIONS] += 1
        value_s, over_bytes = evaluate(a, w, c.device, by_rank)
        accepted = accept(c, plan, p, value_s, np.float64(over_bytes))
        remember(p, q, accepted)
        if accepted:
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
    """Anneal the period by each move's changes. True: stop, it fits.

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
        price = plan.price_rise ** (c.count[STEP] / plan.steps)
        now_s, now_bytes = c.value[NOW_S] + guide_weight * guides[0], c.value[NOW_BYTES]
        now = energy(plan, now_s, price * now_bytes)
        new_s = value_s + guide_weight * guide_s
        taken = energy(plan, new_s, 0.0) - now <= limit
        if taken:
            over_bytes = pipeline_overflow(a, m, w, c, loads)
            taken = energy(plan, new_s, price * over_bytes) - now <= limit
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
