"""Evaluated placements of one problem: the cost of each, and the best of them.

The simulator evaluates; repeated placements cost nothing.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.base import Assignment
from gdp.methods.priorities import (
    RULES,
    RatedPlacements,
    Rule,
    evaluate_rules,
    rank_under,
    rules_of,
)
from gdp.methods.scoring import Evaluated
from gdp.policy.advice import cost
from gdp.problem.problem import Problem

NEAR = 1.01
"""A placement this close to the best is tried under all priority rules."""


class PlacementEvaluator:
    """Costs of placements, each computed once, within a budget of evaluations."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.best = np.zeros(problem.num_ops, dtype=np.int64)
        self.best_s = np.inf
        self.rule: Rule = RULES[0]  # of priority, the best placement's
        self.evaluations = 0
        self.known: dict[bytes, float] = {}

    @property
    def left(self) -> int:
        """Remaining evaluations of the budget."""
        return max(0, self.budget - self.evaluations)

    def answer(self) -> Evaluated:
        """The best placement so far, with its priorities and all evaluations; seconds are inf where
        nothing that fits was met."""
        best = Assignment(self.best, rank_under(self.problem, self.best, self.rule))
        return Evaluated(best, 0, self.best_s, self.evaluations)

    def judge(
        self, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...] = ()
    ) -> Float[np.ndarray, "K"]:
        """Seconds of each placement; remembers the best that fits in memory.

        Under the best placement's priority rule; those close to the best also under all others.
        """
        keys = [device.tobytes() for device in devices]
        new = list({key: k for k, key in enumerate(keys) if key not in self.known}.values())
        if new:
            rated = self._rate(devices[new], rules or (self.rule,))
            for key, seconds in zip([keys[k] for k in new], rated, strict=True):
                self.known[key] = float(seconds)
        return np.array([self.known[key] for key in keys])

    def _rate(
        self, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...]
    ) -> Float[np.ndarray, "K"]:
        """Costs of placements not seen before."""
        rated = evaluate_rules(self.problem, devices, rules)
        self.evaluations += rated.evaluations
        cost_s = cost(self.problem, rated)
        self._keep(rated, cost_s)
        row = rated.best
        others: tuple[Rule, ...] = tuple(r for r in rules_of(self.problem) if r not in rules)
        if others and cost_s[row] < NEAR * self.best_s:
            again = evaluate_rules(self.problem, devices[[row]], others)
            self.evaluations += again.evaluations
            self._keep(again, cost(self.problem, again))
            cost_s[row] = min(cost_s[row], cost(self.problem, again)[0])
        return cost_s

    def _keep(self, rated: RatedPlacements, cost_s: Float[np.ndarray, "K"]) -> None:
        """Update the best feasible placement."""
        key = np.where(rated.overflow == 0, cost_s, np.inf)
        row = int(np.argmin(key))
        if key[row] < self.best_s:
            self.best, self.best_s = rated.device[row].copy(), float(key[row])
            self.rule = RULES[int(rated.rule[row])]
