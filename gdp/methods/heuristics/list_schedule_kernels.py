"""Numba kernels of the list schedulers: HEFT, ETF and critical path, over `Arrays`.

HEFT and critical path place the ops in a given order, ETF the ready op that can start first; which
device an op goes to is one rule (`best_device`) with parameters (`DeviceRule`). Memory is counted
as ops are placed: a device holds the weights of the groups placed on it, and each tensor from its
arrival until its last reader is placed, so that a schedule errs on the safe side where readers run
in another order.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays
from gdp.problem.weights_kernels import added_bytes, hold_weights, holder
from gdp.sim.kernels.events import sending_s

MAX_GAPS = 512  # idle gaps remembered per device; the earliest are forgotten first
TIE = 1e-9  # relative: ends that are this close are drawn between by `critical_plan`


class PartialSchedule(NamedTuple):
    """A schedule under construction. Axes: N ops, T tensors, D devices, C channels, G groups."""

    device: np.ndarray  # [N] int64
    start_s: np.ndarray  # [N]
    finish_s: np.ndarray  # [N]
    arrival_s: np.ndarray  # [T, D] when the tensor is there; inf where it never was sent
    unread: np.ndarray  # [T] readers that are not placed yet
    free_s: np.ndarray  # [D] the end of the last op
    channel_s: np.ndarray  # [C] the end of the last transfer
    group_device: np.ndarray  # [G], D where the group is not placed
    holds: np.ndarray  # [W, D] bool
    weight_bytes: np.ndarray  # [D] there throughout
    live_bytes: np.ndarray  # [D] of tensors
    fullest_bytes: np.ndarray  # [D] the largest `live_bytes` so far
    gap_start_s: np.ndarray  # [D, MAX_GAPS]
    gap_end_s: np.ndarray  # [D, MAX_GAPS]
    num_gaps: np.ndarray  # [D]


class DeviceRule(NamedTuple):
    """Parameters of `best_device`. Axes: N ops, D devices, C channels."""

    insertion: bool  # ops go into idle gaps, else after the last op
    queues: bool  # transfers wait for their channel, else links are always free
    price: float  # seconds of finish that one second on a link counts
    tie: float  # relative: finishes that are this close are equal
    lot: np.ndarray  # [N, D] of equal devices the smallest is taken
    waits: np.ndarray  # [N] bool: placed together with the first reader
    channel_s: np.ndarray  # [C] scratch


class Heaps(NamedTuple):
    """D binary min-heaps of ops with a float key each. Axes: D devices, N ops."""

    key: np.ndarray  # [D, N]
    op: np.ndarray  # [D, N]
    size: np.ndarray  # [D]


as_struct(Arrays, PartialSchedule, DeviceRule, Heaps)


def new_plan(a):
    """A schedule in which nothing is placed."""
    num_ops, num_devices = a.compute_s.shape
    num_tensors, num_groups = len(a.producer), len(a.group_allowed)
    return PartialSchedule(
        device=np.full(num_ops, num_devices),
        start_s=np.zeros(num_ops),
        finish_s=np.zeros(num_ops),
        arrival_s=np.full((num_tensors, num_devices), np.inf),
        unread=np.diff(a.use_start),
        free_s=np.zeros(num_devices),
        channel_s=np.zeros(int(a.channel.max()) + 1),
        group_device=np.full(num_groups, num_devices),
        holds=np.zeros((len(a.weight_bytes), num_devices), dtype=bool),
        weight_bytes=np.zeros(num_devices, dtype=np.int64),
        live_bytes=np.zeros(num_devices, dtype=np.int64),
        fullest_bytes=np.zeros(num_devices, dtype=np.int64),
        gap_start_s=np.zeros((num_devices, MAX_GAPS)),
        gap_end_s=np.zeros((num_devices, MAX_GAPS)),
        num_gaps=np.zeros(num_devices, dtype=np.int64),
    )


@numba.njit(**INNER_INLINE)
@no_type_check
def free_from(channel_s, channel, at):
    """From when, not before a time, a transfer can start: at once where there is no channel."""
    return at if channel < 0 else max(at, channel_s[channel])


@numba.njit(**INNER_INLINE)
@no_type_check
def keep_busy(channel_s, channel, until):
    """Have a channel, where there is one, busy until a time."""
    if channel >= 0:
        channel_s[channel] = max(channel_s[channel], until)


@numba.njit(**INNER)
@no_type_check
def ready_seconds(a, plan, i, d, queues, channel_s):
    """Seconds at which all inputs of op i can be on device d; `channel_s` [C] is scratch."""
    ready = 0.0
    if queues:
        for c in range(channel_s.shape[0]):
            channel_s[c] = plan.channel_s[c]
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        arrival = plan.arrival_s[t, d]
        src = plan.device[a.producer[t]]
        if src == a.compute_s.shape[1]:
            continue  # to be placed with its first reader
        if arrival == np.inf:
            begin = plan.finish_s[a.producer[t]]
            if queues:
                begin = free_from(channel_s, a.channel[src, d], begin)
            arrival = begin + sending_s(a, t, src, d)
            if queues:
                keep_busy(channel_s, a.channel[src, d], arrival)
        ready = max(ready, arrival)
    return ready


@numba.njit(**INNER_INLINE)
@no_type_check
def run_seconds(a, plan, i, d):
    """Seconds that op i occupies device d: its work, and dispatch if it opens a segment there."""
    if a.is_io[i] or a.segment_s[d] == 0.0:
        return a.compute_s[i, d]
    opens = a.in_start[i] == a.in_start[i + 1]
    for x in range(a.in_start[i], a.in_start[i + 1]):
        p = a.producer[a.in_tensor[x]]
        opens = opens or a.is_input[p] or plan.device[p] != d
    return a.compute_s[i, d] + (a.segment_s[d] if opens else 0.0)


@numba.njit(**INNER)
@no_type_check
def excess_bytes(a, plan, i, d, extra):
    """Bytes over the memory of device d, or that it shares, with op i, its group's weights and
    `extra` bytes; or over that of the device that would hold its caches."""
    weights, tensors = plan.weight_bytes[d] + extra, plan.live_bytes[d]
    g, home = a.group[i], holder(a, 1, d)
    if plan.group_device[g] != d:
        weights += added_bytes(a, plan.holds, g, d, d)
    for x in range(a.in_start[i], a.in_start[i + 1]):
        if plan.arrival_s[a.in_tensor[x], d] == np.inf:
            tensors += a.held_bytes[a.in_tensor[x]]
    for x in range(a.out_start[i], a.out_start[i + 1]):
        tensors += a.held_bytes[a.out_tensor[x]]
    excess = over_bytes(a, plan, d, weights + max(plan.fullest_bytes[d], tensors))
    if home != d and plan.group_device[g] != d:
        cached = added_bytes(a, plan.holds, g, d, home)
        need = plan.weight_bytes[home] + plan.fullest_bytes[home] + cached
        excess = max(excess, over_bytes(a, plan, home, need) if cached > 0 else 0)
    return excess


@numba.njit(**INNER)
@no_type_check
def over_bytes(a, plan, d, need):
    """Bytes over the memory of a device, or that it shares, which needs so many."""
    excess = max(need - a.memory_bytes[d], 0)
    if a.pool[d] >= 0:
        for other in range(a.memory_bytes.shape[0]):
            if other != d and a.pool[other] == a.pool[d]:
                need += plan.weight_bytes[other] + plan.fullest_bytes[other]
        excess = max(excess, need - a.pool_bytes[a.pool[d]])
    return excess


@numba.njit(**INNER)
@no_type_check
def earliest_gap(plan, d, ready, seconds):
    """(start, index) of the first idle gap that holds `seconds` after `ready`; index -1: none."""
    low, high = 0, plan.num_gaps[d]
    while low < high:  # the gaps of a device are in order of time
        middle = (low + high) // 2
        if plan.gap_end_s[d, middle] < ready + seconds:
            low = middle + 1
        else:
            high = middle
    for k in range(low, plan.num_gaps[d]):
        start = max(ready, plan.gap_start_s[d, k])
        if start + seconds <= plan.gap_end_s[d, k]:
            return start, k
    return max(ready, plan.free_s[d]), -1


@numba.njit(**INNER)
@no_type_check
def fill_gap(plan, d, k, start, finish):
    """Cut [start, finish] out of gap k: none, one or two gaps remain of it."""
    begin, end = plan.gap_start_s[d, k], plan.gap_end_s[d, k]
    last = plan.num_gaps[d]
    if start > begin and finish < end:
        if last < MAX_GAPS:
            for m in range(last, k, -1):
                plan.gap_start_s[d, m] = plan.gap_start_s[d, m - 1]
                plan.gap_end_s[d, m] = plan.gap_end_s[d, m - 1]
            plan.gap_start_s[d, k], plan.gap_end_s[d, k] = begin, start
            plan.gap_start_s[d, k + 1], plan.gap_end_s[d, k + 1] = finish, end
            plan.num_gaps[d] += 1
        else:
            plan.gap_start_s[d, k] = finish
    elif start > begin:
        plan.gap_end_s[d, k] = start
    elif finish < end:
        plan.gap_start_s[d, k] = finish
    else:
        for m in range(k, last - 1):
            plan.gap_start_s[d, m] = plan.gap_start_s[d, m + 1]
            plan.gap_end_s[d, m] = plan.gap_end_s[d, m + 1]
        plan.num_gaps[d] -= 1


@numba.njit(**INNER)
@no_type_check
def append_gap(plan, d, begin, end):
    last = plan.num_gaps[d]
    if last == MAX_GAPS:
        for m in range(last - 1):
            plan.gap_start_s[d, m] = plan.gap_start_s[d, m + 1]
            plan.gap_end_s[d, m] = plan.gap_end_s[d, m + 1]
        last -= 1
    plan.gap_start_s[d, last], plan.gap_end_s[d, last] = begin, end
    plan.num_gaps[d] = last + 1


@numba.njit(**INNER)
@no_type_check
def place_op(a, plan, i, d, insertion, queues):
    """Run op i on device d: its transfers, its time slot, its group, and the memory."""
    ready = 0.0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        if plan.arrival_s[t, d] == np.inf:
            src = plan.device[a.producer[t]]
            begin = plan.finish_s[a.producer[t]]
            if queues:
                begin = free_from(plan.channel_s, a.channel[src, d], begin)
            arrival = begin + sending_s(a, t, src, d)
            keep_busy(plan.channel_s, a.channel[src, d], arrival)
            plan.arrival_s[t, d] = arrival
            plan.live_bytes[d] += a.held_bytes[t]
        ready = max(ready, plan.arrival_s[t, d])
    seconds = run_seconds(a, plan, i, d)
    start, gap = max(ready, plan.free_s[d]), -1
    if insertion:
        start, gap = earliest_gap(plan, d, ready, seconds)
    finish = start + seconds
    if gap >= 0:
        fill_gap(plan, d, gap, start, finish)
    else:
        if insertion and start > plan.free_s[d]:
            append_gap(plan, d, plan.free_s[d], start)
        plan.free_s[d] = finish
    plan.device[i], plan.start_s[i], plan.finish_s[i] = d, start, finish
    take_memory(a, plan, i, d, finish)


@numba.njit(**INNER)
@no_type_check
def take_memory(a, plan, i, d, finish):
    g = a.group[i]
    if plan.group_device[g] != d:
        plan.group_device[g] = d
        hold_weights(a, plan.holds, plan.weight_bytes, g, d, 1)
    for x in range(a.out_start[i], a.out_start[i + 1]):
        t = a.out_tensor[x]
        plan.arrival_s[t, d] = finish
        if plan.unread[t] > 0:
            plan.live_bytes[d] += a.held_bytes[t]
    plan.fullest_bytes[d] = max(plan.fullest_bytes[d], plan.live_bytes[d])
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        plan.unread[t] -= 1
        if plan.unread[t] == 0:
            for e in range(plan.live_bytes.shape[0]):
                if plan.arrival_s[t, e] < np.inf:
                    plan.live_bytes[e] -= a.held_bytes[t]


@numba.njit(**INNER)
@no_type_check
def waiting(a, plan, i, d):
    """(seconds, bytes of weights) that ops waiting for op i as first reader add on device d."""
    seconds, held = 0.0, 0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        source = a.producer[a.in_tensor[x]]
        if plan.device[source] == a.compute_s.shape[1]:
            seconds += a.compute_s[source, d]
            held += added_bytes(a, plan.holds, a.group[source], d, d)
    return seconds, held


@numba.njit(**INNER)
@no_type_check
def sent_seconds(a, plan, i, d):
    """Seconds on links of the tensors that op i would have sent to device d."""
    seconds = 0.0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        source = plan.device[a.producer[t]]
        if source < a.compute_s.shape[1] and plan.arrival_s[t, d] == np.inf:
            seconds += sending_s(a, t, source, d)
    return seconds


@numba.njit(**INNER)
@no_type_check
def best_device(a, plan, rule, i):
    """Feasible device of least cost (finish plus priced transfers) for op i.

    If it fits nowhere, the device whose memory it exceeds least.
    """
    num_devices = a.compute_s.shape[1]
    g = a.group[i]
    if plan.group_device[g] < num_devices:
        return plan.group_device[g]
    best, best_excess, best_s = -1, 0, np.inf
    for d in range(num_devices):
        if not a.group_allowed[g, d]:
            continue
        before_s, held = waiting(a, plan, i, d)
        excess = excess_bytes(a, plan, i, d, held)
        ready_s = ready_seconds(a, plan, i, d, rule.queues, rule.channel_s)
        seconds = run_seconds(a, plan, i, d)
        start_s = max(ready_s, plan.free_s[d] + before_s)
        if rule.insertion and before_s == 0.0:
            start_s, _ = earliest_gap(plan, d, ready_s, seconds)
        cost_s = start_s + seconds
        if rule.price > 0.0:
            cost_s += rule.price * sent_seconds(a, plan, i, d)
        if abs(cost_s - best_s) <= rule.tie * best_s:
            better = rule.lot[i, d] < rule.lot[i, best]
        else:
            better = cost_s < best_s
        if best < 0 or excess < best_excess or (excess == best_excess and better):
            best, best_excess, best_s = d, excess, cost_s
    return best


@numba.njit(**BARE)
@no_type_check
def run_in_order(a, plan, rule, order):
    """Place each op of `order`; one that waits goes with its first reader. O(E D + N D gaps)."""
    num_devices = a.compute_s.shape[1]
    for i in order:
        if rule.waits[i]:
            continue
        d = best_device(a, plan, rule, i)
        for x in range(a.in_start[i], a.in_start[i + 1]):
            source = a.producer[a.in_tensor[x]]
            if plan.device[source] == num_devices:
                place_op(a, plan, source, d, rule.insertion, rule.queues)
        place_op(a, plan, i, d, rule.insertion, rule.queues)


@numba.njit(**INNER_INLINE)
@no_type_check
def is_less(key_a, op_a, key_b, op_b):
    return key_a < key_b or (key_a == key_b and op_a < op_b)


@numba.njit(**INNER_INLINE)
@no_type_check
def push(heaps, d, key, op):
    k = heaps.size[d]
    heaps.size[d] += 1
    while k > 0:
        up = (k - 1) // 2
        if not is_less(key, op, heaps.key[d, up], heaps.op[d, up]):
            break
        heaps.key[d, k], heaps.op[d, k] = heaps.key[d, up], heaps.op[d, up]
        k = up
    heaps.key[d, k], heaps.op[d, k] = key, op


@numba.njit(**INNER_INLINE)
@no_type_check
def pop(heaps, d):
    heaps.size[d] -= 1
    size = heaps.size[d]
    key, op = heaps.key[d, size], heaps.op[d, size]
    k = 0
    while 2 * k + 1 < size:
        down = 2 * k + 1
        if down + 1 < size and is_less(
            heaps.key[d, down + 1], heaps.op[d, down + 1], heaps.key[d, down], heaps.op[d, down]
        ):
            down += 1
        if not is_less(heaps.key[d, down], heaps.op[d, down], key, op):
            break
        heaps.key[d, k], heaps.op[d, k] = heaps.key[d, down], heaps.op[d, down]
        k = down
    if size > 0:
        heaps.key[d, k], heaps.op[d, k] = key, op


@numba.njit(**INNER)
@no_type_check
def push_ready(a, plan, rule, i, later, copies):
    """Queue a ready op on every device it may still go to, by the time its inputs are there."""
    num_devices = a.compute_s.shape[1]
    g = a.group[i]
    for d in range(num_devices):
        bound = plan.group_device[g] < num_devices and plan.group_device[g] != d
        if a.group_allowed[g, d] and not bound:
            push(later, d, ready_seconds(a, plan, i, d, np.bool_(False), rule.channel_s), i)
            copies[i] += 1


@numba.njit(**INNER)
@no_type_check
def earliest_pair(plan, level_s, later, now, done):
    """(op, device) of the earliest start, ties by the higher level; done ops are dropped."""
    best, best_op, best_start, best_level = -1, -1, np.inf, 0.0
    for d in range(plan.free_s.shape[0]):
        while later.size[d] > 0 and (done[later.op[d, 0]] or later.key[d, 0] <= plan.free_s[d]):
            op = later.op[d, 0]
            pop(later, d)
            if not done[op]:
                push(now, d, -level_s[op], op)
        while now.size[d] > 0 and done[now.op[d, 0]]:
            pop(now, d)
        if now.size[d] > 0:
            op, start = now.op[d, 0], plan.free_s[d]
        elif later.size[d] > 0:
            op, start = later.op[d, 0], later.key[d, 0]
        else:
            continue
        if start < best_start or (start == best_start and level_s[op] > best_level):
            best, best_op, best_start, best_level = d, op, start, level_s[op]
    return best_op, best


@numba.njit(**INNER)
@no_type_check
def place_earliest(a, plan, rule, level_s, later, now, done, copies):
    """Place the op of the earliest start; -1 where it did not fit there and others may."""
    num_devices = a.compute_s.shape[1]
    i, d = earliest_pair(plan, level_s, later, now, done)
    bound = plan.group_device[a.group[i]]
    if bound != d and not (bound == num_devices and excess_bytes(a, plan, i, d, 0) == 0):
        if now.size[d] > 0:
            pop(now, d)
        else:
            pop(later, d)
        copies[i] -= 1
        if copies[i] > 0:
            return -1
        # No device has room as things stand, or the group was bound to a device that had dropped
        # the op before.
        d = best_device(a, plan, rule, i)
    place_op(a, plan, i, d, rule.insertion, rule.queues)
    done[i] = True
    return i


@numba.njit(**BARE)
@no_type_check
def run_earliest_start(a, plan, rule, level_s, later, now, done, copies, unplaced):
    """Place the ready op and device of the earliest start, until all ops are placed."""
    num_ops = a.compute_s.shape[0]
    for i in range(num_ops):
        unplaced[i] = a.in_start[i + 1] - a.in_start[i]
        if unplaced[i] == 0:
            push_ready(a, plan, rule, i, later, copies)
    placed = 0
    while placed < num_ops:
        i = place_earliest(a, plan, rule, level_s, later, now, done, copies)
        if i < 0:
            continue
        placed += 1
        for x in range(a.out_start[i], a.out_start[i + 1]):
            t = a.out_tensor[x]
            for y in range(a.use_start[t], a.use_start[t + 1]):
                j = a.use_op[y]
                unplaced[j] -= 1
                if unplaced[j] == 0:
                    push_ready(a, plan, rule, j, later, copies)


def device_rule(a, insertion, queues, price=0.0, tie=0.0, lot=None, waits=None):
    """A rule for `best_device`; by default of least finish, ties by device, and no op waits."""
    num_channels = int(a.channel.max()) + 1
    return DeviceRule(
        insertion=insertion,
        queues=queues,
        price=price,
        tie=tie,
        lot=np.zeros(a.compute_s.shape) if lot is None else lot,
        waits=np.zeros(len(a.compute_s), dtype=bool) if waits is None else waits,
        channel_s=np.empty(num_channels),
    )


def heft_plan(a, order, insertion, queues):
    """The schedule of HEFT: each op of `order` where it finishes first."""
    plan = new_plan(a)
    run_in_order(a, plan, device_rule(a, insertion, queues), order)
    return plan


def critical_plan(a, order, waits, price, lot):
    """The schedule in which each op of `order` (topological) goes where it costs least.

    `lot` [N, D] decides between devices that are equally good. `waits` [N] marks ops that read
    nothing, may be anywhere and have readers; each is placed with the first of these.
    """
    plan = new_plan(a)
    run_in_order(a, plan, device_rule(a, True, True, price, TIE, lot, waits), order)
    return plan


def etf_plan(a, level_s, queues):
    """The schedule of ETF: always the ready op and device of the earliest start.

    An op's inputs reach a device at a time that is known once its producers are placed, so each
    device keeps its ready ops in two heaps: those whose inputs are there when the device is next
    free, by level, and the others by the time their inputs are there. O(E D + N D log N).
    """
    num_ops, num_devices = a.compute_s.shape
    plan, rule = new_plan(a), device_rule(a, False, queues)
    later, now = (
        Heaps(
            key=np.empty((num_devices, num_ops)),
            op=np.empty((num_devices, num_ops), dtype=np.int64),
            size=np.zeros(num_devices, dtype=np.int64),
        )
        for _ in range(2)
    )
    done = np.zeros(num_ops, dtype=bool)
    copies = np.zeros(num_ops, dtype=np.int64)  # heaps that an op is still in
    unplaced = np.empty(num_ops, dtype=np.int64)  # inputs
    run_earliest_start(a, plan, rule, level_s, later, now, done, copies, unplaced)
    return plan
