"""Padding to a few sizes, so that compilation is rare. The one module that knows jraph.

Axes: N padded ops (in decode order), P padded pairs, D padded devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdp.graph.groups import inverse
from gdp.policy.view.features import DEVICE_SIZES, OP_SIZES, Features, bucket


class Batch(NamedTuple):
    """One padded problem. Ops are in decode order, padding last; pairs index that order."""

    graph: (
        jraph.GraphsTuple
    )  # nodes [N, F]; senders and receivers [P]; two graphs, the last padding
    op_type: Int[Array, "N"]
    op_mask: Bool[Array, "N"]
    pair_mask: Bool[Array, "P"]
    device: Float[Array, "D G"]
    device_mask: Bool[Array, "D"]
    whole: Float[Array, "H"]
    place: Int[Array, "N"]  # [op]: its position in decode order; padding maps to itself


def pad(features: Features) -> Batch:
    """The features of one problem at its bucket's size."""
    n, d = len(features.op), len(features.device)
    # One op and one pair at least are padding, as jraph demands.
    wide_n = bucket(n + 1, OP_SIZES)
    wide_p = bucket(len(features.src) + 1, tuple(2 * wide_n * k for k in (1, 2, 4, 8, 16)))
    wide_d = bucket(d, DEVICE_SIZES)
    position = inverse(features.order)
    # NumPy goes in, and JAX comes in where it is used: nothing is copied to a device twice.
    graph: dict[str, Any] = {
        "nodes": features.op[features.order],
        "edges": None,
        "senders": position[features.src].astype(np.int32),
        "receivers": position[features.dst].astype(np.int32),
        "globals": None,
        "n_node": np.array([n], dtype=np.int32),
        "n_edge": np.array([len(features.src)], dtype=np.int32),
    }
    batch: dict[str, Any] = {
        "graph": jraph.pad_with_graphs(jraph.GraphsTuple(**graph), wide_n, wide_p, 2),
        "op_type": _widen(features.op_type[features.order].astype(np.int32), wide_n),
        "op_mask": np.arange(wide_n) < n,
        "pair_mask": np.arange(wide_p) < len(features.src),
        "device": _widen(features.device, wide_d),
        "device_mask": np.arange(wide_d) < d,
        "whole": features.whole,
        "place": np.concatenate([position, np.arange(n, wide_n)]).astype(np.int32),
    }
    return Batch(**batch)


def pairs(batch: Batch) -> tuple[Int[Array, "P"], Int[Array, "P"]]:
    """(source, destination) of every pair; jraph allows None there, a `Batch` does not."""
    return jnp.asarray(batch.graph.senders), jnp.asarray(batch.graph.receivers)


def op_features(batch: Batch) -> Float[Array, "N F"]:
    """The features of the padded ops."""
    return jnp.asarray(batch.graph.nodes)


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
    return jnp.maximum(jraph.segment_max(sent, to, message.shape[0]), 0.0)


def mean_over_ops(values: Float[Array, "N F"], op_mask: Bool[Array, "N"]) -> Float[Array, "F"]:
    """The mean over real ops."""
    total = jnp.sum(values, axis=0, where=op_mask[:, None])
    return total / jnp.maximum(op_mask.sum(), 1)


def _widen(values: np.ndarray, size: int) -> np.ndarray:
    """Zeros behind, up to `size` rows."""
    wide = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    wide[: len(values)] = values
    return wide


def on_device(batch: Batch) -> Batch:
    """The batch as JAX arrays, so that several updates share one copy."""
    return jax.tree.map(jnp.asarray, batch)
