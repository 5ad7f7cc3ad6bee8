"""Parts that the baselines share: nodes, the judge, units.

Axes: N ops, M nodes, K placements, D devices.
"""

import functools
import time
from dataclasses import dataclass

import numpy as np

from gdp.base.files.disk_cache import use_xla_cache
from gdp.learn.evaluator import PlacementEvaluator
from gdp.learn.hsdag.network import ColocatedNodes, HsdagConfig, make_nodes
from gdp.methods.base import Assignment
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

RESERVED = 6  # evaluations kept back: what comes close to the best is tried under every rule


@dataclass(frozen=True, eq=False)
class Found:
    """Answer of a baseline, and its cost."""

    assignment: Assignment | None  # None where nothing that fits was met
    value_s: float
    first_s: float  # of the first placement drawn
    evaluations: int
    cpu_s: float  # of this process: compilation included
    best_at: int  # how many had been drawn when it was


def nodes_of(problem: Problem) -> ColocatedNodes:
    """The colocated nodes that all baselines place."""
    return make_nodes(problem, HsdagConfig())


class Arena:
    """One problem with its nodes, its judge and a budget."""

    def __init__(self, problem: Problem, evaluations: int) -> None:
        use_xla_cache()  # seeds share what is compiled
        self.problem, self.budget = problem, evaluations
        self.nodes = nodes_of(problem)
        self.judge = PlacementEvaluator(problem, evaluations)
        self.began_s = time.process_time()
        self.drawn, self.first_s, self.best_at = 0, np.inf, 0

    @property
    def left(self) -> int:
        """Placements that may still be drawn; one drawn twice is judged once, but counts here."""
        return self.budget - RESERVED - max(self.drawn, self.judge.evaluations)

    def seconds(self, node_device: np.ndarray) -> np.ndarray:
        """Seconds [K] of placements of the nodes [K, M]."""
        return self.rate(self.nodes.devices(node_device))

    def rate(self, device: np.ndarray) -> np.ndarray:
        """Seconds [K] of placements of the ops [K, N]."""
        before_s = self.judge.best_s
        cost_s = self.judge.judge(device)
        if self.drawn == 0:
            self.first_s = float(cost_s[0])
        self.drawn += len(cost_s)
        if self.judge.best_s < before_s:
            self.best_at = self.drawn
        return cost_s

    def found(self) -> Found:
        """The best placement that was judged."""
        best_s = self.judge.best_s
        best = self.judge.answer().assignment if np.isfinite(best_s) else None
        spent = time.process_time() - self.began_s
        return Found(best, best_s, self.first_s, self.judge.evaluations, spent, self.best_at)


@functools.lru_cache(maxsize=8)
def one_device_s(problem: Problem) -> float:
    """Seconds of all work on the best device, one op after another: a unit for rewards."""
    return float(compute_s(problem).sum(axis=0).min())


def compute_s(problem: Problem) -> np.ndarray:
    """Seconds [N, D] of every op, dispatch included; where a device may not, its best elsewhere."""
    seconds = np.where(problem.allowed, arrays_of(problem).compute_s, np.inf)
    return np.where(np.isfinite(seconds), seconds, seconds.min(axis=1, keepdims=True))
