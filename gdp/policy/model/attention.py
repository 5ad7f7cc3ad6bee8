"""Segment-recurrent attention over the ops in decode order, without positional embedding.

Transformer-XL (Dai et al. 2019, arXiv 1901.02860), as GDP's placer uses it: each segment attends to
itself and to the gradient-stopped hidden states of the segments before it. The memory of a layer is
that layer's own input, so all segments are computed at once and no scan is needed.
Axes: S segments, L ops of a segment, M keys, H heads, F features.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from gdp.policy.model.config import MAX_SUMMARIES, NetworkConfig
from gdp.policy.model.superposition import SuperposedLinear


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
        """What every op reads from its own segment, the memory and the summaries."""
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
