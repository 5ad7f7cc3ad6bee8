"""Reference placements of quick heuristics, which the policy reads.

The heuristics cost milliseconds and know the schedule of the whole graph, which no feature of one
op holds. The policy reads each placement and its cost; the best is the incumbent, row 0 of the
advice. Axes: K placements, N ops, A rows of advice, D devices.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.clock import Clock
from gdp.base.errors import MissingExtraError
from gdp.methods.base import Answer, Search
from gdp.methods.priorities import RatedPlacements, evaluate_rules, timing
from gdp.problem.problem import Problem, cached_on_problem
from gdp.problem.symmetry import canonical

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
    evaluations: int = 0  # that it took, but for those of answers that were known

    @property
    def log_ratio(self) -> Float[np.ndarray, "A"]:
        """Logarithm of the cost over the incumbent's, at most 3; costs may be 0."""
        cost_s = np.maximum(self.cost_s, np.finfo(float).tiny)
        return np.minimum(np.log(cost_s / cost_s[0]), 3.0)

    @property
    def weight(self) -> Float[np.ndarray, "A"]:
        """Shares of the votes, more for the better."""
        vote = np.exp(-SHARPNESS * np.maximum(self.log_ratio, 0.0))
        return vote / vote.sum()


@cached_on_problem
def _known_advice(problem: Problem) -> list[Advice]:
    """The advice on a problem, once it was asked."""
    return []


def advice(
    problem: Problem,
    prior_answers: Mapping[str, Answer] = MappingProxyType({}),
    clock: Clock | None = None,
) -> Advice:
    """The advisers' placements; the best of them is the incumbent.

    They are asked once: where they have been, `prior_answers` of methods by name come too late and
    change nothing. Once the clock is over, each ends with its best so far.
    """
    known = _known_advice(problem)
    if not known:
        known.append(_asked(problem, prior_answers, clock or Clock(None)))
    return known[0]


def _asked(problem: Problem, prior_answers: Mapping[str, Answer], clock: Clock) -> Advice:
    """The advice of methods that are run now, where their answers are not known.

    An adviser that finds none that fits has everything on the first device that it may use.
    """
    from gdp.methods.portfolio import HEURISTICS

    methods, search, spent = dict(HEURISTICS), Search(clock=clock), 0
    rows: dict[str, Int[np.ndarray, "N"]] = {}
    for name in ADVISERS:
        answer = prior_answers.get(name)
        if answer is None:
            try:
                answer = methods[name](problem, search)
            except MissingExtraError:
                continue
            spent += answer.evaluations
        device = problem.allowed.argmax(axis=1)
        if answer.assignment is not None:
            device = answer.assignment.device
        rows[name] = canonical(problem, device, timing(problem).order)
    rated = evaluate_rules(problem, np.stack(list(rows.values())))
    cost_s = cost(problem, rated)
    best, names = int(np.argmin(cost_s)), list(rows)
    chosen = [best, *(names.index(name) if name in rows else best for name in ADVISERS)]
    return Advice(
        rated.device[chosen], cost_s[chosen], int(rated.rule[best]), spent + rated.evaluations
    )
