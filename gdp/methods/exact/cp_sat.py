"""Common parts of the CP-SAT models: the library, whole-number time, weights, the solver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import MissingExtraError
from gdp.base.version import install_command
from gdp.bounds.linear_program import LinearProgram, PlacementSolution
from gdp.bounds.loads import owned_weights
from gdp.methods.fix_and_optimise.rounds import group_devices
from gdp.problem.problem import Problem

TICKS = 10**8
"""Whole-number units in the known value: all times are rounded down to one, which keeps bounds."""
_WORKERS = 4
_FINE = 1 << 40  # whole-number units in the limit of a row that is no load, such as memory
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


def place_groups(
    model: Any, problem: Problem, hint: Int[np.ndarray, "N"] | None
) -> list[list[Any]]:
    """`on[g][d]`: literals of group g on device d, one of them true, within all memories; the
    search starts at the devices of a hint."""
    on = [[model.new_bool_var("") for _ in row] for row in problem.group_allowed]
    if hint is not None:
        _add_hint(model, on, group_devices(problem, hint))
    for row, allowed in zip(on, problem.group_allowed.tolist(), strict=True):
        model.add_exactly_one(row)
        for literal, may in zip(row, allowed, strict=True):
            if not may:
                model.add(literal == 0)
    _fit_weights(model, problem, on)
    return on


Part = tuple[list[list[list[Any]]], Int[np.ndarray, "G"], tuple[tuple[int, tuple[int, ...]], ...]]
"""(of each device of a memory, rows of a literal of each group, any of which has the device hold
it; bytes of each group alone; (bytes, groups) of each weight that groups share)"""


def _add_hint(model: Any, on: list[list[Any]], home: Int[np.ndarray, "G"]) -> None:
    for row, own in zip(on, home.tolist(), strict=True):
        for d, literal in enumerate(row):
            model.add_hint(literal, d == own)


def _fit_weights(model: Any, problem: Problem, on: list[list[Any]]) -> None:
    """Fit weights and caches into every device, and into every memory that devices share."""
    cluster, groups = problem.cluster, (problem.group, problem.num_groups)
    owned = [owned_weights(problem, *groups, kind) for kind in range(len(problem.held_on))]
    here = [list(column) for column in zip(*on, strict=True)]
    memories = [([d], size) for d, size in enumerate(cluster.memory_bytes.tolist())]
    for k, size in enumerate(cluster.pool_bytes.tolist()):
        memories.append((np.flatnonzero(cluster.pool == k).tolist(), size))
    for members, capacity in memories:
        parts = [
            ([[here[s] for s in np.flatnonzero(home == d).tolist()] for d in members], *of)
            for home, of in zip(problem.held_on, owned, strict=True)
        ]
        _limit_weights(model, parts, int(capacity))


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
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refused its model: {model.validate()}")
    if status == cp_model.INFEASIBLE:
        return CpSolution(None, np.inf, True)
    is_feasible = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = float(solver.best_objective_bound)
    return CpSolution(solver if is_feasible else None, bound, status == cp_model.OPTIMAL)


def least_whole(
    program: LinearProgram,
    upper: float,
    seconds: float | None,
    seed: int,
    hint: Int[np.ndarray, "G"] | None = None,
    counted: bool = False,
) -> PlacementSolution:
    """`gdp.bounds.linear_program.least_whole` by CP-SAT: all columns 0 or 1, up to an objective.

    Coefficients are rounded down to whole numbers, which only admits more: bounds hold.

    Args:
        program: Whose objective stands, with -1, in the rows that limit it from below.
        upper: Objective of a known placement, or more.
        seconds: For the solver; None: no limit.
        seed: Of the solver.
        hint: Device of each group, where the search starts.
        counted: Limit the solver's work instead of its seconds.
    """
    model = cp_model_library().CpModel()
    high = np.where(np.arange(len(program.high)) == program.objective, TICKS, program.high)
    z = [model.new_int_var(0, int(limit), "") for limit in high]
    on = [z[d : d + program.shape[1]] for d in range(0, program.num_shares, program.shape[1])]
    for row in on:
        model.add_exactly_one(row)
    for start, stop, b in zip(program.a.indptr, program.a.indptr[1:], program.b, strict=False):
        columns, values = program.a.indices[start:stop], program.a.data[start:stop]
        is_load = columns == program.objective
        unit = TICKS / upper if is_load.any() else 1 if (values % 1 == 0).all() else _FINE
        most = 2 * max(TICKS, unit)  # so much is over any limit, and sums stay whole numbers
        whole = np.clip(np.floor(values * unit * (1 + 1e-15) + 1e-9), -most, most)
        whole[is_load] = -1
        terms = zip(whole.astype(np.int64).tolist(), columns.tolist(), strict=True)
        model.add(sum(value * z[column] for value, column in terms) <= int(np.ceil(b * unit)))
    if hint is not None:
        _add_hint(model, on, hint)
    model.minimize(z[program.objective])
    found = run_cp(model, seconds, seed, counted)
    bound_s = min(max(0.0, found.bound) / TICKS, 1.0) * upper * program.unit_s
    if found.solver is None:
        return PlacementSolution(None, bound_s, found.is_complete)
    device = np.array([[found.solver.value(x) for x in row] for row in on]).argmax(axis=1)
    return PlacementSolution(device, bound_s, found.is_complete)
