"""A mixed-integer linear model put together row by row, and HiGHS's answer to it.

HiGHS comes with SciPy (`scipy.optimize.milp`), which takes no starting point: what is known of the
objective enters as bounds of its variable.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.quiet import silent_stdout

LOG = logging.getLogger(__name__)
INTEGRAL, CONTINUOUS = 1, 0
_INFEASIBLE = 2  # SciPy's status
_MAX_ITERATIONS = 100_000  # of the simplex method
_INTERIOR = 20_000
"""Entries of a matrix from which the interior-point method, with a crossover, is the faster one: of
97,000 entries 3 s instead of 20 s."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What the solver says. Axes: X variables."""

    values: Float[np.ndarray, "X"] | None  # the best found, or None
    bound: float  # no solution has a smaller objective; inf where none exists
    is_infeasible: bool
    is_optimal: bool


@dataclass
class LinearModel:
    """Variables and rows; minimises one variable."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def variables(
        self, shape: int | tuple[int, ...], low: float, high: float, kind: int = CONTINUOUS
    ) -> Int[np.ndarray, "..."]:
        """Numbers of new variables, in an array of the shape."""
        count = int(np.prod(shape))
        first = len(self.low)
        self.low += [low] * count
        self.high += [high] * count
        self.kind += [kind] * count
        return np.arange(first, first + count).reshape(shape)

    def constrain(
        self,
        columns: Sequence[int | np.integer] | np.ndarray,
        values: Sequence[float] | np.ndarray,
        low: float = -np.inf,
        high: float = np.inf,
    ) -> None:
        """Add low <= sum of values * columns <= high."""
        self.row += [len(self.row_low)] * len(columns)
        self.column += [int(c) for c in columns]
        self.value += [float(v) for v in values]
        self.row_low.append(low)
        self.row_high.append(high)

    def fix(self, variable: int | np.integer, value: float) -> None:
        """Leave a variable one value."""
        self.low[variable] = self.high[variable] = value

    def minimise(self, variable: int, seconds: float | None, relative_gap: float) -> Solution:
        """HiGHS's answer, after at most some seconds."""
        from scipy.sparse import csr_array

        cost = np.zeros(len(self.low))
        cost[variable] = 1.0
        matrix = csr_array(
            (self.value, (self.row, self.column)), shape=(len(self.row_low), len(self.low))
        )
        rows = [(matrix, np.array(self.row_low), np.array(self.row_high))]
        low, high, kind = np.array(self.low), np.array(self.high), np.array(self.kind)
        return solve(cost, rows, (low, high), kind, seconds, relative_gap)


def solve(
    cost: Float[np.ndarray, "X"],
    rows: Sequence[tuple[Any, Any, Any]],
    limits: tuple[Any, Any],
    kind: Int[np.ndarray, "X"],
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """HiGHS's answer for rows (matrix, low, high) over variables between their limits, after so
    many nodes of its search tree at most."""
    # SciPy takes arrays for limits, its published types know only floats: so they are `Any`.
    from scipy.optimize import Bounds, LinearConstraint, milp

    options: dict[str, float | bool] = {"mip_rel_gap": relative_gap, "presolve": True}
    if nodes is not None:
        options["node_limit"] = nodes
    if seconds is not None:
        options["time_limit"] = max(0.1, seconds)
    with silent_stdout():
        result = milp(
            cost,
            integrality=kind,
            bounds=Bounds(*limits),
            constraints=[LinearConstraint(*entry) for entry in rows],
            options=options,
        )
    if result.status == _INFEASIBLE:
        return Solution(None, np.inf, is_infeasible=True, is_optimal=True)
    bound = getattr(result, "mip_dual_bound", None)
    if bound is None or not np.isfinite(bound):
        bound = result.fun if result.status == 0 and not kind.any() else -np.inf
    return Solution(result.x, float(bound), False, result.status == 0)


def solve_whole(
    program: dict[str, Any],
    num_whole: int,
    column: int,
    between: tuple[float, float],
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """HiGHS's answer to the arguments of `linprog` where the first variables are whole and one
    column, the objective's, lies between two values."""
    kind = np.zeros(len(program["c"]), dtype=np.int64)
    kind[:num_whole] = INTEGRAL
    low, high = program["bounds"].T.copy()
    low[column], high[column] = between
    rows = [
        (program["A_ub"], -np.inf, program["b_ub"]),
        (program["A_eq"], program["b_eq"], program["b_eq"]),
    ]
    return solve(program["c"], rows, (low, high), kind, seconds, relative_gap, nodes)


def dual_weights(
    program: dict[str, Any], seconds: float
) -> tuple[Float[np.ndarray, "R"], Float[np.ndarray, "X"] | None] | None:
    """(weights >= 0 of the rows `A_ub`, the solution) of a linear program; None if it has none.

    What the interior-point method fails at, the simplex method gets the rest of the seconds for.
    """
    from scipy.optimize import linprog

    clock = Clock(seconds)
    methods = ("highs-ipm", "highs") if program["A_ub"].nnz >= _INTERIOR else ("highs",)
    for method in methods:
        options = {"time_limit": max(0.0, clock.remaining_s()), "maxiter": _MAX_ITERATIONS}
        solved = linprog(**program, method=method, options=options)
        marginals = getattr(getattr(solved, "ineqlin", None), "marginals", None)
        if marginals is not None and np.isfinite(marginals).all():
            x = None if solved.x is None else np.asarray(solved.x)
            return np.maximum(-np.asarray(marginals), 0.0), x
        LOG.debug("no linear bound by %s: %s", method, solved.message)
        if solved.status == _INFEASIBLE or clock.is_over():
            break
    return None
