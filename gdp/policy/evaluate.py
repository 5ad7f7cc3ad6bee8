"""Objective values of placements, each under its best priority rule.

Axes: K placements, N ops.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.methods.base import Assignment
from gdp.methods.priorities import RULES, BestRules, Rule, evaluate_rules, rank_under
from gdp.problem.problem import Problem


def evaluate(
    problem: Problem, devices: Int[np.ndarray, "K N"]
) -> tuple[Float[np.ndarray, "K"], Int[np.ndarray, "K"]]:
    """(seconds of the objective, bytes over device memory) of each placement."""
    rated = evaluate_rules(problem, devices)
    return rated.seconds, rated.overflow


def assignment(problem: Problem, device: Int[np.ndarray, "N"]) -> Assignment:
    """An assignment of devices with the best priority rule."""
    rule = RULES[int(evaluate_rules(problem, device[None]).rule[0])]
    return Assignment(device, rank_under(problem, device, rule))


OVERFLOW_WEIGHT = 4.0
"""A placement that overflows by its whole memory counts as five times as slow."""


def judge(
    problem: Problem, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...] | None = None
) -> tuple[Float[np.ndarray, "K"], Bool[np.ndarray, "K"]]:
    """(cost in seconds, fits in memory?) of placements; overflow raises the cost."""
    rated = evaluate_rules(problem, devices, rules)
    return cost(problem, rated), rated.overflow == 0


def cost(problem: Problem, rated: BestRules) -> Float[np.ndarray, "K"]:
    """Seconds of the objective, raised by memory overflow."""
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).sum())
    return rated.seconds * (1.0 + OVERFLOW_WEIGHT * rated.overflow / capacity)


def best_row(seconds: Float[np.ndarray, "B"], overflow: Int[np.ndarray, "B"]) -> int:
    """Row with the least overflow, then the fewest seconds.

    >>> best_row(np.array([1.0, 3.0, 2.0]), np.array([8, 0, 0]))
    2
    """
    return int(np.lexsort((seconds, overflow))[0])
