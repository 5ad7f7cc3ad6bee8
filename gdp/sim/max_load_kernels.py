"""The kernels behind `gdp.sim.max_load`. They load numba: import them inside functions."""

from typing import no_type_check

import numba
import numpy as np

from gdp.kernel_cache import KEEP


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def device_loads(flat, device):
    """Seconds per sample that each device is busy, [D]."""
    num_devices = flat.is_cpu.size
    load_s = np.zeros(num_devices)
    for op in range(device.size):
        load_s[device[op]] += flat.compute_s[op, device[op]]
    seen = np.full(num_devices, -1, dtype=np.int64)
    for t in range(flat.producer.size):
        home = device[flat.producer[t]]
        seen[home] = t
        cut = False
        for use in range(flat.use_start[t], flat.use_start[t + 1]):
            reader = device[flat.use_op[use]]
            if seen[reader] != t:
                seen[reader] = t
                cut = True
                if not flat.is_cpu[reader]:
                    load_s[reader] += flat.tensor_s[t]
        if cut and not flat.is_cpu[home]:
            load_s[home] += flat.tensor_s[t]
    return load_s


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def batch_loads(flat, devices):
    """The largest load of each placement, [B]."""
    value_s = np.empty(devices.shape[0])
    for b in range(devices.shape[0]):
        value_s[b] = device_loads(flat, devices[b]).max()
    return value_s


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def batch_overflow(flat, devices):
    """Bytes of weights over device memory, summed over devices, of each placement, [B].

    Ops that share a weight id hold one weight, of the largest size that any of them states.
    """
    num_devices = flat.is_cpu.size
    overflow = np.zeros(devices.shape[0], dtype=np.int64)
    for b in range(devices.shape[0]):
        held = np.zeros(num_devices, dtype=np.int64)
        largest = np.zeros(num_devices, dtype=np.int64)
        previous = np.int64(-1)
        for i in range(flat.weight_order.size):
            op = flat.weight_order[i]
            if i == 0 or flat.weight_id[op] != previous:
                held += largest
                largest[:] = 0
                previous = flat.weight_id[op]
            d = devices[b, op]
            largest[d] = max(largest[d], flat.weight_bytes[op])
        held += largest
        for d in range(num_devices):
            overflow[b] += max(0, held[d] - flat.memory_bytes[d])
    return overflow
