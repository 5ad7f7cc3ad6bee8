"""Numba kernels of the static features. Axes: N ops, T tensors, E uses, P op pairs."""

import typing

import numba
import numpy as np

from gdp.kernel_cache import KEEP
from gdp.sim.kernel import BARE


@numba.njit(cache=KEEP, nogil=True)
@typing.no_type_check
def upward_rank(seconds, src, dst, send_s, by_src, first):
    """Seconds from the start of each op to the end of the run on the longest path.

    rank(i) = seconds(i) + max over pairs (i, j) of (send_s(i, j) + rank(j)): Topcuoglu, Hariri and
    Wu 2002, doi 10.1109/71.993206. `by_src[first[i]:first[i + 1]]` are the pairs that leave i.
    """
    n = seconds.shape[0]
    rank = np.zeros(n)
    for back in range(n):
        i = n - 1 - back
        best = 0.0
        for k in range(first[i], first[i + 1]):
            pair = by_src[k]
            best = max(best, send_s[pair] + rank[dst[pair]])
        rank[i] = seconds[i] + best
    return rank


@numba.njit(cache=KEEP, nogil=True)
@typing.no_type_check
def downward_rank(seconds, src, dst, send_s, by_dst, first):
    """Seconds before the start of each op on the longest path from an entry, itself excluded."""
    n = seconds.shape[0]
    rank = np.zeros(n)
    for i in range(n):
        best = 0.0
        for k in range(first[i], first[i + 1]):
            pair = by_dst[k]
            op = src[pair]
            best = max(best, rank[op] + seconds[op] + send_s[pair])
        rank[i] = best
    return rank


@numba.njit(**BARE)
@typing.no_type_check
def slacks(p, device, order, start_s, finish_s, latest_s, waited_s, idle_s, due_s):
    """Fill, for a schedule that was run, what each op of it could spare and what it waited for.

    latest_s: the start that delays nothing while devices keep their order and links are free;
    waited_s: start minus when the inputs could have been there; idle_s: how long the device stood
    idle before the op. `order` are the ops by start, `due_s` [D] is scratch. Axes: N ops, D
    devices.
    """
    n, end = p.cost_s.shape[0], 0.0
    for op in range(n):
        end = max(end, finish_s[op])
    for i in range(due_s.shape[0]):
        due_s[i] = 0.0
    for step in range(n):
        op = order[step]
        here, ready = device[op], 0.0
        for m in range(p.in_first[op], p.in_first[op + 1]):
            t = p.in_tensor[m]
            there = device[p.producer[t]]
            at = finish_s[p.producer[t]]
            if there != here:
                at += p.latency_s[there, here] + p.tensor_bytes[t] * p.s_per_byte[there, here]
            ready = max(ready, at)
        waited_s[op] = start_s[op] - ready
        idle_s[op] = start_s[op] - due_s[here]
        due_s[here] = max(due_s[here], finish_s[op])
    for i in range(due_s.shape[0]):
        due_s[i] = end
    for back in range(n):
        op = order[n - 1 - back]
        here, due = device[op], end
        works = finish_s[op] > start_s[op]
        if works:
            due = due_s[here]
        for q in range(p.out_first[op], p.out_first[op + 1]):
            t = p.out_tensor[q]
            for m in range(p.reader_first[t], p.reader_first[t + 1]):
                there, seconds = device[p.reader[m]], 0.0
                if there != here:
                    seconds = p.latency_s[here, there]
                    seconds += p.tensor_bytes[t] * p.s_per_byte[here, there]
                due = min(due, latest_s[p.reader[m]] - seconds)
        latest_s[op] = due - (finish_s[op] - start_s[op])
        if works:
            due_s[here] = latest_s[op]
