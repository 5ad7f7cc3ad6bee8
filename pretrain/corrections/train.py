"""Training of the correction network."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from gdp.corrections.process import MOST, scales_of, standardised
from pretrain.corrections.network import (
    HEAVY,
    LARGEST,
    SMALLEST,
    VECTOR,
    CorrectionNetwork,
)
from pretrain.corrections.rows import Row

HIDDEN = 32
STEPS = 1500
RATE = 5e-3
DECAY = 3e-4
"""Penalty on the squares of all weights but biases."""
UNKNOWN = 0.4
"""Share of the stacks of each step whose vector is left out, so that what is known suffices."""

Weights = dict[str, jax.Array]


class Samples(NamedTuple):
    """Measured passes. Axes: N passes, F, H and G features, S stacks."""

    shown: Float[np.ndarray, "N F"]
    formats: Float[np.ndarray, "N H"]
    told: Float[np.ndarray, "N G"]  # of the stack
    residual: Float[np.ndarray, "N"]
    weight: Float[np.ndarray, "N"]  # how far measured times show it
    stack: Int[np.ndarray, "N"]
    group: Int[np.ndarray, "N"]  # model, format and stack
    row: Int[np.ndarray, "N"]
    prefill: Int[np.ndarray, "N"]
    keys: tuple[str, ...]  # of the S stacks


def samples_of(rows: Sequence[Row]) -> Samples:
    """All measured passes of rows."""
    keys = tuple(sorted({row.stack.key for row in rows}))
    groups = sorted({row.group for row in rows})
    columns = [
        (lesson.asked.features(), lesson.asked.format_features(),
         row.stack_features(lesson.asked),
         float(np.clip(lesson.residual, -MOST, MOST)), lesson.shown,
         keys.index(row.stack.key), groups.index(row.group), i, int(lesson.asked.prefill))
        for i, row in enumerate(rows) for lesson in row.lessons
    ]  # fmt: skip
    shown, formats, told, *others = (np.array(column) for column in zip(*columns, strict=True))
    residual, weight, stack, group, row, prefill = others
    return Samples(shown, formats, told, residual, weight, stack, group, row, prefill, keys)


class Points(NamedTuple):
    """Measured passes that a process is conditioned on. Axes: P passes, F and G features."""

    shown: Float[np.ndarray, "P F"]
    told: Float[np.ndarray, "P G"]
    residual: Float[np.ndarray, "P"]
    weight: Float[np.ndarray, "P"]
    group: Int[np.ndarray, "P"]


def points_of(samples: Samples, train: np.ndarray) -> Points:
    """The passes that `train` marks, as a Gaussian process has them."""
    own = samples.shown, samples.told, samples.residual, samples.weight, samples.group
    return Points(*(column[train] for column in own))


def initial(key: jax.Array, shown: int, told: int) -> Weights:
    """Random weights; the output is near 0."""
    keys = iter(jax.random.split(key, 8))

    def normal(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

    weights = {
        "kernel1": normal(shown, HIDDEN), "kernel2": normal(HIDDEN, HIDDEN),
        "kernel3": normal(HIDDEN, 2, 0.1), "bias3": jnp.array([0.0, -1.0]),
        "modes": normal(HIDDEN, VECTOR, 0.3),
    }  # fmt: skip
    for i in ("1", "2"):
        weights["gate" + i] = normal(told + VECTOR, HIDDEN, 0.3)
        weights["bias" + i] = weights["open" + i] = jnp.zeros(HIDDEN)
    return weights


def forward(
    weights: Weights, shown: jax.Array, told: jax.Array, vector: jax.Array, gated: bool = True
) -> tuple[jax.Array, jax.Array]:
    """(mean, log spread) of each pass, as `CorrectionNetwork` has them."""
    known, hidden = jnp.concatenate([told, vector], axis=1), shown
    for i in ("1", "2"):
        hidden = jax.nn.silu(hidden @ weights["kernel" + i] + weights["bias" + i])
        if gated:
            hidden *= 1.0 + jnp.tanh(known @ weights["gate" + i] + weights["open" + i])
    out = hidden @ weights["kernel3"] + weights["bias3"]
    mean = out[:, 0] + ((hidden @ weights["modes"]) * vector).sum(axis=1)
    return mean, jnp.clip(out[:, 1], SMALLEST, LARGEST)


def improbability(off: jax.Array, spread: jax.Array) -> jax.Array:
    """Negative log likelihood of Student's t, but for a constant."""
    return spread + (HEAVY + 1) / 2 * jnp.log1p((off / jnp.exp(spread)) ** 2 / HEAVY)


@functools.partial(jax.jit, static_argnames=("stacks", "gated", "gates_learn", "steps"))
def _fit(
    key: jax.Array, shown: jax.Array, told: jax.Array, wanted: jax.Array, weight: jax.Array,
    stack: jax.Array, stacks: int, gated: bool, gates_learn: bool, steps: int,
) -> tuple[Weights, jax.Array]:  # fmt: skip
    begin, more = jax.random.split(key)
    weights = initial(begin, shown.shape[1], told.shape[1])
    vectors = 0.1 * jax.random.normal(more, (stacks, VECTOR))

    def loss_of(both: tuple[Weights, jax.Array], key: jax.Array) -> jax.Array:
        weights, vectors = both
        if not gates_learn:
            fixed = {
                n: jax.lax.stop_gradient(w) for n, w in weights.items() if n[:2] in ("ga", "op")
            }
            weights = weights | fixed
        known = jax.random.uniform(key, (stacks, 1)) > UNKNOWN
        mean, spread = forward(weights, shown, told, (vectors * known)[stack], gated)
        fit = (weight * improbability(wanted - mean, spread)).sum() + 0.5 * (vectors**2).sum()
        size = sum((w**2).sum() for name, w in weights.items() if name[0] in "kgm")
        return fit / weight.sum() + DECAY * size

    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def step(state, key):
        both, moments = state
        loss, slopes = jax.value_and_grad(loss_of)(both, key)
        updates, moments = optimiser.update(slopes, moments)
        return (optax.apply_updates(both, updates), moments), loss

    both = (weights, vectors)
    keys = jax.random.split(key, steps)
    ended: Any = jax.lax.scan(step, (both, optimiser.init(both)), keys)
    ((weights, _), _), curve = ended
    return weights, curve


def trained(
    samples: Samples, train: np.ndarray, seed: int = 0, *, gated: bool = True,
    gates_learn: bool = True, steps: int = STEPS,
) -> tuple[CorrectionNetwork, np.ndarray]:  # fmt: skip
    """(the network, loss of each step) of the passes that `train` marks.

    Args:
        samples: All passes, so that networks of other parts need no new compilation.
        train: [N] Passes that are learned from.
        seed: Of weights and of the stacks that are left out in each step.
        gated: With superposition gates.
        gates_learn: Else they stay as they are drawn.
        steps: Of Adam, over all passes each.
    """
    scales = scales_of(samples.shown[train], samples.told[train])
    shown, told = standardised(scales, samples.shown, samples.told)
    weight = jnp.asarray(samples.weight * train)
    weights, curve = _fit(
        jax.random.PRNGKey(seed), jnp.asarray(shown), jnp.asarray(told),
        jnp.asarray(samples.residual), weight, jnp.asarray(samples.stack), len(samples.keys),
        gated, gates_learn, steps,
    )  # fmt: skip
    plain = {name: np.asarray(w, dtype=np.float64) for name, w in weights.items()}
    if not gated:
        for i in ("1", "2"):
            plain["gate" + i] *= 0.0
            plain["open" + i] *= 0.0
    return CorrectionNetwork(plain | scales), np.asarray(curve)
