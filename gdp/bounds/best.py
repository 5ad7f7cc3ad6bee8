"""Proven lower bounds for any placement, by objective.

Busy times of devices and channels bound a period, and a latency as well; `gdp.bounds.latency` has
the other bounds of a latency.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from gdp.base.rows import imported
from gdp.base.units import format_bytes
from gdp.bounds.budget import QUICK_OPS, Bound, WorkBudget
from gdp.bounds.latency import latency_bounds
from gdp.bounds.linear_program import (
    LinearProgram,
    dual_value_s,
    dual_weights,
    load_weights,
    whole_bound,
)
from gdp.bounds.loads import (
    NO_POINTS,
    build_loads,
    build_work,
    least_launches,
    load_program_size,
    machine_seconds,
    more_points,
    worst_points,
)
from gdp.bounds.path_program import path_program_size, rows_bind
from gdp.bounds.work import shared_work_s
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, TimeUnit
from gdp.problem.ticks import rounding_share
from gdp.sim.objectives import memory_binds, objective_of
from gdp.sim.score import may_replicate

__all__ = ["Bound", "all_bounds", "best_bound"]

DEFAULT_SECONDS = 10.0
CUT_SHORT = "; the clock ended further proofs, so another run may prove more"
_SLACK = 1e-10  # relative; sums here round in other orders, and some without ticks
_MIP_GAP = 1e-4  # relative; left open by HiGHS
_PROVEN = 1e-9
_MEMORY_ROUNDS = 6
_KEPT_SHARE = 0.5  # of the budget's entries, for a program of which only a part fits


def best_bound(
    problem: Problem,
    seconds: float | None = None,
    *,
    found_s: float = np.inf,
    cap_s: float | None = None,
) -> Bound:
    """The largest of the bounds that apply.

    Work is counted, so that the same arguments give the same bound; where the clock ends it, the
    bound's argument says so.

    Args:
        problem: Of any objective.
        seconds: Work of the costlier proofs, as much as an idle core does in these seconds.
        found_s: Value of a known placement; arguments that cannot prove more about it are left out.
        cap_s: Seconds after which the clock ends the proofs, `PATIENCE` times `seconds` by default.
    """
    return max(all_bounds(problem, seconds, found_s, cap_s), key=lambda bound: bound.value_s)


def all_bounds(
    problem: Problem,
    seconds: float | None = None,
    found_s: float = np.inf,
    cap_s: float | None = None,
) -> list[Bound]:
    """Every bound that applies, each with the argument that proves it; see `best_bound`."""
    budget = WorkBudget(DEFAULT_SECONDS if seconds is None else seconds, cap_s)
    proofs = objective_of(problem).bounds
    if not proofs:
        return [Bound(0.0, f"nothing: no bound is known for objective {problem.objective!r}")]
    bounds: list[Bound] = imported(proofs)(problem, budget, found_s)
    ended = CUT_SHORT if budget.cut_short else ""
    kept = 1.0 - max(_SLACK, rounding_share(problem))
    return [Bound(bound.value_s * kept, bound.argument + ended) for bound in bounds]


def bounds_of_latency(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    """Bounds of a latency, and those of the loads where memory binds."""
    # First, as it is quick and where weights stream the only one that is not far off.
    op_s, machines = machine_seconds(problem)
    work_s, share = shared_work_s(op_s)
    if problem.num_ops > QUICK_OPS and budget.is_over():
        quick = [_work(machines, work_s, share), *_launching(problem)]
        return [*quick, *latency_bounds(problem, budget, found_s)]
    bounds = [*_launching(problem), *_work_in_memory(problem, budget, work_s)]
    bounds += latency_bounds(problem, budget, found_s)
    if problem.num_ops > QUICK_OPS and budget.is_over():
        return [*bounds, _work(machines, work_s, share)]
    with_paths = rows_bind(problem) and path_program_size(problem) <= budget.entries
    if with_paths and not budget.paths_unsolved:
        return bounds  # the program of paths has the rows of the loads
    return [*bounds, *load_bounds(problem, budget, found_s, only_memory=True)]


def load_bounds(
    problem: Problem, budget: WorkBudget, found_s: float = np.inf, *, only_memory: bool = False
) -> list[Bound]:
    """Bounds from the busy times of devices and channels.

    Work and largest ops take O(N D); the linear program is built as far as the budget is likely to
    solve it, and then once more with whole placements (a mixed-integer program).
    Where stages may be replicated, each sample has its own placement, and loads are means over
    the samples: linear arguments hold of their mean as well, and those that count whole ops on one
    device are left out (the largest op, and the mixed-integer program).

    Args:
        problem: Any of the event simulator's.
        budget: Shared by all proofs.
        found_s: Value of a known placement, at which nothing more is worth a proof.
        only_memory: Return nothing where memory cannot force ops apart.
    """
    if only_memory and not memory_binds(problem):
        return []
    op_s, machines = machine_seconds(problem)
    work_s, share = shared_work_s(op_s)
    bounds = [_work(machines, work_s, share), *([] if only_memory else _launching(problem))]
    whole = not may_replicate(problem)
    if whole:
        bounds.append(_crowd(op_s, problem.unit))
    unit_s = max(bound.value_s for bound in bounds)
    if problem.num_devices == 1 or unit_s <= 0.0 or unit_s >= found_s * (1.0 - _PROVEN):
        return bounds
    # For tensors, beside work and weights; of a part of them room is left for two more rounds.
    most_entries = _KEPT_SHARE * budget.entries - 2 * problem.num_groups * problem.num_devices
    if load_program_size(problem) <= budget.entries:
        most_entries = np.inf
    if most_entries < 0 or budget.is_over():
        more = [] if only_memory else _work_in_memory(problem, budget, unit_s)
        return [*bounds, *more]
    program, solved = _with_memory(problem, unit_s, budget, most_entries)
    bounds += [] if solved is None else [solved]
    known_s = max(bound.value_s for bound in bounds)
    nodes = budget.nodes(program.size) if whole else 0
    if nodes > 0 and known_s < found_s * (1.0 - _MIP_GAP) and not budget.is_over():
        text = (
            f"mixed-integer program of the loads of {len(program.load_names)} devices and links "
            f"by {program.shape[0]} groups of ops and {program.a.shape[0]} rows of transfers and "
            "limits"
        )
        solved = whole_bound(program, known_s, budget, nodes, _MIP_GAP, text, problem)
        bounds += [] if solved is None else [solved]
    return bounds


def _work(machines: Sequence[str], work_s: float, share: Float[np.ndarray, "M"]) -> Bound:
    parts = ", ".join(
        f"{part:.0%} {name}" for part, name in zip(share, machines, strict=True) if part > 0.005
    )
    return Bound(
        work_s,
        f"work over total speed: with the devices weighed {parts}, each op where it is lightest",
    )


def _launching(problem: Problem) -> list[Bound]:
    """The launches of all ops over the threads of the host that launch; none where ops may go to
    devices that launch their own."""
    least_s, threads = least_launches(problem)
    if least_s <= 0:
        return []
    text = "one thread of the host launches" if threads == 1 else f"{threads} threads launch"
    return [Bound(least_s / threads, f"{text} all ops, each where that is quickest")]


def _work_in_memory(problem: Problem, budget: WorkBudget, known_s: float) -> list[Bound]:
    """Bound of `build_work`; none where memory cannot bind."""
    d = problem.num_devices
    if d == 1 or known_s <= 0.0 or not memory_binds(problem):
        return []
    program = build_work(problem, known_s)
    if program.size > budget.entries or budget.is_over():
        return []
    solved, _ = _linear(program, budget, "linear program of work and of weights within memory")
    if solved is None:
        return []
    text, streams = solved.argument, problem.cluster.streams
    room = problem.cluster.room_bytes(~streams & problem.group_allowed.any(axis=0))
    streamed = int(arrays_of(problem).weight_bytes.sum()) - room
    if streamed > 0 and streams.any():
        text += f"; {format_bytes(streamed)} of weights or more stream"
    return [Bound(solved.value_s, text)]


def _crowd(op_s: Float[np.ndarray, "G M"], unit: TimeUnit) -> Bound:
    """Pigeonhole bound: of the k M + 1 largest ops some machine gets the k + 1 smallest or more."""
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


def _with_memory(
    problem: Problem, unit_s: float, budget: WorkBudget, most_entries: float
) -> tuple[LinearProgram, Bound | None]:
    """The linear program with the rows of memory that its own solutions break, and its bound."""
    points = NO_POINTS
    if memory_binds(problem) and objective_of(problem).memory == "pipeline":
        points = worst_points(problem, np.full((problem.num_groups, problem.num_devices), 1.0))
    program = build_loads(problem, unit_s, points, most_entries)
    best, x = _linear(program, budget)
    for _ in range(min(_MEMORY_ROUNDS, budget.programs(program.size))):
        if x is None or not len(points.op) or budget.is_over():
            break
        more = more_points(points, worst_points(problem, x))
        if len(more.op) == len(points.op):
            break
        points = more
        program = build_loads(problem, unit_s, points, most_entries)
        solved, x = _linear(program, budget)
        if solved is not None and (best is None or solved.value_s > best.value_s):
            best = solved
    return program, best


def _linear(
    program: LinearProgram,
    budget: WorkBudget,
    text: str = "linear program of loads and transfers",
) -> tuple[Bound | None, Float[np.ndarray, "G D"] | None]:
    """(its value, from the dual solution alone, so that no tolerance enters; x)."""
    solved = dual_weights(program, budget.remaining_s())
    budget.is_over()
    if solved is None:
        return None, None
    weight, x = solved
    names = program.load_names
    if weight[: len(names)].sum() <= 0.0:
        return None, None
    weight = load_weights(program, weight)
    by_share = sorted(zip(weight[: len(names)], names, strict=True), key=lambda entry: -entry[0])
    parts = ", ".join(f"{part:.0%} {name}" for part, name in by_share[:4] if part > 0.005)
    value_s = dual_value_s(program, weight)
    return Bound(value_s, f"{text}, weighed {parts}"), x
