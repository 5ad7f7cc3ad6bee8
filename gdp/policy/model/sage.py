"""GraphSAGE with max pooling, as GDP uses it (arXiv 1910.01578, equations 2 and 3).

h_N(v) = max over neighbours u of sigmoid(W h_u + b),   h_v' = FC([h_v ; h_N(v)])
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdp.policy.model.config import Pooling
from gdp.policy.view.batching import Batch, max_over_neighbours, pairs


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
