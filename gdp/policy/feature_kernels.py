"""Numba kernels of the static features. Axes: N ops, T tensors, E uses, P op pairs."""

import typing

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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
