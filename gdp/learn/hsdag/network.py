"""HSDAG's network: encoder, edge scores, pooling of parsed groups, and the policy over devices.

One step, from a state Z (equations 6 to 11 of arXiv 2405.14185):

    h = LN(LN(Z) + GCN(LN(Z)))                  GCN: relu(D^-1/2 (A + I) D^-1/2 x W), both ways
    S_vu = sigmoid(MLP(h_v * h_u))              the score of an edge
    groups: the trees of every node's best edge (`gdp.graph.groups`)
    z_g = mean h + strength * MLP(mean MLP(h))  strength: the mean score of the kept edges of g

and again on the groups, `passes` times in all; then device logits MLP(z_g), and the next state
Z_v + z_g(v). The scores learn through the strength, as in Song et al. 2024. Departures: pooling
takes means, not sums, and states are normalised when they are read, since they grow with every
step. Axes: N nodes with padding, P edges with padding, H width, D devices.
"""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdp.learn.hsdag.nodes import NUM_FEATURES, ColocatedNodes, HsdagConfig
from gdp.policy.model.config import Params
from gdp.policy.view.features import OP_SIZES, bucket

SIZES = (32, 128, *OP_SIZES)
"""Sizes to which the nodes of problems are padded."""


class PaddedNodes(NamedTuple):
    """The nodes of a problem, padded."""

    feature: Float[Any, "N F"]
    src: Int[Any, "P"]
    dst: Int[Any, "P"]
    edge: Bool[Any, "P"]  # False: padding
    legal: Bool[Any, "N D"]  # where a node may go; padding nowhere


class ParsingPass(NamedTuple):
    """One parsing of a graph."""

    part: Int[Any, "N"]  # the group of every node; padding of one of its own, the last
    kept: Bool[Any, "P"]  # edges that tie groups together


def view_of(nodes: ColocatedNodes, max_devices: int) -> PaddedNodes:
    """The padded arrays of a problem's nodes."""
    count, edges = nodes.count, len(nodes.src)
    wide = bucket(count + 1, SIZES)  # the last node is always padding
    wide_p = bucket(edges + 1, tuple(wide * k for k in (2, 4, 8, 16)))
    feature = np.zeros((wide, NUM_FEATURES), dtype=np.float32)
    feature[:count] = nodes.feature
    ends = np.full((2, wide_p), wide - 1, dtype=np.int32)
    ends[:, :edges] = nodes.src, nodes.dst
    legal = np.zeros((wide, max_devices), dtype=bool)
    legal[:count, : nodes.allowed.shape[1]] = nodes.allowed
    return PaddedNodes(feature, ends[0], ends[1], np.arange(wide_p) < edges, legal)


class HsdagNetwork(nnx.Module):
    """The layers; every pass of parsing shares them."""

    def __init__(self, config: HsdagConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        self.enter = nnx.List(_mlp(NUM_FEATURES, width, width, rngs))
        self.before = nnx.LayerNorm(width, rngs=rngs)
        self.after = nnx.LayerNorm(width, rngs=rngs)
        self.gcn = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(config.gnn_layers)])
        self.edge = nnx.List(_mlp(width, width, 1, rngs))
        self.pool = nnx.List(_mlp(width, width, width, rngs))
        self.head = nnx.List(_mlp(width, width, config.max_devices, rngs))

    def start(self, feature: Float[Array, "N F"]) -> Float[Array, "N H"]:
        """The first state of every episode."""
        return _through(self.enter, feature)

    def level(
        self,
        h: Float[Array, "N H"],
        src: Int[Array, "P"],
        dst: Int[Array, "P"],
        edge: Bool[Array, "P"],
    ) -> tuple[Float[Array, "N H"], Float[Array, "P"]]:
        """Embeddings of the nodes of one level, and the scores of its edges, 0 for padding."""
        h = self.before(h)
        weight, count = edge.astype(h.dtype), h.shape[0]
        degree = 1.0 + jraph.segment_sum(weight, src, count)
        degree = degree + jraph.segment_sum(weight, dst, count)
        scale = jax.lax.rsqrt(degree)[:, None]
        x = h
        for layer in self.gcn:
            sent = scale * layer(x)
            told = sent + jraph.segment_sum(sent[src] * weight[:, None], dst, count)
            told = told + jraph.segment_sum(sent[dst] * weight[:, None], src, count)
            x = jax.nn.relu(scale * told)
        h = self.after(h + x)
        score = jax.nn.sigmoid(_through(self.edge, h[src] * h[dst])[:, 0])
        return h, jnp.where(edge, score, 0.0)

    def pooled(
        self,
        h: Float[Array, "N H"],
        score: Float[Array, "P"],
        src: Int[Array, "P"],
        parsed: ParsingPass,
    ) -> Float[Array, "N H"]:
        """Embeddings of the groups, one row each, in rows 0.. of as many as there are nodes."""
        count = h.shape[0]
        first, second = self.pool
        size = jnp.maximum(jraph.segment_sum(jnp.ones(count), parsed.part, count), 1.0)[:, None]
        mean = jraph.segment_sum(h, parsed.part, count) / size
        inner = jraph.segment_sum(jax.nn.relu(first(h)), parsed.part, count) / size
        kept, of = parsed.kept.astype(h.dtype), parsed.part[src]
        ties = jraph.segment_sum(kept, of, count)
        strength = jraph.segment_sum(kept * score, of, count) / jnp.maximum(ties, 1.0)
        # A node on its own has no edge to be strong by.
        return mean + jnp.where(ties > 0, strength, 1.0)[:, None] * second(inner)

    def logits(self, z: Float[Array, "N H"]) -> Float[Array, "N D"]:
        """Scores of every group's devices."""
        return _through(self.head, z)


def _mlp(inputs: int, hidden: int, outputs: int, rngs: nnx.Rngs) -> list[nnx.Linear]:
    return [nnx.Linear(inputs, hidden, rngs=rngs), nnx.Linear(hidden, outputs, rngs=rngs)]


def _through(layers: Any, x: Array) -> Array:
    first, second = layers
    return second(jax.nn.relu(first(x)))


@functools.cache
def _skeleton(config: HsdagConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: HsdagNetwork(config, rngs=nnx.Rngs(0))))


def init(config: HsdagConfig, seed: int) -> Params:
    """Fresh weights, drawn by NumPy: kernels normal with variance 1 / inputs, the policy's last a
    tenth of that, so that it starts close to uniform; scales one, biases zero."""

    def draw(path: Any, leaf: Any) -> np.ndarray:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] != "kernel":
            return np.full(leaf.shape, float(names[-1] == "scale"), np.float32)
        rng = np.random.default_rng([seed, zlib.crc32("/".join(names).encode())])
        factor = 0.1 if names[:2] == ["head", "1"] else 1.0
        return (factor * rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[0])).astype(
            np.float32
        )

    return jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(_skeleton(config)[1]))


def network(config: HsdagConfig, params: Params) -> HsdagNetwork:
    """The network with these weights, inside a function of them."""
    graphdef, abstract = _skeleton(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


@functools.partial(jax.jit, static_argnums=0)
def start(config: HsdagConfig, params: Params, view: PaddedNodes) -> Float[Array, "N H"]:
    """The first state."""
    return network(config, params).start(jnp.asarray(view.feature))


@functools.partial(jax.jit, static_argnums=0)
def level(
    config: HsdagConfig, params: Params, h: Array, src: Array, dst: Array, edge: Array
) -> tuple[Float[Array, "N H"], Float[Array, "P"]]:
    """`HsdagNetwork.level`."""
    return network(config, params).level(h, src, dst, edge)


@functools.partial(jax.jit, static_argnums=0)
def pooled(
    config: HsdagConfig, params: Params, h: Array, score: Array, src: Array, parsed: ParsingPass
) -> Float[Array, "N H"]:
    """`HsdagNetwork.pooled`."""
    return network(config, params).pooled(h, score, src, parsed)


@functools.partial(jax.jit, static_argnums=0)
def finish(
    config: HsdagConfig, params: Params, state: Array, z: Array, part: Array
) -> tuple[Float[Array, "N D"], Float[Array, "N H"]]:
    """(logits of the groups, the next state) from the last embeddings and each node's group."""
    return network(config, params).logits(z), state + z[part]


def replay(
    net: HsdagNetwork, view: PaddedNodes, state: Array, passes: ParsingPass
) -> Float[Array, "N D"]:
    """The logits of one step again, with the groups as they were: `passes` stacked [L, ...]."""
    h, src, dst = state, jnp.asarray(view.src), jnp.asarray(view.dst)
    edge = jnp.asarray(view.edge)
    for number in range(passes.part.shape[0]):
        parsed = ParsingPass(passes.part[number], passes.kept[number])
        h, score = net.level(h, src, dst, edge)
        h = net.pooled(h, score, src, parsed)
        src, dst = parsed.part[src], parsed.part[dst]
        edge = edge & (src != dst)
    return net.logits(h)
