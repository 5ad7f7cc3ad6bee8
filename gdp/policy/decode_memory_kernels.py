"""Numba kernels of the memory estimate of the decoder: bytes that an op would add to a device, and
that devices hold as ops are placed in decode order."""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import INNER
from gdp.problem.weights_kernels import holder


@numba.njit(**INNER)
@typing.no_type_check
def held_bytes(p, s, t, i, copies):
    """Bytes that `copies` of a tensor take on a device, one more per later stage if kept.

    Every device is taken to become one stage.
    """
    if p.kept[t]:
        stage = s.stage[i] if s.stage[i] >= 0 else s.num_stages[0]
        copies += s.stage.shape[0] - 1 - stage
    return copies * p.held_bytes[t]


@numba.njit(**INNER)
@typing.no_type_check
def room(p, s, op, i):
    """Bytes left on a device with an op's undecided group on it, at its fullest; may be negative.

    Its weights, the tensors already made that any member reads, and the op's output. Where caches
    lie on another device, what is left there, if that is less.
    """
    weights, tensors, group = s.weight_bytes[i], s.live_bytes[i], p.group[op]
    home, cached = holder(p, 1, i), 0
    s.visit[0] += 1
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        if not s.holds[p.weight[0, member], i]:
            weights += p.weight_bytes[p.weight[0, member]]
        if p.held_on.shape[0] > 1:
            cache = p.weight[1, member]
            cached += 0 if s.holds[cache, home] else p.weight_bytes[cache]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            t = p.in_tensor[x]
            if s.placed[p.producer[t], 0] >= 0 and not s.held[t, i] and s.seen[t] != s.visit[0]:
                s.seen[t] = s.visit[0]
                tensors += held_bytes(p, s, t, i, p.copies)
    for k in range(p.out_start[op], p.out_start[op + 1]):
        tensors += held_bytes(p, s, p.out_tensor[k], i, 1.0)
    if home == i:
        weights += cached
    need = weights + max(s.fullest_bytes[i], tensors)
    left = min(p.memory_bytes[i] - need, pool_room(p, s, i) - need)
    if home != i and cached > 0:
        need = s.weight_bytes[home] + cached + s.fullest_bytes[home]
        left = min(left, p.memory_bytes[home] - need, pool_room(p, s, home) - need)
    return left


@numba.njit(**INNER)
@typing.no_type_check
def pool_room(p, s, i):
    """Bytes that other devices leave of a memory that they share; all of a device's own."""
    if p.pool[i] < 0:
        return p.memory_bytes[i]
    left = np.float64(p.pool_bytes[p.pool[i]])
    for other in range(p.pool.shape[0]):
        if other != i and p.pool[other] == p.pool[i]:
            left -= s.weight_bytes[other] + s.fullest_bytes[other]
    return left


@numba.njit(**INNER)
@typing.no_type_check
def crowded_reader(p, s, op, more):
    """The device whose placed readers of this op's outputs would overflow its memory.

    -1 where there is none, -2 where there are several. `more` [D] is scratch.
    """
    for i in range(more.shape[0]):
        more[i] = 0.0
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        for x in range(p.use_start[t], p.use_start[t + 1]):
            i = s.group_device[p.group[p.use_op[x]]]
            if i >= 0 and not s.held[t, i]:
                s.held[t, i] = True  # once each; undone below
                more[i] += held_bytes(p, s, t, i, p.copies)
        for i in range(more.shape[0]):
            s.held[t, i] = False
    crowded = -1
    for i in range(more.shape[0]):
        fullest = max(s.fullest_bytes[i], s.live_bytes[i] + more[i])
        limit = min(p.memory_bytes[i], pool_room(p, s, i))
        if more[i] > 0 and s.weight_bytes[i] + fullest > limit:
            crowded = i if crowded == -1 else -2
    return crowded


@numba.njit(**INNER)
@typing.no_type_check
def receive(p, s, t, i):
    """Hold a copy of a tensor on a device that will read it."""
    if not s.held[t, i]:
        s.held[t, i] = True
        s.live_bytes[i] += held_bytes(p, s, t, i, p.copies)
        s.fullest_bytes[i] = max(s.fullest_bytes[i], s.live_bytes[i])


@numba.njit(**INNER)
@typing.no_type_check
def settle_group(p, s, group, i):
    """Place a group: add its weights and its already produced inputs to the device's memory."""
    s.group_device[group] = i
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        for kind in range(p.held_on.shape[0]):
            weight, home = p.weight[kind, member], holder(p, kind, i)
            if not s.holds[weight, home]:
                s.holds[weight, home] = True
                s.weight_bytes[home] += p.weight_bytes[weight]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            if s.placed[p.producer[p.in_tensor[x]], 0] >= 0:
                receive(p, s, p.in_tensor[x], i)


@numba.njit(**INNER)
@typing.no_type_check
def hold_outputs(p, s, op, i):
    """Hold outputs of an op on its device and on the devices of readers already placed."""
    if not p.is_backward[op] and not p.is_io[op] and s.stage[i] < 0:
        s.stage[i] = s.num_stages[0]
        s.num_stages[0] += 1
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        s.held[t, i] = True
        s.live_bytes[i] += held_bytes(p, s, t, i, 1.0)
        for x in range(p.use_start[t], p.use_start[t + 1]):
            reader = s.group_device[p.group[p.use_op[x]]]
            if reader >= 0:
                receive(p, s, t, reader)
    s.fullest_bytes[i] = max(s.fullest_bytes[i], s.live_bytes[i])
    for k in range(p.out_start[op], p.out_start[op + 1]):
        if s.uses_left[p.out_tensor[k]] == 0:
            drop(p, s, p.out_tensor[k])


@numba.njit(**INNER)
@typing.no_type_check
def read_inputs(p, s, op):
    """Free tensors whose last reader was this op."""
    for k in range(p.in_start[op], p.in_start[op + 1]):
        t = p.in_tensor[k]
        s.uses_left[t] -= 1
        if s.uses_left[t] == 0:
            drop(p, s, t)


@numba.njit(**INNER)
@typing.no_type_check
def drop(p, s, t):
    """Free a tensor that all its readers have read.

    A full pipeline keeps what is sent: the next sample's tensor is on its way while one is read.
    """
    count = 0
    for i in range(s.live_bytes.shape[0]):
        count += s.held[t, i]
    if p.copies > 1.0 and count > 1:
        return
    for i in range(s.live_bytes.shape[0]):
        if s.held[t, i]:
            s.held[t, i] = False
            s.live_bytes[i] -= p.held_bytes[t]
