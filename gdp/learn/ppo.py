"""Proximal policy optimisation over whole placements, and imitation, which shares its loss.

PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7, with the advantage of a placement given to
each of its decisions. Imitation: the decoder follows the best known placement, and the policy
learns to choose likewise; with noise, some ops go elsewhere on the way, so that the policy also
sees states after a mistake (Ross et al. 2011, arXiv 1011.0686).
Axes: K placements, N ops, D devices, F pair features.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from gdp.learn.rollout import follow
from gdp.policy.advice import Advice
from gdp.policy.decode import Rollout
from gdp.policy.model.config import NetworkConfig, Params, score
from gdp.policy.model.network import apply
from gdp.policy.policy import Policy
from gdp.policy.view.batching import Batch
from gdp.problem.problem import Problem

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
    rounds: int = 2  # at most so many ungraded rounds improve the incumbent before
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
    assert rollout.feats is not None
    assert rollout.legal is not None
    assert rollout.taken is not None
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
    own = rows.surrogate[:, None] * rows.taken
    count = jnp.maximum(own.sum(), 1.0)
    surrogate = surrogate_loss(log_ratio, rows.advantage[:, None], weights.clip)
    labelled = rows.imitation[:, None] * rows.taken
    cross_entropy = -(labelled * logp).sum() / jnp.maximum(labelled.sum(), 1.0)
    bonus = (own * entropy).sum() / count
    total = (own * surrogate).sum() / count - weights.entropy * bonus
    total = total + weights.imitate * cross_entropy
    clipped = (own * (jnp.abs(jnp.expm1(log_ratio)) > weights.clip)).sum() / count
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
    """Weights of rows such that each counts alike, however few of its choices were its own."""
    own = np.maximum((free & taken).sum(axis=1), 1)
    return np.clip(taken.sum(axis=1) / own, 1.0, MOST_WEIGHT)


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
    policy: Policy,
    problem: Problem,
    label: Int[np.ndarray, "N"],
    noise: float,
    seed: int,
    told: Advice | None = None,
) -> tuple[Batch, ChoiceRows]:
    """Two rows: the label followed exactly, and followed with some ops astray."""
    astray = perturb(problem, label, noise, seed)
    batch, rollout = follow(policy, problem, np.stack([label, astray]), told)
    made = rows(rollout, np.zeros(2), np.zeros(2), np.ones(2))
    n = problem.num_ops
    action = np.array(made.action)
    action[:, :n] = label
    assert rollout.legal is not None
    # Where the label's device is no longer legal there is nothing to imitate.
    still = np.take_along_axis(rollout.legal, action[..., None].astype(np.int64), axis=-1)[..., 0]
    return batch, made._replace(action=jnp.asarray(action), taken=made.taken & jnp.asarray(still))


def perturb(
    problem: Problem, label: Int[np.ndarray, "N"], noise: float, seed: int
) -> Int[np.ndarray, "N"]:
    """The label with a share of the ops on a random allowed device."""
    rng = np.random.default_rng(seed)
    weight = rng.random(problem.allowed.shape) * problem.allowed
    elsewhere = weight.argmax(axis=1)
    return np.where(rng.random(problem.num_ops) < noise, elsewhere, label)
