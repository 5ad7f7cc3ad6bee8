"""Proven lower bounds of what any placement takes."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from gdp.bounds.budget import Bound, WorkBudget
from gdp.problem.problem import Problem
from gdp.problem.ticks import rounding_share

__all__ = ["Bound", "all_bounds", "best_bound"]

DEFAULT_SECONDS = 10.0
CUT_SHORT = "; the clock ended further proofs, so another run may prove more"
_SLACK = 1e-10  # relative; sums here round in other orders, and some without ticks


def best_bound(
    problem: Problem,
    seconds: float | None = None,
    *,
    found_s: float = np.inf,
    cap_s: float | None = None,
) -> Bound:
    """The largest of the bounds that apply.

    Work is counted, so that the same arguments give the same bound; where the clock ends it, the
    bound's argument says so.

    Args:
        problem: Of any objective.
        seconds: Work of the costlier proofs, as much as an idle core does in these seconds.
        found_s: Value of a known placement; arguments that cannot prove more about it are left out.
        cap_s: Seconds after which the clock ends the proofs, `PATIENCE` times `seconds` by default.
    """
    return max(all_bounds(problem, seconds, found_s, cap_s), key=lambda bound: bound.value_s)


def all_bounds(
    problem: Problem,
    seconds: float | None = None,
    found_s: float = np.inf,
    cap_s: float | None = None,
) -> list[Bound]:
    """Every bound that applies, each with the argument that proves it; see `best_bound`."""
    budget = WorkBudget(DEFAULT_SECONDS if seconds is None else seconds, cap_s)
    proofs = BOUNDS.get(problem.objective)
    if proofs is None:
        return [Bound(0.0, f"nothing: no bound is known for objective {problem.objective!r}")]
    bounds = proofs(problem, budget, found_s)
    ended = CUT_SHORT if budget.cut_short else ""
    kept = 1.0 - max(_SLACK, rounding_share(problem))
    return [Bound(bound.value_s * kept, bound.argument + ended) for bound in bounds]


def _latency(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    from gdp.bounds.latency import latency_bounds
    from gdp.bounds.path_program import path_program_size, rows_bind
    from gdp.bounds.throughput import load_bounds

    bounds = latency_bounds(problem, budget, found_s)
    if rows_bind(problem) and path_program_size(problem) <= budget.entries:
        return bounds  # the program of paths has the rows of the loads
    return [*bounds, *load_bounds(problem, budget, found_s, only_memory=True)]


def _throughput(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    from gdp.bounds.throughput import load_bounds

    return load_bounds(problem, budget, found_s)


def _max_load(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    """Compute alone, without transfers through host memory."""
    del budget, found_s
    work_s = float(_fastest_s(problem).sum())
    return [Bound(work_s / problem.num_devices, "work over all devices")]


def _block_latency(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    """The critical path of compute alone."""
    del budget, found_s
    fastest_s = _fastest_s(problem)
    finish_s = fastest_s.copy()
    src, dst = problem.graph.edges
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        finish_s[b] = max(finish_s[b], finish_s[a] + fastest_s[b])
    return [Bound(float(finish_s.max()), "critical path of ops on their fastest devices")]


def _fastest_s(problem: Problem) -> Float[np.ndarray, "N"]:
    return np.where(problem.allowed, problem.compute_s, np.inf).min(axis=1)


BOUNDS: dict[str, Callable[[Problem, WorkBudget, float], list[Bound]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "max_load": _max_load,
    "block_latency": _block_latency,
}
"""Proofs for each objective, given a budget and the value of a known placement."""
