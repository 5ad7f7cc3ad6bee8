"""The policy's answers: what was decoded, and no worse after a repair and a search."""

import numpy as np
import pytest
from tiny import random_problem

from gdp.cluster.types import UNLIMITED_BYTES
from gdp.learn.instances import limit_memory
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.priorities import RULES, rank_under
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, score_all
from gdp.policy import method as policy_method
from gdp.policy.advice import advice
from gdp.policy.method import place_with_policy, policy_methods
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
def test_an_answer_is_no_worse_than_what_was_decoded_or_read(seed: int, objective: str) -> None:
    """And it fits where a placement of any heuristic does."""
    problem = random_problem(seed, objective=objective, num_ops=24, num_devices=2 + seed % 3)
    unlimited = problem.cluster.memory_bytes.min() >= UNLIMITED_BYTES
    if seed % 2 and unlimited:
        problem = limit_memory(problem, 1.2)
    search = Search(seed=seed, seconds=None, evaluations=[None, 1, 40][seed % 3])
    answer = place_with_policy(problem, search)
    decoded = place_with_policy(problem, search, polish=False)
    assert value_s(problem, answer) <= value_s(problem, decoded)
    incumbent = Assignment(advice(problem).device[0])
    read = best_priority_rule(problem, best_of(problem, [incumbent]))
    assert read.overflow_bytes > 0 or value_s(problem, answer) <= read.value_s
    others = (method(problem, Search(seconds=None)) for _, method in HEURISTICS)
    fits = any(other.assignment is not None for other in others)
    assert (answer.assignment is not None) == fits


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(4))
def test_without_search_the_answer_is_what_was_decoded(
    seed: int, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a repair nor a search follows; the greedy placement is one of the 17."""
    problem = random_problem(seed, objective=objective, num_ops=24, num_devices=3)
    for name in ("repair", "_polished"):
        monkeypatch.setattr(policy_method, name, None)
    search, found = Search(seed=seed, seconds=None), {}
    for samples in (0, 16):
        answer = place_with_policy(problem, search, samples=samples, polish=False)
        found[samples] = value_s(problem, answer)
        assert ("best of 17 " in answer.reason) == (samples == 16)
    assert found[16] <= found[0]


@pytest.mark.slow
def test_decodes_without_search_are_methods_that_say_what_was_decoded() -> None:
    """One greedy placement costs fewer evaluations than 17, these fewer than the whole answer."""
    methods, spent = policy_methods(), {}
    for seed in range(1, 4):
        for name, method in methods.items():
            problem = random_problem(seed, num_ops=24, num_devices=3)
            answer = method(problem, Search(seed=seed, seconds=None))
            spent.setdefault(name, []).append(answer.evaluations)
            assert "greedy " in answer.reason
    assert list(spent) == ["policy", "policy_greedy", "policy_samples"]
    for whole, greedy, samples in zip(*spent.values(), strict=True):
        assert greedy < samples < whole


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
