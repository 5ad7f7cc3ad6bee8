"""Numba kernel of priorities that know the placement. Axes: K placements, N ops."""

import typing

import numba

from gdp.kernel import BARE


@numba.njit(**BARE)
@typing.no_type_check
def path_seconds(p, devices, up_s, down_s):
    """Fill the seconds of the longest path from each op's start to the end, and before its start.

    `devices`, `up_s` and `down_s` are [K, N]. An edge takes its transfer's seconds where its ends
    are on two devices and none otherwise; links and devices are taken to be free.
    """
    n = p.cost_s.shape[0]
    for k in range(devices.shape[0]):
        device, up, down = devices[k], up_s[k], down_s[k]
        for back in range(n):
            op = p.order[n - 1 - back]
            here, longest = device[op], 0.0
            for q in range(p.out_first[op], p.out_first[op + 1]):
                t = p.out_tensor[q]
                for m in range(p.reader_first[t], p.reader_first[t + 1]):
                    reader = p.reader[m]
                    there = device[reader]
                    seconds = up[reader]
                    if there != here:
                        seconds += p.latency_s[here, there]
                        seconds += p.tensor_bytes[t] * p.s_per_byte[here, there]
                    longest = max(longest, seconds)
            up[op] = p.cost_s[op, here] + longest
        for step in range(n):
            op = p.order[step]
            here, longest = device[op], 0.0
            for m in range(p.in_first[op], p.in_first[op + 1]):
                t = p.in_tensor[m]
                maker = p.producer[t]
                there = device[maker]
                seconds = down[maker] + p.cost_s[maker, there]
                if there != here:
                    seconds += p.latency_s[there, here]
                    seconds += p.tensor_bytes[t] * p.s_per_byte[there, here]
                longest = max(longest, seconds)
            down[op] = longest
