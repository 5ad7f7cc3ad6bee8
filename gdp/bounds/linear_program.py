"""Linear and mixed-integer programs: rows and columns, HiGHS's answers, bounds from dual weights.

HiGHS comes with SciPy (`scipy.optimize.milp`), which takes no starting point: the value of a known
placement enters as a limit of the objective's column.

Axes: G groups, D devices, R rows, C columns, V nodes or groups that are placed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.clock import Clock
from gdp.base.terminal import redirect_native_stdout
from gdp.bounds.budget import Bound, WorkBudget
from gdp.problem.problem import Problem

LOG = logging.getLogger(__name__)
# HiGHS keeps rows to 1e-7 and whole numbers to 1e-6, in units of about one value.
_MIP_SLACK = 1e-5
UNIT = 1000.0
"""The known value in a program's unit of time: the solver's tolerances are absolute."""
_INFEASIBLE = 2  # SciPy's status
_MAX_ITERATIONS = 100_000  # of the simplex method
_INTERIOR = 20_000
"""Entries of a matrix from which the interior-point method, with a crossover, is the faster one: of
97,000 entries 3 s instead of 20 s."""


class RowBuilder:
    """Columns between 0 and an upper limit, and rows `low <= sum of value * column <= high`."""

    def __init__(self) -> None:
        self.limits: list[float] = []  # of each column
        self.parts: list[tuple[Any, Any, Any]] = []  # (rows, columns, values)
        self.low: list[Any] = []
        self.high: list[Any] = []
        self.count = 0

    def columns(self, count: int, limit: float = 1.0) -> int:
        """Make new columns; the number of the first."""
        first = len(self.limits)
        self.limits += [limit] * count
        return first

    def add(self, row: Any, column: Any, value: Any, high: Any, low: float = -np.inf) -> None:
        """Add entries of new rows, numbered from 0 here, with the rows' upper limits."""
        self.parts.append((np.asarray(row) + self.count, np.asarray(column), np.asarray(value)))
        self.high.append(np.asarray(high, dtype=np.float64))
        self.low.append(np.full(len(self.high[-1]), low))
        self.count += len(self.high[-1])

    def add_row(self, columns: Any, values: Any, high: float = 0.0, low: float = -np.inf) -> None:
        """Add one row of concatenated columns and values."""
        column, value = np.concatenate(columns), np.concatenate(values)
        self.add(np.zeros(len(column), np.int64), column, value, [high], low)

    def add_rows(self, columns: Sequence[Any], values: Sequence[Any]) -> None:
        """Add a row `<= 0` for each entry of the arrays."""
        count = len(columns[0])
        row = np.tile(np.arange(count), len(columns))
        self.add(row, np.concatenate(columns), np.concatenate(values), np.zeros(count))

    def matrix(self) -> tuple[Any, Float[np.ndarray, "R"], Float[np.ndarray, "R"]]:
        """The rows as a sparse matrix, with their lower and upper limits."""
        from scipy.sparse import coo_array

        row, column, value = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        shape = self.count, len(self.limits)
        matrix = coo_array((value.astype(np.float64), (row, column)), shape=shape).tocsr()
        return matrix, np.concatenate(self.low), np.concatenate(self.high)


class LinearProgram(NamedTuple):
    """Minimise one column under `a z <= b`, 0 <= z <= high, and shares of each group that sum to 1.

    The first G * D columns are the shares x, group by group. Seconds are in units of `unit_s`.
    """

    a: Any  # scipy.sparse.csr_array [R, C]
    b: Float[np.ndarray, "R"]
    shape: tuple[int, int]  # G, D
    objective: int  # the column that is minimised; the last one where there are loads
    high: Float[np.ndarray, "C"]
    unit_s: float
    load_names: tuple[str, ...] = ()  # of the first rows: loads that are at most the objective

    @property
    def num_shares(self) -> int:
        """Columns that are whole in a placement."""
        return self.shape[0] * self.shape[1]

    @property
    def size(self) -> int:
        """Entries of the matrix, the largest load's column aside."""
        return int(self.a.nnz) - len(self.load_names)


@dataclass(frozen=True, eq=False)
class Solution:
    """A solver's answer. Axes: C columns."""

    values: Float[np.ndarray, "C"] | None  # the best found, or None
    bound: float  # no solution has a smaller objective; inf where none exists
    is_infeasible: bool
    is_optimal: bool
    nodes: int = 0  # of the search tree


@dataclass(frozen=True, eq=False)
class PlacementSolution:
    """A solver's answer about all placements below a value. Axes: V nodes or groups."""

    device: Int[np.ndarray, "V"] | None  # the best found; None: none found
    bound_s: float  # no placement has a smaller value; the value itself where none is below it
    is_complete: bool  # no better one exists
    rank: Int[np.ndarray, "V"] | None = None  # where the program decides the order, too


def read_solution(
    solution: Solution, first: int, shape: tuple[int, int], upper_s: float, scale: float
) -> PlacementSolution:
    """The placement in the columns from `first` on, and its bound in seconds."""
    if solution.is_infeasible:
        return PlacementSolution(None, upper_s, True)
    # The solver works with tolerances of 1e-6 of UNIT: the bound gives as much away.
    bound_s = max(0.0, (solution.bound - 1e-6 * UNIT) / scale)
    if solution.values is None:
        return PlacementSolution(None, bound_s, False)
    shares = solution.values[first : first + shape[0] * shape[1]].reshape(shape)
    return PlacementSolution(shares.argmax(axis=1), bound_s, solution.is_optimal)


def needless_renamings(
    work_s: Float[np.ndarray, "V D"], classes: Sequence[Sequence[int]]
) -> Bool[np.ndarray, "V D"]:
    """Devices that nodes need not try, as exchanging equal devices leads there.

    Of the nodes in order of work, the i-th is on one of the first i devices of a class.
    """
    finite = np.isfinite(work_s)
    order = np.argsort(-np.where(finite, work_s, 0.0).max(axis=1), kind="stable")
    needless = np.zeros(work_s.shape, dtype=bool)
    for devices in classes:
        inside = order[finite[order, devices[0]]]
        for i, v in enumerate(inside[: len(devices)].tolist()):
            needless[v, list(devices[i + 1 :])] = True
    return needless


def solve(
    cost: Float[np.ndarray, "C"],
    rows: Sequence[tuple[Any, Any, Any]],
    limits: tuple[Any, Any],
    whole: slice,
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """Minimise by HiGHS, in at most some seconds and nodes of its search tree.

    Args:
        cost: Of each column.
        rows: (matrix, low, high) each.
        limits: Lower and upper limits of the columns.
        whole: Columns that must be whole numbers.
        seconds: None for no limit.
        relative_gap: Left open between the best solution and the bound.
        nodes: None for no limit.
    """
    # SciPy takes arrays for limits, its published types know only floats: so they are `Any`.
    from scipy.optimize import Bounds, LinearConstraint, milp

    options: dict[str, float | bool] = {"mip_rel_gap": relative_gap, "presolve": True}
    if nodes is not None:
        options["node_limit"] = nodes
    if seconds is not None and np.isfinite(seconds):
        options["time_limit"] = max(0.1, seconds)
    kind = np.zeros(len(cost), dtype=np.int64)
    kind[whole] = 1
    with redirect_native_stdout():
        result = milp(
            cost,
            integrality=kind,
            bounds=Bounds(*limits),
            constraints=[LinearConstraint(*entry) for entry in rows],
            options=options,
        )
    if result.status == _INFEASIBLE:
        return Solution(None, np.inf, True, True, int(result.get("mip_node_count") or 0))
    bound = getattr(result, "mip_dual_bound", None)
    if bound is None or not np.isfinite(bound):
        bound = result.fun if result.status == 0 and not kind.any() else -np.inf
    nodes_spent = int(result.get("mip_node_count") or 0)
    return Solution(result.x, float(bound), False, result.status == 0, nodes_spent)


def least_whole(
    program: LinearProgram,
    between: tuple[float, float],
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """Solve for whole shares and an objective between two values, in the program's units."""
    arguments = linear_arguments(program)
    low, high = arguments["bounds"].T.copy()
    low[program.objective], high[program.objective] = between
    rows = [
        (program.a, -np.inf, program.b),
        (arguments["A_eq"], arguments["b_eq"], arguments["b_eq"]),
    ]
    whole = slice(program.num_shares)
    return solve(arguments["c"], rows, (low, high), whole, seconds, relative_gap, nodes)


def linear_arguments(program: LinearProgram) -> dict[str, Any]:
    """The arguments of `scipy.optimize.linprog`."""
    from scipy.sparse import csr_array

    g, d = program.shape
    x = np.arange(g * d)
    cost = np.zeros(len(program.high))
    cost[program.objective] = 1.0
    return {
        "c": cost,
        "A_ub": program.a,
        "b_ub": program.b,
        "A_eq": csr_array((np.ones(g * d), (x // d, x)), shape=(g, len(cost))),
        "b_eq": np.ones(g),
        "bounds": np.stack([np.zeros(len(cost)), program.high], axis=1),
    }


def dual_weights(
    program: LinearProgram, seconds: float | None
) -> tuple[Float[np.ndarray, "R"], Float[np.ndarray, "G D"] | None] | None:
    """(weights >= 0 of the rows, the shares of a solution), or None where none is found.

    The simplex method gets the seconds that a failing interior-point method leaves; without
    seconds, its iterations alone are limited.
    """
    from scipy.optimize import linprog

    clock = Clock(seconds)
    methods = ("highs-ipm", "highs") if program.a.nnz >= _INTERIOR else ("highs",)
    arguments = linear_arguments(program)
    for method in methods:
        options: dict[str, float] = {"maxiter": _MAX_ITERATIONS}
        if np.isfinite(left_s := clock.remaining_s()):
            options["time_limit"] = max(0.0, left_s)
        solved = linprog(**arguments, method=method, options=options)
        marginals = getattr(getattr(solved, "ineqlin", None), "marginals", None)
        if marginals is not None and np.isfinite(marginals).all():
            x = None if solved.x is None else np.asarray(solved.x)[: program.num_shares]
            weight = np.maximum(-np.asarray(marginals), 0.0)
            return weight, None if x is None else x.reshape(program.shape)
        LOG.debug("no linear bound by %s: %s", method, solved.message)
        if solved.status == _INFEASIBLE or clock.is_over():
            break
    return None


def load_weights(program: LinearProgram, weight: Float[np.ndarray, "R"]) -> Float[np.ndarray, "R"]:
    """The weights scaled so that those of the loads sum to 1."""
    return weight / weight[: len(program.load_names)].sum()


def dual_value_s(program: LinearProgram, weight: Float[np.ndarray, "R"]) -> float:
    """A lower bound in seconds from any weights >= 0 of the rows.

    sum over groups of min over d of r(g, d) + sum over others of min(0, r high) - weight b, where
    r = cost + weight A. Whatever the weights, no placement is below: an inexact solver costs
    tightness, never truth. Weights of loads must sum to 1 (`load_weights`), so that the largest
    load's column, which has no upper limit, has r = 0.
    """
    reduced = program.a.T @ weight
    reduced[program.objective] += 1.0
    num_x, high = program.num_shares, program.high
    by_group = np.where(high[:num_x] > 0, reduced[:num_x], np.inf).reshape(program.shape)
    rest = slice(num_x, program.objective if program.load_names else None)
    others = np.minimum(reduced[rest] * high[rest], 0.0)
    value = by_group.min(axis=1).sum() + others.sum() - float(weight @ program.b)
    return float(value) * program.unit_s


def whole_bound(
    program: LinearProgram,
    known_s: float,
    budget: WorkBudget,
    nodes: int,
    gap: float,
    text: str,
    problem: Problem,
) -> Bound | None:
    """The bound of the program with whole placements after so many nodes; None without any.

    Args:
        program: Of any objective.
        known_s: A proven bound.
        budget: Its clock ends the solver.
        nodes: Of the search tree.
        gap: Relative; left open by the solver.
        text: The argument of the bound.
        problem: Its unit of time is that of the argument.
    """
    low = known_s / program.unit_s * (1.0 - 1e-6)
    solved = least_whole(program, (low, np.inf), budget.remaining_s(), gap, nodes)
    budget.is_over()
    if solved.is_infeasible or not np.isfinite(solved.bound):
        return None
    value_s = solved.bound * program.unit_s * (1.0 - _MIP_SLACK)
    proven = "solved" if solved.is_optimal else "cut short"
    return Bound(value_s, f"{text}, {proven} at {problem.unit.text(value_s)}")
