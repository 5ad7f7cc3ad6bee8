"""Lower bounds of the latency of one run, cheapest first."""

import numpy as np
from jaxtyping import Float

from gdp.bounds.bound import Bound
from gdp.bounds.effort import Effort
from gdp.bounds.memory import memory_bound
from gdp.bounds.paths import Arcs, Spans, arcs_of, heads_and_tails, no_spans
from gdp.bounds.spans import MAX_DEVICES, MAX_OPS, find_spans
from gdp.bounds.work import window_s
from gdp.problem.problem import Problem
from gdp.units import format_seconds


def latency_bounds(problem: Problem, effort: Effort) -> list[Bound]:
    """What each argument proves about the latency of any placement, in any order of its ops.

    The critical path takes O(E D^2); spans take the branches of the effort.
    """
    arcs = arcs_of(problem)
    head_s, tail_s = heads_and_tails(arcs, no_spans(problem.num_devices))
    bounds = [_path(problem, arcs, head_s), _window(arcs, head_s, tail_s, "")]
    spans = no_spans(problem.num_devices)
    if problem.num_ops <= MAX_OPS and 1 < problem.num_devices <= MAX_DEVICES:
        spans = find_spans(problem, arcs, head_s, effort)
        if len(spans.source):
            head_s, tail_s = heads_and_tails(arcs, spans)
            bounds += [_modules(head_s, spans), _window(arcs, head_s, tail_s, " over modules")]
    split = memory_bound(problem, arcs, spans, head_s, effort)
    return bounds if split is None else [*bounds, split]


def _path(problem: Problem, arcs: Arcs, head_s: Float[np.ndarray, "V D"]) -> Bound:
    value_s = float(head_s[-1].min())
    free_s = 0.0
    if problem.num_ops <= MAX_OPS:
        alone = arcs._replace(
            latency_s=np.zeros_like(arcs.latency_s), s_per_byte=np.zeros_like(arcs.s_per_byte)
        )
        free_s = float(heads_and_tails(alone, no_spans(problem.num_devices))[0][-1].min())
    return Bound(
        value_s,
        f"critical path: {format_seconds(free_s)} of ops on their fastest devices and "
        f"{format_seconds(max(0.0, value_s - free_s))} for transfers or slower devices, the less "
        "of both",
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
        f"work in a window{how}: {len(inside)} ops that cannot start before {format_seconds(r)} "
        f"and are followed by {format_seconds(q)} take at least "
        f"{format_seconds(max(0.0, value_s - r - q))} on all devices together",
    )
