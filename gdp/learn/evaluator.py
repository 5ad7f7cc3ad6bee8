"""Evaluated placements of one problem: the cost of each, and the best of them.

The simulator evaluates, or a reward function: a measured run. Repeated placements cost nothing. As
the lowest of many noisy measurements is low partly by luck, the best few are measured again.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.base import Assignment
from gdp.methods.priorities import RULES, BestRules, Rule, evaluate_rules, rank_under, rules_of
from gdp.policy.advice import cost
from gdp.problem.problem import Problem

Reward = Callable[[Assignment], float]
"""Seconds of one placement; inf where it does not run."""

NEAR = 1.01
"""A placement this close to the best is tried under all priority rules."""

FINALISTS = 4  # measured again
TURNS = 5  # at most
SHARE = 0.2  # of the measured runs, at most


class PlacementEvaluator:
    """Costs of placements, each computed once, within a budget of evaluations."""

    def __init__(self, problem: Problem, budget: int, reward: Reward | None = None) -> None:
        self.problem, self.budget, self.reward = problem, budget, reward
        self.best = np.zeros(problem.num_ops, dtype=np.int64)
        self.best_s = np.inf
        self.rule: Rule = RULES[0]  # of priority, the best placement's
        self.evaluations = 0
        self.known: dict[bytes, float] = {}
        self.finalists: list[tuple[float, int, Assignment]] = []  # best first, of measured runs
        self.simulated: tuple[float, Assignment] | None = None  # the fastest by the simulator

    @property
    def left(self) -> int:
        """Remaining evaluations of the budget."""
        return max(0, self.budget - self.evaluations)

    @property
    def reserved(self) -> int:
        """Evaluations reserved for measuring the finalists again."""
        return 0 if self.reward is None else FINALISTS * turns_of(self.budget)

    def answer(self) -> Assignment:
        """The best placement so far, with its priorities."""
        return Assignment(self.best, rank_under(self.problem, self.best, self.rule))

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

    def confirmed(self) -> tuple[Assignment, float]:
        """(best of the finalists by repeated measurement, its seconds).

        The fastest placement by the simulator is among them, as no lucky measurement selected it.
        """
        finalists = [assignment for _, _, assignment in self.finalists]
        if self.simulated is not None and all(row is not self.simulated[1] for row in finalists):
            finalists = [*finalists[: FINALISTS - 1], self.simulated[1]]
        turns = min(turns_of(self.budget), self.left // max(1, len(finalists)))
        if self.reward is None or len(finalists) < 2 or turns < 1:
            return self.answer(), self.best_s
        self.evaluations += turns * len(finalists)
        row, seconds = confirm(finalists, self.reward, turns)
        return finalists[row], seconds

    def _rate(
        self, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...]
    ) -> Float[np.ndarray, "K"]:
        """Costs of placements not seen before."""
        if self.reward is not None:
            return np.array([self._measured(device, self.reward) for device in devices])
        rated = evaluate_rules(self.problem, devices, rules)
        self.evaluations += rated.evaluations
        cost_s = cost(self.problem, rated)
        self._keep(devices, cost_s, rated)
        row = int(np.lexsort((rated.seconds, rated.overflow))[0])
        others: tuple[Rule, ...] = tuple(r for r in rules_of(self.problem) if r not in rules)
        if others and cost_s[row] < NEAR * self.best_s:
            again = evaluate_rules(self.problem, devices[[row]], others)
            self.evaluations += again.evaluations
            self._keep(devices[[row]], cost(self.problem, again), again)
            cost_s[row] = min(cost_s[row], cost(self.problem, again)[0])
        return cost_s

    def _keep(
        self, devices: Int[np.ndarray, "K N"], cost_s: Float[np.ndarray, "K"], rated: BestRules
    ) -> None:
        """Update the best feasible placement."""
        key = np.where(rated.overflow == 0, cost_s, np.inf)
        row = int(np.argmin(key))
        if key[row] < self.best_s:
            self.best, self.best_s = devices[row].copy(), float(key[row])
            self.rule = RULES[int(rated.rule[row])]

    def _measured(self, device: Int[np.ndarray, "N"], reward: Reward) -> float:
        """Measured seconds of one placement, under the rule that the simulator prefers."""
        rated = evaluate_rules(self.problem, device[None])
        rule = RULES[int(rated.rule[0])]
        self.evaluations += 1
        run = Assignment(device.copy(), rank_under(self.problem, device, rule))
        seconds = reward(run)
        if rated.overflow[0] == 0 and np.isfinite(seconds):
            self.finalists = sorted([*self.finalists, (seconds, self.evaluations, run)])
            self.finalists = self.finalists[:FINALISTS]
            if self.simulated is None or rated.seconds[0] < self.simulated[0]:
                self.simulated = (float(rated.seconds[0]), run)
            if seconds < self.best_s:
                self.best, self.best_s, self.rule = run.device, seconds, rule
        return seconds


def turns_of(evaluations: int) -> int:
    """Repetitions of each finalist out of so many measured runs; may be 0."""
    return min(TURNS, int(SHARE * evaluations) // FINALISTS)


def confirm(
    finalists: Sequence[Assignment], reward: Callable[[Assignment], float], turns: int
) -> tuple[int, float]:
    """(index of the best finalist, its seconds): medians over `turns` new measurements of each."""
    # In turns: what disturbs the machine for a while disturbs all of them.
    seconds = np.array([[reward(finalist) for finalist in finalists] for _ in range(turns)])
    middle = np.median(seconds, axis=0)
    best = int(np.argmin(middle))
    return best, float(middle[best])
