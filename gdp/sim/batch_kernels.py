"""Loops over placements, so that a batch crosses into compiled code once."""

import typing

import numba

from gdp.sim.engine_kernels import set_rank
from gdp.sim.memory_kernels import evaluate
from gdp.sim.throughput_kernels import evaluate_period


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def evaluate_all(a, w, devices, ranks, first, end, latency_s, overflow_bytes):
    """Latency and overflow of placements first..end; `ranks` has no row, one or one for each."""
    by_rank = len(ranks) == 1 and set_rank(w, ranks[0])
    for b in range(first, end):
        if len(ranks) > 1:
            by_rank = set_rank(w, ranks[b])
        latency_s[b], overflow_bytes[b] = evaluate(a, w, devices[b], by_rank)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def evaluate_periods(a, w, devices, first, end, period_s, overflow_bytes):
    """Period and overflow of placements first..end."""
    for b in range(first, end):
        period_s[b], overflow_bytes[b] = evaluate_period(a, w, devices[b])
