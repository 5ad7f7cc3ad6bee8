"""The decoder: masks, groups, symmetry, and agreement of the kernel with the network."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import fork_join, plain_graph, random_problem, unit_cluster

from gdp.costs.base import roofline
from gdp.learn.recipe import load_recipe
from gdp.methods.priorities import timing
from gdp.policy.decode import decode, prepare
from gdp.policy.model.config import Head, NetworkConfig, score
from gdp.policy.model.network import encode, init
from gdp.policy.policy import Policy
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES, PAIR
from gdp.problem.problem import Problem, make_problem
from gdp.problem.symmetry import canonical, twins
from gdp.sim.score import score as simulated

PUBLISHED = load_recipe("pretrain/recipes/gdp_one.toml")[0].network
CONFIG = NetworkConfig(width=16, heads=2, sage_layers=1, head_width=8, segment=64)


@pytest.fixture(scope="module")
def policy() -> Policy:
    params = init(CONFIG, 0)
    # The last layer starts near zero; with a larger one choices differ and tests can fail.
    return Policy(CONFIG, jax.tree.map(lambda x: 1.5 * x, params))


def plain_head(problem: Problem, weight_of_feature: dict[int, float]) -> Head:
    """logit = sum of weight * relu(feature): a head that reads single features."""
    n, d, f = problem.num_ops, problem.num_devices, NUM_PAIR_FEATURES
    w = max(len(weight_of_feature), 1)
    feature = np.zeros((f, w), np.float32)
    out = np.zeros(w, np.float32)
    for k, (index, weight) in enumerate(weight_of_feature.items()):
        feature[index, k], out[k] = 1.0, weight
    zero = np.zeros
    return Head(
        zero((n, w), np.float32), zero((d, w), np.float32), feature,
        np.eye(w, dtype=np.float32), zero(w, np.float32), out,
    )  # fmt: skip


EARLIEST_FINISH = {PAIR.end: -100.0}


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, replace(PUBLISHED, width=16, heads=2, head_width=8)])
def test_kernel_network_and_numpy_give_the_same_log_probabilities(config: NetworkConfig) -> None:
    """The three scorers of a pair: numba in the decoder, JAX in training, NumPy in the search."""
    policy = Policy(config, jax.tree.map(lambda x: 1.5 * x, init(config, 0)))
    for seed in range(4):
        problem = random_problem(seed, num_ops=40, num_devices=4)
        batch = policy.batch(problem)
        drawn = decode(
            policy.view(problem), policy.head(problem), samples=3, seed=seed, keep=batch.size
        )
        padded = encode(config, policy.params, batch)
        scored = score(padded, jnp.asarray(drawn.feats), jax.nn.relu)
        n, d = problem.num_ops, problem.num_devices
        plain = score(policy.head(problem), drawn.feats[:, :n, :d])
        np.testing.assert_allclose(plain, scored[:, :n, :d], rtol=1e-4, atol=1e-4)
        logp = jax.nn.log_softmax(jnp.where(drawn.legal, scored, -1e9), axis=-1)
        action = np.zeros((3, batch.size[0]), dtype=np.int64)
        action[:, : problem.num_ops] = drawn.device
        chosen = jnp.take_along_axis(logp, jnp.asarray(action)[..., None], axis=-1)[..., 0]
        total = np.asarray((chosen * drawn.taken).sum(axis=1))
        np.testing.assert_allclose(total, drawn.log_probability, rtol=1e-4, atol=1e-4)


def test_same_seed_same_placements_in_any_number_of_threads(policy: Policy) -> None:
    problem = random_problem(3, num_ops=40, num_devices=4)
    view, head = policy.view(problem), policy.head(problem)
    one, two = (decode(view, head, samples=6, seed=5, threads=t).device for t in (1, 3))
    assert (one == two).all()


def test_placements_respect_constraints_and_groups(policy: Policy) -> None:
    for seed in range(3):
        problem = random_problem(seed, num_ops=40, num_devices=3)
        drawn = decode(policy.view(problem), policy.head(problem), samples=8, seed=seed).device
        for device in drawn:
            assert problem.allowed[np.arange(problem.num_ops), device].all()
            for group in range(problem.num_groups):
                assert len(set(device[problem.group == group])) == 1


def test_earliest_finish_splits_independent_work() -> None:
    """Two ops of 4 s without edges: the second finishes at 4 s on the empty device, at 8 s behind
    the first."""
    graph = plain_graph(2, [], flop=[4.0, 4.0])
    cluster = unit_cluster(2)
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    drawn = decode(
        prepare(problem), plain_head(problem, EARLIEST_FINISH), samples=1, seed=0, greedy_first=True
    )
    assert sorted(drawn.device[0].tolist()) == [0, 1]


def test_earliest_finish_keeps_fork_join_together() -> None:
    """Every tensor takes 1 s plus a latency of 10 s, so no op finishes earlier elsewhere."""
    problem = fork_join(latency_s=10.0)
    drawn = decode(
        prepare(problem), plain_head(problem, EARLIEST_FINISH), samples=1, seed=0, greedy_first=True
    )
    assert len(set(drawn.device[0].tolist())) == 1


def test_full_devices_are_masked() -> None:
    """Two ops with 6 bytes of weights each, 10 bytes a device: never together, though one is idle
    and the head wants everything on the device with the higher load."""
    graph = plain_graph(2, [(0, 1)], 1, flop=[1.0, 1.0], weight_bytes=[6, 6])
    cluster = unit_cluster(2, memory_bytes=10)
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    head = plain_head(problem, {PAIR.fair_load: 100.0})
    masked = decode(prepare(problem), head, samples=4, seed=0).device
    assert (masked[:, 0] != masked[:, 1]).all()
    assert all(simulated(problem, device).feasible for device in masked)
    free = decode(prepare(problem, mask_memory=False), head, samples=4, seed=0).device
    assert (free[:, 0] == free[:, 1]).all()


def test_forced_ops_go_where_they_are_told(policy: Policy) -> None:
    problem = random_problem(2, num_ops=30, num_devices=3)
    wanted = decode(policy.view(problem), policy.head(problem), samples=2, seed=9).device
    again = decode(policy.view(problem), policy.head(problem), samples=3, seed=1, forced=wanted)
    assert (again.device[1:] == wanted).all()


def test_twins_are_devices_that_can_be_exchanged() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)], flop=[1.0, 2.0, 3.0])
    cluster = unit_cluster(4)
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    assert twins(problem).tolist() == [-1, 0, 1, 2]
    bandwidth = np.array(cluster.link_bytes_per_s)
    bandwidth[0, 1] = bandwidth[1, 0] = 2.0  # 0 and 1 are close; 2 and 3 are alike
    other = replace(cluster, link_bytes_per_s=bandwidth)
    problem = make_problem(graph, other, roofline(graph, other))
    assert twins(problem).tolist() == [-1, 0, -1, 2]


def test_canonical_renames_by_first_use_and_keeps_the_score() -> None:
    graph = plain_graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)], flop=[1.0, 2.0, 3.0, 1.0])
    cluster = unit_cluster(3)
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    device = np.array([2, 1, 2, 0])
    renamed = canonical(problem, device, timing(problem).order)
    assert renamed.tolist() == [0, 1, 0, 2]
    assert simulated(problem, renamed).latency_s == simulated(problem, device).latency_s


def test_empty_devices_that_are_alike_are_tried_in_order(policy: Policy) -> None:
    graph = plain_graph(12, [(i, i + 1) for i in range(11)], flop=[float(k) for k in range(1, 13)])
    cluster = unit_cluster(4)
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    drawn = decode(policy.view(problem), policy.head(problem), samples=16, seed=0).device
    for device in drawn:
        assert (canonical(problem, device, timing(problem).order) == device).all()
