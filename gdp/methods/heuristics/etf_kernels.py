"""The numba kernel of ETF: two heaps per device instead of a scan over all ready ops."""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.methods.heuristics.list_schedule_kernels import (
    best_device,
    excess_bytes,
    new_plan,
    place_op,
    ready_seconds,
)


class Heaps(NamedTuple):
    """D binary min-heaps of ops with a float key each. Axes: D devices, N ops."""

    key: np.ndarray  # [D, N]
    op: np.ndarray  # [D, N]
    size: np.ndarray  # [D]


as_struct(Heaps)


def new_heaps(num_devices, num_ops):
    """D empty heaps."""
    return Heaps(
        key=np.empty((num_devices, num_ops)),
        op=np.empty((num_devices, num_ops), dtype=np.int64),
        size=np.zeros(num_devices, dtype=np.int64),
    )


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
def offer(a, plan, i, later, copies, channel_s):
    """Queue a ready op on every device it may still go to, by the time its inputs are there."""
    num_devices = a.compute_s.shape[1]
    g = a.group[i]
    for d in range(num_devices):
        bound = plan.group_device[g] < num_devices and plan.group_device[g] != d
        if a.group_allowed[g, d] and not bound:
            push(later, d, ready_seconds(a, plan, i, d, np.bool_(False), channel_s), i)
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
def place_earliest(a, plan, level_s, later, now, done, copies, queues, channel_s):
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
        d = best_device(a, plan, i, np.bool_(False), queues, channel_s)
    place_op(a, plan, i, d, np.bool_(False), queues)
    done[i] = True
    return i


@numba.njit(**BARE)
@no_type_check
def run_etf(a, plan, level_s, later, now, done, copies, waits, queues, channel_s):
    num_ops = a.compute_s.shape[0]
    for i in range(num_ops):
        waits[i] = a.in_start[i + 1] - a.in_start[i]
        if waits[i] == 0:
            offer(a, plan, i, later, copies, channel_s)
    placed = 0
    while placed < num_ops:
        i = place_earliest(a, plan, level_s, later, now, done, copies, queues, channel_s)
        if i < 0:
            continue
        placed += 1
        for x in range(a.out_start[i], a.out_start[i + 1]):
            t = a.out_tensor[x]
            for y in range(a.use_start[t], a.use_start[t + 1]):
                j = a.use_op[y]
                waits[j] -= 1
                if waits[j] == 0:
                    offer(a, plan, j, later, copies, channel_s)


def etf_plan(a, level_s, queues):
    """The plan of ETF: always the ready op and device that can start first. O(E D + N D log N).

    An op's inputs reach a device at a time that is known once its producers are placed, so each
    device keeps its ready ops in two heaps: those whose inputs are there when the device is next
    free, by level, and the others by the time their inputs are there.
    """
    num_ops, num_devices = a.compute_s.shape
    plan = new_plan(a)
    later, now = new_heaps(num_devices, num_ops), new_heaps(num_devices, num_ops)
    done = np.zeros(num_ops, dtype=bool)
    copies = np.zeros(num_ops, dtype=np.int64)  # heaps that an op is still in
    waits = np.empty(num_ops, dtype=np.int64)
    channel_s = np.empty_like(plan.channel_s)
    run_etf(a, plan, level_s, later, now, done, copies, waits, queues, channel_s)
    return plan
