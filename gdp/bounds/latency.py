"""Lower bounds of the latency of one run, cheapest first."""

import numpy as np
from jaxtyping import Float

from gdp.bounds.bound import Bound
from gdp.bounds.effort import Effort
from gdp.bounds.linear_program import dual_weights
from gdp.bounds.memory import memory_bound
from gdp.bounds.path_program import (
    Net,
    PathModel,
    build_paths,
    dual_value_s,
    least_whole,
    linear_arguments,
    net_of,
    path_model_size,
    rows_bind,
)
from gdp.bounds.paths import Arcs, Spans, heads_and_tails, no_spans
from gdp.bounds.spans import MAX_OPS
from gdp.bounds.work import window_s
from gdp.problem.problem import Problem, TimeUnit

# HiGHS keeps rows to 1e-7 and whole numbers to 1e-6, in units of about one latency.
_MIP_SLACK = 1e-5
_MIP_GAP = 1e-3  # what HiGHS leaves open


def latency_bounds(problem: Problem, effort: Effort, found_s: float = np.inf) -> list[Bound]:
    """What each argument proves about the latency of any placement, in any order of its ops.

    The critical path takes O(E D^2); spans take the branches of the effort; where memory binds
    the linear program of paths is solved, too. A placement that takes `found_s` ends it as soon as
    no better one is possible.
    """
    net = net_of(problem, effort)
    arcs, spans = net.arcs, net.spans
    head_s, tail_s = heads_and_tails(arcs, no_spans(problem.num_devices))
    bounds = [_path(problem, arcs, head_s), _window(arcs, head_s, tail_s, "", problem.unit)]
    if len(spans.source):
        head_s, tail_s = heads_and_tails(arcs, spans)
        bounds += [
            _modules(head_s, spans),
            _window(arcs, head_s, tail_s, " over modules", problem.unit),
        ]
    split = memory_bound(problem, arcs, spans, head_s, effort)
    bounds += [] if split is None else [split]
    return [*bounds, *_programs(problem, net, effort, max(b.value_s for b in bounds), found_s)]


def _programs(
    problem: Problem, net: Net, effort: Effort, known_s: float, found_s: float
) -> list[Bound]:
    """The linear program of paths and memory, and the same with whole placements."""
    if problem.num_devices == 1 or not rows_bind(problem) or known_s <= 0.0:
        return []
    if known_s >= found_s * (1.0 - 1e-9) or path_model_size(problem) > effort.entries:
        return []
    model = build_paths(problem, known_s, net)
    bounds = [] if effort.is_over() else _linear(model, effort)
    known_s = max([known_s, *(bound.value_s for bound in bounds)])
    nodes = effort.nodes(model.a.nnz, paths=True)
    if nodes == 0 or known_s >= found_s * (1.0 - _MIP_GAP) or effort.is_over():
        return bounds
    low = known_s / model.unit_s * (1.0 - 1e-6)
    solved = least_whole(model, (low, np.inf), effort.remaining_s(), _MIP_GAP, nodes)
    effort.is_over()
    if solved.is_infeasible or not np.isfinite(solved.bound):
        return bounds
    value_s = solved.bound * model.unit_s * (1.0 - _MIP_SLACK)
    proven = "solved" if solved.is_optimal else "cut short"
    rows, _ = model.a.shape
    text = f"mixed-integer program of paths, work, transfers and memory: {model.shape[0]} groups"
    return [
        *bounds,
        Bound(value_s, f"{text}, {rows} rows, {proven} at {problem.unit.text(value_s)}"),
    ]


def _linear(model: PathModel, effort: Effort) -> list[Bound]:
    """The value of the linear program, from its dual solution: no tolerance enters."""
    solved = dual_weights(linear_arguments(model), effort.remaining_s())
    effort.is_over()
    if solved is None:
        return []
    value_s = dual_value_s(model, solved[0])
    text = "linear program of paths, work, transfers and memory"
    return [Bound(value_s, f"{text}: {model.shape[0]} groups in shares, {model.a.shape[0]} rows")]


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


def _modules(head_s: Float[np.ndarray, "V D"], spans: Spans) -> Bound:
    return Bound(
        float(head_s[-1].min()),
        f"critical path over modules: between a fork and its join, {len(spans.source)} times, it "
        "takes as long as the best placement of what lies between",
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
