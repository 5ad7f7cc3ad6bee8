"""The losses, by hand; and that they learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import plain_graph, random_problem, unit_cluster

from gdp.learn.ppo import (
    FAINT,
    Episode,
    PpoConfig,
    Weights,
    advantages,
    gap,
    gap_advantages,
    gap_weights,
    gradient,
    imitation_rows,
    log_probabilities,
    loss,
    perturb,
    published_advantages,
    rows,
    sample,
    step,
    surrogate_loss,
    with_label,
)
from gdp.methods.priorities import timing
from gdp.policy.model.config import NetworkConfig, score
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem, make_problem

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)
compiled_log_probabilities = jax.jit(log_probabilities, static_argnums=0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(5, num_ops=30, num_devices=3)


@pytest.fixture(scope="module")
def episode(policy: Policy, problem: Problem) -> Episode:
    return sample(policy, problem, samples=4, seed=1)


def test_surrogate_by_hand() -> None:
    """Equation 7 with epsilon 0.2: ratio 2 and advantage 1 give -1.2; ratio 2 and advantage -1 give
    2; ratio 0.5 and advantage -1 give 0.8; ratio 1 gives minus the advantage."""
    log_ratio = jnp.log(jnp.array([[2.0], [2.0], [0.5], [1.0]]))
    advantage = jnp.array([[1.0], [-1.0], [-1.0], [3.0]])
    loss = surrogate_loss(log_ratio, advantage, 0.2)
    np.testing.assert_allclose(loss[:, 0], [-1.2, 2.0, 0.8, -3.0], rtol=1e-6)


def test_advantages_have_mean_zero_and_favour_the_fast() -> None:
    found = advantages(np.array([1.0, 2.0, 4.0]))
    # Logarithms are 0, ln 2, 2 ln 2: evenly spaced, so -z of a uniform triple.
    np.testing.assert_allclose(found, [np.sqrt(1.5), 0.0, -np.sqrt(1.5)], atol=1e-12)


def test_published_advantage_by_hand() -> None:
    """Rewards -2 (4 units), -3 (9), -10 (invalid); past mean -1 over two trials."""
    cost, feasible = np.array([4.0, 9.0, 1.0]), np.array([True, True, False])
    found, past = published_advantages(4 * cost, feasible, (-2.0, 2), 4.0)
    np.testing.assert_allclose(found, [-1.0, -2.0, -9.0])
    assert past == (-17.0, 5)
    first, _ = published_advantages(cost, feasible, (0.0, 0), 1.0)
    np.testing.assert_allclose(first, [3.0, 2.0, -5.0])


@pytest.mark.slow
def test_rescored_log_probabilities_are_those_of_the_rollout(
    policy: Policy, problem: Problem, episode: Episode
) -> None:
    made = rows(episode.rollout, np.zeros(4), np.ones(4), np.zeros(4))
    logp, _, _ = compiled_log_probabilities(CONFIG, policy.params, policy.batch(problem), made)
    np.testing.assert_allclose(
        logp.sum(axis=1), episode.rollout.log_probability, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_gradient_of_the_surrogate_raises_good_placements(
    policy: Policy, problem: Problem, episode: Episode
) -> None:
    """One small step along the gradient: the placement with advantage becomes more likely."""
    made = rows(episode.rollout, np.array([1.0, -1.0, 0.0, 0.0]), np.ones(4), np.zeros(4))
    batch = policy.batch(problem)
    grads, metrics = gradient(CONFIG, policy.params, batch, made, Weights(0.2, 0.0, 0.0))
    moved = jax.tree.map(lambda p, g: p - 0.05 * g, policy.params, grads)
    after, _, _ = compiled_log_probabilities(CONFIG, moved, batch, made)
    change = np.asarray((after - metrics.log_probability).sum(axis=1))
    assert change[0] > change[1]
    assert float(metrics.norm) > 0


@pytest.mark.slow
def test_imitation_lowers_the_cross_entropy_of_its_label(policy: Policy, problem: Problem) -> None:
    label = sample(policy, problem, samples=4, seed=7).rollout.device[2]
    batch, made = imitation_rows(policy, problem, label, 0.1, 0)
    params = policy.params
    losses = []
    for _ in range(30):
        grads, metrics = gradient(CONFIG, params, batch, made, Weights(0.2, 0.0, 1.0))
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        losses.append(float(metrics.cross_entropy))
    assert losses[-1] < 0.8 * losses[0]


def test_perturbed_labels_stay_allowed() -> None:
    problem = random_problem(4, num_ops=30, num_devices=3)
    label = problem.allowed.argmax(axis=1)
    assert not problem.allowed.all()
    for seed in range(10):
        astray = perturb(problem, label, 0.99, seed)
        assert problem.allowed[np.arange(problem.num_ops), astray].all()
    assert (perturb(problem, label, 0.0, 0) == label).all()


def test_configs_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="clip must lie"):
        PpoConfig(clip=1.5)
    with pytest.raises(ValueError, match="at least 2"):
        PpoConfig(samples=1)


def test_a_gap_is_worth_what_it_changes() -> None:
    """Half and twice the incumbent's 2 s, and no change: +1, -1, 0 over a mean square of 2/3."""
    found = gap_advantages(np.array([1.0, 4.0, 2.0]), 2.0)
    np.testing.assert_allclose(found, np.array([1.0, -1.0, 0.0]) * np.sqrt(1.5), atol=1e-12)


def test_rows_count_alike_however_few_choices_were_their_own() -> None:
    """Of 4 choices 4, 2 and 1 were free: weights 1, 2 and 4."""
    taken = np.ones((3, 4), dtype=bool)
    free = np.array([[True] * 4, [True, True, False, False], [True, False, False, False]])
    assert gap_weights(free, taken).tolist() == [1.0, 2.0, 4.0]


@pytest.mark.slow
def test_the_loss_rewards_entropy_and_the_label(
    policy: Policy, problem: Problem, episode: Episode
) -> None:
    """Without advantage the loss is -c H for the bonus c, and the cross-entropy for labels."""
    batch = policy.batch(problem)
    none, all_rows = np.zeros(4), np.ones(4)
    own = rows(episode.rollout, none, all_rows, none)
    logp, _, entropy = compiled_log_probabilities(CONFIG, policy.params, batch, own)
    choices = float(own.taken.sum())
    bonus, _ = loss(policy.params, CONFIG, batch, own, Weights(0.2, 0.5, 0.0))
    assert float(entropy.sum()) > 0
    assert float(bonus) == pytest.approx(-0.5 * float(entropy.sum()) / choices, rel=1e-4)
    labelled = rows(episode.rollout, none, none, all_rows)
    told, _ = loss(policy.params, CONFIG, batch, labelled, Weights(0.2, 0.0, 1.0))
    assert float(told) == pytest.approx(-float(logp.sum()) / choices, rel=1e-4)


def test_averaged_weights_follow_slowly() -> None:
    """At 0.75 the average takes a quarter of the new weights, which one step of 1 made -1."""
    transform = optax.sgd(1.0)
    start = {"layer": {"w": jnp.zeros(2)}}
    state = transform.init(start)
    grads = {"layer": {"w": jnp.ones(2)}}
    params, _, averaged = step(transform, start, state, start, grads, 0.75)
    assert params["layer"]["w"].tolist() == [-1.0, -1.0]
    assert averaged["layer"]["w"].tolist() == [-0.25, -0.25]


@pytest.mark.slow
def test_a_faint_gradient_is_not_made_a_strong_one(
    policy: Policy, problem: Problem, episode: Episode
) -> None:
    """Scaled to norm 1, but for one under `FAINT`, whose norm stays in proportion."""
    batch = policy.batch(problem)
    norms = []
    for size in (4.0, 1e-4):
        made = rows(episode.rollout, size * np.array([1, -1, 0, 0]), np.ones(4), np.zeros(4))
        grads, metrics = gradient(CONFIG, policy.params, batch, made, Weights(0.2, 0.0, 0.0))
        norms.append((float(optax.tree.norm(grads)), float(metrics.norm)))
    assert norms[0][1] > FAINT > norms[1][1]
    assert norms[0][0] == pytest.approx(1.0, rel=1e-4)
    assert norms[1][0] == pytest.approx(norms[1][1] / FAINT, rel=1e-4)


def test_hot_samples_are_weighed_by_the_odds_at_which_they_were_drawn(
    policy: Policy, problem: Problem, episode: Episode
) -> None:
    """Ratio of the first step: the policy's own probability over that at temperature 2."""
    batch = policy.batch(problem)
    none = np.zeros(4)
    made = rows(episode.rollout, none, np.ones(4), none, 2.0)
    _, metrics = gradient(CONFIG, policy.params, batch, made, Weights(0.2, 0.0, 0.0))
    head, seen = policy.head(problem), episode.rollout
    n, d = problem.num_ops, problem.num_devices
    logit = np.where(seen.legal[:, :n, :d], score(head, seen.feats[:, :n, :d]), -1e9) / 2.0
    highest = logit.max(axis=-1, keepdims=True)
    logp = logit - highest - np.log(np.exp(logit - highest).sum(axis=-1, keepdims=True))
    wanted = np.take_along_axis(logp, seen.device[..., None], axis=-1)[..., 0]
    free = seen.taken[:, :n]
    assert free.any()
    np.testing.assert_allclose(np.asarray(metrics.old)[:, :n][free], wanted[free], atol=1e-4)
    plain = rows(episode.rollout, none, np.ones(4), none)
    _, cool = gradient(CONFIG, policy.params, batch, plain, Weights(0.2, 0.0, 0.0))
    np.testing.assert_array_equal(cool.old, cool.log_probability)
    assert not np.allclose(metrics.old, cool.old)


def test_a_label_rides_along_as_the_last_row(policy: Policy, problem: Problem) -> None:
    episode = sample(policy, problem, samples=3, seed=1)
    label = sample(policy, problem, samples=1, seed=9).rollout.device[0]
    found = with_label(policy, episode, label)
    assert found.labelled
    assert not episode.labelled
    assert (found.rollout.device[3] == label).all()
    assert (found.rollout.device[:3] == episode.rollout.device).all()
    assert found.cost_s[:3].tolist() == episode.cost_s.tolist()
    lengths = {len(part) for part in (found.free, found.cost_s, found.feasible)}
    assert lengths | {len(rows(found.rollout, *np.zeros((3, 4))).feats)} == {4}


# Gaps that are decoded again: of three kinds, and groups whole.


def test_gaps_are_windows_parts_of_a_device_and_neighbourhoods() -> None:
    """Two interleaved chains: only a neighbourhood stays within one and spans several ops.

    Devices follow neither: only the part of a window on one device has one device and both chains.
    """
    n = 48
    graph = plain_graph(n, [(i, i + 2) for i in range(n - 2)])
    problem = make_problem(graph, unit_cluster(3), np.ones((n, 3)))
    device = np.arange(n) // 2 % 3
    place = np.argsort(timing(problem).order)
    rng = np.random.default_rng(0)
    seen = {"window": 0, "device": 0, "near": 0}
    for _ in range(300):
        ops = gap(problem, device, rng)
        assert 1 <= len(ops) <= n // 4
        if len(ops) < 4:
            continue
        one_chain = len(set((ops % 2).tolist())) == 1
        one_device = len(set(device[ops].tolist())) == 1
        in_a_row = np.ptp(place[ops]) == len(ops) - 1
        seen["near"] += one_chain and not one_device and not in_a_row
        seen["device"] += one_device and not one_chain and not in_a_row
        seen["window"] += in_a_row and not one_chain and not one_device
    assert min(seen.values()) >= 5, seen


def test_a_gap_frees_groups_whole() -> None:
    n = 24
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)])
    together = np.arange(n) % 12
    problem = make_problem(graph, unit_cluster(2), np.ones((n, 2)), together=together)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ops = gap(problem, np.zeros(n, dtype=np.int64), rng)
        freed = set(problem.group[ops].tolist())
        assert set(np.flatnonzero(np.isin(problem.group, list(freed))).tolist()) == set(
            ops.tolist()
        )
