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

import itertools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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


def init(config: HsdagConfig, seed: int) -> Params:
    """Fresh weights, drawn by NumPy; every pass of parsing shares them.

    Kernels are normal with variance 1 / inputs, the policy's last a tenth of that, so that it
    starts close to uniform; scales are one, biases zero.
    """

    def dense(path: str, inputs: int, outputs: int) -> Params:
        rng = np.random.default_rng([seed, zlib.crc32(f"{path}/kernel".encode())])
        factor = 0.1 if path == "head/1" else 1.0
        kernel = factor * rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(outputs, np.float32)}

    def layers(name: str, *widths: int) -> dict[int, Params]:
        sizes = enumerate(itertools.pairwise(widths))
        return {k: dense(f"{name}/{k}", *size) for k, size in sizes}

    width = config.width
    norm = {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}
    return {
        "enter": layers("enter", NUM_FEATURES, width, width),
        "before": norm,
        "after": norm,
        "gcn": layers("gcn", *[width] * (config.gnn_layers + 1)),
        "edge": layers("edge", width, width, 1),
        "pool": layers("pool", width, width, width),
        "head": layers("head", width, width, config.max_devices),
    }


def _dense(p: Params, x: Array) -> Array:
    return x @ jnp.asarray(p["kernel"]) + jnp.asarray(p["bias"])


def _mlp(p: dict[int, Params], x: Array) -> Array:
    return _dense(p[1], jax.nn.relu(_dense(p[0], x)))


def _norm(p: Params, x: Float[Array, "N H"]) -> Float[Array, "N H"]:
    """Layer norm over features."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.maximum((x * x).mean(axis=-1, keepdims=True) - mean * mean, 0.0)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * p["scale"]) + p["bias"]


@jax.jit
def start(params: Params, view: PaddedNodes) -> Float[Array, "N H"]:
    """The first state of every episode."""
    return _mlp(params["enter"], jnp.asarray(view.feature))


@jax.jit
def level(
    params: Params, h: Float[Array, "N H"], src: Int[Array, "P"], dst: Int[Array, "P"],
    edge: Bool[Array, "P"],
) -> tuple[Float[Array, "N H"], Float[Array, "P"]]:  # fmt: skip
    """Embeddings of the nodes of one level, and the scores of its edges, 0 for padding."""
    h = _norm(params["before"], h)
    weight, count = edge.astype(h.dtype), h.shape[0]
    degree = 1.0 + jax.ops.segment_sum(weight, src, count)
    degree = degree + jax.ops.segment_sum(weight, dst, count)
    scale = jax.lax.rsqrt(degree)[:, None]
    x = h
    for k in range(len(params["gcn"])):
        sent = scale * _dense(params["gcn"][k], x)
        received = sent + jax.ops.segment_sum(sent[src] * weight[:, None], dst, count)
        received = received + jax.ops.segment_sum(sent[dst] * weight[:, None], src, count)
        x = jax.nn.relu(scale * received)
    h = _norm(params["after"], h + x)
    score = jax.nn.sigmoid(_mlp(params["edge"], h[src] * h[dst])[:, 0])
    return h, jnp.where(edge, score, 0.0)


@jax.jit
def pooled(
    params: Params, h: Float[Array, "N H"], score: Float[Array, "P"], src: Int[Array, "P"],
    parsed: ParsingPass,
) -> Float[Array, "N H"]:  # fmt: skip
    """Embeddings of the groups, one row each, in rows 0.. of as many as there are nodes."""
    count = h.shape[0]
    size = jnp.maximum(jax.ops.segment_sum(jnp.ones(count), parsed.part, count), 1.0)[:, None]
    mean = jax.ops.segment_sum(h, parsed.part, count) / size
    inner = jax.nn.relu(_dense(params["pool"][0], h))
    inner = jax.ops.segment_sum(inner, parsed.part, count) / size
    kept, of = jnp.asarray(parsed.kept).astype(h.dtype), jnp.asarray(parsed.part)[src]
    ties = jax.ops.segment_sum(kept, of, count)
    strength = jax.ops.segment_sum(kept * score, of, count) / jnp.maximum(ties, 1.0)
    # A node on its own has no edge to be strong by.
    return mean + jnp.where(ties > 0, strength, 1.0)[:, None] * _dense(params["pool"][1], inner)


@jax.jit
def finish(
    params: Params, state: Float[Array, "N H"], z: Float[Array, "N H"], part: Int[Array, "N"]
) -> tuple[Float[Array, "N D"], Float[Array, "N H"]]:
    """(logits of the groups, the next state) from the last embeddings and each node's group."""
    return _mlp(params["head"], z), state + z[part]


def replay(
    params: Params, view: PaddedNodes, state: Float[Array, "N H"], passes: ParsingPass
) -> Float[Array, "N D"]:
    """The logits of one step again, with the groups as they were: `passes` stacked [L, ...]."""
    h, src, dst = state, jnp.asarray(view.src), jnp.asarray(view.dst)
    edge = jnp.asarray(view.edge)
    for number in range(passes.part.shape[0]):
        parsed = ParsingPass(passes.part[number], passes.kept[number])
        h, score = level(params, h, src, dst, edge)
        h = pooled(params, h, score, src, parsed)
        src, dst = parsed.part[src], parsed.part[dst]
        edge = edge & (src != dst)
    return _mlp(params["head"], h)
