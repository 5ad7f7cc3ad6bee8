"""Numba kernels that pack groups onto devices by bytes. Axes as in `gdp.problem.arrays`."""

from typing import no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**INNER_INLINE)
@no_type_check
def added_bytes(a, holds, g, d):
    """Weights of group g that device d does not hold yet."""
    added = 0
    for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
        if holds[a.group_weight[x], d] == 0:
            added += a.weight_bytes[a.group_weight[x]]
    return added


@numba.njit(**INNER_INLINE)
@no_type_check
def hold_weights(a, holds, g, d, sign):
    """Count the weights of group g on device d (or off it); the bytes that this adds there."""
    added = 0
    for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
        w = a.group_weight[x]
        before = holds[w, d]
        holds[w, d] = before + sign
        if (before == 0) != (before + sign == 0):
            added += sign * a.weight_bytes[w]
    return added


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
            need = added_bytes(a, holds, g, d)
            left = (room_bytes[d] - used[d] - need) / max(room_bytes[d], 1.0)
            if a.pool[d] >= 0:
                room = pool_room_bytes[a.pool[d]]
                left = min(left, (room - pool_used(a, used, d) - need) / max(room, 1.0))
            fits = left >= 0.0
            better = fits and not best_fits
            if fits == best_fits:
                better = left > best_left
                if fits and near[d] != best_near:
                    better = near[d] > best_near
            if best < 0 or better:
                best, best_fits, best_near, best_left = d, fits, near[d], left
        group_device[g] = best
        used[best] += hold_weights(a, holds, g, best, 1)


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
def shed(a, group_device, size, order, excess_bytes, slack_bytes, pool_excess, pool_slack, near):
    """Move groups off overfull devices to where there is room, in the order given; count of moves.

    Changes `group_device` and what is over and left in place, of devices and of the memories that
    they share: a group leaves an overfull pool for another memory. The receiver is the device with
    room that the group exchanges most with. `near` [D] is scratch.
    """
    num_devices = a.group_allowed.shape[1]
    moved = 0
    for g in order:
        home = group_device[g]
        crowded = a.pool[home] >= 0 and pool_excess[a.pool[home]] > 0.0
        if (excess_bytes[home] <= 0.0 and not crowded) or size[g] <= 0.0:
            continue
        neighbour_bytes(a, group_device, g, near)
        best = -1
        for d in range(num_devices):
            if d == home or not a.group_allowed[g, d] or slack_bytes[d] < size[g]:
                continue
            inside = a.pool[d] >= 0 and a.pool[d] == a.pool[home]
            if inside and crowded:
                continue
            if a.pool[d] >= 0 and not inside and pool_slack[a.pool[d]] < size[g]:
                continue
            if (
                best < 0
                or near[d] > near[best]
                or (near[d] == near[best] and slack_bytes[d] > slack_bytes[best])
            ):
                best = d
        if best >= 0:
            group_device[g] = best
            excess_bytes[home] -= size[g]
            slack_bytes[best] -= size[g]
            if a.pool[home] >= 0 and a.pool[home] != a.pool[best]:
                pool_excess[a.pool[home]] -= size[g]
            if a.pool[best] >= 0 and a.pool[home] != a.pool[best]:
                pool_slack[a.pool[best]] -= size[g]
            moved += 1
    return moved
