"""The period of a pipeline under moves: what one op's move changes, in O(degree of the op * D).

`Loads` follows a placement. After any moves it equals what `make_loads` computes from scratch, up
to the rounding of sums. Axes as in `gdp.problem.arrays`; C channels.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.problem.arrays import Arrays
from gdp.sim.kernels.engine import transfer_time


class Loads(NamedTuple):
    """Busy seconds per sample and what they follow from."""

    busy_s: np.ndarray  # [D]
    channel_s: np.ndarray  # [C]
    readers: np.ndarray  # [T, D] ops of a device that read a tensor
    foreign: np.ndarray  # [N] uses of tensors made on other devices
    held: np.ndarray  # [W, D] groups of a device that hold a weight
    room_bytes: np.ndarray  # [D] upper bound of the memory used
    kept: np.ndarray  # [T] copies of a tensor that later samples may need beside the first
    saved_s: np.ndarray  # [D + C], see save_loads
    saved_bytes: np.ndarray  # [D]


as_struct(Arrays, Loads)


def new_loads(m):
    """Empty loads; fill them by `make_loads`."""
    num_tensors, num_devices = len(m.producer), m.compute_s.shape[1]
    num_channels = int(m.channel.max()) + 1
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
def add_send(m, loads, t, source, to, sign):
    """Count (or, with sign -1, no longer count) a transfer and its two buffers."""
    seconds = transfer_time(
        m.latency_s[source, to], m.tensor_bytes[t], m.bytes_per_s[source, to], m.round_to
    )
    if m.channel[source, to] >= 0:
        loads.channel_s[m.channel[source, to]] += sign * seconds
    loads.room_bytes[to] += sign * (2 + loads.kept[t]) * m.tensor_bytes[t]


@numba.njit(**INNER_INLINE)
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
        loads.busy_s[d] += m.compute_s[op, d]
        if pays_segment(m, loads, op):
            loads.busy_s[d] += m.segment_s[d]
        hold_weights(m, loads, op, d, 1)
    for t in range(m.producer.shape[0]):
        home = np.int64(device[m.producer[t]])
        loads.room_bytes[home] += (1 + loads.kept[t]) * m.tensor_bytes[t]
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
            loads.busy_s[there] += m.segment_s[there]
        elif before and not after:
            loads.busy_s[there] -= m.segment_s[there]


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
        held = (1 + loads.kept[t]) * m.tensor_bytes[t]
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
    loads.busy_s[old] -= m.compute_s[op, old]
    loads.busy_s[new] += m.compute_s[op, new]
    if pays_segment(m, loads, op):
        loads.busy_s[old] -= m.segment_s[old]
    move_inputs(m, loads, device, op, old, new)
    if pays_segment(m, loads, op):
        loads.busy_s[new] += m.segment_s[new]
    move_outputs(m, loads, device, op, old, new)
    hold_weights(m, loads, op, old, -1)
    hold_weights(m, loads, op, new, 1)
    device[op] = new


@numba.njit(**INNER_INLINE)
@no_type_check
def may_overflow(m, loads):
    """True if the upper bound of the memory used is over that of some device."""
    for d in range(loads.room_bytes.shape[0]):  # noqa: SIM110 (a kernel)
        if loads.room_bytes[d] > m.memory_bytes[d]:
            return True
    return False
