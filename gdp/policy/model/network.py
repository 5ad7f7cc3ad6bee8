"""The policy network in JAX, for learning: padded to a few sizes, so that compilation is rare.

All segments of the attention are computed at once and no scan is needed, as the memory of a layer
is that layer's own input. Axes: N padded ops, in decode order; P padded pairs, D padded devices,
S segments, L ops of a segment, M keys, H heads, F features.
"""

import functools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdp.graph.groups import inverse
from gdp.policy.model.config import MAX_SUMMARIES, Head, NetworkConfig, Params, nested, shapes
from gdp.policy.model.inference import Network
from gdp.policy.view.features import DEVICE_SIZES, OP_SIZES, Features, bucket

OUT_SCALE = 0.1
"""Scale of the first weights of the last layer, so that a fresh policy is close to uniform."""


class Batch(NamedTuple):
    """One padded problem. Ops are in decode order, padding last; pairs index that order."""

    graph: jraph.GraphsTuple  # nodes [N, F], senders and receivers [P]; the second is padding
    op_type: Int[Array, "N"]
    op_mask: Bool[Array, "N"]
    pair_mask: Bool[Array, "P"]
    device: Float[Array, "D G"]
    device_mask: Bool[Array, "D"]
    whole: Float[Array, "H"]
    place: Int[Array, "N"]  # [op]: its position in decode order; padding maps to itself

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of ops and devices, padding included."""
        return len(self.op_mask), len(self.device_mask)


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


def _widen(values: np.ndarray, size: int) -> np.ndarray:
    """Zeros behind, up to `size` rows."""
    wide = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    wide[: len(values)] = values
    return wide


def on_device(batch: Batch) -> Batch:
    """The batch as JAX arrays, so that several updates share one copy."""
    return jax.tree.map(jnp.asarray, batch)


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


class JaxNetwork(Network):
    """The network on one padded problem."""

    xp = jnp

    def __init__(self, config: NetworkConfig, params: Params, batch: Batch) -> None:
        self.config, self.params, self.whole = config, params, batch.whole
        # jraph allows None in the fields of a graph, a `Batch` does not.
        self.op, self.op_type = jnp.asarray(batch.graph.nodes), batch.op_type
        src, dst = jnp.asarray(batch.graph.senders), jnp.asarray(batch.graph.receivers)
        self.device = batch.device
        self.place, self.op_mask, self.device_mask = batch.place, batch.op_mask, batch.device_mask
        self.into = lambda sent: max_over_neighbours(sent, dst, src, batch.pair_mask)
        self.out_of = lambda sent: max_over_neighbours(sent, src, dst, batch.pair_mask)

    def attend(self, p: Params, x: Float[Array, "N F"]) -> Float[Array, "N F"]:
        """Attention of every op to its own segment, the memory and the summaries."""
        n, width = x.shape
        length = min(self.config.segment, n)
        rows, mask = x.reshape(-1, length, width), self.op_mask.reshape(-1, length)
        keys, key_mask = self._keys(rows, mask)

        def split(name: str, of: Float[Array, "S M F"]) -> Float[Array, "S M H f"]:
            return self.gated(p[name], of).reshape(*of.shape[:2], self.config.heads, -1)

        query, key, value = split("query", rows), split("key", keys), split("value", keys)
        score = jnp.einsum("slhf,smhf->shlm", query, key) / math.sqrt(width // self.config.heads)
        score = jnp.where(key_mask[:, None, None, :], score, -1e9)
        mixed = jnp.einsum("shlm,smhf->slhf", jax.nn.softmax(score, axis=-1), value)
        return self.gated(p["out"], mixed.reshape(n, width))

    def _keys(
        self, rows: Float[Array, "S L F"], mask: Bool[Array, "S L"]
    ) -> tuple[Float[Array, "S M F"], Bool[Array, "S M"]]:
        """The keys of every segment: memory (gradient-stopped), itself, and the summaries."""
        parts, masks = [rows], [mask]
        past, past_mask = jax.lax.stop_gradient(rows), mask
        for _ in range(min(self.config.memory, rows.shape[0] - 1)):
            past = jnp.pad(past, ((1, 0), (0, 0), (0, 0)))[:-1]
            past_mask = jnp.pad(past_mask, ((1, 0), (0, 0)))[:-1]
            parts.insert(0, past)
            masks.insert(0, past_mask)
        if self.config.summaries and rows.shape[0] > 1:
            for part, one in zip((parts, masks), _summaries(rows, mask), strict=True):
                part.append(jnp.broadcast_to(one, (rows.shape[0], *one.shape)))
        return jnp.concatenate(parts, axis=1), jnp.concatenate(masks, axis=1)

    def relu(self, x: Any) -> Any:
        """Rectifier, whose gradient at zero is zero."""
        return jax.nn.relu(x)

    def mean(self, rows: Float[Array, "N F"], mask: Bool[Array, "N"]) -> Float[Array, "F"]:
        """Mean over the rows that are not padding."""
        return jnp.sum(rows, axis=0, where=mask[:, None]) / jnp.maximum(mask.sum(), 1)

    def product(
        self, x: Float[Array, "... F"], kernel: Float[Array, "F O"]
    ) -> Float[Array, "... O"]:
        """x @ kernel."""
        return x @ kernel


def _summaries(
    rows: Float[Array, "S L F"], mask: Bool[Array, "S L"]
) -> tuple[Float[Array, "Q F"], Bool[Array, "Q"]]:
    """The mean of each segment; of several together where there would be too many."""
    together = -(-rows.shape[0] // MAX_SUMMARIES)
    spare = -rows.shape[0] % together
    total = jnp.where(mask[:, :, None], rows, 0.0).sum(axis=1)
    total = jnp.pad(total, ((0, spare), (0, 0))).reshape(-1, together, rows.shape[2]).sum(axis=1)
    count = jnp.pad(mask.sum(axis=1), (0, spare)).reshape(-1, together).sum(axis=1)
    return total / jnp.maximum(count, 1)[:, None], count > 0


def init(config: NetworkConfig, seed: int) -> Params:
    """Fresh weights, drawn by NumPy: no compilation, and the same on every device.

    Kernels: normal with variance 1 / inputs; scales one; gates, biases and strengths zero, so that
    gates are 1 and gated residual branches are off.
    """

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        first, *_, last = path.split("/")
        if last not in ("kernel", "embedding") or "conditioning" in path:
            return np.full(shape, float(last == "scale"), np.float32)
        rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
        factor = OUT_SCALE if first == "out_head" else 1.0
        fan_in = shape[0] if last == "kernel" else shape[1]
        return (factor * rng.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)

    return nested({path: draw(path, shape) for path, shape in shapes(config).items()})


def apply(config: NetworkConfig, params: Params, batch: Batch) -> Head:
    """The network as a pure function of its weights."""
    return JaxNetwork(config, params, batch)()


@functools.partial(jax.jit, static_argnums=0)
def encode(config: NetworkConfig, params: Params, batch: Batch) -> Head:
    """`apply`, compiled once per bucket."""
    return apply(config, params, batch)
