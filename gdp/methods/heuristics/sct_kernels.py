"""The numba kernel of SCT: ETF in which a device waits a little for the favourite child."""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER
from gdp.kernels.struct import as_struct
from gdp.methods.heuristics.etf_kernels import Heaps, new_heaps, offer, pop, push
from gdp.methods.heuristics.list_schedule_kernels import (
    best_device,
    excess_bytes,
    new_plan,
    place_op,
    ready_seconds,
)


class Claims(NamedTuple):
    """What each device waits for. Axes: N ops, D devices."""

    child: np.ndarray  # [N] the favourite child of each op, or -1
    saved_s: np.ndarray  # [N] of its transfer
    op: np.ndarray  # [D] the favourite child of the last op, or -1
    ready_s: np.ndarray  # [D] when its inputs are there; inf while that is not known
    until_s: np.ndarray  # [D] from when others may start


as_struct(Heaps, Claims)


@numba.njit(**INNER)
@no_type_check
def next_of(plan, claims, level_s, later, now, done, d):
    """(op, start in seconds, whether it is the favourite) on device d; -1 where none is ready."""
    until_s = max(claims.until_s[d], plan.free_s[d])
    while later.size[d] > 0 and (done[later.op[d, 0]] or later.key[d, 0] <= plan.free_s[d]):
        op = later.op[d, 0]
        pop(later, d)
        if not done[op]:
            push(now, d, -level_s[op], op)
    while now.size[d] > 0 and done[now.op[d, 0]]:
        pop(now, d)
    op, start_s = -1, np.inf
    if now.size[d] > 0:
        op, start_s = now.op[d, 0], until_s
    elif later.size[d] > 0:
        op, start_s = later.op[d, 0], max(later.key[d, 0], until_s)
    favourite = claims.op[d]
    if favourite >= 0:
        own_s = max(claims.ready_s[d], plan.free_s[d])
        if own_s < np.inf and own_s <= start_s:
            return favourite, own_s, True
    return op, start_s, False


@numba.njit(**INNER)
@no_type_check
def earliest(plan, claims, level_s, later, now, done):
    """(op, device, whether it is the favourite) of the earliest start, ties by the higher level."""
    best, best_op, best_s, best_level_s, is_favourite = -1, -1, np.inf, 0.0, False
    for d in range(plan.free_s.shape[0]):
        op, start_s, favourite = next_of(plan, claims, level_s, later, now, done, d)
        if op < 0:
            continue
        if start_s < best_s or (start_s == best_s and level_s[op] > best_level_s):
            best, best_op, best_s, best_level_s = d, op, start_s, level_s[op]
            is_favourite = favourite
    return best_op, best, is_favourite


@numba.njit(**INNER)
@no_type_check
def place_next(a, plan, claims, level_s, later, now, done, copies, queues, channel_s):
    """Place the op of the earliest start; -1 where it did not fit there and others may."""
    num_devices = a.compute_s.shape[1]
    i, d, favourite = earliest(plan, claims, level_s, later, now, done)
    bound = plan.group_device[a.group[i]]
    if bound != d and not (bound == num_devices and excess_bytes(a, plan, i, d, 0) == 0):
        if favourite:  # it is in the heaps too
            claims.op[d], claims.until_s[d] = -1, 0.0
            return -1
        pop(now if now.size[d] > 0 else later, d)
        copies[i] -= 1
        if copies[i] > 0:
            return -1
        d = best_device(a, plan, i, np.bool_(False), queues, channel_s)
    place_op(a, plan, i, d, np.bool_(False), queues)
    done[i] = True
    claim(a, plan, claims, i, d)
    release(a, claims, i, d)
    return i


@numba.njit(**INNER)
@no_type_check
def claim(a, plan, claims, i, d):
    """Device d waits from the end of op i for its favourite child, where that may run there."""
    child = claims.child[i]
    claims.op[d], claims.ready_s[d], claims.until_s[d] = -1, np.inf, 0.0
    if child >= 0:
        g = a.group[child]
        if a.group_allowed[g, d] and plan.group_device[g] in (d, a.compute_s.shape[1]):
            claims.op[d], claims.until_s[d] = child, plan.finish_s[i] + claims.saved_s[i]


@numba.njit(**INNER)
@no_type_check
def release(a, claims, i, d):
    """Op i binds its group to device d: no other device waits for any of that group any longer."""
    for other in range(claims.op.shape[0]):
        child = claims.op[other]
        if other != d and child >= 0 and a.group[child] == a.group[i]:
            claims.op[other], claims.until_s[other] = -1, 0.0


@numba.njit(**INNER)
@no_type_check
def tell(a, plan, claims, j, queues, channel_s):
    """The op j is ready: devices that wait for it learn when it can start."""
    for d in range(plan.free_s.shape[0]):
        if claims.op[d] == j:
            claims.ready_s[d] = ready_seconds(a, plan, j, d, queues, channel_s)


@numba.njit(**BARE)
@no_type_check
def run_sct(a, plan, claims, level_s, later, now, done, copies, waits, queues, channel_s):
    num_ops = a.compute_s.shape[0]
    for i in range(num_ops):
        waits[i] = a.in_start[i + 1] - a.in_start[i]
        if waits[i] == 0:
            offer(a, plan, i, later, copies, channel_s)
    placed = 0
    while placed < num_ops:
        i = place_next(a, plan, claims, level_s, later, now, done, copies, queues, channel_s)
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
                    tell(a, plan, claims, j, queues, channel_s)


def sct_plan(a, level_s, child, saved_s, queues):
    """The plan of SCT for favourite children [N] and the seconds [N] that keeping them saves.

    As ETF, but a device that ran an op starts nothing else than its favourite child until that
    child's transfer would have been over or its group is bound to another device, and of two that
    could start at once the child. What is started after a wait in vain is planned as if there had
    been none.
    O(E D + N D (D + log N)).
    """
    num_ops, num_devices = a.compute_s.shape
    plan = new_plan(a)
    claims = Claims(
        child=child,
        saved_s=saved_s,
        op=np.full(num_devices, -1),
        ready_s=np.full(num_devices, np.inf),
        until_s=np.zeros(num_devices),
    )
    later, now = new_heaps(num_devices, num_ops), new_heaps(num_devices, num_ops)
    done = np.zeros(num_ops, dtype=bool)
    copies = np.zeros(num_ops, dtype=np.int64)  # heaps that an op is still in
    waits = np.empty(num_ops, dtype=np.int64)
    channel_s = np.empty_like(plan.channel_s)
    run_sct(a, plan, claims, level_s, later, now, done, copies, waits, queues, channel_s)
    return plan
