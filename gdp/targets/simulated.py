"""Plans that a runtime's program has simulated, each a row among the candidates of its answer."""

import time
from dataclasses import dataclass

import numpy as np

from gdp.base.units import format_bytes
from gdp.methods.base import Candidate
from gdp.placement.placement import Placement
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.sim.objectives import Score


@dataclass(frozen=True, eq=False)
class Simulated:
    """A placement with its score."""

    placement: Placement
    score: Score
    exchanged: float | None  # share of the latency that collectives take; None: none are needed
    seconds: float  # that the simulation took

    @property
    def rank(self) -> tuple[int, float]:
        """Plans that fit first, the fastest first."""
        return self.score.overflow_bytes, self.score.value_s

    def candidate(self, name: str) -> Candidate:
        """Its row."""
        score = self.score
        reason = "" if score.feasible else f"{format_bytes(score.overflow_bytes)} over memory"
        return Candidate(
            name, score.latency_s, score.period_s, score.value_s, score.feasible, self.seconds,
            reason,
        )  # fmt: skip


def simulated(question: Question, placement: Placement) -> Simulated:
    """A placement of a question with its score; `ModelError` where a split has no whole piece."""
    started_s = time.perf_counter()
    predicted = prepare_placement(question, placement)
    score, problem, exchanged = predicted.score(), predicted.problem, None
    if problem.origin.exchange_s is not None and score.latency_s:
        where = predicted.assignment.device
        exchange_s = problem.origin.exchange_s[np.arange(problem.num_ops), where]
        exchanged = float((exchange_s * problem.graph.repeats).sum()) / score.latency_s
    return Simulated(placement, score, exchanged, time.perf_counter() - started_s)
