"""Reference placements of quick heuristics, which the policy reads, follows and improves on.

The heuristics cost milliseconds and know the schedule of the whole graph, which no feature of one
op holds. The policy reads each placement and its cost; the best is the incumbent, row 0 of the
advice. Placements of the same heuristics on coarser graphs (`methods.heuristics.multilevel`) and,
for throughput, the best pipeline along a few linear orders (`methods.pipeline`) are further starts
without rows of their own. Axes: N ops, A rows of advice, D devices.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.errors import MissingExtraError
from gdp.methods.base import Answer, Search
from gdp.methods.priorities import evaluate_rules, timing
from gdp.policy.evaluate import cost
from gdp.problem.problem import Problem, cached_on_problem
from gdp.problem.symmetry import canonical
from gdp.sim.objectives import objective_of

ADVISERS = ("single", "blocks", "heft", "etf", "metis")
"""Methods that advise, by name; rows 1 to 5 of the advice. Without pymetis the best of the others
takes the place of the last."""
SHARPNESS = 20.0
"""An adviser's vote loses a factor of e for every twentieth that its cost is worse."""


class Advice(NamedTuple):
    """Placements with devices that are alike renamed by first use, and what they cost."""

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


def advice(problem: Problem) -> Advice:
    """The advisers' placements; the best of them is the incumbent."""
    return _asked(problem)[0]


def incumbents(problem: Problem) -> Int[np.ndarray, "K N"]:
    """The advisers' different placements, the best first: what a decode may start from."""
    return _asked(problem)[1]


def advise(problem: Problem, known: Mapping[str, Answer], seconds: float | None = None) -> Advice:
    """The advice, with the answers of advisers that were run already, by name.

    Advisers are asked once: where they have been, `known` comes too late and changes nothing. Once
    the `seconds` are over, each ends with what it has.
    """
    _answers(problem).update(known)
    _limits(problem).append(Clock(seconds))
    try:
        heuristic_answers(problem)
        return advice(problem)
    finally:
        _limits(problem).pop()


def heuristic_answers(problem: Problem) -> Mapping[str, Answer]:
    """Answers of all heuristics, each run once per problem; none of a missing package."""
    from gdp.methods.portfolio import HEURISTICS

    return {
        name: answer for name, _ in HEURISTICS if (answer := _answer(problem, name)) is not None
    }


def asked(problem: Problem) -> Mapping[str, Answer]:
    """The answers of the heuristics that were run for the advice, not told by `advise`."""
    return _own(problem)


@cached_on_problem
def _answers(problem: Problem) -> dict[str, Answer]:
    """Answers that are known already."""
    del problem
    return {}


@cached_on_problem
def _limits(problem: Problem) -> list[Clock]:
    """Time limits of heuristics that are run now; empty without a limit."""
    del problem
    return []


def _left_s(problem: Problem) -> float | None:
    limits = _limits(problem)
    return limits[-1].left_s() if limits else None


@cached_on_problem
def _own(problem: Problem) -> dict[str, Answer]:
    """Answers of heuristics that were run here."""
    del problem
    return {}


def _answer(problem: Problem, name: str) -> Answer | None:
    """A heuristic's answer; None where its optional package is not installed."""
    from gdp.methods.portfolio import HEURISTICS

    known = _answers(problem)
    if name not in known:
        try:
            search = Search(seconds=_left_s(problem))
            known[name] = dict(HEURISTICS)[name](problem, search)
        except MissingExtraError:
            return None
        _own(problem)[name] = known[name]
    return known[name]


@cached_on_problem
def _asked(problem: Problem) -> tuple[Advice, Int[np.ndarray, "K N"]]:
    """(the advice, all that was tried, the best first)."""
    placed = [_placed(problem, name) for name in ADVISERS]
    more = [_multilevel(problem), _pipeline(problem)]
    rows = np.stack([row for row in [*placed, *more] if row is not None])
    rated = evaluate_rules(problem, rows)
    cost_s = cost(problem, rated)
    best = int(np.argmin(cost_s))
    order = [best, *np.cumsum([row is not None for row in placed]) - 1]
    for k, row in enumerate(placed):
        order[1 + k] = best if row is None else order[1 + k]
    made = Advice(rows[order], cost_s[order], int(rated.rule[best]))
    sorted_rows = rows[np.argsort(cost_s, kind="stable")]
    first = np.unique(sorted_rows, axis=0, return_index=True)[1]
    return made, sorted_rows[np.sort(first)]


def with_incumbent(found: Advice, problem: Problem, device: Int[np.ndarray, "N"]) -> Advice:
    """The advice with another placement as the incumbent."""
    device = canonical(problem, device, timing(problem).order)
    rated = evaluate_rules(problem, device[None])
    rows, cost_s = found.device.copy(), found.cost_s.copy()
    rows[0], cost_s[0] = device, cost(problem, rated)[0]
    return Advice(rows, cost_s, int(rated.rule[0]))


def _multilevel(problem: Problem) -> Int[np.ndarray, "N"] | None:
    """Best placement of heuristics on coarser graphs; None where there is none."""
    answer = _answer(problem, "multilevel")
    if answer is None or answer.assignment is None:
        return None
    return canonical(problem, answer.assignment.device, timing(problem).order)


def _pipeline(problem: Problem) -> Int[np.ndarray, "N"] | None:
    """The pipeline whose dearest stage costs least along a few linear orders, for a throughput."""
    objective = objective_of(problem)
    if not (objective.pipelined and objective.on_links):
        return None
    from gdp.methods.pipeline.method import best_pipeline

    found = best_pipeline(problem, Search(seconds=_left_s(problem)), linear_only=True)
    if found.device is None:
        return None
    return canonical(problem, found.device, timing(problem).order)


def _placed(problem: Problem, name: str) -> Int[np.ndarray, "N"] | None:
    """One adviser's placement; where it finds none that fits, everything on the first it may.

    None where the adviser is an optional package that is not installed.
    """
    answer = _answer(problem, name)
    if answer is None:
        return None
    if answer.assignment is None:
        return problem.allowed.argmax(axis=1).astype(np.int64)
    return canonical(problem, answer.assignment.device, timing(problem).order)
