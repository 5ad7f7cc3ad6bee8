"""The period of a pipeline under moves: what one op's move changes, in O(degree of the op * D).

`Loads` follows a placement. After any moves it equals what `make_loads` computes from scratch, up
to the rounding of sums. Axes as in `gdp.sim.engine`; W distinct weights.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.sim.engine import OPENS


class Loads(NamedTuple):
    """Busy seconds per sample and what they follow from."""

    busy_s: np.ndarray  # [D]
    channel_s: np.ndarray  # [C]
    readers: np.ndarray  # [T, D] int32, ops of a device that read a tensor
    foreign: np.ndarray  # [N] int64, uses of tensors made on other devices
    held: np.ndarray  # [W, D] int32, groups of a device that hold a weight
    room_bytes: np.ndarray  # [D] int64, upper bound of the memory used
    kept: np.ndarray  # [T] copies of a tensor that later samples may need beside the first
    saved_s: np.ndarray  # [D + C], see save_loads
    saved_bytes: np.ndarray  # [D]


@numba.njit(cache=True, nogil=True)
@no_type_check
def send_s(a, tensor, source, to):
    return a.latency_s[source, to] + a.tensor_bytes[tensor] / a.bytes_per_s[source, to]


@numba.njit(cache=True, nogil=True)
@no_type_check
def new_loads(a, m):
    num_ops, num_devices = a.op_s.shape
    num_tensors, num_channels = len(a.producer), a.channel.max() + 1
    kept = np.zeros(num_tensors, np.int64)
    for t in range(num_tensors):
        if not a.is_backward[a.producer[t]]:
            for u in range(a.first_use[t], a.first_use[t + 1]):
                if a.is_backward[a.use_op[u]]:
                    kept[t] = num_devices - 1
    return Loads(
        np.zeros(num_devices),
        np.zeros(num_channels),
        np.zeros((num_tensors, num_devices), np.int32),
        np.zeros(num_ops, np.int64),
        np.zeros((m.weight_bytes.shape[0], num_devices), np.int32),
        np.zeros(num_devices, np.int64),
        kept,
        np.zeros(num_devices + num_channels),
        np.zeros(num_devices, np.int64),
    )


@numba.njit(cache=True, nogil=True)
@no_type_check
def save_loads(loads):
    """Remember the sums, so that a rejected move leaves no rounding behind."""
    d = len(loads.busy_s)
    loads.saved_s[:d] = loads.busy_s
    loads.saved_s[d:] = loads.channel_s
    loads.saved_bytes[:] = loads.room_bytes


@numba.njit(cache=True, nogil=True)
@no_type_check
def restore_loads(loads):
    d = len(loads.busy_s)
    loads.busy_s[:] = loads.saved_s[:d]
    loads.channel_s[:] = loads.saved_s[d:]
    loads.room_bytes[:] = loads.saved_bytes


@numba.njit(cache=True, nogil=True)
@no_type_check
def pays_segment(a, op, foreign):
    """Whether an op opens a segment, for which its device may charge."""
    return not a.is_io[op] and (a.state[op] & OPENS != 0 or foreign > 0)


@numba.njit(cache=True, nogil=True)
@no_type_check
def make_loads(a, m, loads, device):
    """Fill `loads` from scratch. O(N + E D)."""
    num_ops, num_devices = a.op_s.shape
    loads.busy_s[:] = 0.0
    loads.channel_s[:] = 0.0
    loads.readers[:] = 0
    loads.foreign[:] = 0
    loads.held[:] = 0
    loads.room_bytes[:] = 0
    for op in range(num_ops):
        d = device[op]
        loads.busy_s[d] += a.op_s[op, d]
        loads.room_bytes[d] += a.output_bytes[op]
        for k in range(a.first_input[op], a.first_input[op + 1]):
            loads.readers[a.input_tensor[k], d] += 1
            if device[a.input_op[k]] != d:
                loads.foreign[op] += 1
        if pays_segment(a, op, loads.foreign[op]):
            loads.busy_s[d] += a.segment_s[d]
        hold_weights(m, loads, op, d, 1)
    for t in range(len(a.producer)):
        home = device[a.producer[t]]
        loads.room_bytes[home] += loads.kept[t] * a.held_bytes[t]
        for d in range(num_devices):
            if d != home and loads.readers[t, d] > 0:
                add_send(a, loads, t, home, d, 1)


@numba.njit(cache=True, nogil=True)
@no_type_check
def add_send(a, loads, t, source, to, sign):
    """Count (or, with sign -1, no longer count) a transfer and its two buffers."""
    loads.channel_s[a.channel[source, to]] += sign * send_s(a, t, source, to)
    loads.room_bytes[to] += sign * (2 + loads.kept[t]) * a.held_bytes[t]


@numba.njit(cache=True, nogil=True)
@no_type_check
def hold_weights(m, loads, op, d, sign):
    """Count the weights of an op's group on a device, with its first op."""
    g = m.group[op]
    if m.group_op[m.group_start[g]] != op:
        return
    for x in range(m.group_weight_start[g], m.group_weight_start[g + 1]):
        w = m.group_weight[x]
        before = loads.held[w, d]
        loads.held[w, d] = before + sign
        if (before == 0) != (before + sign == 0):
            loads.room_bytes[d] += sign * m.weight_bytes[w]


@numba.njit(cache=True, nogil=True)
@no_type_check
def move_op(a, m, loads, device, op, new):
    """Move one op to device `new`; everything in `loads` and `device` follows."""
    old = np.int64(device[op])
    if old == new:
        return
    loads.busy_s[old] -= a.op_s[op, old]
    loads.busy_s[new] += a.op_s[op, new]
    if pays_segment(a, op, loads.foreign[op]):
        loads.busy_s[old] -= a.segment_s[old]
    move_inputs(a, loads, device, op, old, new)
    if pays_segment(a, op, loads.foreign[op]):
        loads.busy_s[new] += a.segment_s[new]
    move_outputs(a, loads, device, op, old, new)
    loads.room_bytes[old] -= a.output_bytes[op]
    loads.room_bytes[new] += a.output_bytes[op]
    hold_weights(m, loads, op, old, -1)
    hold_weights(m, loads, op, new, 1)
    device[op] = new


@numba.njit(cache=True, nogil=True)
@no_type_check
def move_inputs(a, loads, device, op, old, new):
    foreign = 0
    for k in range(a.first_input[op], a.first_input[op + 1]):
        t = np.int64(a.input_tensor[k])
        source = np.int64(device[a.input_op[k]])
        loads.readers[t, old] -= 1
        if loads.readers[t, old] == 0 and source != old:
            add_send(a, loads, t, source, old, -1)
        if loads.readers[t, new] == 0 and source != new:
            add_send(a, loads, t, source, new, 1)
        loads.readers[t, new] += 1
        foreign += source != new
    loads.foreign[op] = foreign


@numba.njit(cache=True, nogil=True)
@no_type_check
def move_outputs(a, loads, device, op, old, new):
    u = np.int64(a.op_first_use[op])
    while u < a.op_first_use[op + 1]:
        t = np.int64(a.use_tensor[u])
        u = np.int64(a.first_use[t + 1])
        for d in range(a.op_s.shape[1]):
            if loads.readers[t, d] > 0:
                if d != old:
                    add_send(a, loads, t, old, d, -1)
                if d != new:
                    add_send(a, loads, t, new, d, 1)
        loads.room_bytes[old] -= loads.kept[t] * a.held_bytes[t]
        loads.room_bytes[new] += loads.kept[t] * a.held_bytes[t]
    for u in range(a.op_first_use[op], a.op_first_use[op + 1]):
        reader = np.int64(a.use_op[u])
        there = device[reader]
        before = pays_segment(a, reader, loads.foreign[reader])
        if there == old:
            loads.foreign[reader] += 1
        elif there == new:
            loads.foreign[reader] -= 1
        after = pays_segment(a, reader, loads.foreign[reader])
        if after and not before:
            loads.busy_s[there] += a.segment_s[there]
        elif before and not after:
            loads.busy_s[there] -= a.segment_s[there]


@numba.njit(cache=True, nogil=True)
@no_type_check
def load_excess(a, m, loads):
    """By how many bytes the upper bound of the memory used is over that of some device."""
    most = 0.0
    for d in range(len(loads.room_bytes)):
        most = max(most, float(loads.room_bytes[d] - a.capacity_bytes[d]))
    return most
