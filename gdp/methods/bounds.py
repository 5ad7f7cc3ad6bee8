"""Proven lower bounds of what any placement takes."""

from dataclasses import dataclass

import numpy as np

from gdp.sim.problem import Problem


@dataclass(frozen=True)
class Bound:
    """No placement is faster than this."""

    value_s: float
    argument: str  # what proves it


def best_bound(problem: Problem, seconds: float | None = None) -> Bound:
    """The largest of the bounds that apply."""
    del seconds
    return max((critical_path(problem), total_work(problem)), key=lambda bound: bound.value_s)


def critical_path(problem: Problem) -> Bound:
    """The longest path with every op on its fastest device and no transfers; latency only."""
    if problem.objective != "latency":
        return Bound(0.0, "none")
    fastest_s = np.where(problem.allowed, problem.compute_s, np.inf).min(axis=1)
    finish_s = fastest_s.copy()
    src, dst = problem.graph.edges
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        finish_s[b] = max(finish_s[b], finish_s[a] + fastest_s[b])
    return Bound(float(finish_s.max()), "critical path on fastest devices")


def total_work(problem: Problem) -> Bound:
    """All work, shared out over devices as if every device were the fastest for every op."""
    fastest_s = np.where(problem.allowed, problem.compute_s, np.inf).min(axis=1)
    return Bound(float(fastest_s.sum()) / problem.num_devices, "work over all devices")
