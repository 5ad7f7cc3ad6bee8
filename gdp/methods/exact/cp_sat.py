"""Common parts of the CP-SAT models: the library, whole-number time, weights, the solver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import MissingExtraError
from gdp.base.version import install_command
from gdp.bounds.loads import owned_weights
from gdp.problem.problem import Problem

TICKS = 10**8
"""Whole-number units in the known value: all times are rounded down to one, which keeps bounds."""
_WORKERS = 2
_SEEDS = 1 << 31
_COUNTED_S = 20.0  # of the solver's own count of work, which is about a second each


@dataclass(frozen=True, eq=False)
class CpSolution:
    """CP-SAT's answer to a model that minimises."""

    solver: Any  # reads values; None where nothing was found
    bound: float  # in the objective's units; inf where no solution exists
    is_complete: bool  # optimal or infeasible


def cp_model_library() -> Any:
    """The module `ortools.sat.python.cp_model`.

    Raises:
        MissingExtraError: Without ortools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError(
            f"exact latency needs ortools (CP-SAT): {install_command('exact')}"
        ) from error
    return cp_model


def ticks(seconds: np.ndarray, unit_s: float) -> Int[np.ndarray, "..."]:
    """Seconds in whole units, rounded down; inf becomes more than any known value."""
    finite = np.where(np.isfinite(seconds), seconds, 0.0)
    # Add epsilon before flooring, so that exact integers are not rounded down.
    whole = np.floor(finite / unit_s * (1 + 1e-15) + 1e-9)
    return np.where(np.isfinite(seconds), whole, 2 * TICKS).astype(np.int64)


Part = tuple[list[list[list[Any]]], Int[np.ndarray, "G"], tuple[tuple[int, tuple[int, ...]], ...]]
"""(of each device of a memory, rows of a literal of each group, any of which has the device hold
it; bytes of each group alone; (bytes, groups) of each weight that groups share)"""


def fit_weights(model: Any, problem: Problem, on: dict[int, list[Any]]) -> None:
    """Fit weights and caches into every device, and into every memory that devices share.

    Args:
        model: Under construction.
        problem: With the weights of its ops.
        on: Literal of each group, for each device; devices without are not limited.
    """
    cluster, groups = problem.cluster, (problem.group, problem.num_groups)
    owned = [owned_weights(problem, *groups, kind) for kind in range(len(problem.held_on))]
    memories = [([d], int(cluster.memory_bytes[d])) for d in on]
    for k, size in enumerate(cluster.pool_bytes.tolist()):
        members = [d for d in on if cluster.pool[d] == k]
        memories += [(members, size)] if members else []
    for members, capacity in memories:
        parts = [
            ([[on[s] for s in np.flatnonzero(home == d).tolist() if s in on] for d in members], *of)
            for home, of in zip(problem.held_on, owned, strict=True)
        ]
        _limit_weights(model, parts, capacity)


def _limit_weights(model: Any, parts: Sequence[Part], capacity: int) -> None:
    """Fit parts into a memory; each of its devices holds shared ones once."""
    most = sum(
        int(held.sum()) + len(here) * sum(size for size, _ in shared)
        for here, held, shared in parts
    )
    if capacity >= most:
        return
    terms = []
    for here, held, shared in parts:
        for rows in here:
            terms += [int(size) * on[g] for on in rows for g, size in enumerate(held) if size]
            for size, groups in shared:
                there = model.new_bool_var("")
                for on in rows:
                    for g in groups:
                        model.add_implication(on[g], there)
                terms.append(int(size) * there)
    model.add(sum(terms) <= capacity)


def run_cp(model: Any, seconds: float | None, seed: int, counted: bool = False) -> CpSolution:
    """The solver's answer within the seconds; counted, within as much work on any machine."""
    cp_model = cp_model_library()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1 if counted else _WORKERS
    solver.parameters.random_seed = seed % _SEEDS
    if counted:
        solver.parameters.max_deterministic_time = _COUNTED_S
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(0.05, seconds)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return CpSolution(None, np.inf, True)
    is_feasible = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = float(solver.best_objective_bound)
    return CpSolution(solver if is_feasible else None, bound, status == cp_model.OPTIMAL)
