"""The policy network: encoder, placer and pair head, in the published and the improved form.

Axes: N ops, D devices, C representation of the whole.
"""

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gdp.policy.model.attention import SegmentAttention
from gdp.policy.model.config import TYPE_WIDTH, NetworkConfig, Params
from gdp.policy.model.head import Head
from gdp.policy.model.sage import SAGE
from gdp.policy.model.superposition import SuperposedLinear
from gdp.policy.view.batching import Batch, mean_over_ops, op_features
from gdp.policy.view.features import (
    NUM_DEVICE_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_OP_FEATURES,
    NUM_OP_TYPES,
)
from gdp.policy.view.pair_features import NUM_PAIR_FEATURES


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
            bias=self.mixing.offset(),
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
"""Of the last layer's first weights, so that a fresh policy is close to uniform."""


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
