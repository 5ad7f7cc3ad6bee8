"""What an op reads of the incumbent's placement, device by device: the prior of the pair head.

Two ways, each switched by the configuration. Attention from every op to what the incumbent has on
each device, in 32 bins of its schedule's time, with a learned bias by how many bins lie between;
and the incumbent's devices diffused along the edges, so that an op sees where its surroundings are.
Both end in one zero layer: a policy that gains them places as before until it learns.
Axes: N ops (in decode order), D devices, S bins, W head width, P pairs.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdp.policy.model.config import NetworkConfig
from gdp.policy.view.batching import Batch, pairs
from gdp.policy.view.features import NUM_BINS, NUM_DEVICE_FEATURES


class Across(nnx.Module):
    """Embeddings of the ops in, a score of each pair of op and device out."""

    def __init__(self, config: NetworkConfig, *, rngs: nnx.Rngs) -> None:
        width, inner = config.width, config.head_width
        self.hops = config.diffusion
        self.attends = config.device_attention
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.from_op = nnx.Linear(width, inner, rngs=rngs)
        self.from_device = nnx.Linear(NUM_DEVICE_FEATURES, inner, rngs=rngs)
        if self.attends:
            self.query, self.value = (nnx.Linear(width, inner, rngs=rngs) for _ in range(2))
            self.key = nnx.Linear(inner, inner, rngs=rngs)
            self.relative = nnx.Param(jnp.zeros(2 * NUM_BINS - 1))
            self.from_bins = nnx.Linear(inner + 2, inner, rngs=rngs)
        if self.hops:
            self.from_homes = nnx.Linear(2 * self.hops + 1, inner, rngs=rngs)
        self.last = nnx.Linear(inner, 1, rngs=rngs)

    def __call__(self, h: Float[Array, "N F"], batch: Batch) -> Float[Array, "N D"]:
        x, d = self.norm(h), batch.device.shape[0]
        # No advice and padding have no home: a row of zeros.
        home = jax.nn.one_hot(batch.home, d)
        hidden = self.from_op(x)[:, None] + self.from_device(batch.device)
        if self.attends:
            hidden = hidden + self.from_bins(self.attend(x, home, batch))
        if self.hops:
            hidden = hidden + self.from_homes(diffused(home, batch, self.hops))
        return self.last(jax.nn.relu(hidden))[..., 0]

    def attend(
        self, x: Float[Array, "N F"], home: Float[Array, "N D"], batch: Batch
    ) -> Float[Array, "N D W2"]:
        """The mixture over the bins of each device: mean of the values of the ops there, share of
        the bin's ops, and whether there are any. Bins without ops are keys too."""
        bins = jax.nn.one_hot(batch.bin, NUM_BINS) * batch.op_mask[:, None]
        count = jnp.einsum("ns,nd->sd", bins, home)
        mean = jnp.einsum("ns,nd,nw->sdw", bins, home, self.value(x))
        mean = mean / jnp.maximum(count, 1.0)[..., None]
        share = count / jnp.maximum(bins.sum(axis=0), 1.0)[:, None]
        token = jnp.concatenate([mean, share[..., None], (count > 0)[..., None]], axis=-1)
        key = self.key(mean)
        score = jnp.einsum("nw,sdw->nsd", self.query(x), key) / math.sqrt(key.shape[-1])
        between = jnp.arange(NUM_BINS)[None] - batch.bin[:, None] + NUM_BINS - 1
        score = score + self.relative[...][between][:, :, None]
        return jnp.einsum("nsd,sdw->ndw", jax.nn.softmax(score, axis=1), token)


def diffused(home: Float[Array, "N D"], batch: Batch, hops: int) -> Float[Array, "N D C"]:
    """The devices of an op, and of its readers and producers up to so many edges away: the mean
    over the edges, of means. C is 1 + 2 hops."""
    src, dst = pairs(batch)
    there = batch.pair_mask.astype(jnp.float32)[:, None]
    readers = jnp.maximum(jax.ops.segment_sum(there, src, len(home)), 1.0)
    producers = jnp.maximum(jax.ops.segment_sum(there, dst, len(home)), 1.0)
    ahead, behind, parts = home, home, [home]
    for _ in range(hops):
        ahead = jax.ops.segment_sum(ahead[dst] * there, src, len(home)) / readers
        behind = jax.ops.segment_sum(behind[src] * there, dst, len(home)) / producers
        parts += [ahead, behind]
    return jnp.stack(parts, axis=-1)
