"""Exploration in the gates: what is tried is what is kept, and the best of it wins."""

import numpy as np
import pytest
from tiny import random_problem

from gdp.learn.finetune import ELITE, LAYERS, Explorer, FinetuneConfig, finetune, fold, scaled
from gdp.learn.instances import Instance, make, random_graph
from gdp.policy.decode import decode
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3), "fresh")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(5, num_ops=30, num_devices=3)


def test_a_scaled_head_is_what_the_scaled_weights_encode(policy: Policy, problem: Problem) -> None:
    rng = np.random.default_rng(0)
    head = policy.head(problem)
    factor = {name: rng.normal(size=len(getattr(head, name))) for name in LAYERS}
    moved = Policy(CONFIG, fold(policy.params, factor)).head(problem)
    assert not np.allclose(moved.feature, head.feature)
    for a, b in zip(scaled(head, factor), moved, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_first_policy_tried_is_the_one_given(policy: Policy, problem: Problem) -> None:
    view, head = policy.view(problem), policy.head(problem)
    drawn = Explorer(policy.params, 0).draw(view, head, 3)
    greedy = decode(view, head, samples=1, seed=0, greedy_first=True).device[0]
    np.testing.assert_array_equal(drawn[0], greedy)


def test_the_best_policies_are_kept_and_adapted_places_as_the_best(
    policy: Policy, problem: Problem
) -> None:
    view, head = policy.view(problem), policy.head(problem)
    explorer = Explorer(policy.params, 0)
    rng = np.random.default_rng(1)
    placed: dict[float, np.ndarray] = {}
    for _ in range(3):
        drawn = explorer.draw(view, head, 6)
        cost_s = rng.random(6)
        placed |= dict(zip(cost_s.tolist(), drawn, strict=True))
        explorer.learn(cost_s)
    assert [rated.cost_s for rated in explorer.elite] == sorted(placed)[:ELITE]
    adapted = Policy(CONFIG, explorer.adapted())
    found = decode(view, adapted.head(problem), samples=1, seed=0, greedy_first=True)
    np.testing.assert_array_equal(found.device[0], placed[min(placed)])


def test_equal_costs_are_one_policy(policy: Policy, problem: Problem) -> None:
    explorer = Explorer(policy.params, 0)
    explorer.draw(policy.view(problem), policy.head(problem), 4)
    explorer.learn(np.array([2.0, 1.0, 1.0, 2.0]))
    assert [rated.cost_s for rated in explorer.elite] == [1.0, 2.0]
    assert explorer.elite[1].factor is explorer.drawn[0]


def test_exploring_lowers_the_best_and_stays_within_its_share(policy: Policy) -> None:
    problem = make(Instance(graph="layered-60-3", cluster=5), random_graph)
    config = FinetuneConfig(
        updates=50, evaluations=200, samples=8, explore=0.5, search=0.0, portfolio=False
    )
    found = finetune(problem, policy, config=config, seed=1)
    explored = [numbers for numbers in found.history if "explore" in numbers]
    best = [numbers["best_s"] for numbers in explored]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
    assert explored[-2]["evaluations"] < 100
    assert found.value_s <= best[-1]
    assert found.evaluations <= 200


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"explore and search .* got 0.7 and 0.4"):
        FinetuneConfig(explore=0.7, search=0.4)
