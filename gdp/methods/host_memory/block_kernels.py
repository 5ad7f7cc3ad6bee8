"""Kernels of block latency for `gdp.methods.host_memory.load`; loads numba: import it lazily."""

from typing import no_type_check

import numba
import numpy as np

from gdp.base.kernels.cache import KEEP


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def block_levels(flat, op_set):
    """Times that the paths to an op have come back to its set, itself included, [N].

    level(v) = max(1, max_u level(u) + [u not in S]) in the set S of v, and on the way to it,
    through ops outside, max(0, max_u level(u)). Ops are in topological order, and so are tensors
    by producer: levels are final when read.
    """
    level = np.zeros((op_set.size, op_set.max() + 1), dtype=np.int64)
    tensor = 0
    for op in range(op_set.size):
        own = op_set[op]
        level[op, own] = max(1, level[op, own])
        while tensor < flat.producer.size and flat.producer[tensor] == op:
            for use in range(flat.use_start[tensor], flat.use_start[tensor + 1]):
                reader = flat.use_op[use]
                for s in range(level.shape[1]):
                    comes_back = op_set[reader] == s and own != s
                    level[reader, s] = max(level[reader, s], level[op, s] + comes_back)
            tensor += 1
    return np.array([level[op, op_set[op]] for op in range(op_set.size)])


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def _arcs(flat, device, block):
    """(seconds of each block [K], sources and destinations of the arcs between blocks).

    An arc joins the block of a tensor to each block that reads it, and each block of an
    accelerator to its next block.
    """
    num_blocks = block.max() + 1
    seconds = np.zeros(num_blocks)
    home = np.empty(num_blocks, dtype=np.int64)
    for op in range(device.size):
        seconds[block[op]] += flat.compute_s[op, device[op]]
        home[block[op]] = device[op]
    src = np.empty(flat.use_op.size + num_blocks, dtype=np.int64)
    dst = np.empty(flat.use_op.size + num_blocks, dtype=np.int64)
    count = 0
    seen = np.full(num_blocks, -1, dtype=np.int64)
    for t in range(flat.producer.size):
        maker, before = block[flat.producer[t]], count
        seen[maker] = t
        for use in range(flat.use_start[t], flat.use_start[t + 1]):
            reader = block[flat.use_op[use]]
            if seen[reader] != t:
                seen[reader] = t
                src[count], dst[count] = maker, reader
                count += 1
                if not flat.is_cpu[home[reader]]:
                    seconds[reader] += flat.sent_s[t]
        if count > before and not flat.is_cpu[home[maker]]:
            seconds[maker] += flat.sent_s[t]
    for b in range(1, num_blocks):
        if home[b] == home[b - 1] and not flat.is_cpu[home[b]]:
            src[count], dst[count] = b - 1, b
            count += 1
    return seconds, src[:count], dst[:count]


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def block_finish_s(flat, device, block):
    """The end of the last block; inf where blocks wait for each other in a circle."""
    seconds, src, dst = _arcs(flat, device, block)
    order = np.argsort(src)
    first = np.searchsorted(src[order], np.arange(seconds.size + 1))
    missing = np.bincount(dst, minlength=seconds.size)
    start = np.zeros(seconds.size)
    ready = np.empty(seconds.size, dtype=np.int64)
    count, done, last = 0, 0, 0.0
    for b in range(seconds.size):
        if missing[b] == 0:
            ready[count] = b
            count += 1
    while done < count:
        b = ready[done]
        done += 1
        end = start[b] + seconds[b]
        last = max(last, end)
        for arc in range(first[b], first[b + 1]):
            following = dst[order[arc]]
            start[following] = max(start[following], end)
            missing[following] -= 1
            if missing[following] == 0:
                ready[count] = following
                count += 1
    return last if count == seconds.size else np.inf
