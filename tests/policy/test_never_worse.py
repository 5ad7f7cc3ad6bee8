"""The policy's answer is never worse than any heuristic's, whatever the instance and the seed."""

import numpy as np
import pytest
from tiny import random_problem

from gdp.cluster.types import UNLIMITED_BYTES
from gdp.learn.instances import limit_memory
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.priorities import RULES, rank_under
from gdp.methods.scoring import Evaluated, best_priority_rule, score_all
from gdp.policy.method import place_with_policy
from gdp.policy.policy import default_checkpoint
from gdp.problem.problem import Problem
from gdp.sim.score import values

pytestmark = pytest.mark.skipif(
    not (default_checkpoint() / "meta.json").exists(), reason="no policy is shipped"
)


def value_s(problem: Problem, answer: Answer) -> float:
    """Seconds of an answer as it is given; inf where it has no placement."""
    if answer.assignment is None:
        return np.inf
    seconds, overflow = values(problem, answer.assignment.device[None], answer.assignment.rank)
    assert overflow[0] == 0
    return float(seconds[0])


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(6))
def test_no_heuristic_is_better_than_the_policy(seed: int, objective: str) -> None:
    problem = random_problem(seed, objective=objective, num_ops=24, num_devices=2 + seed % 3)
    unlimited = problem.cluster.memory_bytes.min() >= UNLIMITED_BYTES
    if seed % 2 and unlimited:
        problem = limit_memory(problem, 1.2)
    budget = [None, 1, 40][seed % 3]
    answer = place_with_policy(problem, None, Search(seed=seed, seconds=None, evaluations=budget))
    found_s = value_s(problem, answer)
    for name, method in HEURISTICS:
        assert found_s <= value_s(problem, method(problem, Search(seconds=None))), name


def test_own_ranks_stay_in_the_running() -> None:
    """Ranks that no rule makes, and that are better than all rules, are kept; others are not."""
    kept = 0
    for seed in range(12):
        problem = random_problem(seed, num_ops=20, num_devices=3)
        rng = np.random.default_rng(seed)
        device = rng.integers(3, size=(1, 20))
        device = np.where(problem.allowed[np.arange(20), device[0]], device, problem.cluster.host)
        rows = [rng.permutation(20) for _ in range(1 + seed % 2 * 40)]
        own = min(score_all(problem, [Assignment(device[0], rank) for rank in rows]))
        rated = best_priority_rule(problem, own)
        by_rule: list[Evaluated] = score_all(
            problem, [Assignment(device[0], rank_under(problem, device[0], r)) for r in RULES]
        )
        assert rated.key == min(own.key, *(entry.key for entry in by_rule))
        kept += rated.assignment is own.assignment
    assert 0 < kept < 12
