"""Loops over placements, so that a batch crosses into compiled code once."""

import typing

import numba

from gdp.kernels.options import BARE
from gdp.sim.kernels.engine import set_order
from gdp.sim.kernels.memory import evaluate_with
from gdp.sim.kernels.throughput import evaluate_period


@numba.njit(**BARE)
@typing.no_type_check
def evaluate_all(a, w, devices, orders, ranked, always, latency_s, overflow_bytes):
    """Latency and overflow of every placement.

    `orders` and `ranked` have no row, one for all placements, or one for each: the ops in order of
    priority, and whether it counts. With `always`, the last run's times, transfers and peaks are
    left in `w`.
    """
    by_rank = False
    for b in range(len(devices)):
        if b < len(ranked):
            by_rank = ranked[b]
            if by_rank:
                set_order(w, orders[b])
        latency_s[b], overflow_bytes[b] = evaluate_with(a, w, devices[b], by_rank, always)


@numba.njit(**BARE)
@typing.no_type_check
def evaluate_periods(a, w, devices, first, end, period_s, overflow_bytes):
    """Period and overflow of placements first..end."""
    for b in range(first, end):
        period_s[b], overflow_bytes[b] = evaluate_period(a, w, devices[b])
