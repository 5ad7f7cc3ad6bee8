"""A placed problem, and what it predicts."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.costs.base import CostModel
from gdp.placement import Teams
from gdp.problem.problem import Problem
from gdp.sim.objectives import Score


class Prediction(NamedTuple):
    """A placed problem over fused ops, which predicts times, and the fused op of every op.

    Axes: M fused ops, N ops of the model.
    """

    problem: Problem
    device: Int[np.ndarray, "M"]
    group_of: Int[np.ndarray, "N"]
    teams: Teams = ()  # of the stages that several devices serve in turn
    rank: Int[np.ndarray, "M"] | None = None  # None: first ready first
    costs: str = ""  # which cost model, and why it
    model: CostModel | None = None  # that the label `costs` is of

    def score(self) -> Score:
        """Times and memory of the placement."""
        from gdp.sim.score import score

        return score(self.problem, self.device, self.rank, self.teams)
