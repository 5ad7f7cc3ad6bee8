"""Value and memory of placements, by the problem's objective.

For `max_load` and `block_latency`, which have evaluators of their own, the period of a score is the
largest load, its latency that of blocks, and its memory that of the weights.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.placement import Teams
from gdp.problem.problem import Problem
from gdp.sim.objectives import Score as Score
from gdp.sim.objectives import objective_of


def score(
    problem: Problem,
    device: Int[np.ndarray, "N"],
    rank: Int[np.ndarray, "N"] | None = None,
    teams: Teams = (),
) -> Score:
    """The score of one placement. Memory is of one run, or of a full pipeline for throughput.

    Stages of `teams` are replicated: see `gdp.sim.replicas`.
    """
    if teams:
        from gdp.sim.replicas import replicated_score

        return replicated_score(problem, device, rank, teams)
    return objective_of(problem).score(problem, device, rank)


def values(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "N"] | Int[np.ndarray, "B N"] | None = None,
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Seconds of the problem's objective and overflow in bytes, for each placement."""
    return objective_of(problem).values(problem, devices, ranks)
