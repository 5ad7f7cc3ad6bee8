"""GDP's policy network in JAX: GraphSAGE, segment-recurrent attention, superposition, pair head.

Encoder (arXiv 1910.01578, equations 2 and 3), GraphSAGE with max pooling:
    h_N(v) = max over neighbours u of sigmoid(W h_u + b),   h_v' = FC([h_v ; h_N(v)])
Placer: segment-recurrent attention over the ops in decode order, without positional embedding
(Transformer-XL, Dai et al. 2019, arXiv 1901.02860). Each segment attends to itself and to the
gradient-stopped hidden states of the segments before it. The memory of a layer is that layer's own
input, so all segments are computed at once and no scan is needed.
Parameter superposition (equation 5): x' = g(c(x0) * x), a dense layer g behind a gate c that the
representation x0 of the whole graph conditions; after Cheung et al. 2019, arXiv 1902.05522.
Axes: N ops, D devices, C representation of the whole, S segments, L ops of a segment, M keys,
H heads, F features.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from gdp.policy.model.config import MAX_SUMMARIES, TYPE_WIDTH, Head, NetworkConfig, Params, Pooling
from gdp.policy.view.batching import Batch, max_over_neighbours, mean_over_ops, op_features, pairs
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES
from gdp.policy.view.features import (
    NUM_DEVICE_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_OP_FEATURES,
    NUM_OP_TYPES,
)


class Gate(nnx.Module):
    """Gate c: a positive factor per input feature, 2 sigmoid(W x0 + b); initially one."""

    def __init__(self, whole: int, features: int, *, rngs: nnx.Rngs) -> None:
        self.conditioning = nnx.Linear(
            whole,
            features,
            kernel_init=nnx.initializers.zeros_init(),
            bias_init=nnx.initializers.zeros_init(),
            rngs=rngs,
        )

    def __call__(self, whole: Float[Array, "C"]) -> Float[Array, "F"]:
        return 2.0 * jax.nn.sigmoid(self.conditioning(whole))


class SuperposedLinear(nnx.Module):
    """A dense layer behind its gate; without a gate, an ordinary dense layer."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        whole: int,
        *,
        gated: bool,
        rngs: nnx.Rngs,
    ) -> None:
        self.dense = nnx.Linear(inputs, outputs, rngs=rngs)
        self.gate = Gate(whole, inputs, rngs=rngs) if gated else None

    def factor(self, whole: Float[Array, "C"]) -> Float[Array, "F"]:
        """The gate's value, ones without a gate."""
        if self.gate is None:
            return jnp.ones(self.dense.in_features)
        return self.gate(whole)

    def kernel(self, whole: Float[Array, "C"]) -> Float[Array, "F O"]:
        """The weights with the gate folded in: (c * x) W = x (c W)."""
        return self.factor(whole)[:, None] * self.dense.kernel[...]

    def __call__(self, x: Float[Array, "... F"], whole: Float[Array, "C"]) -> Float[Array, "... O"]:
        return self.dense(x * self.factor(whole))


class PublishedSage(nnx.Module):
    """One iteration of equations 2 and 3."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.message = nnx.Linear(width, width, rngs=rngs)
        self.combine = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, h: Float[Array, "N F"], batch: Batch) -> Float[Array, "N F"]:
        sent = jax.nn.sigmoid(self.message(h))
        src, dst = pairs(batch)
        before = max_over_neighbours(sent, dst, src, batch.pair_mask)
        after = max_over_neighbours(sent, src, dst, batch.pair_mask)
        return self.combine(jnp.concatenate([h, jnp.maximum(before, after)], axis=-1))


class DirectedSage(nnx.Module):
    """One iteration with weights of its own for each direction of the edges."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.message = nnx.Linear(width, 2 * width, rngs=rngs)
        self.combine = nnx.Linear(3 * width, width, rngs=rngs)

    def __call__(self, h: Float[Array, "N F"], batch: Batch) -> Float[Array, "N F"]:
        normed = self.norm(h)
        down, up = jnp.split(jax.nn.relu(self.message(normed)), 2, axis=-1)
        src, dst = pairs(batch)
        before = max_over_neighbours(down, dst, src, batch.pair_mask)
        after = max_over_neighbours(up, src, dst, batch.pair_mask)
        return h + jax.nn.relu(self.combine(jnp.concatenate([normed, before, after], axis=-1)))


SAGE: dict[Pooling, Callable[..., nnx.Module]] = {
    "published": PublishedSage,
    "directed": DirectedSage,
}


class SegmentAttention(nnx.Module):
    """One block: attention and feed-forward, each behind a residual connection.

    `residual_gate` multiplies both branches by a learned strength that starts at zero, so that the
    untrained block passes its input through (Bachlechner et al. 2020, arXiv 2003.04887); without it
    the block is the published one. With `summaries`, one mean key per segment gives every op a view
    of the whole graph.
    """

    def __init__(self, config: NetworkConfig, whole: int, *, rngs: nnx.Rngs) -> None:
        width, gated = config.width, config.superposition
        self.heads, self.segment = config.heads, config.segment
        self.memory, self.summaries = config.memory, config.summaries

        def linear(inputs: int, outputs: int) -> SuperposedLinear:
            return SuperposedLinear(inputs, outputs, whole, gated=gated, rngs=rngs)

        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.out = linear(width, width)
        self.norm_after = nnx.LayerNorm(width, rngs=rngs)
        self.widen, self.narrow = linear(width, 2 * width), linear(2 * width, width)
        self.strength = nnx.Param(jnp.zeros(2)) if config.residual_gate else None

    def __call__(
        self, h: Float[Array, "N F"], op_mask: Bool[Array, "N"], whole: Float[Array, "C"]
    ) -> Float[Array, "N F"]:
        branch = (1.0, 1.0) if self.strength is None else (self.strength[0], self.strength[1])
        h = h + branch[0] * self.attend(self.norm(h), op_mask, whole)
        inner = jax.nn.relu(self.widen(self.norm_after(h), whole))
        return h + branch[1] * self.narrow(inner, whole)

    def attend(
        self, x: Float[Array, "N F"], op_mask: Bool[Array, "N"], whole: Float[Array, "C"]
    ) -> Float[Array, "N F"]:
        """Attention of every op to its own segment, the memory and the summaries."""
        n, width = x.shape
        length = min(self.segment, n)
        rows, mask = x.reshape(-1, length, width), op_mask.reshape(-1, length)
        query = self._split(self.query(rows, whole))
        keys, key_mask = self._context(rows, mask)
        key, value = self._split(self.key(keys, whole)), self._split(self.value(keys, whole))
        score = jnp.einsum("slhf,smhf->shlm", query, key) / math.sqrt(width // self.heads)
        score = jnp.where(key_mask[:, None, None, :], score, -1e9)
        mixed = jnp.einsum("shlm,smhf->slhf", jax.nn.softmax(score, axis=-1), value)
        return self.out(mixed.reshape(n, width), whole)

    def _context(
        self, rows: Float[Array, "S L F"], mask: Bool[Array, "S L"]
    ) -> tuple[Float[Array, "S M F"], Bool[Array, "S M"]]:
        """The keys of every segment: memory (gradient-stopped), itself, and the summaries."""
        parts, masks = [rows], [mask]
        past, past_mask = jax.lax.stop_gradient(rows), mask
        for _ in range(min(self.memory, rows.shape[0] - 1)):
            past = jnp.pad(past, ((1, 0), (0, 0), (0, 0)))[:-1]
            past_mask = jnp.pad(past_mask, ((1, 0), (0, 0)))[:-1]
            parts.insert(0, past)
            masks.insert(0, past_mask)
        if self.summaries and rows.shape[0] > 1:
            mean, present = self._summaries(rows, mask)
            parts.append(jnp.broadcast_to(mean, (rows.shape[0], *mean.shape)))
            masks.append(jnp.broadcast_to(present, (rows.shape[0], *present.shape)))
        return jnp.concatenate(parts, axis=1), jnp.concatenate(masks, axis=1)

    def _summaries(
        self, rows: Float[Array, "S L F"], mask: Bool[Array, "S L"]
    ) -> tuple[Float[Array, "Q F"], Bool[Array, "Q"]]:
        """The mean of each segment; of several together where there would be too many."""
        together = -(-rows.shape[0] // MAX_SUMMARIES)
        spare = -rows.shape[0] % together
        total = jnp.where(mask[:, :, None], rows, 0.0).sum(axis=1)
        total = (
            jnp.pad(total, ((0, spare), (0, 0))).reshape(-1, together, rows.shape[2]).sum(axis=1)
        )
        count = jnp.pad(mask.sum(axis=1), (0, spare)).reshape(-1, together).sum(axis=1)
        return total / jnp.maximum(count, 1)[:, None], count > 0

    def _split(self, x: Float[Array, "S M F"]) -> Float[Array, "S M H f"]:
        return x.reshape(*x.shape[:2], self.heads, -1)


class PolicyNetwork(nnx.Module):
    """Problem in, `Head` out; ops in the problem's own order."""

    def __init__(self, config: NetworkConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, inner = config.width, config.head_width
        self.whole_size = width + NUM_GLOBAL_FEATURES
        self.type_embedding = nnx.Embed(NUM_OP_TYPES, TYPE_WIDTH, rngs=rngs)
        self.enter = nnx.Linear(
            NUM_OP_FEATURES + TYPE_WIDTH + self._context_size(), width, rngs=rngs
        )
        self.sage = nnx.List(
            [SAGE[config.pooling](width, rngs=rngs) for _ in range(config.sage_layers)]
        )
        self.attention = nnx.List(
            [
                SegmentAttention(config, self.whole_size, rngs=rngs)
                for _ in range(config.attention_layers)
            ]
        )
        self.leave = nnx.LayerNorm(width, rngs=rngs)
        self.device_in = nnx.Linear(NUM_DEVICE_FEATURES, inner, rngs=rngs)
        self.device_out = nnx.Linear(inner, inner, rngs=rngs)
        self.node_head = self._linear(width, inner, rngs)
        self.feature_head = self._linear(NUM_PAIR_FEATURES, inner, rngs)
        self.mixing = self._linear(inner, inner, rngs)
        self.out_head = self._linear(inner, 1, rngs)

    def __call__(self, batch: Batch) -> Head:
        h, whole = self.encode(batch)
        for block in self.attention:
            h = block(h, batch.op_mask, whole)
        h = self.leave(h)
        return self._head(h[batch.place], batch, whole)

    def encode(self, batch: Batch) -> tuple[Float[Array, "N H"], Float[Array, "C"]]:
        """Embeddings of the ops in decode order, and the representation of the whole."""
        parts = [op_features(batch), self.type_embedding(batch.op_type)]
        if self.config.features == "full":
            parts.append(jnp.broadcast_to(batch.whole, (len(batch.op_type), batch.whole.shape[0])))
        h = self.enter(jnp.concatenate(parts, axis=-1))
        for layer in self.sage:
            h = layer(h, batch)
        return h, jnp.concatenate([mean_over_ops(h, batch.op_mask), batch.whole])

    def _head(self, h: Float[Array, "N H"], batch: Batch, whole: Float[Array, "C"]) -> Head:
        device = jax.nn.relu(self.device_in(batch.device))
        device = device + mean_over_ops(device, batch.device_mask)
        return Head(
            node=self.node_head(h, whole),
            device=self.device_out(device),
            feature=self.feature_head.kernel(whole),
            mixing=self.mixing.kernel(whole),
            bias=jnp.asarray(self.mixing.dense.bias),
            out=self.out_head.kernel(whole)[:, 0],
        )

    def _context_size(self) -> int:
        return NUM_GLOBAL_FEATURES if self.config.features == "full" else 0

    def _linear(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> SuperposedLinear:
        gated = self.config.superposition
        return SuperposedLinear(inputs, outputs, self.whole_size, gated=gated, rngs=rngs)


@functools.cache
def _skeleton(config: NetworkConfig) -> tuple[Any, Any]:
    """The structure of the network and a state to hang weights on."""
    model = nnx.eval_shape(lambda: PolicyNetwork(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)


OUT_SCALE = 0.1
"""Scale of the first weights of the last layer, so that a fresh policy is close to uniform."""


def init(config: NetworkConfig, seed: int) -> Params:
    """Fresh weights, drawn by NumPy: no compilation, and the same on every device.

    Kernels: normal with variance 1 / inputs; scales one; gates, biases and strengths zero, so that
    gates are 1 and gated residual branches are off.
    """

    def draw(path: Any, leaf: Any) -> np.ndarray:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] == "scale":
            return np.ones(leaf.shape, np.float32)
        if names[-1] not in ("kernel", "embedding") or "conditioning" in names:
            return np.zeros(leaf.shape, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32("/".join(names).encode())])
        factor = OUT_SCALE if names[0] == "out_head" else 1.0
        fan_in = leaf.shape[0] if names[-1] == "kernel" else leaf.shape[1]
        return (factor * rng.standard_normal(leaf.shape) / np.sqrt(fan_in)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract(config))


def abstract(config: NetworkConfig) -> Params:
    """The shapes of the weights, without computing any."""
    return nnx.to_pure_dict(_skeleton(config)[1])


def apply(config: NetworkConfig, params: Params, batch: Batch) -> Head:
    """The network as a pure function of its weights."""
    graphdef, abstract = _skeleton(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)(batch)


@functools.partial(jax.jit, static_argnums=0)
def encode(config: NetworkConfig, params: Params, batch: Batch) -> Head:
    """`apply`, compiled once per bucket."""
    return apply(config, params, batch)
