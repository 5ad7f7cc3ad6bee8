"""Kernels of loads and block latency for `gdp.sim.host_load`; loads numba: import it lazily."""

from typing import no_type_check

import numba
import numpy as np

from gdp.kernels.cache import KEEP


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
    """The largest load of a device or a processor that devices share, of each placement, [B]."""
    value_s = np.empty(devices.shape[0])
    for b in range(devices.shape[0]):
        load_s = device_loads(flat, devices[b])
        value_s[b] = load_s.max()
        for k in range(flat.processor.max() + 1):
            value_s[b] = max(value_s[b], load_s[flat.processor == k].sum())
    return value_s


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def batch_overflow(flat, devices):
    """Bytes of weights and caches over device memory, summed over devices, of each placement, [B].

    Ops that share a weight id hold one weight, of the largest size that any of them states.
    """
    num_devices = flat.is_cpu.size
    overflow = np.zeros(devices.shape[0], dtype=np.int64)
    for b in range(devices.shape[0]):
        held = np.zeros(num_devices, dtype=np.int64)
        largest = np.zeros(num_devices, dtype=np.int64)
        previous = np.int64(-1)
        for i in range(flat.weight_op.size):
            if i == 0 or flat.weight_id[i] != previous:
                held += largest
                largest[:] = 0
                previous = flat.weight_id[i]
            d = devices[b, flat.weight_op[i]]
            if i >= flat.first_cache:
                d = flat.cache_home[d]
            largest[d] = max(largest[d], flat.weight_bytes[i])
        held += largest
        for d in range(num_devices):
            overflow[b] += max(0, held[d] - flat.memory_bytes[d])
        within = np.minimum(held, flat.memory_bytes)
        for k in range(flat.pool_bytes.size):
            overflow[b] += max(0, within[flat.pool == k].sum() - flat.pool_bytes[k])
    return overflow


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def _levels(flat, op_set, which):
    """Level of each op: returns to the set on the paths to it, itself included, [N].

    level(v) = max(1, max_u level(u) + [u not in S]) in the set S, max(0, max_u level(u)) outside.
    Ops are in topological order, and so are tensors by producer: levels are final when read.
    """
    level = np.zeros(op_set.size, dtype=np.int64)
    tensor = 0
    for op in range(op_set.size):
        if op_set[op] == which and level[op] == 0:
            level[op] = 1
        while tensor < flat.producer.size and flat.producer[tensor] == op:
            for use in range(flat.use_start[tensor], flat.use_start[tensor + 1]):
                reader = flat.use_op[use]
                comes_back = op_set[reader] == which and op_set[op] != which
                level[reader] = max(level[reader], level[op] + comes_back)
            tensor += 1
    return level


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def block_ids(flat, devices, sets):
    """Blocks numbered by (set, level); ops on CPUs are blocks of their own, [B, N]."""
    num_rows, num_ops = devices.shape
    block = np.empty((num_rows, num_ops), dtype=np.int64)
    for b in range(num_rows):
        count = 0
        for which in range(sets[b].max() + 1):
            is_accelerator = False
            for op in range(num_ops):
                if sets[b, op] == which:
                    is_accelerator = not flat.is_cpu[devices[b, op]]
                    break
            if not is_accelerator:
                continue
            level = _levels(flat, sets[b], which)
            highest = 0
            for op in range(num_ops):
                if sets[b, op] == which:
                    block[b, op] = count + level[op] - 1
                    highest = max(highest, level[op])
            count += highest
        for op in range(num_ops):
            if flat.is_cpu[devices[b, op]]:
                block[b, op] = count
                count += 1
    return block


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def _block_seconds(flat, device, block, num_blocks):
    """(seconds of each block [K], sources and destinations of the arcs between blocks).

    An arc joins the block of a tensor to each block that reads it, and each block of an
    accelerator to its next block.
    """
    seconds = np.zeros(num_blocks)
    block_device = np.empty(num_blocks, dtype=np.int64)
    for op in range(device.size):
        seconds[block[op]] += flat.compute_s[op, device[op]]
        block_device[block[op]] = device[op]
    src = np.empty(flat.use_op.size + num_blocks, dtype=np.int64)
    dst = np.empty(flat.use_op.size + num_blocks, dtype=np.int64)
    count = 0
    seen = np.full(num_blocks, -1, dtype=np.int64)
    for t in range(flat.producer.size):
        home = block[flat.producer[t]]
        seen[home] = t
        is_read = False
        for use in range(flat.use_start[t], flat.use_start[t + 1]):
            reader = block[flat.use_op[use]]
            if seen[reader] != t:
                seen[reader] = t
                is_read = True
                src[count], dst[count] = home, reader
                count += 1
                if not flat.is_cpu[block_device[reader]]:
                    seconds[reader] += flat.tensor_s[t]
        if is_read and not flat.is_cpu[block_device[home]]:
            seconds[home] += flat.tensor_s[t]
    for b in range(1, num_blocks):
        if block_device[b] == block_device[b - 1] and not flat.is_cpu[block_device[b]]:
            src[count], dst[count] = b - 1, b
            count += 1
    return seconds, src[:count], dst[:count]


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def block_finish(flat, device, block):
    """When each block is done, [K]; inf for all where blocks wait for each other in a circle."""
    num_blocks = block.max() + 1
    seconds, src, dst = _block_seconds(flat, device, block, num_blocks)
    missing = np.zeros(num_blocks, dtype=np.int64)
    first = np.zeros(num_blocks + 1, dtype=np.int64)
    for arc in range(src.size):
        missing[dst[arc]] += 1
        first[src[arc] + 1] += 1
    first = np.cumsum(first)
    slot = first.copy()
    following = np.empty(src.size, dtype=np.int64)
    for arc in range(src.size):
        following[slot[src[arc]]] = dst[arc]
        slot[src[arc]] += 1
    ready = np.empty(num_blocks, dtype=np.int64)
    count = 0
    for b in range(num_blocks):
        if missing[b] == 0:
            ready[count] = b
            count += 1
    finish = np.zeros(num_blocks)
    done = 0
    while done < count:
        b = ready[done]
        done += 1
        finish[b] += seconds[b]
        for arc in range(first[b], first[b + 1]):
            after = following[arc]
            finish[after] = max(finish[after], finish[b])
            missing[after] -= 1
            if missing[after] == 0:
                ready[count] = after
                count += 1
    if done < num_blocks:
        return np.full(num_blocks, np.inf)
    return finish
