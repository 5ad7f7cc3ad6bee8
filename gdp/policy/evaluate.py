"""Values of placements under any objective, with the policy's priorities."""

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.policy.decode import priority
from gdp.sim.problem import Problem


def evaluate(
    problem: Problem, devices: Int[np.ndarray, "B N"]
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """(seconds of the objective, bytes over device memory) of each placement."""
    from gdp.sim import block_latency, max_load, score

    if problem.objective == "max_load":
        return max_load.values(problem, devices)
    if problem.objective == "block_latency":
        return block_latency.values(problem, devices)
    return score.values(problem, devices, priority(problem))


OVERFLOW_WEIGHT = 4.0
"""A placement that overflows by its whole memory counts as five times as slow."""


def judge(
    problem: Problem, devices: Int[np.ndarray, "K N"]
) -> tuple[Float[np.ndarray, "K"], Bool[np.ndarray, "K"]]:
    """(cost in seconds, feasible) of placements: the value, raised where memory overflows."""
    value_s, overflow = evaluate(problem, devices)
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).sum())
    return value_s * (1.0 + OVERFLOW_WEIGHT * overflow / capacity), overflow == 0


def best_row(seconds: Float[np.ndarray, "B"], overflow: Int[np.ndarray, "B"]) -> int:
    """The row that overflows least, and of those the fastest.

    >>> best_row(np.array([1.0, 3.0, 2.0]), np.array([8, 0, 0]))
    2
    """
    return int(np.lexsort((seconds, overflow))[0])
