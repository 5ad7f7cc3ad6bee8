"""exact: the program of the objective by a general solver, and a proof of how good the answer is.

| objective | program | solver |
| --- | --- | --- |
| throughput | `gdp.methods.fix_and_optimise.period`, memory row by row as it binds | HiGHS |
| latency | `gdp.methods.exact.schedule`, a relaxation of the event simulator's | CP-SAT |
| others | those of their rows (`Objective.programs`), an `ExactProgram` each | |

A good placement comes first; it is the solver's cutoff or hint. The placement always comes with the
simulator's own value. Where the program is a relaxation, an optimum is proven only when the
simulator confirms the program's value. The solver's bound counts also when time runs out, and the
best known lower bound goes with every answer.

Throughput and latency of more variables or intervals than a solver gets through in minutes
(`MOST_VARIABLES`, `MOST_INTERVALS`) are left to the portfolio and `pipeline_dp`, and so is a
latency without CP-SAT.

With `Search.evaluations` the solvers' work is counted as well (nodes of a search tree, CP-SAT's
deterministic time on one worker), and no clock enters an answer.

Axes: N ops.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock, WorkClock
from gdp.base.errors import MissingExtraError
from gdp.base.rows import imported
from gdp.bounds.loads import NO_POINTS
from gdp.bounds.work import work_over_speed_s
from gdp.methods.base import Answer, Assignment, Method, MethodNote, Search
from gdp.methods.exact.targets import CLOSE, ProofState, close_gap
from gdp.methods.scoring import (
    Evaluated,
    best_of,
    group_seconds,
    proven_misfit,
    refusal,
    score_all,
    score_of,
)
from gdp.methods.shares import (
    EXACT_BOUND_SHARE,
    EXACT_PIPELINE_SHARE,
    EXACT_START_SHARE,
    EXACT_VALUE_SHARE,
)
from gdp.problem.problem import Problem
from gdp.sim.objectives import OBJECTIVES, objective_of
from gdp.sim.score import may_replicate

MOST_VARIABLES = 150_000
"""Above this the linear relaxation of the period program alone takes minutes."""
COUNTED_VARIABLES = 10_000
"""`MOST_VARIABLES` where work is counted: up to here the linear relaxation takes seconds."""
MOST_INTERVALS = 8000
"""Above this CP-SAT's bound is no better than the critical path within minutes."""
_EVALUATIONS = 20_000  # of the portfolio where no limit is given
_COUNTED_S = 10.0  # work of a pipeline's program, where work is counted
_COUNTED_NODES = 2000  # of a round's search tree, likewise
NO_TIME = "no schedule takes less than no time"
PROVEN_MISFIT = "no placement fits the devices' memories (proven)"
NO_FIT = "no placement was found that fits the devices' memories; none is ruled out"


def exact(problem: Problem, search: Search) -> Answer:
    """The best placement of the program's solver; the notes give its proven gap."""
    if "exact" not in objective_of(problem).programs:
        known = [name for name, row in OBJECTIVES.items() if "exact" in row.programs]
        return refusal(problem, "exact", known)
    if is_counted(search):
        search = dataclasses.replace(search, seconds=None)
    clock = Clock(search.seconds)
    if may_replicate(problem):
        how, answer = _with_replicas(problem, search, clock)
    else:
        how, answer = _solved(problem, search)
    if (assignment := answer.assignment) is None:
        return dataclasses.replace(answer, candidates=(), notes=())
    answer = _with_bound(problem, answer, clock)
    value_s = _value_s(problem, assignment)
    optimal = answer.proven_optimal or answer.bound_s >= value_s * (1 - 1e-9)
    if optimal:
        note = f"optimal, proven by {answer.bound_by} ({how})"
    elif answer.bound_s > 0:
        gap = 1.0 - answer.bound_s / value_s
        note = f"optimum not proven: at most {gap:.2%} better ({how}; bound: {answer.bound_by})"
    else:
        note = f"optimum not proven, no bound known ({how})"
    return dataclasses.replace(
        answer, proven_optimal=optimal, candidates=(), notes=(MethodNote(note),)
    )


def is_counted(search: Search) -> bool:
    """True where work is counted, of solvers too, and no clock enters the answer."""
    return search.evaluations is not None


def _with_replicas(problem: Problem, search: Search, clock: Clock) -> tuple[str, Answer]:
    """The better of the solver's answer, of one device for each stage, and the pipeline program's,
    whose stages may be replicated; only the latter's bound holds for both."""
    from gdp.methods.pipeline.method import replicated_pipeline

    part = WorkClock(_COUNTED_S) if is_counted(search) else clock.part(EXACT_PIPELINE_SHARE)
    replicated = replicated_pipeline(problem, dataclasses.replace(search, clock=part))
    rest = dataclasses.replace(search, seconds=clock.left_s(), clock=None)
    how, answer = _solved(without_replicas(problem), rest)
    if answer.assignment is not None:
        why = "the best found of one device for each stage; replicated stages were not looked at"
        answer = dataclasses.replace(answer, reason=why)
    answer = dataclasses.replace(
        answer,
        bound_s=replicated.bound_s,
        bound_by=replicated.bound_by,
        proven_optimal=False,
    )
    if replicated.assignment is None:
        return how, answer
    plain_s = np.inf if answer.assignment is None else _value_s(problem, answer.assignment)
    if plain_s <= _value_s(problem, replicated.assignment):
        return how, answer
    return "pipelines with replicated stages", replicated


def without_replicas(problem: Problem) -> Problem:
    """The problem with one device for every stage."""
    return dataclasses.replace(problem, replicas=False)


def _solved(problem: Problem, search: Search) -> tuple[str, Answer]:
    """(which solver and why, its answer)."""
    program: ExactProgram = imported(objective_of(problem).programs["exact"])
    if size := program.too_large(problem, is_counted(search)):
        return _heuristic(problem, search, size)
    try:
        return f"mip, {program.solver}", program.solve(problem, search)
    except MissingExtraError as error:
        if not objective_of(problem).general:
            raise  # which no heuristic knows
        how, answer = _heuristic(problem, search, "no CP-SAT")
        return f"{how}; {error}", answer


def _heuristic(problem: Problem, search: Search, why: str) -> tuple[str, Answer]:
    """The portfolio's answer, or the pipeline program's where that is better."""
    from gdp.methods.pipeline.method import pipeline_dp
    from gdp.methods.portfolio import auto

    how = f"heuristics: {why} are too many for a solver"
    if not objective_of(problem).pipelined:
        return how, auto(problem, dataclasses.replace(search, clock=None))
    seconds = search.seconds
    first = None if seconds is None else seconds * EXACT_PIPELINE_SHARE
    rest = None if seconds is None else seconds * (1 - EXACT_PIPELINE_SHARE)
    part = None if is_counted(search) else Clock(first)
    pipeline = pipeline_dp(problem, dataclasses.replace(search, clock=part))
    best = auto(problem, dataclasses.replace(search, seconds=rest, clock=None))
    answers = [a for a in (pipeline, best) if a.assignment is not None] or [best]
    return how, min(
        answers,
        key=lambda a: float("inf") if a.assignment is None else _value_s(problem, a.assignment),
    )


def _with_bound(problem: Problem, answer: Answer, clock: Clock) -> Answer:
    """The answer with the objective's combinatorial bounds, where they are higher."""
    from gdp.bounds.best import best_bound

    if clock.seconds is None:
        bound = best_bound(problem)
    else:
        # The work is that of a share of the seconds asked for, however many of them are left.
        share_s = EXACT_BOUND_SHARE * clock.seconds
        bound = best_bound(problem, share_s, cap_s=max(share_s, clock.remaining_s()))
    if bound.value_s <= answer.bound_s:
        return answer
    return dataclasses.replace(answer, bound_s=bound.value_s, bound_by=bound.argument)


def _value_s(problem: Problem, assignment: Assignment) -> float:
    """The value by the problem's own evaluator."""
    return score_of(problem, assignment).value_s


def least_period(problem: Problem, search: Search) -> Answer:
    """The placement of least period, as far as the seconds suffice."""
    from gdp.methods.fix_and_optimise.period import PeriodRounds, RoundLimits, solve_rounds

    clock, first = _start(problem, search)
    if isinstance(first, Answer):
        return first
    bound_s, work = work_over_speed_s(group_seconds(problem)), "work over the speed of all devices"
    points = NO_POINTS
    limits = RoundLimits(nodes=_COUNTED_NODES) if is_counted(search) else RoundLimits()

    def below(state: ProofState, target_s: float, seconds: float | None) -> ProofState:
        nonlocal points  # a row of memory that a solution broke once holds for every target
        limit = Clock(seconds and max(0.5, seconds))
        known = PeriodRounds(state.best, points)
        rounds = solve_rounds(problem, known, limit, limits, upper_s=target_s)
        points = rounds.points
        state = dataclasses.replace(state, best=rounds.best, value_s=_fitting_s(rounds.best))
        return state.after(rounds.solution, target_s, "HiGHS over all placements")

    state = close_gap(
        ProofState(first, _fitting_s(first), bound_s, work), below, clock, EXACT_VALUE_SHARE
    )
    if np.isinf(state.bound_s):
        return Answer(None, reason=PROVEN_MISFIT, proven_misfit=True)
    return _simulated(state.best, state.bound_s, state.by)


def _fitting_s(scored: Evaluated) -> float:
    """The value; inf where memory overflows."""
    return scored.value_s if scored.overflow_bytes == 0 else np.inf


def least_latency(problem: Problem, search: Search) -> Answer:
    """The placement of least simulated latency, as far as the seconds suffice."""
    from gdp.methods.exact.schedule import solve_schedule

    clock, first = _start(problem, search)
    if isinstance(first, Answer):
        return first
    fits = first.overflow_bytes == 0
    if fits and first.value_s == 0.0:  # which no unit of the solver divides
        return _simulated(first, 0.0, NO_TIME)
    upper_s = first.value_s if fits else _serial_s(problem)
    left_s = None if search.seconds is None else clock.remaining_s()
    hint = first.assignment.device if fits else None
    limits = left_s, search.seed
    solution = solve_schedule(problem, upper_s, *limits, hint, is_counted(search))
    best = first
    if solution.device is not None:
        ranks: list[Int[np.ndarray, "N"] | None] = [solution.rank, None]
        placements = [Assignment(solution.device, rank) for rank in ranks]
        best = min(best, *score_all(problem, placements))
    elif solution.is_complete and not fits:
        return Answer(None, reason=PROVEN_MISFIT, proven_misfit=True)
    return _simulated(best, solution.bound_s, "CP-SAT over all schedules")


def _start(problem: Problem, search: Search) -> tuple[Clock, Evaluated | Answer]:
    """A good placement to begin with, or the answer that nothing can fit."""
    from gdp.methods.portfolio import auto

    clock = Clock(search.seconds)
    if (proof := proven_misfit(problem)) is not None:
        return clock, Answer(None, reason=proof, proven_misfit=True)
    if search.seconds is None:
        count = search.evaluations or _EVALUATIONS
        first = dataclasses.replace(search, evaluations=count, clock=None)
    else:
        first = dataclasses.replace(search, seconds=search.seconds * EXACT_START_SHARE, clock=None)
    answer = auto(problem, first)
    if answer.assignment is None:
        homes = problem.group_allowed.argmax(axis=1)[problem.group]
        return clock, best_of(problem, [Assignment(homes)])
    return clock, best_of(problem, [answer.assignment])


def _serial_s(problem: Problem) -> float:
    """Upper bound of a schedule without idling: all work and all transfers one by one."""
    from gdp.problem.arrays import arrays_of

    a = arrays_of(problem)
    compute_s = np.where(np.isfinite(a.compute_s), a.compute_s + a.segment_s, 0.0).max(axis=1)
    sent_s = float(a.latency_s.max()) + a.sent_bytes / float(a.bytes_per_s.min())
    return float(compute_s.sum() + sent_s.sum() * (problem.num_devices - 1)) or 1.0


def _simulated(best: Evaluated, bound_s: float, by: str) -> Answer:
    """The answer of the event simulator's best placement, and how certain it is."""
    if best.overflow_bytes > 0:
        return Answer(None, reason=NO_FIT, bound_s=bound_s, bound_by=by)
    optimal = bound_s >= best.value_s * CLOSE
    share = 1 - bound_s / best.value_s if best.value_s > 0 else 0.0
    reason = f"optimum not proven: at most {share:.2%} better"
    return Answer(
        best.assignment,
        reason="" if optimal else reason,
        bound_s=min(bound_s, best.value_s),
        bound_by=by,
        proven_optimal=optimal,
        evaluations=best.evaluations,
    )


def _variables(problem: Problem, counted: bool) -> str:
    most = min(COUNTED_VARIABLES, MOST_VARIABLES) if counted else MOST_VARIABLES
    return _excess(problem, problem.num_groups, most, "variables")


def _intervals(problem: Problem, counted: bool) -> str:
    del counted  # the solver counts its work
    return _excess(problem, problem.num_ops, MOST_INTERVALS, "intervals")


def _excess(problem: Problem, rows: int, most: int, unit: str) -> str:
    """The size of a program in shares and transfers where a solver takes too long; else empty."""
    d = problem.num_devices
    count = rows * d + problem.graph.num_tensors * d * (d - 1)
    return f"{count} {unit}" if count > most else ""


@dataclasses.dataclass(frozen=True)
class ExactProgram:
    """An exact program of one objective."""

    solve: Method
    solver: str
    # The size, where it is; with counted work as well.
    too_large: Callable[[Problem, bool], str] = lambda problem, counted: ""


LEAST_PERIOD = ExactProgram(least_period, "HiGHS", _variables)
LEAST_LATENCY = ExactProgram(least_latency, "CP-SAT", _intervals)
