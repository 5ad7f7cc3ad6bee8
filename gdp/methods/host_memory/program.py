"""Non-contiguous max-load as a mixed-integer program, by CP-SAT and then by HiGHS.

    minimise T    subject to, for every device d,
    sum over g of work(g, d) x(g, d)  +  sum over h of weight(h) cut(h, d)  <=  T   (cuts: paying d)
    cut(h, d) = top(h, d) - low(h, d),   low(h, d) <= x(g, d) <= top(h, d)   for the pins g of h
    weights and caches of the groups on d  <=  memory(d),        sum over d of x(g, d) = 1

Every tensor is a hyperedge over the groups of its producer and readers, its pins; cut(h, d) is 1
where d holds some, but not all, pins of h (Tarnawski et al. 2020, arXiv 2006.16423, section 5.2,
without its contiguity constraint).

A good placement comes first, from the pipeline's dynamic program. CP-SAT starts there and finds the
better ones; HiGHS, whose relaxation is stronger where devices are many, raises the bound target by
target below the best value. Without CP-SAT, HiGHS does both.

Axes: N ops, G groups, D devices.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.errors import MissingExtraError
from gdp.bounds.linear_program import (
    UNIT,
    LinearProgram,
    PlacementSolution,
    RowBuilder,
    least_whole,
    needless_renamings,
    read_solution,
)
from gdp.bounds.loads import add_weights, cut_tensors
from gdp.bounds.work import work_over_speed_s
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact import cp_sat
from gdp.methods.exact.method import NO_FIT, PROVEN_MISFIT, ExactProgram, is_counted
from gdp.methods.exact.targets import CLOSE, ProofState, close_gap
from gdp.methods.fix_and_optimise.rounds import group_devices
from gdp.methods.host_memory.load import group_work_s, is_cpu, sent_s
from gdp.methods.host_memory.pipelines import best
from gdp.methods.scoring import expand, score_all
from gdp.methods.shares import LOAD_CP_SHARE, LOAD_PIPELINE_SHARE, LOAD_VALUE_SHARE
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, interchangeable, same

_COUNTED_NODES = 2000  # of a search tree, where work is counted


def least_load(problem: Problem, search: Search) -> Answer:
    """The placement of least largest load, contiguous or not."""
    clock, counted = Clock(search.seconds), is_counted(search)
    start = search.start
    if start is None:
        first = Clock(search.seconds and search.seconds * LOAD_PIPELINE_SHARE)
        start = best(problem, dataclasses.replace(search, clock=first)).assignment
    device = None if start is None else start.device
    value_s, bound_s = fitting_s(problem, device), work_over_speed_s(group_work_s(problem))
    device = device if np.isfinite(value_s) else None
    state = ProofState(device, value_s, bound_s, "work over the speed of all devices")
    if bound_s < value_s * CLOSE:
        program = build_loads(problem, (value_s if device is not None else _any_s(problem)) / UNIT)
        state = _by_cp_sat(problem, program, state, search, clock)

        def below(state: ProofState, target_s: float, seconds: float | None) -> ProofState:
            nodes = _COUNTED_NODES if counted else None
            solution = solve_loads(problem, program, target_s, seconds, nodes)
            return _after(problem, state, solution, target_s, "HiGHS over all placements")

        state = state if state.is_complete else close_gap(state, below, clock, LOAD_VALUE_SHARE)
    assignment = None if state.best is None else Assignment(state.best)
    return answered(assignment, state.value_s, state.bound_s, state.by, state.is_complete)


LEAST_LOAD = ExactProgram(least_load, "CP-SAT and HiGHS")


def answered(
    best: Assignment | None, value_s: float, bound_s: float, by: str, complete: bool
) -> Answer:
    """The answer of a solver of host loads, with its certainty as the reason."""
    if best is None:
        if complete:
            return Answer(None, PROVEN_MISFIT, bound_by=by, proven_misfit=True)
        return Answer(None, NO_FIT, bound_s, by)
    optimal = bound_s >= value_s * CLOSE
    reason = "" if optimal else f"cut short: at most {1 - bound_s / value_s:.2%} from the optimum"
    return Answer(best, reason, min(bound_s, value_s), by, optimal, evaluations=1)


def fitting_s(problem: Problem, device: Int[np.ndarray, "N"] | None) -> float:
    """The objective's value; inf where memory overflows or there is no placement."""
    if device is None:
        return np.inf
    scored = score_all(problem, [Assignment(device)])[0]
    return scored.value_s if scored.overflow_bytes == 0 else np.inf


def _by_cp_sat(
    problem: Problem, program: LinearProgram, state: ProofState, search: Search, clock: Clock
) -> ProofState:
    """The state after CP-SAT's share of the seconds; as it was without CP-SAT."""
    upper_s = program.unit_s * UNIT
    hint = None if state.best is None else group_devices(problem, state.best)
    seconds = clock.part(LOAD_CP_SHARE).seconds
    try:
        solution = cp_sat.least_whole(
            program, UNIT, seconds, search.seed, hint, is_counted(search) or seconds is None
        )
    except MissingExtraError:
        return state
    target_s = np.inf if state.best is None else upper_s
    return _after(problem, state, solution, target_s, "CP-SAT over all placements")


def _after(
    problem: Problem, state: ProofState, solution: PlacementSolution, target_s: float, by: str
) -> ProofState:
    """The state after a solver's answer about all that is below a target."""
    if solution.device is not None:
        device = expand(problem, solution.device)
        value_s = fitting_s(problem, device)
        if value_s < state.value_s:
            state = dataclasses.replace(state, best=device, value_s=value_s)
        if not np.isfinite(value_s):  # the solver's tolerance let some bytes too many pass
            solution = dataclasses.replace(solution, is_complete=False)
    return state.after(solution, target_s, by)


def solve_loads(
    problem: Problem, program: LinearProgram, upper_s: float, seconds: float | None,
    nodes: int | None = None,
) -> PlacementSolution:  # fmt: skip
    """HiGHS's placement of least load below `upper_s`, as far as seconds and nodes suffice."""
    work_s = group_work_s(problem)
    needless = needless_renamings(
        work_s, classes_of(interchangeable(problem) & same(is_cpu(problem)))
    )
    high = program.high.copy()
    high[: needless.size] *= ~needless.reshape(-1)
    limits = (0.0, min(upper_s, _any_s(problem)) / program.unit_s)
    solution = least_whole(program._replace(high=high), limits, seconds, 1e-6, nodes)
    return read_solution(solution, 0, program.shape, upper_s, 1.0 / program.unit_s)


def build_loads(problem: Problem, unit_s: float) -> LinearProgram:
    """The program of a problem, in units of time that make a known value about `UNIT`."""
    rows, d, paying = RowBuilder(), problem.num_devices, ~is_cpu(problem)
    work_s = group_work_s(problem)
    x = rows.columns(work_s.size) + np.arange(work_s.size).reshape(work_s.shape)
    rows.limits[:] = np.isfinite(work_s).reshape(-1).astype(float).tolist()
    largest = rows.columns(1, _any_s(problem) / unit_s)
    works = np.isfinite(work_s) & (work_s > 0)
    loads = [([x[works[:, i], i]], [work_s[works[:, i], i] / unit_s]) for i in range(d)]
    for pins, seconds in _hyperedges(problem).items():
        for i in np.flatnonzero(paying).tolist():
            columns, signs = _cut(rows, x[list(pins), i])
            loads[i][0].append(columns)
            loads[i][1].append(signs * (seconds / unit_s))
    shared = problem.cluster.processor
    machines = [[i] for i in range(d)]
    machines += [np.flatnonzero(shared == k).tolist() for k in range(int(shared.max()) + 1)]
    for members in machines:
        columns = [part for i in members for part in loads[i][0]]
        values = [part for i in members for part in loads[i][1]]
        rows.add_row([*columns, [largest]], [*values, [-1.0]])
    add_weights(rows, problem)
    matrix, _, b = rows.matrix()
    return LinearProgram(matrix, b, work_s.shape, largest, np.array(rows.limits), unit_s)


def _hyperedges(problem: Problem) -> dict[tuple[int, ...], float]:
    """The seconds of each set of groups that one or more tensors join."""
    cut, moved_s = cut_tensors(problem), sent_s(problem)
    pins = [{int(g)} for g in cut.maker]
    for t, g in zip(cut.use_cut.tolist(), cut.use_group.tolist(), strict=True):
        pins[t].add(g)
    edges: dict[tuple[int, ...], float] = {}
    for known, seconds in zip(pins, moved_s[cut.tensor].tolist(), strict=True):
        if seconds > 0:
            key = tuple(sorted(known))
            edges[key] = edges.get(key, 0.0) + seconds
    return edges


def _cut(
    rows: RowBuilder, on: Int[np.ndarray, "P"]
) -> tuple[Int[np.ndarray, "C"], Int[np.ndarray, "C"]]:
    """(columns, signs) that add up to 1 where some, but not all, pins are 1."""
    one = np.ones(len(on))
    top = rows.columns(1)
    if len(on) == 2:
        rows.add_rows([on, on[::-1], np.full(2, top)], [one, -one, -one])
        return np.array([top]), np.array([1])
    low = rows.columns(1)
    rows.add_rows([on, np.full(len(on), top)], [one, -one])
    rows.add_rows([np.full(len(on), low), on], [one, -one])
    return np.array([top, low]), np.array([1, -1])


def _any_s(problem: Problem) -> float:
    """Upper bound of any placement's load: all work, and all transfers on every device."""
    work_s = group_work_s(problem)
    slowest_s = np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1)
    return float(slowest_s.sum() + problem.num_devices * sent_s(problem).sum()) or 1.0
