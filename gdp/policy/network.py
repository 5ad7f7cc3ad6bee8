"""The policy network: encoder, placer and pair head, in the published and the improved form.

Axes: N ops, D devices, K placements, F pair features, W head width, C representation of the whole.
"""

import functools
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gdp.policy.batching import Batch, mean_over_ops, op_features
from gdp.policy.features import (
    NUM_DEVICE_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_OP_FEATURES,
    NUM_OP_TYPES,
    FeatureSet,
)
from gdp.policy.sage import SAGE, Pooling
from gdp.policy.segment_attention import LAST_OF_BRANCH, SegmentAttention
from gdp.policy.superposition import SuperposedLinear

NUM_PAIR_FEATURES = 35
"""As in pair_kernels, which imports numba and is not imported here; a test holds them equal."""

Params = dict[str, Any]
"""The weights as a plain pytree of nested dicts."""


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of the network. `published()` is GDP as its paper describes it."""

    features: FeatureSet = "full"
    decode: Literal["autoregressive", "independent"] = "autoregressive"
    pooling: Pooling = "directed"
    width: int = 64
    sage_layers: int = 3
    attention_layers: int = 1
    heads: int = 4
    segment: int = 128  # ops per segment
    memory: int = 1  # earlier segments that an op attends to
    summaries: bool = True  # attend to the mean of every segment too
    residual_gate: bool = True  # attention starts switched off and is learned in
    zero_kernels: bool = False  # switched off by zero kernels instead of a gate at zero
    superposition: bool = True
    head_width: int = 32
    max_devices: int = 8  # of the independent head, which is tied to device indices
    advice: bool = True  # read what heuristics propose
    mask_memory: bool = True  # decode under the memory limits
    mask_alike: bool = True  # of empty devices that are alike, only the first

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie in [{least}, {most}], got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


_RANGES = {
    "width": (1, 1 << 14), "sage_layers": (0, 256), "attention_layers": (0, 256),
    "heads": (1, 1 << 10), "segment": (1, 1 << 20), "memory": (0, 1 << 10),
    "head_width": (1, 1 << 14), "max_devices": (1, 1 << 14),
}  # fmt: skip
"""What a network may be; a checkpoint or a recipe may come from anywhere."""


def published(**changes: Any) -> NetworkConfig:
    """GDP as published: its features, one-shot independent decode, no masks."""
    base: dict[str, Any] = asdict(NetworkConfig()) | {
        "features": "published",
        "decode": "independent",
        "pooling": "published",
        "attention_layers": 2,
        "summaries": False,
        "residual_gate": False,
        "advice": False,
        "mask_memory": False,
        "mask_alike": False,
    }
    return NetworkConfig(**(base | changes))


class Encoded(NamedTuple):
    """What the pair head needs of one problem; ops in the problem's own order."""

    prior: Float[Array, "N D"]
    node: Float[Array, "N W"]
    device: Float[Array, "D W"]
    feature: Float[Array, "F W"]
    mixing: Float[Array, "W W"]
    bias: Float[Array, "W"]
    out: Float[Array, "W"]


class PolicyNetwork(nnx.Module):
    """Problem in, `Encoded` out."""

    def __init__(self, config: NetworkConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, inner = config.width, config.head_width
        self.whole_size = width + NUM_GLOBAL_FEATURES
        self.type_embedding = nnx.Embed(NUM_OP_TYPES, 16, rngs=rngs)
        self.enter = nnx.Linear(NUM_OP_FEATURES + 16 + self._context_size(), width, rngs=rngs)
        self.sage = nnx.List(
            [SAGE[config.pooling](width, rngs=rngs) for _ in range(config.sage_layers)]
        )
        self.attention = nnx.List([self._block(rngs) for _ in range(config.attention_layers)])
        self.leave = nnx.LayerNorm(width, rngs=rngs)
        if config.decode == "independent":
            self.index_head = self._linear(width, config.max_devices, rngs)
            return
        self.device_in = nnx.Linear(NUM_DEVICE_FEATURES, inner, rngs=rngs)
        self.device_out = nnx.Linear(inner, inner, rngs=rngs)
        self.node_head = self._linear(width, inner, rngs)
        self.feature_head = self._linear(NUM_PAIR_FEATURES, inner, rngs)
        self.mixing = self._linear(inner, inner, rngs)
        self.out_head = self._linear(inner, 1, rngs)

    def __call__(self, batch: Batch) -> Encoded:
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

    def _head(self, h: Float[Array, "N H"], batch: Batch, whole: Float[Array, "C"]) -> Encoded:
        n, d, inner = h.shape[0], batch.device.shape[0], self.config.head_width
        if self.config.decode == "independent":
            table = self.index_head(h, whole)
            prior = jnp.pad(table, ((0, 0), (0, max(0, d - table.shape[1]))))[:, :d]
            nothing = jnp.zeros((inner, inner))
            feature = jnp.zeros((NUM_PAIR_FEATURES, inner))
            return Encoded(
                prior, jnp.zeros((n, inner)), jnp.zeros((d, inner)), feature, nothing,
                nothing[0], nothing[0],
            )  # fmt: skip
        device = jax.nn.relu(self.device_in(batch.device))
        device = device + mean_over_ops(device, batch.device_mask)
        return Encoded(
            prior=jnp.zeros((n, d)),
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

    def _block(self, rngs: nnx.Rngs) -> SegmentAttention:
        c = self.config
        return SegmentAttention(
            c.width, self.whole_size, heads=c.heads, segment=c.segment, memory=c.memory,
            summaries=c.summaries, residual_gate=c.residual_gate, gated=c.superposition, rngs=rngs,
        )  # fmt: skip


@functools.cache
def _skeleton(config: NetworkConfig) -> tuple[Any, Any]:
    """The structure of the network and a state to hang weights on."""
    model = nnx.eval_shape(lambda: PolicyNetwork(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)


QUIET = {"index_head": 0.1, "out_head": 0.1}
"""Layers whose weights start this much smaller, so that a fresh policy is close to uniform."""


def init(config: NetworkConfig, seed: int) -> Params:
    """Fresh weights, drawn by NumPy: no compilation, and the same on every device.

    Kernels: normal with variance 1 / inputs; scales one; gates, biases and strengths zero, so that
    gates are 1 and gated residual branches are off; with `zero_kernels` they are off because their
    last kernels are zero, and strengths are one.
    """
    ones = {"scale", "strength"} if config.zero_kernels else {"scale"}

    def draw(path: Any, leaf: Any) -> np.ndarray:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] in ones:
            return np.ones(leaf.shape, np.float32)
        if config.zero_kernels and names[0] == "attention" and names[2] in LAST_OF_BRANCH:
            return np.zeros(leaf.shape, np.float32)
        if names[-1] not in ("kernel", "embedding") or "conditioning" in names:
            return np.zeros(leaf.shape, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32("/".join(names).encode())])
        factor = min([QUIET.get(name, 1.0) for name in names])
        fan_in = leaf.shape[0] if names[-1] == "kernel" else leaf.shape[1]
        return (factor * rng.standard_normal(leaf.shape) / np.sqrt(fan_in)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract(config))


def abstract(config: NetworkConfig) -> Params:
    """The shapes of the weights, without computing any."""
    return nnx.to_pure_dict(_skeleton(config)[1])


def apply(config: NetworkConfig, params: Params, batch: Batch) -> Encoded:
    """The network as a pure function of its weights."""
    graphdef, abstract = _skeleton(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)(batch)


@functools.partial(jax.jit, static_argnums=0)
def encode(config: NetworkConfig, params: Params, batch: Batch) -> Encoded:
    """`apply`, compiled once per bucket."""
    return apply(config, params, batch)


def score(encoded: Encoded, feats: Float[Array, "K N D F"]) -> Float[Array, "K N D"]:
    """logit = prior + out . relu(mixing' relu(node + device + feature' f) + bias)."""
    first = encoded.node[None, :, None, :] + encoded.device[None, None] + feats @ encoded.feature
    second = jax.nn.relu(jax.nn.relu(first) @ encoded.mixing + encoded.bias)
    return encoded.prior[None] + second @ encoded.out
