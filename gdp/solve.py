"""The library calls place, compare and simulate; the command line prints their results."""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from gdp.candidates import Planner, best_executed, expanded, planned_method
from gdp.clock import COMPILE, Clock, Phases, waiting_for
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.types import Cluster, nearly_full, overflow_bytes, shared_overflow
from gdp.constraints import Constraints
from gdp.costs.adapt import AdaptedCosts
from gdp.costs.base import CostModel
from gdp.costs.offload import moved_caches
from gdp.errors import ArgumentError, InfeasibleError, MissingExtraError, of_kind
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.models import Model, load
from gdp.placement import Placed, Placement
from gdp.prepare import (
    PreparedProblem,
    placed_on,
    prepare_placement,
    prepare_problem,
    requests_in_flight,
    room_bytes,
)
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks
from gdp.reports.view import PlacementView
from gdp.result import Counts, Result, with_best_bound
from gdp.sim.objectives import Score, find_objective

LOG = logging.getLogger(__name__)
# Share of the time budget kept for the proven lower bound.
BOUND_SHARE = 0.1
COUNTED_BOUND_S = 2.0
"""Work of the bound where evaluations are given, in seconds of an idle core."""
SIMPLIFY_SHARE = 0.05
"""Of the seconds, kept for fewer transfers and pieces."""
DEVIATION_SHARE = 0.05
"""Of the seconds, kept for draws of learned costs."""
POLICY_OPS = 5000
"""Ops from which `auto` asks the shipped policy: on smaller graphs search alone is as good."""
MAX_WAYS = 12


def methods(
    checkpoint: str | Path | None = None, planned: Sequence[tuple[str, Method]] = ()
) -> dict[str, Method]:
    """Every placement method by its command-line name.

    The policy of a checkpoint is `policy` and a candidate of `auto`; the shipped one only of graphs
    of `POLICY_OPS` ops and more. `planned` are further candidates of `auto`, which come first.
    """
    from gdp.methods.portfolio import auto
    from gdp.methods.table import METHODS

    trained = _trained(checkpoint)

    def with_policy(problem: Problem, search: Search) -> Answer:
        extra: list[tuple[str, Method]] = []
        if trained and (checkpoint is not None or problem.num_ops >= POLICY_OPS):
            from gdp.policy.method import policy_candidate

            extra = [("policy", policy_candidate(checkpoint))]
        return auto(problem, search, extra=extra, planned=planned)

    return METHODS | trained | {"hsdag": _hsdag, "auto": with_policy}


def _trained(checkpoint: str | Path | None) -> dict[str, Method]:
    """The methods of the trained policy, none where no checkpoint ships."""
    try:
        from gdp.policy.method import policy_methods
    except ModuleNotFoundError:
        return {}
    return policy_methods(checkpoint)


def _hsdag(problem: Problem, search: Search) -> Answer:
    """Training from scratch on the problem; JAX is imported where it is called."""
    from gdp.learn.hsdag.train import hsdag

    return hsdag(problem, search)


def place(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    method: str = "auto",
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    planners: Mapping[str, Planner] = MappingProxyType({}),
) -> Result:
    """Place the ops of a model, freely; arguments and errors as `gdp.place` documents them. `auto`
    knows the placements of `planners`, too."""
    from gdp.methods.simplify import simpler

    search, phases = of_kind(search, Search, "search"), Phases()
    cluster = load_cluster(cluster)
    graph = load(model, room_bytes=room_bytes(cluster, constraints))
    _require_method(method, methods(checkpoint))
    find_objective(objective)
    phases.ended("read")
    start_up(objective)
    clock, started_s = search.budget(), time.perf_counter()
    prepared = prepare_problem(
        graph, cluster, objective, costs=costs, constraints=constraints, replicas=True
    )
    phases.ended("costs")
    learned = prepared.model.adaptation if isinstance(prepared.model, AdaptedCosts) else None
    deviation_share = 0.0 if learned is None else DEVIATION_SHARE
    kept = BOUND_SHARE + deviation_share
    if not clock.is_counted:
        limit = clock.part(1 - kept - SIMPLIFY_SHARE)
        search = replace(search, seconds=limit.seconds, clock=limit)
    curve: list[tuple[float, float]] = []
    problem = in_ticks(prepared.problem)
    planned = [(k, planned_method(graph, prepared, planner)) for k, planner in planners.items()]
    table = methods(checkpoint, planned)
    answer = table[method](problem, _recorded(search, curve, started_s, problem.unit.seconds))
    phases.ended("search")
    part, found = clock.part(SIMPLIFY_SHARE / (SIMPLIFY_SHARE + kept)), answer.assignment
    answer = simpler(problem, answer, search, part, learned).in_seconds(problem.unit.seconds)
    executed = partial(_executed, graph, cluster, prepared, costs)
    if prepared.is_relaxed:
        answer = best_executed(answer, found, executed)
    phases.ended("simplify")
    placed, assignment = _fitting(executed, answer, method, search, phases.seconds)
    part = clock.part(deviation_share / kept)
    deviation_s = _deviation_s(prepared, assignment, placed.value_s, part)
    phases.ended("deviation")
    bound = _bound(prepared, answer, clock, placed.value_s)
    phases.ended("bound")
    result = _result(graph, prepared, answer, assignment, placed, bound, method, search.seed)
    phases.ended("counts")
    return replace(
        result, curve=tuple(curve), deviation_s=deviation_s,
        seconds=sum(phases.seconds.values()), phases=phases.seconds,
    )  # fmt: skip


@functools.cache
def start_up(objective: str) -> None:
    """Import and compile once per process all that runs beside methods, so that no budget pays."""
    from gdp.bounds.best import best_bound
    from gdp.methods.scoring import tiny_problem
    from gdp.methods.simplify import simpler

    with waiting_for(COMPILE):
        tiny = tiny_problem(objective if find_objective(objective).on_links else "latency")
        problem = in_ticks(prepare_problem(tiny.graph, tiny.cluster, tiny.objective).problem)
        alone = Assignment(np.zeros(problem.num_ops, dtype=np.int64))
        simpler(problem, Answer(alone), Search(evaluations=1))
        best_bound(problem, COUNTED_BOUND_S)


def _executed(
    graph: OpGraph, cluster: Cluster, prepared: PreparedProblem,
    costs: CostModel | str | Path | None, assignment: Assignment,
) -> Score:  # fmt: skip
    """The score of an assignment; of a relaxed problem with the kernels that devices fuse."""
    from gdp.sim.score import score

    problem = prepared.problem
    if not prepared.is_relaxed:
        return score(problem, assignment.device, assignment.rank, assignment.teams)
    placement = expanded(graph, prepared, assignment, "gdp")
    fused, device, rank = prepare_placement(
        graph, placement, cluster, problem.objective, costs=costs
    )
    return score(fused.problem, device, rank, assignment.teams)


DRAWS, LEAST_DRAWS = 8, 4
"""Of learned costs, for the deviation of a value: so many, or fewer where the clock is over."""


def _deviation_s(
    prepared: PreparedProblem, assignment: Assignment, value_s: float, clock: Clock
) -> float | None:
    """Standard deviation of a value over draws of the costs that were learned of the machine; None
    where nothing was."""
    from gdp.sim.score import score

    costs = prepared.model
    if not isinstance(costs, AdaptedCosts):
        return None
    drawn: list[float] = []
    for problem in prepared.drawn(range(DRAWS)):
        scored = score(problem, assignment.device, assignment.rank, assignment.teams)
        drawn.append(scored.value_s)
        if clock.is_over() and len(drawn) >= LEAST_DRAWS:
            break
    # What no effect explains is another for each device, roughly.
    own = costs.adaptation.noise / len(np.unique(assignment.device)) ** 0.5
    return float(np.hypot(np.std(drawn), own * value_s))


def _require_method(method: str, table: Mapping[str, Method]) -> None:
    if not isinstance(method, str) or method not in table:
        raise ArgumentError(f"no method {method!r}; there are {', '.join(table)}")


def require_answerable(
    graph: OpGraph,
    cluster: Cluster,
    *,
    method: str = "auto",
    costs: CostModel | str | Path | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
) -> None:
    """Raise the errors of `place` on its arguments before anything is compiled or searched."""
    from gdp.constraints import allowed_mask, together_ids

    _require_method(method, methods(checkpoint))
    constraints = of_kind(constraints, Constraints, "constraints")
    allowed_mask(constraints, graph, cluster)
    together_ids(constraints, graph)
    if costs is not None:
        from gdp.costs.default import resolve_costs

        resolve_costs(costs, cluster, graph)
    if checkpoint is not None:
        from gdp.policy.method import load as load_policy

        load_policy(checkpoint)


def _recorded(
    search: Search, curve: list[tuple[float, float]], started_s: float, unit_s: float
) -> Search:
    """A search that also appends (seconds, value) to `curve` at each improvement; its methods
    report values in units of `unit_s` seconds."""

    def record(fraction: float, value: float) -> None:
        value_s = value * unit_s
        if not curve or value_s < curve[-1][1]:
            curve.append((time.perf_counter() - started_s, value_s))
        if search.progress is not None:
            search.progress(fraction, value_s)

    return replace(search, progress=record)


def _fitting(
    executed: Callable[[Assignment], Score], answer: Answer, method: str, search: Search,
    spent_s: Mapping[str, float],
) -> tuple[Score, Assignment]:  # fmt: skip
    """The score of an answer and its assignment; `InfeasibleError` where it does not fit, which
    says whether none does or none was found."""
    if answer.assignment is None and answer.proven_misfit:
        raise InfeasibleError(answer.reason)
    if answer.assignment is None:
        budget = f"{sum(spent_s.values()):.3g} s"
        if search.evaluations is not None:
            budget = f"{search.evaluations} evaluations"
        raise InfeasibleError(
            f"method {method!r} found no placement in {budget}: {answer.reason}; this is no proof "
            "that none fits: more seconds, another seed or another method may find one"
        )
    assignment = answer.assignment
    placed = executed(assignment)
    if not placed.feasible:
        raise InfeasibleError(f"method {method!r} found no placement that fits: {placed}")
    return placed, assignment


def _result(
    graph: OpGraph, prepared: PreparedProblem, answer: Answer, assignment: Assignment,
    placed: Score, bound: tuple[float, str], method: str, seed: int,
) -> Result:  # fmt: skip
    """The result of an answer that fits, without its seconds."""
    problem = prepared.problem
    placement = expanded(graph, prepared, assignment, f"gdp {method} seed={seed}")
    (bound_s, bound_by), value_s = bound, placed.value_s
    return Result(
        placement=replace(placement, simplicity_cost=answer.simplicity_cost),
        score=placed,
        objective=problem.objective,
        method=method,
        # Bound and value are sums in different orders; rounding must not put one past the other.
        bound_s=min(bound_s, value_s),
        bound_by=bound_by,
        proven_optimal=(answer.proven_optimal and not prepared.is_relaxed)
        or bound_s >= value_s * (1 - 1e-9),
        candidates=answer.candidates,
        evaluations=answer.evaluations,
        seconds=0.0,
        seed=seed,
        costs=prepared.costs,
        notes=(*answer.messages, *_nearly_full(problem.cluster, placed)),
        counts=counts_of(graph, placement),
    )


def _nearly_full(cluster: Cluster, scored: Score) -> list[str]:
    note = nearly_full(cluster, scored.peak_bytes.tolist()) if scored.feasible else ""
    return [note] if note else []


def counts_of(graph: OpGraph, placement: Placement) -> Counts:
    """Ops and kernels of each device, as runtimes fuse what is on one device."""
    from gdp.graph.fuse import fuse

    serving = {team[0]: team for team in placement.teams}

    def per_device(devices: Int[np.ndarray, "K"]) -> tuple[int, ...]:
        """Ops of a team count on each of its devices."""
        led = np.bincount(devices, minlength=len(placement.device_names))
        counts = led.copy()
        for lead, team in serving.items():
            counts[list(team)] = led[lead]
        return tuple(counts.tolist())

    fused = fuse(graph, apart=placement.device)
    on = np.zeros(fused.graph.num_ops, dtype=np.int64)
    on[fused.group_of] = placement.device
    return Counts(per_device(placement.device[~graph.is_io]), per_device(on[~fused.graph.is_io]))


def _bound(
    prepared: PreparedProblem, answer: Answer, clock: Clock, found_s: float
) -> tuple[float, str]:
    """The better of the method's own bound and those of `gdp.bounds.best`."""
    from gdp.bounds.best import best_bound

    seconds, cap_s = COUNTED_BOUND_S, math.inf
    if clock.seconds is not None:
        seconds, cap_s = clock.seconds * BOUND_SHARE, max(0.0, clock.remaining_s())
    problem = in_ticks(prepared.problem)
    bound = best_bound(problem, seconds, found_s=found_s / problem.unit.seconds, cap_s=cap_s)
    bound_s, bound_by = bound.value_s * problem.unit.seconds, bound.argument
    if bound_s <= answer.bound_s:
        bound_s, bound_by = answer.bound_s, answer.bound_by
    return max(0.0, bound_s - prepared.slack_s), bound_by


def bound_of(prepared: PreparedProblem, clock: Clock, value_s: float) -> tuple[float, str]:
    """A lower bound of a problem's value in seconds and its argument, within the rest of a clock;
    `value_s` is that of a known placement."""
    return _bound(prepared, Answer(None), clock, value_s)


def compare(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    names: Sequence[str] | None = None,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result | str]:
    """Place a model by several methods, each with the same budget.

    Args:
        model: As in `place`.
        cluster: As in `place`.
        objective: As in `place`.
        names: Methods to compare. Default: all.
        costs: As in `place`.
        search: Budget and seed of each method. Its simplicity is ignored: values are compared, and
            none is traded for fewer transfers.
        checkpoint: As in `place`.
        constraints: As in `place`.
        progress: Called with the name of each method before it runs.

    Returns:
        By method, its `Result`, or the reason (a string) why it has none. All results carry the
        best of the bounds, since a bound holds for every placement.

    Raises:
        ModelError, ClusterError, ValueError: As `place` does.
    """
    cluster = load_cluster(cluster)
    graph = load(model, room_bytes=room_bytes(cluster, constraints))
    table = methods(checkpoint)
    search = replace(of_kind(search, Search, "search"), simplicity=0.0)
    rows: dict[str, Result | str] = {}
    for name in names or ():
        _require_method(name, table)
    for name in names or table:
        if progress is not None:
            progress(name)
        try:
            rows[name] = place(
                graph,
                cluster,
                objective=objective,
                method=name,
                costs=costs,
                search=search,
                checkpoint=checkpoint,
                constraints=constraints,
            )
        except (InfeasibleError, MissingExtraError) as error:
            rows[name] = str(error)
    return with_best_bound(rows)


def simulate(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
) -> Score:
    """Simulate a placement.

    Args:
        model: As in `place`; None for the one that the placement was made for.
        placement: A `Placement`, its file, or a map from op names or module paths to devices, such
            as a `device_map` of accelerate.
        cluster: As in `place`; None for the one that the placement was made for.
        objective: The objective whose value `Score.value_s` gives.
        costs: As in `place`; None for those that the placement was made with.

    Returns:
        Makespan and period in seconds, peak bytes of each device, and whether it is feasible.

    Raises:
        PlacementError: The placement is of another model or cluster.
    """
    from gdp.sim.score import score

    graph, placement, cluster, costs = placed_on(model, placement, cluster, costs)
    prepared, device, rank = prepare_placement(graph, placement, cluster, objective, costs=costs)
    scored = score(prepared.problem, device, rank, placement.teams)
    return _caches_at_home(scored, graph, placement, cluster, objective)


def _caches_at_home(
    scored: Score, graph: OpGraph, placement: Placement, cluster: Cluster, objective: str
) -> Score:
    """The score with caches of offloaded modules on the device that computes them."""
    moved = moved_caches(graph, placement.device, cluster)
    if not moved.any():
        return scored
    peak_bytes = scored.peak_bytes + requests_in_flight(graph, cluster, objective) * moved
    over = overflow_bytes(cluster, peak_bytes)
    return replace(scored, peak_bytes=peak_bytes, overflow_bytes=over)


def evaluated(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
) -> Result:
    """Score and proven bound of a placement that was made elsewhere, as `place` returns them."""
    from gdp.sim.score import score

    graph, placement, cluster, costs = placed_on(model, placement, cluster, costs)
    started_s = time.perf_counter()
    prepared, device, rank = prepare_placement(graph, placement, cluster, objective, costs=costs)
    scored = score(prepared.problem, device, rank, placement.teams)
    scored = _caches_at_home(scored, graph, placement, cluster, objective)
    free = prepare_problem(graph, cluster, objective, costs=costs, replicas=True)
    value_s = scored.value_s
    bound_s, bound_by = _bound(free, Answer(None), Search().budget(), value_s)
    return Result(
        placement=placement,
        score=scored,
        objective=objective,
        method=placement.made_by or "given",
        bound_s=min(bound_s, value_s),
        bound_by=bound_by,
        proven_optimal=bound_s >= value_s * (1 - 1e-9),
        candidates=(),
        evaluations=1,
        seconds=time.perf_counter() - started_s,
        seed=0,
        costs=prepared.costs,
        notes=(
            *filter(None, [shared_overflow(cluster, scored.peak_bytes)]),
            *_nearly_full(cluster, scored),
        )[:1],
        counts=counts_of(graph, placement),
    )


def view_of(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    costs: CostModel | str | Path | None = None,
) -> PlacementView:
    """Simulated schedule of a placed model for display. With replicated stages, one schedule for
    each sample until the assignment of samples to replicas repeats, at most `MAX_WAYS`."""
    from gdp.sim.latency import simulate as simulate_latency
    from gdp.sim.score import cycle_length, devices_of_sample

    graph, placement, cluster, costs = placed_on(model, placement, cluster, costs)
    prepared, device, rank = prepare_placement(graph, placement, cluster, costs=costs)
    views: list[PlacementView] = []
    for sample in range(min(cycle_length(placement.teams), MAX_WAYS)):
        way = devices_of_sample(prepared.problem, device, placement.teams, sample)
        schedule = simulate_latency(prepared.problem, way, rank)
        since_s = views[-1].since_s + views[-1].schedule.latency_s if views else 0.0
        views.append(
            PlacementView(
                graph,
                prepared.problem,
                schedule,
                way,
                prepared.group_of,
                placement.teams,
                (),
                since_s,
            )
        )
    return replace(views[0], others=tuple(views[1:]))
