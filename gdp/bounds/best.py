"""Proven lower bounds of what any placement takes."""

import numpy as np

from gdp.bounds.bound import Bound
from gdp.clock import Clock
from gdp.problem.problem import Problem

__all__ = ["Bound", "all_bounds", "best_bound"]

DEFAULT_SECONDS = 10.0
_SLACK = 1e-10  # relative; sums here and in the simulator round in different orders


def best_bound(problem: Problem, seconds: float | None = None, *, found_s: float = np.inf) -> Bound:
    """The largest of the bounds that apply. The seconds end the costlier ones early.

    `found_s` is the value of a placement: what cannot prove more about it is left out.
    """
    return max(all_bounds(problem, seconds, found_s), key=lambda bound: bound.value_s)


def all_bounds(
    problem: Problem, seconds: float | None = None, found_s: float = np.inf
) -> list[Bound]:
    """Every bound that applies, each with the argument that proves it."""
    from gdp.bounds.latency import latency_bounds
    from gdp.bounds.throughput import load_bounds

    clock = Clock(DEFAULT_SECONDS if seconds is None else seconds)
    if problem.objective == "latency":
        found = latency_bounds(problem, clock.remaining_s())
        found += load_bounds(problem, max(0.0, clock.remaining_s()), found_s, only_memory=True)
    elif problem.objective == "throughput":
        found = load_bounds(problem, clock.remaining_s(), found_s)
    else:
        found = [_plain(problem)]
    return [Bound(bound.value_s * (1.0 - _SLACK), bound.argument) for bound in found]


def _plain(problem: Problem) -> Bound:
    """For the objectives of accelerators that meet in host memory: compute alone."""
    fastest_s = np.where(problem.allowed, problem.compute_s, np.inf).min(axis=1)
    if problem.objective == "max_load":
        return Bound(float(fastest_s.sum()) / problem.num_devices, "work over all devices")
    finish_s = fastest_s.copy()
    src, dst = problem.graph.edges
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        finish_s[b] = max(finish_s[b], finish_s[a] + fastest_s[b])
    return Bound(float(finish_s.max()), "critical path of ops on their fastest devices")
