"""What a solver's answer says of the assignments below a value."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gdp.bounds.linear_program import Solution

UNIT = 1000.0  # what the known value becomes: the solver's tolerances are absolute


@dataclass(frozen=True, eq=False)
class LoadSolution:
    """What is known of the assignments below a value. Axes: V nodes."""

    device: Int[np.ndarray, "V"] | None  # the best found; None: none found
    bound_s: float  # no assignment has a smaller load; the value itself where none is below it
    is_complete: bool  # no better one exists


def read_solution(solution: Solution, x: np.ndarray, upper_s: float, scale: float) -> LoadSolution:
    """The answer in seconds; the bound gives the solver's tolerances away."""
    if solution.is_infeasible:
        return LoadSolution(None, upper_s, True)
    # The solver works with tolerances of 1e-6 of UNIT: the bound gives as much away.
    bound_s = max(0.0, (solution.bound - 1e-6 * UNIT) / scale)
    if solution.values is None:
        return LoadSolution(None, bound_s, False)
    return LoadSolution(solution.values[x].argmax(axis=1), bound_s, solution.is_optimal)
