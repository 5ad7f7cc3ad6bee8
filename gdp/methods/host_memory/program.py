"""Non-contiguous max-load: a search, then a mixed-integer program of the reduced problem.

    minimise T    subject to, for every device d,
    sum over v of work(v, d) x(v, d)  +  sum over h of weight(h) cut(h, d)  <=  T   (cuts: paying d)
    cut(h, d) = top(h, d) - low(h, d),   low(h, d) <= x(v, d) <= top(h, d)   for the pins v of h
    sum over v of bytes(v) x(v, d)  <=  memory(d),        sum over d of x(v, d) = 1

cut(h, d) is 1 where d holds some, but not all, pins of h (Tarnawski et al. 2020, arXiv 2006.16423,
section 5.2, without its contiguity constraint). Equal devices are told apart by one rule: of the
nodes in order of work, the i-th is on one of the first i of them.

A good placement comes first, from the pipeline's dynamic program, annealing, and `polish`: nodes
that are not near borders stay where they are and become one node per device, and the solver
balances all devices at once, which single moves cannot (large neighbourhood search: Shaw 1998,
doi 10.1007/3-540-49481-2_30). Its value is the solver's cutoff; the model is reduced by rules that
keep every better placement (`gdp.methods.host_memory.hypergraph`).

Axes: N ops, G groups, V nodes, D devices, H hyperedges.
"""

import dataclasses
import logging
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.clock import Clock
from gdp.bounds.linear_program import (
    UNIT,
    PlacementSolution,
    RowBuilder,
    needless_renamings,
    read_solution,
    solve,
)
from gdp.bounds.work import work_over_speed_s
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.method import NO_FIT, PROVEN_MISFIT, ExactProgram, is_counted
from gdp.methods.exact.targets import CLOSE, ProofState, close_gap
from gdp.methods.host_memory.hypergraph import (
    LoadHypergraph,
    absorb,
    equal_devices,
    load_model,
    merge,
    reduce_model,
)
from gdp.methods.host_memory.load import values
from gdp.methods.host_memory.pipelines import best
from gdp.methods.shares import (
    LOAD_PIPELINE_SHARE,
    LOAD_POLISH_ROUND_SHARE,
    LOAD_POLISH_SHARE,
    LOAD_REDUCE_SHARE,
    LOAD_SEARCH_SHARE,
    LOAD_VALUE_SHARE,
)
from gdp.problem.problem import Problem

LOG = logging.getLogger(__name__)

_ROUNDS = 12  # of annealing where no limit is given
_MOST_ROUNDS = 200
_FREE = 40  # nodes that one round of polishing may move
_BETTER = 1.0 - 1e-4
_COUNTED_NODES = 2000  # of a search tree, where work is counted
_MOST_FAILURES = 16  # rounds in a row without a better assignment


def least_load(problem: Problem, search: Search) -> Answer:
    """The placement of least largest load, contiguous or not."""
    clock = Clock(search.seconds)
    model = load_model(problem)
    groups = _good_groups(problem, model, search)
    device = None if groups is None else groups[problem.group]
    value_s, bound_s = load_value_s(problem, device), work_over_speed_s(model.work_s)
    device = device if np.isfinite(value_s) else None
    state = ProofState(device, value_s, bound_s, "work over the speed of all devices")
    nodes = _COUNTED_NODES if is_counted(search) else None

    def below(state: ProofState, target_s: float, seconds: float | None) -> ProofState:
        return _solve_below(problem, model, state, target_s, seconds, nodes)

    state = close_gap(state, below, clock, LOAD_VALUE_SHARE)
    assignment = None if state.best is None else Assignment(state.best)
    return answered(assignment, state.value_s, state.bound_s, state.by, state.is_complete)


LEAST_LOAD = ExactProgram(least_load, "HiGHS")


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


def _solve_below(
    problem: Problem,
    model: LoadHypergraph,
    state: ProofState,
    target_s: float,
    seconds: float | None,
    nodes: int | None = None,
) -> ProofState:
    """Reduce and solve for an assignment below a target within some seconds and nodes."""
    clock = Clock(seconds)
    reduced = reduce_model(model, target_s, Clock(seconds and LOAD_REDUCE_SHARE * seconds))
    LOG.debug("target %.6g s: %s", target_s, reduced and (reduced.num_nodes, len(reduced.pins)))
    if reduced is None:
        return state.raised(target_s, "minimum cuts")
    left_s = None if seconds is None else clock.remaining_s()
    solution = solve_loads(reduced, target_s, left_s, nodes=nodes)
    if solution.device is not None:
        device = solution.device[reduced.node][problem.group]
        value_s = load_value_s(problem, device)
        if value_s < state.value_s:
            state = dataclasses.replace(state, best=device, value_s=value_s)
        if not np.isfinite(value_s):  # the solver's tolerance let some bytes too many pass
            solution = dataclasses.replace(solution, is_complete=False)
    return state.after(solution, target_s, "HiGHS over all placements")


def load_value_s(problem: Problem, device: Int[np.ndarray, "N"] | None) -> float:
    """The largest load; inf where memory overflows or there is no placement."""
    if device is None:
        return np.inf
    value_s, overflow = values(problem, device[None])
    return float(value_s[0]) if overflow[0] == 0 else np.inf


def _good_groups(
    problem: Problem, model: LoadHypergraph, search: Search
) -> Int[np.ndarray, "G"] | None:
    """A good device for each group, by the pipelines' program and annealing; None: none fits."""
    from gdp.methods.host_memory.search import search_loads

    seconds = search.seconds if search.seconds is None else search.seconds * LOAD_PIPELINE_SHARE
    if search.start is not None:
        first = np.array(search.start.device)
    else:
        few = dataclasses.replace(search, clock=Clock(seconds))
        placed = best(problem, few).assignment
        first = None if placed is None else placed.device
    upper_s = load_value_s(problem, first)
    small = absorb(model, upper_s)
    if first is not None and np.isfinite(upper_s):
        starts = [_node_values(small, problem, first)]
    else:
        starts = [np.isfinite(small.work_s).argmax(axis=1)]
    share_s = None if search.seconds is None else LOAD_SEARCH_SHARE * search.seconds
    rounds = _ROUNDS if search.seconds is None else _MOST_ROUNDS
    device, load_s, over = search_loads(small, starts, Clock(share_s), search.seed, rounds)
    if over == 0 and load_s < upper_s:
        share_s = None if search.seconds is None else LOAD_POLISH_SHARE * search.seconds
        nodes = None if search.evaluations is None else _COUNTED_NODES
        return polish(small, device, load_s, Clock(share_s), search.seed, nodes)[small.node]
    if first is None or not np.isfinite(upper_s):
        return None
    return _node_values(model, problem, first)


def _node_values(
    model: LoadHypergraph, problem: Problem, device: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "V"]:
    """The device of each node, where each node's ops are on one device, or on any of theirs."""
    of_node = np.zeros(model.num_nodes, dtype=np.int64)
    of_node[model.node[problem.group]] = device
    barred = ~np.isfinite(model.work_s[np.arange(model.num_nodes), of_node])
    return np.where(barred, np.isfinite(model.work_s).argmax(axis=1), of_node).astype(np.int64)


def polish(
    model: LoadHypergraph,
    device: Int[np.ndarray, "V"],
    value_s: float,
    clock: Clock,
    seed: int,
    nodes: int | None = None,
) -> Int[np.ndarray, "V"]:
    """The best assignment found by freeing nodes near borders, others in every round."""
    rng = np.random.default_rng(seed)
    failures = 0
    while failures < _MOST_FAILURES and not clock.is_over():
        free = _near_borders(model, device, rng)
        stays = ~free[:, None] & (np.arange(model.num_devices) != device[:, None])
        held = replace(model, work_s=np.where(stays, np.inf, model.work_s))
        target = np.arange(model.num_nodes)
        for d in range(model.num_devices):
            fixed = np.flatnonzero((device == d) & ~free)
            target[fixed] = fixed.min(initial=model.num_nodes)
        number = np.unique(target, return_inverse=True)[1]
        seconds = None if clock.seconds is None else LOAD_POLISH_ROUND_SHARE * clock.remaining_s()
        solution = solve_loads(merge(held, target), value_s * _BETTER, seconds, 1e-3, nodes)
        if solution.device is None:
            failures += 1
            continue
        device, failures = solution.device[number], 0
        value_s = load_s(model, device)
    return device


def load_s(model: LoadHypergraph, device: Int[np.ndarray, "V"]) -> float:
    """The largest load of an assignment."""
    on = device[:, None] == np.arange(model.num_devices)
    loads = np.where(on, model.work_s, 0.0).sum(axis=0)
    for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
        part = on[list(pins)]
        loads += seconds * (part.any(axis=0) & ~part.all(axis=0) & model.pays)
    return float(loads.max())


def _near_borders(
    model: LoadHypergraph, device: Int[np.ndarray, "V"], rng: np.random.Generator
) -> Bool[np.ndarray, "V"]:
    """Some nodes: those of random cut hyperedges, then their neighbours."""
    edges_of = model.edges_of()
    cut = [h for h, pins in enumerate(model.pins) if len({int(device[v]) for v in pins}) > 1]
    chosen: dict[int, None] = {}
    waiting = [v for h in rng.permutation(cut).astype(int).tolist() for v in model.pins[h]]
    while waiting and len(chosen) < _FREE:
        following = []
        for v in waiting:
            if v not in chosen and len(chosen) < _FREE:
                chosen[v] = None
                following += [u for h in edges_of[v] for u in model.pins[h] if len(edges_of[v]) < 9]
        waiting = rng.permutation(following).astype(int).tolist()
    free = np.zeros(model.num_nodes, dtype=bool)
    free[list(chosen)] = True
    return free


def solve_loads(
    model: LoadHypergraph,
    upper_s: float,
    seconds: float | None,
    relative_gap: float = 1e-6,
    nodes: int | None = None,
) -> PlacementSolution:
    """The assignment of least load below `upper_s`, as far as seconds and nodes suffice."""
    scale = UNIT / (upper_s if np.isfinite(upper_s) else _any_upper_s(model))
    rows = RowBuilder()
    load = rows.columns(1, upper_s * scale)
    first, size = rows.columns(model.work_s.size), model.work_s.size
    x = np.arange(first, first + size).reshape(model.work_s.shape)
    for v in range(model.num_nodes):
        rows.add_row([x[v]], [np.ones(len(x[v]))], 1.0, 1.0)
        for d in np.flatnonzero(~np.isfinite(model.work_s[v])):
            rows.limits[x[v, d]] = 0.0
    for column in x[needless_renamings(model.work_s, equal_devices(model))]:
        rows.limits[column] = 0.0
    alone = [[d] for d in np.flatnonzero(model.processor < 0).tolist()]
    together = [
        np.flatnonzero(model.processor == k).tolist() for k in range(int(model.processor.max()) + 1)
    ]
    for members in [*alone, *together]:
        _limit_load(model, rows, x, load, members, scale)
    _limit_weights(model, rows, x)
    cost = np.zeros(len(rows.limits))
    cost[load] = 1.0
    limits = np.zeros(len(cost)), np.array(rows.limits)
    whole = slice(first, first + size)
    solution = solve(cost, [rows.matrix()], limits, whole, seconds, relative_gap, nodes)
    return read_solution(solution, first, model.work_s.shape, upper_s, scale)


def _any_upper_s(model: LoadHypergraph) -> float:
    """Upper bound of any assignment's load: all work and all transfers together."""
    work_s = np.where(np.isfinite(model.work_s), model.work_s, 0.0).max(axis=1)
    return float(work_s.sum() + model.weight_s.sum()) or 1.0


def _limit_load(
    model: LoadHypergraph, rows: RowBuilder, x: np.ndarray, load: int, members: list[int],
    scale: float,
) -> None:  # fmt: skip
    """The load of one device, or of all that share a processor."""
    columns, values = [load], [-1.0]
    for d in members:
        works = np.isfinite(model.work_s[:, d]) & (model.work_s[:, d] > 0)
        columns += x[works, d].tolist()
        values += (model.work_s[works, d] * scale).tolist()
        if model.pays[d]:
            for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
                for column, sign in _cut(rows, [int(x[v, d]) for v in pins]):
                    columns.append(column)
                    values.append(sign * seconds * scale)
    rows.add_row([columns], [values])


def _cut(rows: RowBuilder, pins: list[int]) -> list[tuple[int, float]]:
    """(variable, factor) pairs that add up to 1 where some, but not all, pins are 1."""
    live = [v for v in pins if rows.limits[v] > 0]
    if not live:
        return []
    top = rows.columns(1) if len(live) > 1 else live[0]
    if len(live) < len(pins):  # one pin is never there: any other is a cut
        if len(live) > 1:
            for v in live:
                rows.add_row([[top, v]], [[1.0, -1.0]], np.inf, 0.0)
        return [(top, 1.0)]
    if len(pins) == 2:
        one, two = pins
        rows.add_row([[top, one, two]], [[1.0, -1.0, 1.0]], np.inf, 0.0)
        rows.add_row([[top, one, two]], [[1.0, 1.0, -1.0]], np.inf, 0.0)
        return [(top, 1.0)]
    low = rows.columns(1)
    for v in pins:
        rows.add_row([[top, v]], [[1.0, -1.0]], np.inf, 0.0)
        rows.add_row([[v, low]], [[1.0, -1.0]], np.inf, 0.0)
    return [(top, 1.0), (low, -1.0)]


def _limit_weights(model: LoadHypergraph, rows: RowBuilder, x: np.ndarray) -> None:
    """Fit weights and caches into every device; one that nodes share is there once."""
    for d, capacity in enumerate(model.memory_bytes.tolist()):
        if capacity >= model.stored_bytes:
            continue
        columns, values = [], []
        for kind, s in np.argwhere(model.held_on == d).tolist():
            columns += list(x[:, s])
            values += list(model.held_bytes[:, kind] / capacity)
        for size, nodes, kind in model.shared:
            held = rows.columns(1)
            columns.append(held)
            values.append(size / capacity)
            for v in nodes:
                for s in np.flatnonzero(model.held_on[kind] == d).tolist():
                    rows.add_row([[held, x[v, s]]], [[1.0, -1.0]], np.inf, 0.0)
        rows.add_row([columns], [values], 1.0)
