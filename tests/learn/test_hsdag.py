"""HSDAG: its features by hand, its loss by hand, and that it learns and repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import brute_force_s, plain_graph, random_problem, unit_cluster

from gdp.learn.evaluator import PlacementEvaluator
from gdp.learn.hsdag.network import (
    NUM_FEATURES,
    SHAPE,
    HsdagConfig,
    HsdagNetwork,
    Parsing,
    colocated,
    fractal_dimension,
    init,
    make_nodes,
    published,
    run,
    sinusoids,
    view_of,
)
from gdp.learn.hsdag.train import (
    Learner,
    episode_loss,
    hsdag,
    legal_of,
    parse_state,
    policy_loss,
    pretrain,
    train,
)
from gdp.methods.base import Search
from gdp.problem.problem import Problem, make_problem

SMALL = HsdagConfig(width=8, rate=3e-3, entropy=0.01)


def two_chains() -> Problem:
    """Two chains of three ops of 2 s and a common end of 1 s; a byte takes 1 s to send."""
    graph = plain_graph(7, [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)])
    compute_s = np.repeat([[2.0]] * 6 + [[1.0]], 2, axis=1)
    return make_problem(graph, unit_cluster(2), compute_s)


def four_chains() -> Problem:
    """Four chains of three ops of 2 s and a common end of 1 s; 14 s on two devices.

    The device without the end must send its last result: with six ops of the chains on each, 12 +
    1 + 1; with seven on the end's device, 14 + 1; with seven on the other, 14 + 1 + 1.
    """
    inside = [(3 * c + i, 3 * c + i + 1) for c in range(4) for i in range(2)]
    graph = plain_graph(13, inside + [(3 * c + 2, 12) for c in range(4)])
    compute_s = np.repeat([[2.0]] * 12 + [[1.0]], 2, axis=1)
    return make_problem(graph, unit_cluster(2), compute_s)


def grid(side: int) -> tuple[np.ndarray, np.ndarray]:
    """The edges of a square grid."""
    at = np.arange(side * side).reshape(side, side)
    src = np.concatenate([at[:, :-1].ravel(), at[:-1].ravel()])
    return src, np.concatenate([at[:, 1:].ravel(), at[1:].ravel()])


def test_chains_of_only_children_are_one_node() -> None:
    """The two chains and the end: three nodes."""
    assert colocated(two_chains()).tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_ops_that_may_go_to_different_devices_are_not_joined() -> None:
    allowed = np.ones((7, 2), dtype=bool)
    allowed[1, 0] = False
    problem = two_chains()
    pinned = make_problem(problem.graph, problem.cluster, problem.compute_s, allowed=allowed)
    assert colocated(pinned).tolist() == [0, 1, 2, 3, 3, 3, 4]
    tied = make_problem(
        problem.graph, problem.cluster, problem.compute_s, together=np.array([0, 1, 2, 3, 4, 5, 0])
    )
    assert colocated(tied).tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_fractal_dimension_of_a_path_is_one_from_its_end() -> None:
    """N(v, r) = r from the end. In the middle of nine, N = 2r up to r = 4: slope 1 too."""
    slope = fractal_dimension(np.arange(8), np.arange(1, 9), 9)
    np.testing.assert_allclose(slope[[0, 4, 8]], 1.0, atol=1e-12)


def test_fractal_dimension_of_a_grid_by_hand() -> None:
    """From the middle of a 5 x 5 grid 4, 12, 20 and 24 nodes lie within 1, 2, 3 and 4 hops."""
    slope = fractal_dimension(*grid(5), 25)
    x, y = np.log([1, 2, 3, 4]), np.log([4, 12, 20, 24])
    assert slope[12] == pytest.approx(np.polyfit(x, y, 1)[0])
    assert slope[12] > 1.25


def test_a_node_with_one_radius_has_no_dimension() -> None:
    """A pair and a lone node."""
    assert fractal_dimension(np.array([0]), np.array([1]), 3).tolist() == [0.0, 0.0, 0.0]


def test_sinusoids_by_hand() -> None:
    expected = [np.sin(3.0), np.cos(3.0), np.sin(3.0 / 100.0), np.cos(3.0 / 100.0)]
    np.testing.assert_allclose(sinusoids(np.array([3]), 4)[0], expected)


def test_ablations_empty_their_features_and_nothing_else() -> None:
    problem = random_problem(5, num_ops=30)
    whole = make_nodes(problem, HsdagConfig()).feature
    assert whole.shape[1] == NUM_FEATURES
    spans = {"output_shape": slice(64, 64 + SHAPE), "structure": slice(70, 87)}
    spans["node_id"] = slice(87, NUM_FEATURES)
    for name, span in spans.items():
        part = make_nodes(problem, HsdagConfig(**{name: False})).feature
        others = np.ones(NUM_FEATURES, dtype=bool)
        others[span] = False
        assert (part[:, span] == 0).all()
        assert (part[:, others] == whole[:, others]).all()
    assert (whole[:, spans["structure"]] != 0).any()
    assert (whole[:, spans["node_id"]] != 0).any()


def test_the_gradient_of_the_policy_loss_by_hand() -> None:
    """Two groups, two devices, uniform: d loss / d logit = -advantage (1[chosen] - 1/2).

    A third group has one device only, and adds nothing; the entropy is at its peak.
    """
    gradient = jax.jit(jax.grad(policy_loss))
    legal = jnp.array([[True, True], [True, True], [True, False]])
    action = jnp.array([[0, 1, 0]])
    grad = gradient(jnp.zeros((3, 2)), legal, action, jnp.array([2.0]), jnp.array(0.5))
    np.testing.assert_allclose(grad, [[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]], atol=1e-6)
    # Two placements are averaged.
    both = jnp.array([[0, 1, 0], [1, 1, 0]])
    grad = gradient(jnp.zeros((3, 2)), legal, both, jnp.array([2.0, 0.0]), jnp.array(0.0))
    np.testing.assert_allclose(grad, [[-0.5, 0.5], [0.5, -0.5], [0.0, 0.0]], atol=1e-6)


def logits_again(learner: Learner, state: jax.Array, parsing: Parsing) -> jax.Array:
    """What the loss makes of a recorded step."""

    return run(HsdagNetwork.replay, SMALL, learner.params, learner.view, state, parsing)


def test_the_loss_sees_the_groups_and_logits_of_the_episode() -> None:
    """Replayed with unchanged weights, each step's logits are those it was drawn from."""
    problem = random_problem(3, num_ops=30)
    learner = Learner(problem, SMALL, PlacementEvaluator(problem, 100), 1, init(SMALL, 1))
    steps, _ = learner.episode(2)
    state = learner.first()
    for number in range(SMALL.steps):
        parsed = parse_state(SMALL, learner.params, learner.view, state, learner.nodes.count)
        parsing = jax.tree.map(lambda rows, number=number: rows[number], steps.parsing)
        before = jnp.asarray(steps.state[number])
        again = logits_again(learner, before, parsing)
        np.testing.assert_allclose(again, parsed.logits, rtol=1e-4, atol=1e-5)
        state = parsed.next
    assert not np.allclose(steps.state[0], steps.state[1])


def test_scores_of_edges_learn_from_the_reward() -> None:
    """The gradient reaches the layers that score edges."""
    problem = random_problem(3, num_ops=30)
    learner = Learner(problem, SMALL, PlacementEvaluator(problem, 100), 1, init(SMALL, 1))
    steps, devices = learner.episode(2)
    advantage = np.linspace(-1, 1, devices.shape[0] * 2).reshape(-1, 2).astype(np.float32)
    gradient = jax.jit(jax.grad(episode_loss), static_argnums=1)
    grads = gradient(learner.params, SMALL, learner.view, steps, jnp.asarray(advantage))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["edge"][0]))


@pytest.mark.parametrize("connected", [False, True])
def test_parsing_keeps_more_than_one_group(connected: bool) -> None:
    """The two chains and their end are one tree: each stays by itself."""
    problem = two_chains() if connected else random_problem(4, num_ops=60)
    nodes, params = make_nodes(problem, SMALL), init(SMALL, 2)
    view = view_of(nodes, SMALL.max_devices)
    first = run(HsdagNetwork.start, SMALL, params, view)
    parsed = parse_state(SMALL, params, view, first, nodes.count)
    groups = np.unique(parsed.parsing.part[: nodes.count])
    assert (groups == np.arange(len(groups))).all()
    assert len(groups) == 3 if connected else 2 <= len(groups) < nodes.count


def test_a_group_may_go_where_one_of_its_nodes_may() -> None:
    legal = np.array([[True, False], [False, True], [False, True], [False, False]])
    found = legal_of(np.array([0, 0, 1, 3]), legal)
    assert found.tolist() == [[True, True], [False, True], [False, False], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, published(width=8, steps=5, samples=4, rate=3e-3)])
def test_it_learns_the_optimum_of_four_chains(config: HsdagConfig) -> None:
    """From a worse first sample, and its last parsing is not one group."""
    found = train(four_chains(), config, seed=2, evaluations=200)
    assert found.best.value_s == 14.0 < found.first_s
    assert found.groups.max() > 0


@pytest.mark.slow
def test_the_trained_policy_itself_has_learned() -> None:
    """Its most probable placements are better than all it drew at first."""
    problem = random_problem(7, num_ops=40, num_devices=3)
    judge = PlacementEvaluator(problem, 1 << 30)
    learner = Learner(problem, SMALL, judge, 5, init(SMALL, 5))
    first_s = learner.learn()
    for _ in range(20):
        learner.learn()
    assert judge.judge(learner.greedy()).max() < first_s.min()


def test_the_same_seed_and_budget_give_the_same_answer() -> None:
    problem = four_chains()
    first, again, other = (hsdag(problem, Search(seed, None, 120), SMALL) for seed in (1, 1, 2))
    assert first.assignment is not None
    assert again.assignment is not None
    assert (first.assignment.device == again.assignment.device).all()
    assert first.reason == again.reason
    assert first.evaluations == again.evaluations <= 120
    assert first.reason != other.reason


@pytest.mark.slow
def test_pretrained_weights_start_better_on_another_problem() -> None:
    """Two chains, of other lengths: trained on the first, the first placement of the second is
    its most probable one, and the best."""

    def chains(length: int) -> Problem:
        edges = [(i, i + 1) for i in range(2 * length - 1) if i != length - 1]
        ends = [(length - 1, 2 * length), (2 * length - 1, 2 * length)]
        graph = plain_graph(2 * length + 1, edges + ends)
        return make_problem(graph, unit_cluster(2), np.ones((2 * length + 1, 2)))

    params = pretrain([chains(4), chains(5)], SMALL, seed=0, updates=30)
    unseen = chains(3)
    found = train(unseen, SMALL, seed=0, evaluations=3, params=params)
    assert found.best.evaluations <= 3 + 4
    assert found.best.value_s == brute_force_s(unseen) == 5.0


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        HsdagConfig(steps=0)
    with pytest.raises(ValueError, match="discount must lie in"):
        HsdagConfig(discount=0.0)
