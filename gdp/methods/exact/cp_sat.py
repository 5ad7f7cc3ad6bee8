"""Common parts of the CP-SAT models: the library, whole-number time, weights, the solver."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.errors import MissingExtraError
from gdp.version import install_command

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


def limit_weights(
    model: Any,
    here: list[list[Any]],
    capacity: int,
    held: Int[np.ndarray, "G"],
    shared: tuple[tuple[int, tuple[int, ...]], ...],
) -> None:
    """Fit the weights of groups into a memory; each of its devices holds shared ones once.

    Args:
        model: Under construction.
        here: A literal of each group, for each device of the memory.
        capacity: Bytes of the memory.
        held: Bytes of each group alone.
        shared: (bytes, groups) of each weight that groups share.
    """
    if capacity >= int(held.sum()) + len(here) * sum(size for size, _ in shared):
        return
    terms = []
    for on in here:
        terms += [int(size) * on[g] for g, size in enumerate(held) if size]
        for size, groups in shared:
            there = model.new_bool_var("")
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
