"""The published baselines: their parts by hand; GDP as published learns on a toy."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import cpu, fork_join, plain_graph, unit_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.baselines import expert
from benchmarks.published.baselines.common import Arena
from benchmarks.published.baselines.gdp_one import RECIPE, ByIndex, blind, gdp_batch, gdp_one
from gdp.cluster.types import make_cluster
from gdp.learn.recipe import load_recipe
from gdp.policy.decode import decode
from gdp.policy.model.config import score
from gdp.policy.model.network import init
from gdp.problem.problem import Problem, make_problem

pytestmark = pytest.mark.usefixtures("few_shapes")


def favoured() -> Problem:
    """Eight ops in two rows with crossing edges; the even run in 1 s on d0 and 9 s on d1, the odd
    the other way round; tensors are empty, so that nothing is lost by sending.

    Every op where it is fast: four levels of 1 s, 4 s, which is the longest path at best.
    """
    edges = [(i, j) for i in range(6) for j in (2 * (i // 2) + 2, 2 * (i // 2) + 3)]
    compute_s = np.array([[1.0, 9.0], [9.0, 1.0]] * 4)
    return make_problem(plain_graph(8, edges, 0), unit_cluster(2), compute_s)


@pytest.mark.slow
def test_gdp_as_published_improves_within_its_budget_and_repeats() -> None:
    first, again = (gdp_one(favoured(), 60, 1) for _ in range(2))
    assert first.value_s < first.first_s
    assert (first.evaluations, first.best_at) == (again.evaluations, again.best_at)
    assert first.evaluations <= 60
    assert 3 <= first.best_at <= 54
    assert first.value_s == again.value_s


def test_gdp_as_published_decides_in_one_shot() -> None:
    """With the blind weights a choice has the same odds whatever the ops before have chosen."""
    problem, network = favoured(), load_recipe(RECIPE)[0].network
    forced = np.stack([np.zeros(problem.num_ops, np.int64), np.ones(problem.num_ops, np.int64)])
    last = 7  # reads two ops that the rows place apart
    forced[:, last] = 0
    odds = []
    for blinded in (False, True):
        params = init(network, 0)
        policy = ByIndex(network, blind(params) if blinded else params)
        rollout = decode(
            policy.view(problem), policy.head(problem), samples=2, seed=0, forced=forced,
            keep=(problem.num_ops, problem.num_devices),
        )  # fmt: skip
        odds.append(score(policy.head(problem), rollout.feats)[:, last])
    assert not np.allclose(odds[0][0], odds[0][1])
    np.testing.assert_array_equal(odds[1][0], odds[1][1])


@pytest.mark.slow
def test_gdp_batch_learns_from_all_problems_in_turn_within_each_budget() -> None:
    alone = gdp_one(favoured(), 120, 1)
    (only,) = gdp_batch([favoured()], 120, 1)
    assert (only.value_s, only.evaluations) == (alone.value_s, alone.evaluations)
    first, other = gdp_batch([favoured(), fork_join()], 120, 1)
    assert first.value_s < first.first_s
    assert max(first.evaluations, other.evaluations) <= 120
    assert first.evaluations != alone.evaluations  # the other problem's updates are between
    assert other.value_s <= 7.0  # of the best single device


def test_the_expert_gives_each_layer_of_a_recurrent_model_a_device() -> None:
    """Scopes lstm0 and lstm1, what has none with the layer before; two fast devices, one slow."""
    graph = plain_graph(5, [(i, i + 1) for i in range(4)], 0,
                        scope=["lstm0/a", "", "lstm1/a", "lstm1/b", "head"])  # fmt: skip
    devices = [cpu("slow"), cpu("g0"), cpu("g1")]
    cluster = make_cluster("c", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    object.__setattr__(cluster.devices[1], "kind", "gpu")
    object.__setattr__(cluster.devices[2], "kind", "gpu")
    problem = make_problem(graph, cluster, np.array([[5.0, 1.0, 1.0]] * 5))
    assert expert.layers(problem).tolist() == [0, 0, 1, 1, 1]
    for family, expected in (
        ("recurrent", [1, 1, 2, 2, 2]), ("transformer", [1, 1, 2, 2, 2]),
        ("convolutional", [1] * 5),
    ):  # fmt: skip
        found = expert.expert(problem, family)
        assert found.assignment is not None
        nodes = Arena(problem, 10).nodes.node_of
        assert (found.assignment.device == np.array(expected)[[np.flatnonzero(nodes == g)[0]
                                                              for g in nodes]]).all()  # fmt: skip
    assert expert.only_on(problem, 0).value_s == 25.0
