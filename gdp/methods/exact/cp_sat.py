"""What the CP-SAT models share: the library, whole-number time, and a run of the solver."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.errors import MissingExtraError
from gdp.version import install_command

TICKS = 10**8
"""Whole-number units in the known value: all times are rounded down to one, which keeps bounds."""
_WORKERS = 2


@dataclass(frozen=True, eq=False)
class CpSolution:
    """What CP-SAT says of a model that minimises."""

    solver: Any  # reads values; None where nothing was found
    bound: float  # in the objective's units; inf where no solution exists
    is_complete: bool  # optimal or infeasible


def cp_model_library() -> Any:
    """The module `ortools.sat.python.cp_model`; raises `MissingExtraError` without ortools."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError(
            f"exact latency needs ortools (CP-SAT): {install_command('exact')}"
        ) from error
    return cp_model


def ticks(seconds: np.ndarray, unit_s: float) -> Int[np.ndarray, "..."]:
    """Seconds in whole units, rounded down; what is infinite becomes more than any known value."""
    finite = np.where(np.isfinite(seconds), seconds, 0.0)
    # A hair more, so that what is a whole number stays one.
    whole = np.floor(finite / unit_s * (1 + 1e-15) + 1e-9)
    return np.where(np.isfinite(seconds), whole, 2 * TICKS).astype(np.int64)


def run_cp(model: Any, seconds: float | None, seed: int) -> CpSolution:
    """The solver's answer within the seconds."""
    cp_model = cp_model_library()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = _WORKERS
    solver.parameters.random_seed = seed
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(0.05, seconds)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return CpSolution(None, np.inf, True)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = float(solver.best_objective_bound)
    return CpSolution(solver if found else None, bound, status == cp_model.OPTIMAL)
