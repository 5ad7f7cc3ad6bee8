"""Proximal policy optimisation over whole placements, and imitation, which shares its loss.

PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7, with the advantage of a placement given to
each of its decisions. Imitation: the decoder follows the best known placement, and the policy
learns to choose likewise; with noise, some ops go elsewhere on the way, so that the policy also
sees states after a mistake (Ross et al. 2011, arXiv 1011.0686).

Placements are drawn whole, or with a gap decoded again: a set of ops that is freed while everything
else stays (large neighbourhood search, Shaw 1998, doi 10.1007/3-540-49481-2_30).
Axes: K placements, N ops, D devices, F pair features; wide N and D are those of the padded network.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from gdp.methods.priorities import timing
from gdp.policy.advice import advice, judge
from gdp.policy.decode import Rollout, decode
from gdp.policy.model.config import Head, NetworkConfig, Params, score
from gdp.policy.model.network import Batch, apply
from gdp.policy.policy import Policy
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem


def gap(
    problem: Problem, device: Int[np.ndarray, "N"], rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """Ops to place anew; how many is uniform in its logarithm, up to a quarter of the graph.

    One in three: a window of the decode order, the part of a window on one device, or the ops
    nearest to one in the graph. Groups are freed whole, so that no member closes the gap.
    """
    n = problem.num_ops
    length = int(np.exp(rng.uniform(0.0, np.log(max(n / 4.0, 2.0)))))
    kind = int(rng.integers(3))
    if kind == 2:
        ops = _near(arrays_of(problem), int(rng.integers(n)), length)
    else:
        first = int(rng.integers(max(1, n - length + 1)))
        ops = timing(problem).order[first : first + length]
        if kind == 1:
            ops = ops[device[ops] == device[ops[int(rng.integers(len(ops)))]]]
    return np.flatnonzero(np.isin(problem.group, problem.group[ops]))


def _near(a: Arrays, op: int, length: int) -> Int[np.ndarray, "M"]:
    """The ops nearest to one, breadth first over producers and readers."""
    near, queue = {op}, [op]
    for here in queue:
        if len(near) >= length:
            break
        tensors = a.out_tensor[a.out_start[here] : a.out_start[here + 1]]
        makers = a.producer[a.in_tensor[a.in_start[here] : a.in_start[here + 1]]].tolist()
        readers = [r for t in tensors for r in a.use_op[a.use_start[t] : a.use_start[t + 1]]]
        for other in (*makers, *readers):
            if other not in near and len(near) < length:
                near.add(int(other))
                queue.append(int(other))
    return np.fromiter(near, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Episode:
    """Sampled placements of one problem, for one update."""

    problem: Problem
    batch: Batch  # what the network read: the gradient needs it again
    rollout: Rollout
    free: Bool[np.ndarray, "K M"]  # where a choice was not forced; of labels, everywhere
    gaps: slice  # the rows that are the incumbent with a gap decoded again
    incumbent_s: float  # cost of the incumbent
    cost_s: Float[np.ndarray, "K"]  # value of the objective, raised where memory overflows
    feasible: np.ndarray  # [K] bool
    labelled: bool = False  # whether the last row follows a label


def sample(
    policy: Policy, problem: Problem, *, samples: int, seed: int, gaps: int = 0, threads: int = 1
) -> Episode:
    """`samples` placements with all that was seen; the last `gaps` are the best adviser's with a
    gap each that is decoded again."""
    batch, gap_rows = policy.batch(problem), slice(samples - gaps, samples)
    free = np.ones((samples, batch.size[0]), dtype=bool)
    forced, incumbent_s = None, np.nan
    if gaps:
        start = advice(problem)
        incumbent_s = float(start.cost_s[0])
        forced = with_gaps(problem, start.device[0], gaps, np.random.default_rng([seed, 5]))
        free[gap_rows, : problem.num_ops] = forced < 0
    rollout = decode(
        policy.view(problem), policy.head_of(problem, batch), samples=samples, seed=seed,
        forced=forced, keep=batch.size, threads=threads,
    )  # fmt: skip
    cost_s, feasible = judge(problem, rollout.device)
    return Episode(problem, batch, rollout, free, gap_rows, incumbent_s, cost_s, feasible)


def with_label(policy: Policy, episode: Episode, label: Int[np.ndarray, "N"]) -> Episode:
    """The episode with one more row, which follows a label."""
    followed = follow(policy, episode.problem, label[None], episode.batch.size)
    cost_s, feasible = judge(episode.problem, followed.device)
    return replace(
        episode,
        rollout=Rollout(*map(np.concatenate, zip(episode.rollout, followed, strict=True))),
        free=np.concatenate([episode.free, np.ones_like(episode.free[:1])]),
        cost_s=np.concatenate([episode.cost_s, cost_s]),
        feasible=np.concatenate([episode.feasible, feasible]),
        labelled=True,
    )


def with_gaps(
    problem: Problem, device: Int[np.ndarray, "N"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "K N"]:
    """Copies of a placement with a gap each: -1 where the policy is to choose."""
    table = np.repeat(device[None], count, axis=0)
    for row in table:
        row[gap(problem, device, rng)] = -1
    return table


def follow(
    policy: Policy, problem: Problem, labels: Int[np.ndarray, "K N"], size: tuple[int, int]
) -> Rollout:
    """Inputs of the decoder when placements are forced, padded to a size of the network."""
    view, head = policy.view(problem), blank_head(problem)
    return decode(view, head, samples=len(labels), seed=0, forced=labels, keep=size)


def blank_head(problem: Problem) -> Head:
    """A head of zeros: following a label needs no scores."""
    n, d, width = problem.num_ops, problem.num_devices, 1
    return Head(
        node=np.zeros((n, width), np.float32),
        device=np.zeros((d, width), np.float32),
        feature=np.zeros((NUM_PAIR_FEATURES, width), np.float32),
        mixing=np.zeros((width, width), np.float32),
        bias=np.zeros(width, np.float32),
        out=np.zeros(width, np.float32),
    )


Advantage = Literal["normalised", "published"]
"""normalised: by mean and deviation of the batch. published: minus the mean of past rewards,
seconds over those of the best single device.
"""


@dataclass(frozen=True)
class PpoConfig:
    """Settings of policy updates from sampled placements."""

    updates: int = 1000
    graphs: int = 4  # problems per update
    samples: int = 16  # placements drawn per problem
    gaps: float = 0.0  # share of the samples that is the incumbent with a gap decoded again
    epochs: int = 2  # optimiser steps per update
    clip: float = 0.2  # epsilon of equation 7
    entropy: float = 1e-3  # weight of the entropy bonus at the start
    entropy_end: float = 3e-4
    rate: float = 1e-3  # learning rate after warm-up
    rate_end: float = 1e-4
    advantage: Advantage = "normalised"
    imitate: float = 0.1  # weight of the label's cross-entropy beside the surrogate
    average: float = 0.995  # of the averaged weights, per step

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < 1.0:
            raise ValueError(f"clip must lie in (0, 1), got {self.clip}")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2 to have a baseline, got {self.samples}")
        if not 0.0 <= self.gaps < 1.0:
            raise ValueError(f"gaps must lie in [0, 1), got {self.gaps}")


class ChoiceRows(NamedTuple):
    """Placements with the inputs of their choices, padded to the sizes of the network."""

    feats: Float[Array, "K N D F"]
    legal: Bool[Array, "K N D"]
    taken: Bool[Array, "K N"]
    action: Int[Array, "K N"]
    old: Float[Array, "K N"]  # log-probabilities when drawn
    fresh: Bool[Array, ""]  # first step since they were drawn: old is not known yet
    temperature: Float[Array, ""]  # at which they were drawn
    advantage: Float[Array, "K"]
    surrogate: Float[Array, "K"]  # weight of the row in the surrogate loss
    imitation: Float[Array, "K"]  # weight of the row in the cross-entropy


class Weights(NamedTuple):
    """Coefficients of the loss."""

    clip: float
    entropy: float
    imitate: float


class Metrics(NamedTuple):
    """Diagnostics of one gradient step; means over free choices."""

    log_probability: Float[Array, "K N"]
    old: Float[Array, "K N"]  # log-probabilities when drawn, for the next steps
    entropy: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    clipped: Float[Array, ""]
    norm: Float[Array, ""]


def rows(
    rollout: Rollout,
    advantage: Float[np.ndarray, "K"],
    surrogate: Float[np.ndarray, "K"],
    imitation: Float[np.ndarray, "K"],
    temperature: float = 1.0,
) -> ChoiceRows:
    """The arrays of a rollout, ready for `gradient`."""
    samples, wide = rollout.taken.shape
    action = np.zeros((samples, wide), dtype=np.int32)
    action[:, : rollout.device.shape[1]] = rollout.device
    return ChoiceRows(
        feats=jnp.asarray(rollout.feats),
        legal=jnp.asarray(rollout.legal),
        taken=jnp.asarray(rollout.taken),
        action=jnp.asarray(action),
        old=jnp.zeros((samples, wide), dtype=jnp.float32),
        fresh=jnp.asarray(True),
        temperature=jnp.asarray(temperature, dtype=jnp.float32),
        advantage=jnp.asarray(advantage, dtype=jnp.float32),
        surrogate=jnp.asarray(surrogate, dtype=jnp.float32),
        imitation=jnp.asarray(imitation, dtype=jnp.float32),
    )


def with_old(rows: ChoiceRows, metrics: Metrics) -> ChoiceRows:
    """The rows for further steps, with the log-probabilities that the first step computed."""
    return rows._replace(old=metrics.old, fresh=jnp.asarray(False))


def log_probabilities(
    config: NetworkConfig, params: Params, batch: Batch, rows: ChoiceRows
) -> tuple[Float[Array, "K N"], Float[Array, "K N"], Float[Array, "K N"]]:
    """(log-probability of each action, the same at the temperature at which it was drawn, entropy
    of each choice), zero where nothing was free.

    No step depends on another: the features of every choice were recorded while decoding.
    """
    logits = jnp.where(
        rows.legal, score(apply(config, params, batch), rows.feats, jax.nn.relu), -1e9
    )
    logp = jax.nn.log_softmax(logits, axis=-1)
    drawn = jax.nn.log_softmax(logits / rows.temperature, axis=-1)
    chosen, drawn = (
        jnp.where(rows.taken, jnp.take_along_axis(x, rows.action[..., None], axis=-1)[..., 0], 0.0)
        for x in (logp, drawn)
    )
    entropy = -jnp.where(rows.legal, jnp.exp(logp) * logp, 0.0).sum(axis=-1)
    return chosen, drawn, jnp.where(rows.taken, entropy, 0.0)


def surrogate_loss(
    log_ratio: Float[Array, "K N"],
    advantage: Float[Array, "K 1"],
    clip: Float[Array, ""] | float,
) -> Float[Array, "K N"]:
    """Minus the clipped surrogate of each decision: equation 7."""
    # Beyond exp(20) only bad placements are unclipped; the bound ends their gradient.
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def loss(
    params: Params,
    config: NetworkConfig,
    batch: Batch,
    rows: ChoiceRows,
    weights: Weights,
) -> tuple[Float[Array, ""], Metrics]:
    """Surrogate, minus the entropy bonus, plus the cross-entropy of the rows that are labels."""
    logp, drawn, entropy = log_probabilities(config, params, batch, rows)
    old = jnp.where(rows.fresh, jax.lax.stop_gradient(drawn), rows.old)
    log_ratio = logp - old
    free_weight = rows.surrogate[:, None] * rows.taken
    count = jnp.maximum(free_weight.sum(), 1.0)
    surrogate = surrogate_loss(log_ratio, rows.advantage[:, None], weights.clip)
    labelled = rows.imitation[:, None] * rows.taken
    cross_entropy = -(labelled * logp).sum() / jnp.maximum(labelled.sum(), 1.0)
    bonus = (free_weight * entropy).sum() / count
    total = (free_weight * surrogate).sum() / count - weights.entropy * bonus
    total = total + weights.imitate * cross_entropy
    clipped = (free_weight * (jnp.abs(jnp.expm1(log_ratio)) > weights.clip)).sum() / count
    return total, Metrics(logp, old, bonus, cross_entropy, clipped, jnp.zeros(()))


FAINT = 0.05
"""Norm of a gradient below which it is not scaled to 1; of those in training a quarter are below
2.5e-3 and the largest near 3."""


@functools.partial(jax.jit, static_argnames="config")
def gradient(
    config: NetworkConfig,
    params: Params,
    batch: Batch,
    rows: ChoiceRows,
    weights: Weights,
) -> tuple[Params, Metrics]:
    """The gradient of `loss`, scaled to norm 1 so that no graph drowns another.

    One below `FAINT` keeps its proportion: it is mostly noise, which nothing shall amplify.
    """
    grads, metrics = jax.grad(loss, has_aux=True)(params, config, batch, rows, weights)
    norm = optax.tree.norm(grads)
    scaled = jax.tree.map(lambda g: g / jnp.maximum(norm, FAINT), grads)
    return scaled, metrics._replace(norm=norm)


def advantages(cost_s: Float[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """Minus the logarithm of the cost, to mean 0 and deviation 1; zeros where all cost the same.

    >>> advantages(np.array([1.0, 1.0, 1.0]))
    array([0., 0., 0.])
    """
    reward = -np.log(cost_s)
    spread = reward.std()
    # Differences in the last digits are noise of the clock of the simulator, not a signal.
    if spread < 1e-7:
        return np.zeros_like(reward)
    return (reward - reward.mean()) / spread


def gap_advantages(cost_s: Float[np.ndarray, "K"], incumbent_s: float) -> Float[np.ndarray, "K"]:
    """Logarithm of the incumbent's cost over each, to mean square 1; zeros where nothing changes.

    The incumbent is the baseline: what a gap is worth is what it changes.

    >>> gap_advantages(np.array([1.0, 2.0]), 1.0).round(3)
    array([-0.   , -1.414])
    """
    gain = -np.log(cost_s / incumbent_s)
    spread = np.sqrt((gain**2).mean()) if len(gain) else 0.0
    return gain / spread if spread > 1e-7 else np.zeros_like(gain)


MOST_WEIGHT = 50.0
"""Of a decision in a small gap over one of a whole placement."""


def gap_weights(
    free: Bool[np.ndarray, "K N"], taken: Bool[np.ndarray, "K N"]
) -> Float[np.ndarray, "K"]:
    """Weights by which rows count equally, however few of their choices were their own."""
    num_free = np.maximum((free & taken).sum(axis=1), 1)
    return np.clip(taken.sum(axis=1) / num_free, 1.0, MOST_WEIGHT)


def published_advantages(
    cost_s: Float[np.ndarray, "K"], feasible: np.ndarray, past: tuple[float, int], unit_s: float
) -> tuple[Float[np.ndarray, "K"], tuple[float, int]]:
    """GDP's advantage: -sqrt(seconds), -10 where invalid, minus the mean of all earlier trials.

    Seconds count in units of the problem's own, so that a reward of milliseconds is a signal too.
    `past` is (sum of rewards, number of trials); the new one comes back.
    """
    reward = np.where(feasible, -np.sqrt(cost_s / unit_s), -10.0)
    total, count = past
    baseline = total / count if count else float(reward.mean())
    return reward - baseline, (total + float(reward.sum()), count + len(reward))


@functools.cache  # `step` is compiled for each
def optimiser(rate: float, rate_end: float, steps: int) -> optax.GradientTransformation:
    """Adam under a cosine rate with a short warm-up; gradients clipped to norm 1."""
    warm = min(20, max(1, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.1 * rate, rate, warm, max(steps, 2), rate_end)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.partial(jax.jit, static_argnums=0)
def step(
    transform: optax.GradientTransformation,
    params: Params,
    state: Any,
    averaged: Params,
    grads: Params,
    average: Float[Array, ""] | float,
) -> tuple[Params, Any, Params]:
    """(weights, optimiser state, averaged weights) after one step."""
    updates, state = transform.update(grads, state, params)
    params = cast(Params, optax.apply_updates(params, updates))
    averaged = jax.tree.map(lambda a, p: average * a + (1.0 - average) * p, averaged, params)
    return params, state, averaged


@dataclass(frozen=True)
class ImitationConfig:
    """Settings of imitation learning, which precedes PPO."""

    updates: int = 500
    graphs: int = 4  # problems per update
    rate: float = 1e-3
    rate_end: float = 5e-4
    noise: float = 0.05  # share of ops sent elsewhere in the second of the two rows
    average: float = 0.99  # of the averaged weights, per step

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < 1.0:
            raise ValueError(f"noise must lie in [0, 1), got {self.noise}")


def imitation_rows(
    policy: Policy, problem: Problem, label: Int[np.ndarray, "N"], noise: float, seed: int
) -> tuple[Batch, ChoiceRows]:
    """Two rows: the label followed exactly, and followed with some ops astray."""
    batch, astray = policy.batch(problem), perturb(problem, label, noise, seed)
    rollout = follow(policy, problem, np.stack([label, astray]), batch.size)
    labelled = rows(rollout, np.zeros(2), np.zeros(2), np.ones(2))
    n = problem.num_ops
    action = np.array(labelled.action)
    action[:, :n] = label
    # Where the label's device is no longer legal there is nothing to imitate.
    still = np.take_along_axis(rollout.legal, action[..., None].astype(np.int64), axis=-1)[..., 0]
    return batch, labelled._replace(
        action=jnp.asarray(action), taken=labelled.taken & jnp.asarray(still)
    )


def perturb(
    problem: Problem, label: Int[np.ndarray, "N"], noise: float, seed: int
) -> Int[np.ndarray, "N"]:
    """The label with a share of the ops on a random allowed device."""
    rng = np.random.default_rng(seed)
    weight = rng.random(problem.allowed.shape) * problem.allowed
    elsewhere = weight.argmax(axis=1)
    return np.where(rng.random(problem.num_ops) < noise, elsewhere, label)
