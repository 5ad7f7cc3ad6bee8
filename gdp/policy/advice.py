"""Reference placements of quick heuristics, which the policy reads, follows and improves on.

The heuristics cost milliseconds and know the schedule of the whole graph, which no feature of one
op holds. The policy reads each placement and its cost; the best is the incumbent, row 0 of the
advice. Placements of the same heuristics on coarser graphs (`methods.heuristics.multilevel`) and,
for throughput, the best pipeline along a few linear orders (`methods.pipeline`) are further starts
without rows of their own. Axes: K placements, N ops, A rows of advice, D devices.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.clock import Clock
from gdp.base.errors import MissingExtraError
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.priorities import RatedPlacements, evaluate_rules, timing
from gdp.problem.problem import Problem, cached_on_problem
from gdp.problem.symmetry import canonical
from gdp.sim.objectives import objective_of

ADVISERS = ("single", "blocks", "heft", "etf", "metis")
"""Methods that advise, by name; rows 1 to 5 of the advice. Without pymetis the best of the others
takes the place of the last."""
SHARPNESS = 20.0
"""An adviser's vote loses a factor of e for every twentieth that its cost is worse."""


OVERFLOW_WEIGHT = 4.0
"""A placement that overflows by its whole memory counts as five times as slow."""


def judge(
    problem: Problem, devices: Int[np.ndarray, "K N"]
) -> tuple[Float[np.ndarray, "K"], Bool[np.ndarray, "K"]]:
    """(cost in seconds, fits in memory?) of placements under their best priority rules."""
    rated = evaluate_rules(problem, devices)
    return cost(problem, rated), rated.overflow == 0


def cost(problem: Problem, rated: RatedPlacements) -> Float[np.ndarray, "K"]:
    """Seconds of the objective, raised by memory overflow."""
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).sum())
    return rated.seconds * (1.0 + OVERFLOW_WEIGHT * rated.overflow / capacity)


class Advice(NamedTuple):
    """Baseline placements, interchangeable devices renamed by first use, and their costs."""

    device: Int[np.ndarray, "A N"]  # the incumbent, then one row per adviser
    cost_s: Float[np.ndarray, "A"]  # under the best priorities, raised where memory overflows
    rule: int  # of priority, the incumbent's best: an index into RULES

    @property
    def log_ratio(self) -> Float[np.ndarray, "A"]:
        """Logarithm of the cost over the incumbent's, at most 3."""
        return np.minimum(np.log(self.cost_s / self.cost_s[0]), 3.0)

    @property
    def weight(self) -> Float[np.ndarray, "A"]:
        """Shares of the votes, more for the better."""
        vote = np.exp(-SHARPNESS * np.maximum(self.log_ratio, 0.0))
        return vote / vote.sum()


class Advisers:
    """The heuristics of one problem, each run once, and their placements."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.answers: dict[str, Answer] = {}
        self.run_here: dict[str, Answer] = {}  # those of them that nobody else had run
        self.clock = Clock(None)  # limit of heuristics that are run now

    def answer(self, name: str) -> Answer | None:
        """A heuristic's answer; None where its optional package is not installed."""
        from gdp.methods.portfolio import HEURISTICS

        if name not in self.answers:
            try:
                search = Search(clock=self.clock)
                answer = dict(HEURISTICS)[name](self.problem, search)
            except MissingExtraError:
                return None
            self.answers[name] = self.run_here[name] = answer
        return self.answers[name]

    @functools.cached_property
    def advised(self) -> tuple[Advice, Int[np.ndarray, "K N"]]:
        """(the advice, all that was tried, the best first)."""
        placed = [self._placed(name) for name in ADVISERS]
        more = [self._multilevel(), self._pipeline()]
        rows = np.stack([row for row in [*placed, *more] if row is not None])
        rated = evaluate_rules(self.problem, rows)
        cost_s = cost(self.problem, rated)
        best = int(np.argmin(cost_s))
        order = [best, *np.cumsum([row is not None for row in placed]) - 1]
        for k, row in enumerate(placed):
            order[1 + k] = best if row is None else order[1 + k]
        best_advice = Advice(rows[order], cost_s[order], int(rated.rule[best]))
        sorted_rows = rows[np.argsort(cost_s, kind="stable")]
        first = np.unique(sorted_rows, axis=0, return_index=True)[1]
        return best_advice, sorted_rows[np.sort(first)]

    def _placed(self, name: str) -> Int[np.ndarray, "N"] | None:
        """One adviser's placement; where it finds none that fits, everything on the first it may.

        None where the adviser is an optional package that is not installed.
        """
        answer = self.answer(name)
        if answer is not None and answer.assignment is None:
            return self.problem.allowed.argmax(axis=1).astype(np.int64)
        return None if answer is None else self._canonical(answer.assignment)

    def _multilevel(self) -> Int[np.ndarray, "N"] | None:
        """Best placement of heuristics on coarser graphs; None where there is none."""
        answer = self.answer("multilevel")
        return None if answer is None else self._canonical(answer.assignment)

    def _pipeline(self) -> Int[np.ndarray, "N"] | None:
        """The pipeline whose dearest stage costs least along a few linear orders, for a
        throughput."""
        if not objective_of(self.problem).pipelined:
            return None
        from gdp.methods.pipeline.method import best_pipeline

        search = Search(clock=self.clock)
        pipeline = best_pipeline(self.problem, search, linear_only=True)
        return self._canonical(pipeline.assignment)

    def _canonical(self, assignment: Assignment | None) -> Int[np.ndarray, "N"] | None:
        if assignment is None:
            return None
        return canonical(self.problem, assignment.device, timing(self.problem).order)


@cached_on_problem
def _advisers(problem: Problem) -> Advisers:
    return Advisers(problem)


def advice(problem: Problem) -> Advice:
    """The advisers' placements; the best of them is the incumbent."""
    return _advisers(problem).advised[0]


def incumbents(problem: Problem) -> Int[np.ndarray, "K N"]:
    """The advisers' distinct placements, the best first: starts of decodes."""
    return _advisers(problem).advised[1]


def advise(
    problem: Problem, prior_answers: Mapping[str, Answer], clock: Clock | None = None
) -> Advice:
    """The advice, with the answers of advisers that were run already, by name.

    Advisers are asked once: where they have been, `prior_answers` comes too late and changes
    nothing. Once the clock is over, each ends with its best so far.
    """
    advisers = _advisers(problem)
    advisers.answers.update(prior_answers)
    advisers.clock = clock or Clock(None)
    try:
        heuristic_answers(problem)
        return advice(problem)
    finally:
        advisers.clock = Clock(None)


def heuristic_answers(problem: Problem) -> Mapping[str, Answer]:
    """Answers of all heuristics, each run once per problem; none of a missing package."""
    from gdp.methods.portfolio import HEURISTICS

    advisers = _advisers(problem)
    answers = {name: advisers.answer(name) for name, _ in HEURISTICS}
    return {name: answer for name, answer in answers.items() if answer is not None}


def answers_run_here(problem: Problem) -> Mapping[str, Answer]:
    """The answers of the heuristics that were run for the advice, not given to `advise`."""
    return _advisers(problem).run_here


def with_incumbent(start: Advice, problem: Problem, device: Int[np.ndarray, "N"]) -> Advice:
    """The advice with another placement as the incumbent."""
    device = canonical(problem, device, timing(problem).order)
    rated = evaluate_rules(problem, device[None])
    rows, cost_s = start.device.copy(), start.cost_s.copy()
    rows[0], cost_s[0] = device, cost(problem, rated)[0]
    return Advice(rows, cost_s, int(rated.rule[0]))
