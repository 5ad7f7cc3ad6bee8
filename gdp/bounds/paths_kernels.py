"""Heads and tails of all ops on all devices; `gdp.bounds.paths` has the recurrences."""

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
def heads(a, spans, head_s):
    """Fill `head_s` [V, D]: the earliest end of op v on device d."""
    num_ops, num_devices = a.op_s.shape
    at = 0
    for v in range(num_ops):
        for d in range(num_devices):
            start_s = 0.0
            for k in range(a.first_input[v], a.first_input[v + 1]):
                first_s = np.inf
                for e in range(num_devices):
                    first_s = min(first_s, head_s[a.source[k], e] + _send_s(a, k, v, e, d))
                start_s = max(start_s, first_s)
            head_s[v, d] = start_s + a.op_s[v, d]
        while at < len(spans.target) and spans.target[at] == v:
            for d in range(num_devices):
                first_s = np.inf
                for e in range(num_devices):
                    begin_s = head_s[spans.source[at], e] if spans.source[at] >= 0 else 0.0
                    first_s = min(first_s, begin_s + spans.span_s[at, e, d])
                head_s[v, d] = max(head_s[v, d], first_s)
            at += 1


@numba.njit(**BARE)
@typing.no_type_check
def tails(a, spans, tail_s):
    """Fill `tail_s` [V, D]: the least time from the end of op u on device e to the end."""
    num_ops, num_devices = a.op_s.shape
    tail_s[:] = 0.0
    at = len(spans.target) - 1
    for v in range(num_ops - 1, -1, -1):
        for k in range(a.first_input[v], a.first_input[v + 1]):
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    after_s = a.op_s[v, d] + tail_s[v, d]
                    least_s = min(least_s, _send_s(a, k, v, e, d) + after_s)
                tail_s[a.source[k], e] = max(tail_s[a.source[k], e], least_s)
        while at >= 0 and spans.target[at] == v:
            u = spans.source[at]
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    least_s = min(least_s, spans.span_s[at, e, d] + tail_s[v, d])
                if u >= 0:
                    tail_s[u, e] = max(tail_s[u, e], least_s)
            at -= 1
