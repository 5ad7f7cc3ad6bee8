"""Solving a question: the problem, a method, fewer cuts, the score, a proven bound.

`solve` is the page to read first. `simulate` and `evaluate` judge placements that were made
elsewhere.
"""

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

from gdp.base.clock import COMPILE, Clock, Phases, waited_cpu_s, waiting_for
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.base.rows import later
from gdp.cluster.types import Cluster, nearly_full, shared_overflow
from gdp.costs.adapt import AdaptedCosts
from gdp.graph.fuse import fuse
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.shares import BOUND_SHARE, DEVIATION_SHARE, SIMPLIFY_SHARE
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Placement, require
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks
from gdp.question.candidates import Plans, best_executed, expanded, planned_method
from gdp.question.prepare import costs_of, drawn_problems, prepare_placement, problem_of
from gdp.question.question import SIMPLICITY, Question
from gdp.question.result import (
    DIVIDED_OPS,
    WHOLE_OPS,
    Result,
    counts_of,
    with_bound,
)
from gdp.reports.view import PlacementView
from gdp.sim.objectives import Score, find_objective

LOG = logging.getLogger(__name__)
UNPROVEN = 0.0, ""
"""The bound of a placement that is only a candidate: a proof takes longer than its evaluation."""
CHECK_OP_S, RESULT_OP_S = 8e-6, 2e-6
"""Seconds of an idle core in which an op of an answer is at least simplified and bounded, and in
which it is counted and named, roughly; kept of the requested seconds, as graphs may be huge."""
LEAST_OP_S = 15e-6
"""Seconds of an idle core for each op of the quickest answer, from costs to counts: 3 s for 200,000
(`benchmarks.budgets kept --seconds 3`)."""
SHORT_S = 1.0
"""Seconds that every call may take, however few are requested."""
COUNTED_BOUND_S = 2.0
"""Work of the bound where evaluations are given, in seconds of an idle core."""
GREEDY_S, GREEDY_OP_S, GREEDY_SHARE = 0.1, 2.2e-4, 0.1
"""Seconds of an idle core that the shipped policy's greedy decode takes, for each op besides, and
the most that it may take of the requested seconds, as a candidate of `auto`: without it search is
up to 6% behind on tiled products, and as good elsewhere (docs/decisions.md)."""
MAX_WAYS = 12
HSDAG = "gdp.learn.hsdag.train:hsdag"
"""Training from scratch on the problem; JAX is imported where it is called."""


def solve(question: Question, planners: Mapping[str, Plans] = MappingProxyType({})) -> Result:
    """Answer a question freely: any device for any op that its constraints allow.

    Args:
        question: Of a graph; its target, granularity and offload are heeded by who asks
            (`gdp.api.answer`).
        planners: Makers of placements that `auto` knows, too, by name.

    Raises:
        InfeasibleError: Nothing fits, or none that fits was found.
    """
    from gdp.methods.simplify import simpler

    search, phases = question.search, Phases()
    table = methods_of(question, planners)
    require_time(question)
    start_up(question.objective)
    with waiting_for(COMPILE):  # costs that ship are read once per process
        costs_of(question)
    clock, started_s = search.budget(), time.perf_counter()
    began_s = time.process_time() - waited_cpu_s(COMPILE)
    problem = problem_of(question, replicas=True)
    costs_cpu_s = time.process_time() - waited_cpu_s(COMPILE) - began_s
    phases.ended("costs")
    op_s = _load(clock.elapsed_s(), costs_cpu_s) * problem.num_ops
    is_learned = isinstance(problem.origin.model, AdaptedCosts)
    deviation_share = DEVIATION_SHARE if is_learned else 0.0
    kept = BOUND_SHARE + deviation_share
    if not clock.is_counted:
        limit = _before_result(clock, RESULT_OP_S * op_s).part(1 - kept - SIMPLIFY_SHARE)
        if limit.seconds is not None:
            after_s = (CHECK_OP_S + RESULT_OP_S) * op_s
            limit = limit.at_most(max(0.0, clock.remaining_s() - after_s))
        search = replace(search, seconds=limit.seconds, clock=limit)
    curve: list[tuple[float, float]] = []
    ticks = in_ticks(problem)
    began_s = time.process_time() - waited_cpu_s(COMPILE)
    value_unit = find_objective(question.objective).scale(ticks.unit.seconds)
    answer = table[question.method](ticks, _recorded(search, curve, started_s, value_unit))
    search_cpu_s = time.process_time() - waited_cpu_s(COMPILE) - began_s
    phases.ended("search")
    result_s = RESULT_OP_S * op_s
    part = _before_result(clock, result_s).part(SIMPLIFY_SHARE / (SIMPLIFY_SHARE + kept))
    found = answer.assignment
    answer = simpler(ticks, answer, question.simplicity, search.evaluations, part)
    answer = answer.in_seconds(ticks.unit.seconds, value_unit)
    executed = partial(_executed, question, problem)
    if problem.origin.is_relaxed:
        answer = best_executed(answer, found, executed)
    phases.ended("simplify")
    placed, assignment = _fitting(executed, answer, question, phases.seconds)
    deviation_s = _deviation_s(
        question, problem, assignment, placed.value_s, clock.part(deviation_share / kept)
    )
    phases.ended("deviation")
    bound = _bound(problem, answer, clock, placed.value_s, result_s)
    phases.ended("bound")
    result = _result(question, problem, answer, assignment, placed, bound)
    phases.ended("counts")
    return replace(
        result, curve=tuple(curve), search_cpu_s=search_cpu_s, deviation_s=deviation_s,
        seconds=sum(phases.seconds.values()), phases=phases.seconds,
    )  # fmt: skip


def require_time(question: Question) -> None:
    """Raise `ArgumentError` where the requested seconds are fewer than the quickest answer takes on
    an idle core."""
    search, num_ops = question.search, question.graph.num_ops
    if search.evaluations is not None or search.clock is not None or search.seconds is None:
        return
    least_s = LEAST_OP_S * num_ops
    if least_s > max(SHORT_S, 1.1 * search.seconds):
        raise ArgumentError(
            f"{search.seconds:g} s are too few for {num_ops:,} ops: costs, the quickest placement "
            f"and its score take about {least_s:.1f} s on an idle core; give at least so many "
            "seconds, or evaluations instead"
        )


def _load(wall_s: float, cpu_s: float) -> float:
    """Wall-clock seconds per CPU second, at least 1: more where other programs hold the cores."""
    return max(1.0, wall_s / cpu_s) if cpu_s > 0 else 1.0


def _before_result(clock: Clock, result_s: float) -> Clock:
    """The clock without the seconds in which the result is made up."""
    if clock.seconds is None or clock.is_counted:
        return clock
    return clock.at_most(max(0.0, clock.remaining_s() - result_s))


def methods(
    checkpoint: str | Path | None = None, planned: Sequence[tuple[str, Method]] = ()
) -> dict[str, Method]:
    """Every placement method by its command-line name.

    The policy of a checkpoint is `policy`, without search `policy_greedy` and `policy_samples`, and
    a candidate of `auto`; of the shipped one the greedy decode is, where it is cheap. A plain
    pipeline is another, for a throughput. `planned` are further ones, which come first.
    """
    from gdp.methods.portfolio import auto
    from gdp.methods.scoring import compile_once
    from gdp.methods.table import METHODS, for_general

    trained = _trained(checkpoint)

    def with_policy(problem: Problem, search: Search) -> Answer:
        extra: list[tuple[str, Method]] = []
        seconds = search.budget().seconds if search.evaluations is None else None
        greedy_s = GREEDY_S + GREEDY_OP_S * problem.num_ops
        if trained and checkpoint is not None:
            extra = [("policy", trained["policy_samples"])]
        elif trained and (seconds is None or greedy_s <= GREEDY_SHARE * seconds):
            extra = [("policy", trained["policy_greedy"])]
        if find_objective(problem.objective).pipelined:
            extra.append(("pipeline", _linear_pipeline))
        for name, method in extra:
            compile_once(name, method, problem.objective)
        return auto(problem, search, extra=extra, planned=planned)

    return METHODS | for_general(trained | {"hsdag": later(HSDAG), "auto": with_policy})


def _linear_pipeline(problem: Problem, search: Search) -> Answer:
    """The plain pipeline whose dearest stage costs least along a few linear orders."""
    from gdp.methods.pipeline.method import best_pipeline

    pipeline = best_pipeline(problem, search, linear_only=True)
    return Answer(pipeline.assignment, reason="" if pipeline.assignment else "no pipeline fits")


def _trained(checkpoint: str | Path | None) -> dict[str, Method]:
    """The methods of the trained policy, none where no checkpoint ships."""
    try:
        from gdp.policy.method import policy_methods
    except ModuleNotFoundError:
        return {}
    return policy_methods(checkpoint)


@functools.cache
def start_up(objective: str) -> None:
    """Import and compile once per process everything besides methods, outside of any budget."""
    from gdp.bounds.best import best_bound
    from gdp.methods.scoring import tiny_problem
    from gdp.methods.simplify import simpler

    with waiting_for(COMPILE):
        tiny = tiny_problem(objective if find_objective(objective).general else "latency")
        fuse(tiny.graph)
        problem = in_ticks(tiny)
        alone = Assignment(np.zeros(problem.num_ops, dtype=np.int64))
        simpler(problem, Answer(alone), SIMPLICITY, 1)
        best_bound(problem, COUNTED_BOUND_S)


def _executed(question: Question, problem: Problem, assignment: Assignment) -> Score:
    """The score of an assignment; of a relaxed problem with the kernels that devices fuse."""
    from gdp.sim.score import score_of

    if not problem.origin.is_relaxed:
        return score_of(problem, assignment)
    return prepare_placement(question, expanded(question.graph, problem, assignment, "gdp")).score()


DRAWS, LEAST_DRAWS = 8, 4
"""Of learned costs, for the deviation of a value: so many, or fewer where the clock is over."""


def _deviation_s(
    question: Question, problem: Problem, assignment: Assignment, value_s: float, clock: Clock
) -> float | None:
    """Standard deviation of a value over draws of learned costs; None without learned costs."""
    from gdp.sim.score import score_of

    costs = problem.origin.model
    if not isinstance(costs, AdaptedCosts):
        return None
    drawn: list[float] = []
    for draw in drawn_problems(question, problem, range(DRAWS)):
        drawn.append(score_of(draw, assignment).value_s)
        if clock.is_over() and len(drawn) >= LEAST_DRAWS:
            break
    # What no effect explains is another for each device, roughly.
    own = costs.adaptation.noise / len(np.unique(assignment.device)) ** 0.5
    return float(np.hypot(np.std(drawn), own * value_s))


def methods_of(
    question: Question, planners: Mapping[str, Plans] = MappingProxyType({})
) -> dict[str, Method]:  # fmt: skip
    """The methods for a question by name; raises `ArgumentError` where its own is none of them."""
    planned = [(k, planned_method(question.graph, plan)) for k, plan in planners.items()]
    table = methods(question.checkpoint, planned)
    if not isinstance(question.method, str) or question.method not in table:
        raise ArgumentError(f"no method {question.method!r}; there are {', '.join(table)}")
    return table


def _recorded(
    search: Search, curve: list[tuple[float, float]], started_s: float, value_unit: float
) -> Search:
    """A search that appends (seconds, value) to `curve` at each improvement."""

    def record(fraction: float, value: float) -> None:
        value_s = value * value_unit
        if not curve or value_s < curve[-1][1]:
            curve.append((time.perf_counter() - started_s, value_s))
        if search.progress is not None:
            search.progress(fraction, value_s)

    return replace(search, progress=record)


def _fitting(
    executed: Callable[[Assignment], Score], answer: Answer, question: Question,
    spent_s: Mapping[str, float],
) -> tuple[Score, Assignment]:  # fmt: skip
    """The score and assignment of a feasible answer; `InfeasibleError` for any other."""
    method, search = question.method, question.search
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
    question: Question, problem: Problem, answer: Answer, assignment: Assignment,
    placed: Score, bound: tuple[float, str],
) -> Result:  # fmt: skip
    """The result of an answer that fits, without its seconds."""
    made_by = f"gdp {question.method} seed={question.search.seed}"
    placement = expanded(question.graph, problem, assignment, made_by)
    (bound_s, bound_by), value_s = bound, placed.value_s
    return Result(
        question=question,
        placement=replace(placement, simplicity_cost=answer.simplicity_cost),
        score=placed,
        objective=question.objective,
        method=question.method,
        # Bound and value are sums in different orders; rounding must not put one past the other.
        bound_s=min(bound_s, value_s),
        bound_by=bound_by,
        proven_optimal=(answer.proven_optimal and not problem.origin.is_relaxed)
        or bound_s >= value_s * (1 - 1e-9),
        candidates=answer.candidates,
        evaluations=answer.evaluations,
        seconds=0.0,
        seed=question.search.seed,
        costs=problem.origin.costs,
        notes=(*answer.messages, *_nearly_full(question.cluster, placed)),
        counts=counts_of(question, placement),
    )


def _nearly_full(cluster: Cluster, scored: Score) -> list[str]:
    note = nearly_full(cluster, scored.peak_bytes.tolist()) if scored.feasible else ""
    return [note] if note else []


def _bound(
    problem: Problem, answer: Answer, clock: Clock, found_s: float, result_s: float = 0.0
) -> tuple[float, str]:
    """The better of the method's bound and `best_bound`, which leaves `result_s` of the clock."""
    from gdp.bounds.best import best_bound

    seconds, cap_s = COUNTED_BOUND_S, math.inf
    if clock.seconds is not None:
        seconds = clock.seconds * BOUND_SHARE
        cap_s = max(0.0, clock.remaining_s() - result_s)
    ticks = in_ticks(problem)
    row = find_objective(problem.objective)
    value_unit = row.scale(ticks.unit.seconds)
    bound = best_bound(ticks, seconds, found_s=found_s / value_unit, cap_s=cap_s)
    bound_s, bound_by = bound.value_s * value_unit, bound.argument
    if bound_s <= answer.bound_s:
        bound_s, bound_by = answer.bound_s, answer.bound_by
    # Bounds of other units know what parts of kernels change of these.
    slack = problem.origin.slack_s if row.unit == "s" else 0.0
    return max(0.0, bound_s - slack), bound_by


def simulate(question: Question, placement: Placement) -> Score:
    """Times and memory of a placement of the question's graph on its cluster.

    Raises:
        PlacementError: The placement is of another graph or cluster.
    """
    require(placement, question.graph, question.cluster)
    return prepare_placement(question, placement).score()


def evaluate(
    question: Question, placement: Placement, bound: tuple[float, str] | None = None
) -> Result:
    """Score and proven bound of a placement that was made elsewhere, as `solve` returns them; a
    bound that is given, with its argument, is taken as it is, for ops that devices may divide.
    `UNPROVEN` leaves the proof to `proven`."""
    require(placement, question.graph, question.cluster)
    divides = bound is not None and bound != UNPROVEN
    started_s, cluster = time.perf_counter(), question.cluster
    prediction = prepare_placement(question, placement)
    scored = prediction.score()
    value_s = scored.value_s
    if bound is None and placement.splits:
        bound = 0.0, ""  # bounds are those of whole ops
    if bound is None:
        bound = _bound_of_any(question, value_s)
    bound_s, bound_by = bound
    return Result(
        question=question,
        placement=placement,
        score=scored,
        objective=question.objective,
        method=placement.made_by or "given",
        bound_s=min(bound_s, value_s),
        bound_by=bound_by,
        bound_over=DIVIDED_OPS if divides else WHOLE_OPS,
        proven_optimal=bound_s >= value_s * (1 - 1e-9),
        candidates=(),
        evaluations=1,
        seconds=time.perf_counter() - started_s,
        seed=0,
        costs=prediction.problem.origin.costs,
        notes=(
            *filter(None, [shared_overflow(cluster, scored.peak_bytes)]),
            *_nearly_full(cluster, scored),
        )[:1],
        counts=counts_of(question, placement),
    )


def proven(result: Result) -> Result:
    """A result of `evaluate` that was left unproven, with its bound; others unchanged."""
    if result.bound_by or result.placement.splits:
        return result
    return with_bound(result, *_bound_of_any(result.question, result.value_s))


def _bound_of_any(question: Question, value_s: float) -> tuple[float, str]:
    """A bound of every placement, whatever the constraints, and its argument."""
    free = problem_of(replace(question, constraints=Constraints()), replicas=True)
    return _bound(free, Answer(None), Search().budget(), value_s)


def view_of(question: Question, placement: Placement) -> PlacementView:
    """Simulated schedule of a placed model for display. With replicated stages, one schedule for
    each sample until the assignment of samples to replicas repeats, at most `MAX_WAYS`."""
    from gdp.sim.latency import simulate as simulate_latency
    from gdp.sim.score import cycle_length, devices_of_sample

    problem, placed = prepare_placement(replace(question, objective="latency"), placement)
    views: list[PlacementView] = []
    for sample in range(min(cycle_length(placement.teams), MAX_WAYS)):
        way = devices_of_sample(problem, placed.device, placement.teams, sample)
        schedule = simulate_latency(problem, way, placed.rank)
        since_s = views[-1].since_s + views[-1].schedule.latency_s if views else 0.0
        views.append(
            PlacementView(
                question.graph, problem, schedule, way, placement.teams, (), placement.splits,
                since_s,
            )
        )  # fmt: skip
    return replace(views[0], others=tuple(views[1:]))
