"""exact: the solver that suits the objective and the size, and whether the optimum is proven.

| objective | small | large |
| --- | --- | --- |
| max_load | mip, from the best pipeline | the same; then the gap is what time leaves |
| block_latency | mip | the same |
| throughput | mip, from the portfolio's best | pipeline_dp and the portfolio |
| latency | mip, from the portfolio's best | the portfolio |

Large means more variables or intervals than a solver gets through in minutes
(`gdp.methods.period.program.MOST_VARIABLES`, `gdp.methods.exact.schedule.MOST_INTERVALS`).
The best known lower bound goes with every answer.
"""

import dataclasses

import numpy as np

from gdp.clock import Clock
from gdp.errors import MissingExtraError
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.mip import PROGRAMS, mip, without_proof, without_replicas
from gdp.methods.scoring import refusal
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of
from gdp.sim.replicas import may_replicate
from gdp.sim.score import score, values

_PIPELINE_SHARE = 0.3  # of the seconds, where a pipeline's program comes before the portfolio
_BOUND_SHARE = 0.2  # of the seconds, for bounds that know no placement


def exact(problem: Problem, search: Search) -> Answer:
    """The best placement of the solver that suits the problem; the notes say what is proven."""
    if problem.objective not in PROGRAMS:
        return refusal(problem, "exact", PROGRAMS)
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
    return dataclasses.replace(answer, proven_optimal=optimal, candidates=(), notes=(note,))


def _with_replicas(problem: Problem, search: Search, clock: Clock) -> tuple[str, Answer]:
    """The better of the solver's answer, of one device for each stage, and the pipeline program's,
    whose stages may be replicated; only the latter's bound holds for both."""
    from gdp.methods.pipeline.method import replicated_pipeline

    first = dataclasses.replace(search, seconds=clock.left_s(_PIPELINE_SHARE))
    replicated = replicated_pipeline(problem, first)
    rest = dataclasses.replace(search, seconds=clock.left_s())
    how, answer = _solved(without_replicas(problem), rest)
    answer = dataclasses.replace(
        without_proof(answer), bound_s=replicated.bound_s, bound_by=replicated.bound_by
    )
    if (found := replicated.assignment) is None:
        return how, answer
    plain_s = np.inf if answer.assignment is None else _value_s(problem, answer.assignment)
    if plain_s <= _value_s(problem, found):
        return how, answer
    return "pipelines with replicated stages", replicated


def _solved(problem: Problem, search: Search) -> tuple[str, Answer]:
    """(which solver and why, its answer)."""
    program = PROGRAMS[problem.objective]
    if size := program.too_large(problem):
        return _heuristic(problem, search, size)
    try:
        return f"mip, {program.solver}", mip(problem, search)
    except MissingExtraError as error:
        if not objective_of(problem).on_links:
            raise  # which no heuristic knows
        how, answer = _heuristic(problem, search, "no CP-SAT")
        return f"{how}; {error}", answer


def _heuristic(problem: Problem, search: Search, why: str) -> tuple[str, Answer]:
    """The portfolio's answer, or the pipeline program's where that is better."""
    from gdp.methods.pipeline.method import pipeline_dp
    from gdp.methods.portfolio import auto

    how = f"heuristics: {why} are too many for a solver"
    if not objective_of(problem).pipelined:
        return how, auto(problem, search)
    seconds = search.seconds
    first = None if seconds is None else seconds * _PIPELINE_SHARE
    rest = None if seconds is None else seconds * (1 - _PIPELINE_SHARE)
    pipeline = pipeline_dp(problem, dataclasses.replace(search, seconds=first))
    best = auto(problem, dataclasses.replace(search, seconds=rest))
    answers = [a for a in (pipeline, best) if a.assignment is not None] or [best]
    return how, min(
        answers,
        key=lambda a: float("inf") if a.assignment is None else _value_s(problem, a.assignment),
    )


def _with_bound(problem: Problem, answer: Answer, clock: Clock) -> Answer:
    """With the combinatorial bounds of the event simulator's objectives, where they are higher."""
    if not objective_of(problem).on_links:
        return answer
    from gdp.bounds.best import best_bound

    if clock.seconds is None:
        bound = best_bound(problem)
    else:
        # The work is that of a share of the seconds asked for, however many of them are left.
        share_s = _BOUND_SHARE * clock.seconds
        bound = best_bound(problem, share_s, cap_s=max(share_s, clock.remaining_s()))
    if bound.value_s <= answer.bound_s:
        return answer
    return dataclasses.replace(answer, bound_s=bound.value_s, bound_by=bound.argument)


def _value_s(problem: Problem, assignment: Assignment) -> float:
    """What the problem's own evaluator says."""
    if assignment.teams:
        return score(problem, assignment.device, assignment.rank, assignment.teams).value_s
    return float(values(problem, assignment.device[None], assignment.rank)[0][0])
