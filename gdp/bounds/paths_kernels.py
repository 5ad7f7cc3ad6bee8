"""Heads and tails of all ops by the recurrences of `gdp.bounds.paths`; ancestors as bit sets."""

import typing

import numba
import numpy as np

from gdp.kernels.options import BARE, INLINE


@numba.njit(**INLINE)
@typing.no_type_check
def _send_s(a, k, v, e, d):
    """Seconds from the end of arc k's source on e until v can start on d, dispatch included."""
    if e == d:
        return 0.0
    if a.group[a.source[k]] == a.group[v]:
        return np.inf
    tensors, size = a.tensors[k], a.size_bytes[k]
    if not a.queues[e, d]:
        tensors, size = min(tensors, 1.0), a.largest_bytes[k]
    return tensors * a.latency_s[e, d] + size * a.s_per_byte[e, d] + a.opens_s[v, d]


@numba.njit(**BARE)
@typing.no_type_check
def heads(a, head_s):
    """Fill `head_s` [V, D]: the earliest end of op v on device d."""
    num_ops, num_devices = a.op_s.shape
    for v in range(num_ops):
        for d in range(num_devices):
            start_s = 0.0
            for k in range(a.first_input[v], a.first_input[v + 1]):
                first_s = np.inf
                for e in range(num_devices):
                    first_s = min(first_s, head_s[a.source[k], e] + _send_s(a, k, v, e, d))
                start_s = max(start_s, first_s)
            head_s[v, d] = start_s + a.op_s[v, d]


@numba.njit(**BARE)
@typing.no_type_check
def tails(a, tail_s):
    """Fill `tail_s` [V, D]: the least time from the end of op u on device e to the end."""
    num_ops, num_devices = a.op_s.shape
    tail_s[:] = 0.0
    for v in range(num_ops - 1, -1, -1):
        for k in range(a.first_input[v], a.first_input[v + 1]):
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    after_s = a.op_s[v, d] + tail_s[v, d]
                    least_s = min(least_s, _send_s(a, k, v, e, d) + after_s)
                tail_s[a.source[k], e] = max(tail_s[a.source[k], e], least_s)


@numba.njit(**BARE)
@typing.no_type_check
def ancestors(first_input, source, above):
    """Fill `above` [V, words]: bit u of row v where a path leads from u to v."""
    for v in range(len(first_input) - 1):
        for k in range(first_input[v], first_input[v + 1]):
            u = source[k]
            for word in range(u // 64 + 1):
                above[v, word] |= above[u, word]
            above[v, u // 64] |= np.uint64(1) << np.uint64(u % 64)


@numba.njit(**BARE)
@typing.no_type_check
def gates(first_input, source, is_idle, head_s, above, gate, depth, partial):
    """Fill `gate` [V]: a late op on most paths to v, -1 for the start.

    The nearest common dominator of the inputs of v. Left out are inputs that are ancestors of other
    inputs, because paths lead around through these; idle ones, which are there from the start; and
    those that have no gate in common with the input of the largest head, such as masks: `partial`.
    """
    for v in range(len(gate)):
        first, end = first_input[v], first_input[v + 1]
        late = np.int64(-1)
        for k in range(first, end):
            u = source[k]
            if not is_idle[u] and (late < 0 or head_s[u] >= head_s[late]):
                late = u
        if late < 0 and end == first + 1:
            late = source[first]
        common = late
        for k in range(first, end):
            if common < 0:
                break
            u = source[k]
            around = is_idle[u]
            for other in range(first, end):
                bits = above[source[other], u // 64] >> np.uint64(u % 64)
                around |= (bits & np.uint64(1)) != 0
            if around:
                continue
            a, b = common, u
            while a != b and a >= 0 and b >= 0:
                if depth[a] >= depth[b]:
                    a = gate[a]
                else:
                    b = gate[b]
            if a == b:
                common = a
            else:
                partial[v] = True
        gate[v] = common
        depth[v] = depth[common] + 1 if common >= 0 else 0


@numba.njit(**BARE)
@typing.no_type_check
def between(above, u, v, inner):
    """Leave in `inner` the ops on the paths from u to v, or all before v for u = -1; how many."""
    count = 0
    for x in range(u + 1, v):
        on_path = (above[v, x // 64] >> np.uint64(x % 64)) & np.uint64(1)
        if u >= 0:
            on_path &= above[x, u // 64] >> np.uint64(u % 64)
        if on_path:
            inner[count] = x
            count += 1
    return count
