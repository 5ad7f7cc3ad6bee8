"""Numba kernels of the decoder's memory: what each device holds as ops are placed.

The rules are those of `gdp.sim.memory`, as far as they are known part-way. A tensor is sent as soon
as it is made and its reader's device is known, however long that device is busy before it reads
it; weights are there throughout, beside the fullest moment of the tensors.
"""

import typing

import numba

from gdp.kernels.options import INNER, INNER_INLINE


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def later_stages(p, s, i):
    """How many stages follow a device's, if every device becomes one; an empty device is next."""
    stage = s.stage[i] if s.stage[i] >= 0 else s.num_stages[0]
    return s.stage.shape[0] - 1 - stage


@numba.njit(**INNER)
@typing.no_type_check
def copy_bytes(p, s, t, i):
    """Bytes that a received tensor takes on a device."""
    times = p.copies + (later_stages(p, s, i) if p.kept[t] else 0)
    return times * p.tensor_bytes[t]


@numba.njit(**INNER)
@typing.no_type_check
def room(p, s, op, i):
    """Bytes left on a device with an op's undecided group on it, at its fullest; may be negative.

    Its weights, what any member reads of what is already made, and what the op makes.
    """
    weights, tensors, group = s.weight_bytes[i], s.live_bytes[i], p.group[op]
    s.visit[0] += 1
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        if not s.holds[p.weight[member], i]:
            weights += p.weight_bytes[p.weight[member]]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            t = p.in_tensor[x]
            if s.placed[p.producer[t], 0] >= 0 and not s.held[t, i] and s.seen[t] != s.visit[0]:
                s.seen[t] = s.visit[0]
                tensors += copy_bytes(p, s, t, i)
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        tensors += p.tensor_bytes[t] * (1 + (later_stages(p, s, i) if p.kept[t] else 0))
    return p.memory_bytes[i] - weights - max(s.fullest_bytes[i], tensors)


@numba.njit(**INNER)
@typing.no_type_check
def crowded_reader(p, s, op, more):
    """The device that has no room for what the op makes elsewhere and its ops will read.

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
                more[i] += copy_bytes(p, s, t, i)
        for i in range(more.shape[0]):
            s.held[t, i] = False
    crowded = -1
    for i in range(more.shape[0]):
        fullest = max(s.fullest_bytes[i], s.live_bytes[i] + more[i])
        if more[i] > 0 and s.weight_bytes[i] + fullest > p.memory_bytes[i]:
            crowded = i if crowded == -1 else -2
    return crowded


@numba.njit(**INNER)
@typing.no_type_check
def receive(p, s, t, i):
    """Hold a copy of a tensor on a device that will read it."""
    if not s.held[t, i]:
        s.held[t, i] = True
        s.live_bytes[i] += copy_bytes(p, s, t, i)
        s.fullest_bytes[i] = max(s.fullest_bytes[i], s.live_bytes[i])


@numba.njit(**INNER)
@typing.no_type_check
def settle_group(p, s, group, i):
    """Decide a group's device: its weights come, and what its ops read of what is already made."""
    s.group_device[group] = i
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        weight = p.weight[member]
        if not s.holds[weight, i]:
            s.holds[weight, i] = True
            s.weight_bytes[i] += p.weight_bytes[weight]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            if s.placed[p.producer[p.in_tensor[x]], 0] >= 0:
                receive(p, s, p.in_tensor[x], i)


@numba.njit(**INNER)
@typing.no_type_check
def hold_outputs(p, s, op, i):
    """What an op makes is held on its device, and where ops will read it whose device is known."""
    if not p.is_backward[op] and not p.is_io[op] and s.stage[i] < 0:
        s.stage[i] = s.num_stages[0]
        s.num_stages[0] += 1
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        s.held[t, i] = True
        s.live_bytes[i] += p.tensor_bytes[t] * (1 + (later_stages(p, s, i) if p.kept[t] else 0))
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
    """Free what an op was the last to read."""
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
            s.live_bytes[i] -= p.tensor_bytes[t]
