"""Lower bounds of the latency of one run, cheapest first.

Memory along a path is priced: where the weights of a longest path do not fit where it runs fastest,
it must change devices. With a price c_d >= 0 for each byte of device d, any placement that fits
takes at least

    min over devices of the path's ops of (time along the path + sum of c_d * weights on d)
        - sum over d of c_d * memory_d

(at the price of the device that holds them, `Problem.held_on`)

(Lagrangian relaxation of a shortest path with resources: Handler and Zang 1980,
doi 10.1002/net.3230100403). The minimum is a dynamic program over the path; prices follow the
overflow of its solution.

Axes: V ops and the end, D devices, L steps of the path.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.base.units import format_bytes
from gdp.bounds.budget import QUICK_OPS, Bound, WorkBudget
from gdp.bounds.linear_program import LinearProgram, dual_value_s, dual_weights, whole_bound
from gdp.bounds.path_program import (
    TimingGraph,
    build_paths,
    path_program_size,
    rows_bind,
    timing_graph,
)
from gdp.bounds.paths import MAX_OPS, Arcs, Spans, heads_and_tails, no_spans, send_s
from gdp.bounds.work import window_s
from gdp.problem.problem import Problem, TimeUnit, stored_bytes

_MIP_GAP = 1e-3  # relative; left open by HiGHS
_PRICE_ROUNDS = 100
_PATHS_SHARE = 0.6
"""Of the clock's remaining seconds, for the linear program of paths: where it takes longer, the
smaller one of loads has the rest, whose bound is else the lower one."""
_SHRINK = 0.92  # of the price steps: a sum of 12 first ones is in reach


def latency_bounds(problem: Problem, budget: WorkBudget, found_s: float = np.inf) -> list[Bound]:
    """Bounds of the latency of any placement, in any order of its ops.

    The critical path takes O(E D^2), and is all of a large graph once the clock is over; spans take
    the branches of the budget; where memory binds the linear program of paths is solved, too.

    Args:
        problem: Any of the event simulator's.
        budget: Shared by all proofs.
        found_s: Value of a known placement, at which nothing more is worth a proof.
    """
    timing = timing_graph(problem, budget)
    arcs, spans = timing.arcs, timing.spans
    head_s, tail_s = heads_and_tails(arcs, no_spans(problem.num_devices))
    bounds = [_path(problem, arcs, head_s)]
    if problem.num_ops > QUICK_OPS and budget.is_over():
        return bounds
    bounds.append(_window(arcs, head_s, tail_s, "", problem.unit))
    if len(spans.source):
        head_s, tail_s = heads_and_tails(arcs, spans)
        text = (
            f"critical path over modules: between a fork and its join, {len(spans.source)} times, "
            "it takes as long as the best placement of what lies between"
        )
        bounds.append(Bound(float(head_s[-1].min()), text))
        bounds.append(_window(arcs, head_s, tail_s, " over modules", problem.unit))
    priced = _memory(problem, arcs, spans, head_s, budget)
    bounds += [] if priced is None else [priced]
    known_s = max(bound.value_s for bound in bounds)
    return [*bounds, *_programs(problem, timing, budget, known_s, found_s)]


def _programs(
    problem: Problem, timing: TimingGraph, budget: WorkBudget, known_s: float, found_s: float
) -> list[Bound]:
    """Bounds of the linear program of paths and memory, in shares and with whole placements."""
    if problem.num_devices == 1 or not rows_bind(problem) or known_s <= 0.0:
        return []
    if known_s >= found_s * (1.0 - 1e-9) or path_program_size(problem) > budget.entries:
        return []
    program = build_paths(problem, known_s, timing)
    budget.paths_unsolved = budget.is_over()
    bounds = [] if budget.paths_unsolved else _linear(program, budget)
    known_s = max([known_s, *(bound.value_s for bound in bounds)])
    nodes = budget.nodes(program.size, paths=True)
    if (
        nodes == 0
        or budget.paths_unsolved
        or known_s >= found_s * (1.0 - _MIP_GAP)
        or budget.is_over()
    ):
        return bounds
    text = (
        "mixed-integer program of paths, work, transfers and memory: "
        f"{program.shape[0]} groups, {program.a.shape[0]} rows"
    )
    whole = whole_bound(program, known_s, budget, nodes, _MIP_GAP, text, problem)
    return bounds if whole is None else [*bounds, whole]


def _linear(program: LinearProgram, budget: WorkBudget) -> list[Bound]:
    """The value of the linear program, from its dual solution: no tolerance enters."""
    solved = dual_weights(program, _PATHS_SHARE * budget.remaining_s())
    budget.is_over()
    budget.paths_unsolved = solved is None
    if solved is None:
        return []
    rows, groups = program.a.shape[0], program.shape[0]
    text = f"linear program of paths, work, transfers and memory: {groups} groups in shares"
    return [Bound(dual_value_s(program, solved[0]), f"{text}, {rows} rows")]


def _path(problem: Problem, arcs: Arcs, head_s: Float[np.ndarray, "V D"]) -> Bound:
    value_s = float(head_s[-1].min())
    free_s = 0.0
    if problem.num_ops <= MAX_OPS:
        alone = arcs._replace(
            latency_s=np.zeros_like(arcs.latency_s), s_per_byte=np.zeros_like(arcs.s_per_byte)
        )
        free_s = float(heads_and_tails(alone, no_spans(problem.num_devices))[0][-1].min())
    rest = problem.unit.text(max(0.0, value_s - free_s))
    return Bound(
        value_s,
        f"critical path: {problem.unit.text(free_s)} of ops on their fastest devices and {rest} "
        "for transfers or slower devices, the less of both",
    )


def _window(
    arcs: Arcs,
    head_s: Float[np.ndarray, "V D"],
    tail_s: Float[np.ndarray, "V D"],
    how: str,
    unit: TimeUnit,
) -> Bound:
    """The work of a window between the latest heads and tails, shared over all devices."""
    possible = np.isfinite(arcs.op_s) & np.isfinite(head_s)
    start_s = np.where(possible, head_s - np.where(possible, arcs.op_s, 0.0), np.inf).min(axis=1)
    after_s = np.where(possible, tail_s, np.inf).min(axis=1)
    if not np.isfinite(start_s).all():
        return Bound(0.0, "none")
    value_s, inside = window_s(arcs.op_s, start_s, after_s)
    if len(inside) == 0:
        return Bound(0.0, "none")
    r, q = float(start_s[inside].min()), float(after_s[inside].min())
    return Bound(
        value_s,
        f"work in a window{how}: {len(inside)} ops that cannot start before {unit.text(r)} "
        f"and are followed by {unit.text(q)} take at least "
        f"{unit.text(max(0.0, value_s - r - q))} on all devices together",
    )


def _memory(
    problem: Problem,
    arcs: Arcs,
    spans: Spans,
    head_s: Float[np.ndarray, "V D"],
    budget: WorkBudget,
) -> Bound | None:
    """The bound of the path behind the largest head, if memory binds on it. O(L D^2) a round."""
    memory = problem.cluster.memory_bytes.astype(np.float64)
    if problem.graph.weight_bytes.sum() <= memory.min() or problem.num_ops > MAX_OPS:
        return None
    steps_s, path = _longest_path(arcs, spans, head_s)
    held = _weights(problem, path)
    if held.sum() <= memory.min():
        return None
    price = np.zeros(problem.num_devices)
    best_s = 0.0
    # Prices are of the order of the slowest way along the path for the bytes that a device holds.
    slowest_s = float(np.where(np.isfinite(steps_s), steps_s, 0.0).max(axis=(1, 2)).sum())
    step = 0.5 * slowest_s / memory
    for _ in range(_PRICE_ROUNDS):
        if budget.is_over():
            break
        price_s = (held[:, :, None] * price[problem.held_on][:, None]).sum(axis=0)
        value_s, device = _cheapest(steps_s, price_s)
        best_s = max(best_s, value_s - float(price @ memory))
        load = np.bincount(problem.held_on[:, device].ravel(), held.ravel(), minlength=len(price))
        over = load / memory - 1.0
        over = np.where((price > 0.0) | (over > 0.0), over, 0.0)
        if not over.any():
            break
        price = np.maximum(0.0, price + step * over / np.abs(over).max())
        step = step * _SHRINK
    return Bound(
        best_s,
        f"memory: {format_bytes(held.sum())} of weights along the critical path do not "
        f"fit where it is fastest; spread over devices it takes at least "
        f"{problem.unit.text(best_s)}",
    )


def _longest_path(
    arcs: Arcs, spans: Spans, head_s: Float[np.ndarray, "V D"]
) -> tuple[Float[np.ndarray, "L D D"], Int[np.ndarray, "L"]]:
    """(seconds from step to step by devices, its ops) of a path that leads to the end of the run.

    Backwards from the end, each time over the arc or span that makes the op wait longest. The first
    step comes from nowhere and has equal rows.
    """
    num_devices = arcs.op_s.shape[1]
    v = len(arcs.op_s) - 1
    steps, ops = [], []
    while v >= 0:
        ops.append(v)
        longest_s, step_s, u = -1.0, np.tile(arcs.op_s[v], (num_devices, 1)), -1
        for k in range(arcs.first_input[v], arcs.first_input[v + 1]):
            along_s = send_s(arcs, np.array([k]))[0] + arcs.opens_s[v][None, :]
            if arcs.group[arcs.source[k]] == arcs.group[v]:
                along_s = np.full_like(along_s, np.inf)
            np.fill_diagonal(along_s, 0.0)
            along_s = along_s + arcs.op_s[v]
            end_s = float((head_s[arcs.source[k]][:, None] + along_s).min())
            if end_s > longest_s:
                longest_s, step_s, u = end_s, along_s, int(arcs.source[k])
        for k in np.flatnonzero((spans.target == v) & (spans.source >= 0)).tolist():
            end_s = float((head_s[spans.source[k]][:, None] + spans.span_s[k]).min())
            if end_s > longest_s:
                longest_s, step_s, u = end_s, spans.span_s[k], int(spans.source[k])
        steps.append(step_s)
        v = u
    return np.array(steps[::-1]), np.array(ops[::-1], dtype=np.int64)


def _weights(problem: Problem, path: Int[np.ndarray, "L"]) -> Float[np.ndarray, "K L"]:
    """Bytes of each kind of weights of each op of the path; a shared weight counts once."""
    graph, stored = problem.graph, stored_bytes(problem)
    ops = path[:-1]  # the last one is the end of the run
    _, first = np.unique(graph.weight_id[ops], return_index=True)
    counted = np.zeros(len(path), dtype=bool)
    counted[first] = True
    by_op = np.zeros((len(problem.held_on), graph.num_ops))
    by_op[stored.kind, stored.op] = stored.size_bytes
    return np.pad(by_op[:, ops], ((0, 0), (0, 1))) * counted


def _cheapest(
    steps_s: Float[np.ndarray, "L D D"], price_s: Float[np.ndarray, "L D"]
) -> tuple[float, Int[np.ndarray, "L"]]:
    """(least time plus prices, the devices that take it)."""
    count, num_devices = price_s.shape
    total_s = np.zeros(num_devices)
    came_from = np.zeros((count, num_devices), dtype=np.int64)
    for k in range(count):
        ways_s = total_s[:, None] + steps_s[k]
        came_from[k] = ways_s.argmin(axis=0)
        total_s = ways_s.min(axis=0) + price_s[k]
    device = np.zeros(count, dtype=np.int64)
    device[-1] = int(total_s.argmin())
    for k in range(count - 1, 0, -1):
        device[k - 1] = came_from[k, device[k]]
    return float(total_s.min()), device
