"""Numba kernels of the list schedulers, HEFT and ETF, over `Arrays`.

A schedule under construction is a `Plan`. Memory is counted as the ops are placed: a device holds
the weights of the groups placed on it, and each tensor from its arrival until its last reader is
placed, so that a plan errs on the safe side where readers run in another order.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.problem.arrays import Arrays
from gdp.sim.kernels.engine import transfer_time

MAX_GAPS = 512  # idle gaps remembered per device; the earliest are forgotten first


class Plan(NamedTuple):
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


as_struct(Arrays, Plan)


def new_plan(a):
    """A plan in which nothing is placed."""
    num_ops, num_devices = a.compute_s.shape
    num_tensors, num_groups = len(a.producer), len(a.group_allowed)
    return Plan(
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
def send_seconds(a, t, src, dst):
    return transfer_time(
        a.latency_s[src, dst], a.tensor_bytes[t], a.bytes_per_s[src, dst], a.round_to
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
    """When all that op i reads can be on device d. `channel_s` is scratch for queues of sends."""
    ready = 0.0
    if queues:
        for c in range(channel_s.shape[0]):
            channel_s[c] = plan.channel_s[c]
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        arrival = plan.arrival_s[t, d]
        src = plan.device[a.producer[t]]
        if src == a.compute_s.shape[1]:
            continue  # to be placed with its first reader, see critical_path_kernels
        if arrival == np.inf:
            begin = plan.finish_s[a.producer[t]]
            if queues:
                begin = free_from(channel_s, a.channel[src, d], begin)
            arrival = begin + send_seconds(a, t, src, d)
            if queues:
                keep_busy(channel_s, a.channel[src, d], arrival)
        ready = max(ready, arrival)
    return ready


@numba.njit(**INNER_INLINE)
@no_type_check
def run_seconds(a, plan, i, d):
    """How long op i occupies device d: its work, and the dispatch if it opens a segment there."""
    if a.is_io[i] or a.segment_s[d] == 0.0:
        return a.compute_s[i, d]
    opens = a.in_start[i] == a.in_start[i + 1]
    for x in range(a.in_start[i], a.in_start[i + 1]):
        p = a.producer[a.in_tensor[x]]
        opens = opens or a.is_input[p] or plan.device[p] != d
    return a.compute_s[i, d] + (a.segment_s[d] if opens else 0.0)


@numba.njit(**INNER)
@no_type_check
def excess_bytes(a, plan, i, d, besides):
    """By how much device d would be over its memory with op i, the weights of its group, and some
    bytes besides."""
    weights, tensors = plan.weight_bytes[d] + besides, plan.live_bytes[d]
    g = a.group[i]
    if plan.group_device[g] != d:
        for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
            if not plan.holds[a.group_weight[x], d]:
                weights += a.weight_bytes[a.group_weight[x]]
    for x in range(a.in_start[i], a.in_start[i + 1]):
        if plan.arrival_s[a.in_tensor[x], d] == np.inf:
            tensors += a.tensor_bytes[a.in_tensor[x]]
    for x in range(a.out_start[i], a.out_start[i + 1]):
        tensors += a.tensor_bytes[a.out_tensor[x]]
    return max(weights + max(plan.fullest_bytes[d], tensors) - a.memory_bytes[d], 0)


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
            arrival = begin + send_seconds(a, t, src, d)
            keep_busy(plan.channel_s, a.channel[src, d], arrival)
            plan.arrival_s[t, d] = arrival
            plan.live_bytes[d] += a.tensor_bytes[t]
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
        for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
            w = a.group_weight[x]
            if not plan.holds[w, d]:
                plan.holds[w, d] = True
                plan.weight_bytes[d] += a.weight_bytes[w]
    for x in range(a.out_start[i], a.out_start[i + 1]):
        t = a.out_tensor[x]
        plan.arrival_s[t, d] = finish
        if plan.unread[t] > 0:
            plan.live_bytes[d] += a.tensor_bytes[t]
    plan.fullest_bytes[d] = max(plan.fullest_bytes[d], plan.live_bytes[d])
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        plan.unread[t] -= 1
        if plan.unread[t] == 0:
            for e in range(plan.live_bytes.shape[0]):
                if plan.arrival_s[t, e] < np.inf:
                    plan.live_bytes[e] -= a.tensor_bytes[t]


@numba.njit(**INNER)
@no_type_check
def best_device(a, plan, i, insertion, queues, channel_s):
    """The allowed device where op i fits and finishes first; where none fits, the least excess."""
    num_devices = a.compute_s.shape[1]
    g = a.group[i]
    if plan.group_device[g] < num_devices:
        return plan.group_device[g]
    best, best_excess, best_finish = -1, 0, np.inf
    for d in range(num_devices):
        if not a.group_allowed[g, d]:
            continue
        excess = excess_bytes(a, plan, i, d, 0)
        ready = ready_seconds(a, plan, i, d, queues, channel_s)
        seconds = run_seconds(a, plan, i, d)
        start = max(ready, plan.free_s[d])
        if insertion:
            start, _ = earliest_gap(plan, d, ready, seconds)
        finish = start + seconds
        if best < 0 or excess < best_excess or (excess == best_excess and finish < best_finish):
            best, best_excess, best_finish = d, excess, finish
    return best


@numba.njit(**BARE)
@no_type_check
def run_heft(a, plan, order, insertion, queues, channel_s):
    """Place each op of `order` where it finishes first. O(E D + N D gaps)."""
    for i in order:
        d = best_device(a, plan, i, insertion, queues, channel_s)
        place_op(a, plan, i, d, insertion, queues)


def heft_plan(a, order, insertion, queues):
    """The plan of HEFT: each op of `order` where it finishes first."""
    plan = new_plan(a)
    run_heft(a, plan, order, insertion, queues, np.empty_like(plan.channel_s))
    return plan
