"""A placed problem, which predicts times."""

from typing import NamedTuple

from gdp.placement.placement import Assignment
from gdp.problem.problem import Problem
from gdp.sim.score import Score, score_of


class Prediction(NamedTuple):
    """A placed problem, which predicts times."""

    problem: Problem
    assignment: Assignment

    def score(self) -> Score:
        """Times and memory of the placement."""
        return score_of(self.problem, self.assignment)
