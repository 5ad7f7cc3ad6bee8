"""Padding to a few sizes, so that compilation is rare.

Axes: N padded ops (in decode order), P padded pairs, D padded devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdp.graph.groups import inverse
from gdp.policy.view.features import DEVICE_SIZES, OP_SIZES, Features, bucket


class Batch(NamedTuple):
    """One padded problem. Ops are in decode order, padding last; pairs index that order."""

    op: Float[Array, "N F"]
    op_type: Int[Array, "N"]
    op_mask: Bool[Array, "N"]
    src: Int[Array, "P"]
    dst: Int[Array, "P"]
    pair_mask: Bool[Array, "P"]
    device: Float[Array, "D G"]
    device_mask: Bool[Array, "D"]
    whole: Float[Array, "H"]
    place: Int[Array, "N"]  # [op]: its position in decode order; padding maps to itself


def pad(features: Features) -> Batch:
    """The features of one problem at its bucket's size."""
    n, d = len(features.op), len(features.device)
    # One op at least is padding, which padded pairs join to itself.
    wide_n = bucket(n + 1, OP_SIZES)
    wide_p = bucket(len(features.src) + 1, tuple(2 * wide_n * k for k in (1, 2, 4, 8, 16)))
    wide_d = bucket(d, DEVICE_SIZES)
    position = inverse(features.order)
    # NumPy goes in, and JAX comes in where it is used: nothing is copied to a device twice.
    arrays: dict[str, Any] = {
        "op": _widen(features.op[features.order], wide_n),
        "op_type": _widen(features.op_type[features.order].astype(np.int32), wide_n),
        "op_mask": np.arange(wide_n) < n,
        "src": _widen(position[features.src].astype(np.int32), wide_p, n),
        "dst": _widen(position[features.dst].astype(np.int32), wide_p, n),
        "pair_mask": np.arange(wide_p) < len(features.src),
        "device": _widen(features.device, wide_d),
        "device_mask": np.arange(wide_d) < d,
        "whole": features.whole,
        "place": np.concatenate([position, np.arange(n, wide_n)]).astype(np.int32),
    }
    return Batch(**arrays)


def max_over_neighbours(
    message: Float[Array, "N F"],
    to: Int[Array, "P"],
    by: Int[Array, "P"],
    pair_mask: Bool[Array, "P"],
) -> Float[Array, "N F"]:
    """Element-wise maximum of the messages of each op's neighbours; zero where it has none.

    Messages must not be negative, which the published sigmoid and a rectifier both grant.
    """
    sent = jnp.where(pair_mask[:, None], message[by], 0.0)
    return jnp.maximum(jax.ops.segment_max(sent, to, message.shape[0]), 0.0)


def mean_over_ops(values: Float[Array, "N F"], op_mask: Bool[Array, "N"]) -> Float[Array, "F"]:
    """The mean over real ops."""
    total = jnp.sum(values, axis=0, where=op_mask[:, None])
    return total / jnp.maximum(op_mask.sum(), 1)


def _widen(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """Rows of `fill` behind, up to `size` rows."""
    wide = np.full((size, *values.shape[1:]), fill, dtype=values.dtype)
    wide[: len(values)] = values
    return wide


def on_device(batch: Batch) -> Batch:
    """The batch as JAX arrays, so that several updates share one copy."""
    return jax.tree.map(jnp.asarray, batch)
