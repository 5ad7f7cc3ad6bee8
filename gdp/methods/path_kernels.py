"""Numba kernels of longest paths, over `problem.arrays.Arrays`. Axes: K placements, N ops."""

import typing

import numba

from gdp.base.kernels.options import BARE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**BARE)
@typing.no_type_check
def fill_downward_ranks(a, seconds, send_s, rank):
    """rank(i) = max over tensors t that i reads, of maker m: rank(m) + seconds(m) + send(t)."""
    for i in range(seconds.shape[0]):
        longest = 0.0
        for x in range(a.in_start[i], a.in_start[i + 1]):
            t = a.in_tensor[x]
            maker = a.producer[t]
            longest = max(longest, rank[maker] + seconds[maker] + send_s[t])
        rank[i] = longest


@numba.njit(**BARE)
@typing.no_type_check
def path_seconds(a, order, cost_s, latency_s, s_per_byte, devices, up_s, down_s):
    """Fill the seconds of the longest path from each op's start to the end, and before its start.

    `devices`, `up_s` and `down_s` are [K, N]. An edge takes its transfer's seconds where its ends
    are on two devices and none otherwise; links and devices are taken to be free.
    """
    n = order.shape[0]
    for k in range(devices.shape[0]):
        device, up, down = devices[k], up_s[k], down_s[k]
        for back in range(n):
            op = order[n - 1 - back]
            here, longest = device[op], 0.0
            for q in range(a.out_start[op], a.out_start[op + 1]):
                t = a.out_tensor[q]
                for m in range(a.use_start[t], a.use_start[t + 1]):
                    reader = a.use_op[m]
                    there = device[reader]
                    seconds = up[reader]
                    if there != here:
                        seconds += latency_s[here, there]
                        seconds += a.sent_bytes[t] * s_per_byte[here, there]
                    longest = max(longest, seconds)
            up[op] = cost_s[op, here] + longest
        for step in range(n):
            op = order[step]
            here, longest = device[op], 0.0
            for m in range(a.in_start[op], a.in_start[op + 1]):
                t = a.in_tensor[m]
                maker = a.producer[t]
                there = device[maker]
                seconds = down[maker] + cost_s[maker, there]
                if there != here:
                    seconds += latency_s[there, here]
                    seconds += a.sent_bytes[t] * s_per_byte[there, here]
                longest = max(longest, seconds)
            down[op] = longest


@numba.njit(**BARE)
@typing.no_type_check
def fill_upward_ranks(a, mean_compute_s, mean_send_s, rank):
    """rank(i) = mean_compute(i) + max over tensors t of i and readers j of (send(t) + rank(j))."""
    num_ops = mean_compute_s.shape[0]
    for i in range(num_ops - 1, -1, -1):
        longest = 0.0
        for x in range(a.out_start[i], a.out_start[i + 1]):
            t = a.out_tensor[x]
            for y in range(a.use_start[t], a.use_start[t + 1]):
                longest = max(longest, mean_send_s[t] + rank[a.use_op[y]])
        rank[i] = mean_compute_s[i] + longest
