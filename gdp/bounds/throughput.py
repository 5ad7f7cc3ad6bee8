"""Lower bounds of the period of a pipeline, cheapest first; loads bound a latency, too."""

import numpy as np
from jaxtyping import Float

from gdp.bounds.bound import Bound
from gdp.bounds.effort import Effort
from gdp.bounds.linear_program import dual_weights
from gdp.bounds.load_memory import NO_MARKS, more_marks, worst_marks
from gdp.bounds.load_program import (
    LoadModel,
    build,
    group_seconds,
    least_whole,
    linear_arguments,
    model_size,
)
from gdp.bounds.work import shared_work_s
from gdp.problem.problem import Problem, TimeUnit
from gdp.sim.objectives import memory_binds, objective_of
from gdp.sim.replicas import may_replicate

# HiGHS keeps rows to 1e-7 and whole numbers to 1e-6, in units of about one period.
_MIP_SLACK = 1e-5
_MIP_GAP = 1e-4  # what HiGHS leaves open
_PROVEN = 1e-9
_MARK_ROUNDS = 6


def load_bounds(
    problem: Problem, effort: Effort, found_s: float = np.inf, *, only_memory: bool = False
) -> list[Bound]:
    """What the busy times of devices and channels prove about any placement.

    Work and largest ops take O(N D); the linear program is built where the effort is likely to
    solve it, and then once more with whole placements (a mixed-integer program). Where stages may
    be replicated, each sample has a placement of its own, and loads are means over the samples:
    what is linear in placements holds of their mean as well, and what counts whole ops on one
    device is left out (the largest op, and the mixed-integer program). With
    `only_memory` nothing is done where memory cannot force ops apart. A placement that takes
    `found_s` ends it as soon as no better one is possible.
    """
    if only_memory and not memory_binds(problem):
        return []
    op_s = group_seconds(problem)
    work_s, share = shared_work_s(op_s)
    bounds = [_work(problem, work_s, share)]
    whole = not may_replicate(problem)
    if whole:
        bounds.append(_crowd(op_s, problem.unit))
    unit_s = max(bound.value_s for bound in bounds)
    if problem.num_devices == 1 or unit_s <= 0.0 or unit_s >= found_s * (1.0 - _PROVEN):
        return bounds
    if model_size(problem) > effort.entries or effort.is_over():
        return bounds
    model, solved = _with_marks(problem, unit_s, effort)
    if solved is not None:
        bounds.append(solved)
    known_s = max(bound.value_s for bound in bounds)
    nodes = effort.nodes(model.a.nnz) if whole else 0
    if nodes > 0 and known_s < found_s * (1.0 - _MIP_GAP) and not effort.is_over():
        solved = _whole(model, known_s, effort, nodes, problem.unit)
        if solved is not None:
            bounds.append(solved)
    return bounds


def _work(problem: Problem, work_s: float, share: Float[np.ndarray, "D"]) -> Bound:
    parts = ", ".join(
        f"{part:.0%} {name}"
        for part, name in zip(share, problem.cluster.device_names, strict=True)
        if part > 0.005
    )
    return Bound(
        work_s,
        f"work over total speed: with the devices weighed {parts}, each op where it is lightest",
    )


def _crowd(op_s: Float[np.ndarray, "G D"], unit: TimeUnit) -> Bound:
    """Of k D + 1 ops some device gets k + 1: at least the k + 1 smallest of the largest so many."""
    d = op_s.shape[1]
    least_s = np.sort(op_s.min(axis=1))[::-1]
    total_s = np.concatenate([[0.0], np.cumsum(least_s)])
    k = np.arange((len(least_s) - 1) // d + 1)
    value_s = total_s[k * d + 1] - total_s[k * d - k]
    best = int(value_s.argmax())
    if best == 0:
        text = f"the largest op, or ops that share a device, takes {unit.text(least_s[0])}"
    else:
        text = f"of the {best * d + 1} largest ops some device gets {best + 1}"
    return Bound(float(value_s[best]) * (1.0 - 1e-12), text)


def _with_marks(problem: Problem, unit_s: float, effort: Effort) -> tuple[LoadModel, Bound | None]:
    """The linear program with the rows of memory that its own solutions break, and its bound."""
    marks = NO_MARKS
    if memory_binds(problem) and objective_of(problem).memory == "pipeline":
        marks = worst_marks(problem, np.full((problem.num_groups, problem.num_devices), 1.0))
    model = build(problem, unit_s, marks)
    best, x = _linear(model, effort)
    for _ in range(min(_MARK_ROUNDS, effort.programs(model.a.nnz))):
        if x is None or not len(marks.op) or effort.is_over():
            break
        more = more_marks(marks, worst_marks(problem, x))
        if len(more.op) == len(marks.op):
            break
        marks = more
        model = build(problem, unit_s, marks)
        solved, x = _linear(model, effort)
        if solved is not None and (best is None or solved.value_s > best.value_s):
            best = solved
    return model, best


def _linear(
    model: LoadModel, effort: Effort
) -> tuple[Bound | None, Float[np.ndarray, "G D"] | None]:
    """(its value, from the dual solution alone, so that no tolerance enters; x)."""
    solved = dual_weights(linear_arguments(model), effort.remaining_s())
    effort.is_over()
    if solved is None:
        return None, None
    weight, values = solved
    if weight[: model.num_loads].sum() <= 0.0:
        return None, None
    value_s, share = dual_value_s(model, weight)
    parts = ", ".join(
        f"{part:.0%} {name}"
        for part, name in sorted(
            zip(share, model.load_names, strict=True), key=lambda entry: -entry[0]
        )[:4]
        if part > 0.005
    )
    x = None
    if values is not None:
        x = values[: model.shape[0] * model.shape[1]].reshape(model.shape)
    return Bound(value_s, f"linear program of loads and transfers, weighed {parts}"), x


def dual_value_s(
    model: LoadModel, weight: Float[np.ndarray, "R"]
) -> tuple[float, Float[np.ndarray, "L"]]:
    """(a lower bound of the period in seconds, shares of the loads) from any weights >= 0 of rows.

    sum over groups of min over d of r(g, d) + sum over others of min(0, r) - weight b, where
    r = weight A and the weights of the loads add up to 1: whatever the weights, no placement is
    below, so an inexact solver costs tightness, never truth.
    """
    scaled = weight / weight[: model.num_loads].sum()
    reduced = np.where(model.possible, model.a.T @ scaled, np.inf)
    num_x = model.shape[0] * model.shape[1]
    by_group = reduced[:num_x].reshape(model.shape).min(axis=1)
    others = np.minimum(reduced[num_x:], 0.0)
    value = by_group.sum() + others.sum() - float(scaled @ model.b)
    return float(value) * model.unit_s, scaled[: model.num_loads]


def _whole(
    model: LoadModel, known_s: float, effort: Effort, nodes: int, unit: TimeUnit
) -> Bound | None:
    """The bound of the program with whole placements after so many nodes."""
    low = known_s / model.unit_s * (1.0 - 1e-6)
    solved = least_whole(model, (low, np.inf), effort.remaining_s(), _MIP_GAP, nodes)
    effort.is_over()
    if solved.is_infeasible or not np.isfinite(solved.bound):
        return None
    value_s = solved.bound * model.unit_s * (1.0 - _MIP_SLACK)
    proven = "solved" if solved.is_optimal else "cut short"
    return Bound(
        value_s,
        f"mixed-integer program of the loads of {len(model.load_names)} devices and links by "
        f"{model.shape[0]} groups of ops and {model.a.shape[0]} rows of transfers and limits, "
        f"{proven} at {unit.text(value_s)}",
    )
