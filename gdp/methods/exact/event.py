"""Exact answers for the event simulator's objectives: a heuristic's placement, then a solver.

The placement always comes with the simulator's own value. Where the solver's model is a relaxation
(`gdp.methods.period.program`, `gdp.methods.exact.schedule`), an optimum is proven only when
the simulator confirms the model's value.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from gdp.bounds.load_memory import NO_MARKS
from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.targets import CLOSE, Known, close_gap
from gdp.methods.scoring import Scored, best_of, proven_misfit, score_all
from gdp.problem.problem import Problem

_START_SHARE = 0.25  # of the seconds, for the heuristic
_EVALUATIONS = 20_000  # for it where no limit is given
_FIRST_SHARE = 0.3  # of the seconds left, to decide the value itself


def least_period(problem: Problem, search: Search) -> Answer:
    """The placement of least period, as far as the seconds suffice."""
    from gdp.methods.period.fit import Fitted, RoundLimits, fit
    from gdp.methods.period.program import too_large

    clock, first = _start(problem, search)
    if isinstance(first, Answer):
        return first
    work = "work over the speed of all devices"
    if size := too_large(problem):
        why = f"{size} are too many for a solver"
        return _answer(problem, first, _work_s(problem), work, why)

    marks = NO_MARKS

    def below(known: Known, target_s: float, seconds: float | None) -> Known:
        nonlocal marks  # a row of memory that a solution broke once holds for every target
        limit = Clock(seconds and max(0.5, seconds))
        rounds = fit(problem, Fitted(known.best, marks=marks), limit, RoundLimits(), None, target_s)
        marks = rounds.marks
        known = dataclasses.replace(known, best=rounds.best, value_s=_value_s(rounds.best))
        return known.after(rounds.solution, target_s, "HiGHS over all placements")

    known = Known(first, _value_s(first), _work_s(problem), work)
    known = close_gap(known, below, clock, _FIRST_SHARE)
    if np.isinf(known.bound_s):
        return Answer(None, reason="no placement fits the devices' memories (proven)")
    return _answer(problem, known.best, known.bound_s, known.by)


def _value_s(scored: Scored) -> float:
    """Its value; inf where memory overflows."""
    return scored.value_s if scored.overflow_bytes == 0 else np.inf


def _work_s(problem: Problem) -> float:
    """No period is shorter: work over the speed of all devices."""
    from gdp.methods.scoring import group_seconds

    work_s = group_seconds(problem)
    fastest_s = work_s.min(axis=1)
    works = fastest_s > 0
    if not works.any():
        return 0.0
    price = (work_s[works] / fastest_s[works, None]).min(axis=0)
    return max(float(fastest_s.sum() / (1.0 / price).sum()), float(fastest_s.max()))


def least_latency(problem: Problem, search: Search) -> Answer:
    """The placement of least simulated latency, as far as the seconds suffice."""
    from gdp.methods.exact.schedule import solve_schedule, too_large

    clock, first = _start(problem, search)
    if isinstance(first, Answer):
        return first
    if size := too_large(problem):
        return _answer(problem, first, 0.0, "", f"{size} are too many for a solver")
    fits = first.overflow_bytes == 0
    upper_s = first.value_s if fits else _serial_s(problem)
    left_s = None if search.seconds is None else clock.remaining_s()
    hint = first.assignment.device if fits else None
    solution = solve_schedule(problem, upper_s, left_s, search.seed, hint)
    best = first
    if solution.device is not None:
        ranks: list[Int[np.ndarray, "N"] | None] = [solution.rank, None]
        placements = [Assignment(solution.device, rank) for rank in ranks]
        best = min(best, *score_all(problem, placements), key=lambda scored: scored.key)
    elif solution.is_complete and not fits:
        return Answer(None, reason="no placement fits the devices' memories (proven)")
    return _answer(problem, best, solution.bound_s, "CP-SAT over all schedules")


def _start(problem: Problem, search: Search) -> tuple[Clock, Scored | Answer]:
    """A good placement to begin with, or the answer that nothing can fit."""
    from gdp.methods.portfolio import auto

    clock = Clock(search.seconds)
    if (proof := proven_misfit(problem)) is not None:
        return clock, Answer(None, reason=proof)
    if search.seconds is None:
        first = dataclasses.replace(search, evaluations=search.evaluations or _EVALUATIONS)
    else:
        first = dataclasses.replace(search, seconds=search.seconds * _START_SHARE)
    answer = auto(problem, first)
    if answer.assignment is None:
        homes = problem.group_allowed.argmax(axis=1)[problem.group]
        return clock, best_of(problem, [Assignment(homes)])
    return clock, best_of(problem, [answer.assignment])


def _serial_s(problem: Problem) -> float:
    """No schedule without idling is longer: all work and all transfers, one after another."""
    from gdp.problem.arrays import arrays_of

    a = arrays_of(problem)
    compute_s = np.where(np.isfinite(a.compute_s), a.compute_s + a.segment_s, 0.0).max(axis=1)
    sent_s = float(a.latency_s.max()) + a.tensor_bytes / float(a.bytes_per_s.min())
    return float(compute_s.sum() + sent_s.sum() * (problem.num_devices - 1)) or 1.0


def _answer(problem: Problem, best: Scored, bound_s: float, by: str, reason: str = "") -> Answer:
    """The best placement with its bound, and how certain it is."""
    if best.overflow_bytes > 0:
        why = "no placement was found that fits the devices' memories; none is ruled out"
        return Answer(None, reason=why, bound_s=bound_s, bound_by=by)
    optimal = bound_s >= best.value_s * CLOSE
    if not optimal and not reason:
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
