"""Numba kernels that pack groups onto devices by bytes. Axes as in `gdp.problem.arrays`."""

from typing import no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays
from gdp.problem.weights_kernels import added_bytes, hold_weights, holder

as_struct(Arrays)


@numba.njit(**INNER)
@no_type_check
def neighbour_bytes(a, group_device, g, near):
    """Leave in `near` the bytes that group g exchanges with each device; D: not placed yet."""
    near[:] = 0.0
    for x in range(a.group_start[g], a.group_start[g + 1]):
        i = a.group_op[x]
        for y in range(a.in_start[i], a.in_start[i + 1]):
            t = a.in_tensor[y]
            h = a.group[a.producer[t]]
            if h != g and group_device[h] < near.shape[0]:
                near[group_device[h]] += a.sent_bytes[t]
        for y in range(a.out_start[i], a.out_start[i + 1]):
            t = a.out_tensor[y]
            for z in range(a.use_start[t], a.use_start[t + 1]):
                h = a.group[a.use_op[z]]
                if h != g and group_device[h] < near.shape[0]:
                    near[group_device[h]] += a.sent_bytes[t]


@numba.njit(**BARE)
@no_type_check
def fill_packs(a, order, room_bytes, pool_room_bytes, group_device, holds, used, near):
    """A device for every group, in the order given: where it fits, the one it exchanges most with.

    Ties and groups without placed neighbours go to the device with the largest share of its room
    left; a group that fits nowhere goes there too. What is left of a memory that devices share is
    left on none of them more than once.
    """
    num_devices = a.group_allowed.shape[1]
    for g in order:
        neighbour_bytes(a, group_device, g, near)
        best, best_fits, best_near, best_left = -1, False, -1.0, -np.inf
        for d in range(num_devices):
            if not a.group_allowed[g, d]:
                continue
            left = share_left(a, holds, used, room_bytes, pool_room_bytes, g, d, d)
            home = holder(a, 1, d)
            if home != d and added_bytes(a, holds, g, d, home) > 0:
                there = share_left(a, holds, used, room_bytes, pool_room_bytes, g, d, home)
                left = min(left, there)
            fits = left >= 0.0
            better = fits and not best_fits
            if fits == best_fits:
                better = left > best_left
                if fits and near[d] != best_near:
                    better = near[d] > best_near
            if best < 0 or better:
                best, best_fits, best_near, best_left = d, fits, near[d], left
        group_device[g] = best
        hold_weights(a, holds, used, g, best, 1)


@numba.njit(**INNER_INLINE)
@no_type_check
def share_left(a, holds, used, room_bytes, pool_room_bytes, g, d, at):
    """Share of the room of device `at`, or of its pool, that is left with group g on device d."""
    need = added_bytes(a, holds, g, d, at)
    left = (room_bytes[at] - used[at] - need) / max(room_bytes[at], 1.0)
    if a.pool[at] >= 0:
        room = pool_room_bytes[a.pool[at]]
        left = min(left, (room - pool_used(a, used, at) - need) / max(room, 1.0))
    return left


@numba.njit(**INNER)
@no_type_check
def pool_used(a, used, d):
    """Bytes used by all devices of the pool of device d."""
    total = 0.0
    for other in range(used.shape[0]):
        if a.pool[other] == a.pool[d]:
            total += used[other]
    return total


def pack(a, order, room_bytes, pool_room_bytes):
    """The device of every group by `fill_packs`."""
    num_groups, num_devices = a.group_allowed.shape
    group_device = np.full(num_groups, num_devices)
    holds = np.zeros((len(a.weight_bytes), num_devices), dtype=np.int64)
    used, near = np.zeros(num_devices), np.zeros(num_devices)
    fill_packs(a, order, room_bytes, pool_room_bytes, group_device, holds, used, near)
    return group_device


@numba.njit(**BARE)
@no_type_check
def shed(
    a, group_device, size, cache, order, excess_bytes, slack_bytes, pool_excess, pool_slack, near
):
    """Move groups off overfull devices to where there is room, in the order given; count of moves.

    Changes `group_device` and what is over and left in place, of devices and of the memories that
    they share: a group leaves an overfull pool for another memory. `cache` [G] are bytes beside
    `size`, of the second kind, whose device may be overfull, too. The receiver is the device with
    room that the group exchanges most with. `near` [D] is scratch.
    """
    num_devices = a.group_allowed.shape[1]
    moved = 0
    for g in order:
        home = group_device[g]
        kept = holder(a, 1, home)
        crowded = a.pool[home] >= 0 and pool_excess[a.pool[home]] > 0.0
        lacks = (excess_bytes[home] > 0.0 or crowded) and size[g] > 0.0
        if not lacks and (cache[g] <= 0.0 or excess_bytes[kept] <= 0.0):
            continue
        neighbour_bytes(a, group_device, g, near)
        best = -1
        for d in range(num_devices):
            if d == home or not a.group_allowed[g, d]:
                continue
            there = holder(a, 1, d)
            left = cache[g] if there != kept else 0.0  # caches that change their device
            if not lacks and left == 0.0:
                continue
            need = size[g] + left if there == d else size[g]
            if slack_bytes[d] < need or (there != d and slack_bytes[there] < left):
                continue
            inside = a.pool[d] >= 0 and a.pool[d] == a.pool[home]
            if inside and crowded:
                continue
            if a.pool[d] >= 0 and not inside and pool_slack[a.pool[d]] < need:
                continue
            if (
                best < 0
                or near[d] > near[best]
                or (near[d] == near[best] and slack_bytes[d] > slack_bytes[best])
            ):
                best = d
        if best >= 0:
            group_device[g] = best
            carry(a, home, best, size[g], excess_bytes, slack_bytes, pool_excess, pool_slack)
            there = holder(a, 1, best)
            if there != kept and cache[g] > 0.0:
                carry(a, kept, there, cache[g], excess_bytes, slack_bytes, pool_excess, pool_slack)
            moved += 1
    return moved


@numba.njit(**INNER_INLINE)
@no_type_check
def carry(a, source, to, size, excess_bytes, slack_bytes, pool_excess, pool_slack):
    """Move `size` bytes between two devices, in the excess and the slack of their memories."""
    excess_bytes[source] -= size
    slack_bytes[to] -= size
    if a.pool[source] >= 0 and a.pool[source] != a.pool[to]:
        pool_excess[a.pool[source]] -= size
    if a.pool[to] >= 0 and a.pool[source] != a.pool[to]:
        pool_slack[a.pool[to]] -= size
