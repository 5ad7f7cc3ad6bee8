"""HSDAG's configuration, the nodes it sees of a problem, and its network.

Colocation: an op that is the only reader of its only producer joins it (the paper's appendix G).
Features: mean of the one-hot op types, output shape, in- and out-degree (one-hot), fractal
dimension (equation 4), position in topological order as a number and as sinusoids (equation 5).
The network: encoder, edge scores, pooling of parsed groups, and the policy over devices. One step,
from a state Z (equations 6 to 11 of arXiv 2405.14185):

    h = LN(LN(Z) + GCN(LN(Z)))                  GCN: relu(D^-1/2 (A + I) D^-1/2 x W), both ways
    S_vu = sigmoid(MLP(h_v * h_u))              the score of an edge
    groups: the trees of every node's best edge (`gdp.graph.groups`)
    z_g = mean h + strength * MLP(mean MLP(h))  strength: the mean score of the kept edges of g

then device logits MLP(z_g), and the next state
Z_v + z_g(v). The scores learn through the strength, as in Song et al. 2024. Departures: pooling
takes means, not sums, and states are normalised when they are read, since they grow with every
step. Axes: N ops, M nodes, P edges, D devices, F features; in the network, where arrays are padded,
N nodes, P edges, H width.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdp.graph.groups import all_per_group, components, merge_ids, sum_per_group
from gdp.policy.model.config import Params
from gdp.policy.view.features import NUM_OP_TYPES, OP_SIZES, bucket
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem


@dataclass(frozen=True)
class HsdagConfig:
    """Network and training. `published()` has the paper's values, as far as it gives them."""

    width: int = 64
    gnn_layers: int = 2
    max_devices: int = 8
    output_shape: bool = True  # the features of the paper's ablation
    node_id: bool = True
    structure: bool = True  # in- and out-degree, fractal dimension
    steps: int = 5  # of the state between two updates: each parses anew
    samples: int = 4  # placements drawn per step
    epochs: int = 4  # optimiser steps per update
    rate: float = 5e-4
    discount: float = 1.0  # gamma of equation 14: weight of a reward, per step
    advantage: Literal["centred", "published"] = "centred"
    entropy: float = 0.3

    def __post_init__(self) -> None:
        for name in ("width", "gnn_layers", "steps", "samples", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.discount <= 1.0:
            raise ValueError(f"discount must lie in (0, 1], got {self.discount}")
        if self.advantage == "centred" and self.steps * self.samples < 2:
            raise ValueError("steps x samples must be at least 2 to have a baseline")


def published(**changes: Any) -> HsdagConfig:
    """The settings of the paper's table 6, and no baseline (equation 14).

    The discount is not in the paper; 0.95 is that of the code its authors released.
    """
    config = HsdagConfig(
        width=128, steps=20, samples=1, epochs=4, rate=1e-4, discount=0.95,
        advantage="published", entropy=0.0,
    )  # fmt: skip
    return replace(config, **changes)


SHAPE = 6  # axes of an output that are told
DEGREES = 8  # larger degrees count as 7
SINUSOIDS = 16  # d_pos of equation 5, which the paper does not tell
RADIUS = 64  # hops over which the fractal dimension is fitted, at most
NUM_FEATURES = NUM_OP_TYPES + SHAPE + 2 * DEGREES + 1 + 1 + SINUSOIDS
_ROWS = 256  # nodes whose distances are held at once


@dataclass(frozen=True, eq=False)
class ColocatedNodes:
    """A coarse graph; a node's ops share a device."""

    node_of: Int[np.ndarray, "N"]
    src: Int[np.ndarray, "P"]  # each edge once, no edge from a node to itself
    dst: Int[np.ndarray, "P"]
    allowed: Bool[np.ndarray, "M D"]
    fastest: Int[np.ndarray, "M"]  # the allowed device where a node's ops run fastest
    feature: Float[np.ndarray, "M F"]

    @property
    def count(self) -> int:
        """M."""
        return len(self.fastest)

    def devices(self, node_device: Int[np.ndarray, "... M"]) -> Int[np.ndarray, "... N"]:
        """The device of every op: the one wanted for its node, or the fastest where that may not
        be."""
        may = self.allowed[np.arange(self.count), node_device]
        return np.where(may, node_device, self.fastest)[..., self.node_of]


def make_nodes(problem: Problem, config: HsdagConfig) -> ColocatedNodes:
    """The nodes of a problem, with the features that the configuration leaves in."""
    node_of = colocated(problem)
    src, dst = _distinct(*(node_of[end] for end in problem.graph.edges))
    allowed = all_per_group(problem.allowed, node_of)
    seconds = sum_per_group(arrays_of(problem).compute_s, node_of)
    fastest = np.where(allowed, seconds, np.inf).argmin(axis=1)
    graph = problem.graph
    count = int(node_of.max()) + 1
    kind = np.zeros((graph.num_ops, NUM_OP_TYPES))
    # The same hash as the graph policy's: weights then fit any graph, whatever types it has.
    kinds = [zlib.crc32(t.encode()) % NUM_OP_TYPES for t in graph.op_types]
    kind[np.arange(graph.num_ops), kinds] = 1.0
    size = np.bincount(node_of, minlength=count)[:, None]
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, node_of, np.arange(graph.num_ops))
    degrees = [np.bincount(end, minlength=count) for end in (dst, src)]
    one_hot = [np.eye(DEGREES)[np.minimum(degree, DEGREES - 1)] for degree in degrees]
    index = np.arange(count)  # ids are in order of first appearance: topological
    fractal = fractal_dimension(src, dst, count) if config.structure else np.zeros(count)
    feature = np.concatenate(
        [
            sum_per_group(kind, node_of) / size,
            config.output_shape * np.stack([_shape(problem, op) for op in last.tolist()]),
            config.structure * np.concatenate([*one_hot, fractal[:, None]], axis=1),
            config.node_id * np.concatenate([index[:, None] / count, sinusoids(index)], axis=1),
        ],
        axis=1,
    ).astype(np.float32)
    return ColocatedNodes(node_of, src, dst, allowed, fastest, feature)


def colocated(problem: Problem) -> Int[np.ndarray, "N"]:
    """The node of every op: chains of only children of only parents, and colocated ops.

    Ops that may go to different devices are not joined, nor inputs and outputs of the model.
    """
    graph = problem.graph
    src, dst = _distinct(*graph.edges)
    only_child = np.bincount(src, minlength=graph.num_ops)[src] == 1
    only_parent = np.bincount(dst, minlength=graph.num_ops)[dst] == 1
    may = problem.group_allowed[problem.group]
    alike = (may[src] == may[dst]).all(axis=1) & ~graph.is_io[src] & ~graph.is_io[dst]
    linked = only_child & only_parent & alike
    return merge_ids(components(src[linked], dst[linked], graph.num_ops), problem.group)


def fractal_dimension(
    src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"], num_nodes: int
) -> Float[np.ndarray, "M"]:
    """The slope of log N(v, r) over log r for every node v: equation 4.

    N(v, r) counts the nodes within r hops of v, itself left out, edges read in both directions;
    r = 1 .. the furthest node, at most `RADIUS`. 0 where there are fewer than two radii. A path
    has 1 from its end. O(M (M + P)).
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import dijkstra

    links = coo_array((np.ones(len(src)), (src, dst)), shape=(num_nodes, num_nodes)).tocsr()
    slope = np.zeros(num_nodes)
    for first in range(0, num_nodes, _ROWS):
        rows = np.arange(first, min(first + _ROWS, num_nodes))
        hops = dijkstra(links, directed=False, indices=rows, unweighted=True, limit=RADIUS)
        for row, hop in zip(rows, hops, strict=True):
            at = np.bincount(hop[np.isfinite(hop)].astype(np.int64))
            if len(at) > 2:
                x, y = np.log(np.arange(1, len(at))), np.log(np.cumsum(at[1:]))
                x = x - x.mean()
                slope[row] = (x * (y - y.mean())).sum() / (x * x).sum()
    return slope


def sinusoids(position: Int[np.ndarray, "M"], size: int = SINUSOIDS) -> Float[np.ndarray, "M S"]:
    """Alternating sin and cos of pos / 10000^(2i / size): equation 5."""
    angle = position[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(len(position), -1)


def _shape(problem: Problem, op: int) -> Float[np.ndarray, "S"]:
    """The logarithms of an op's output shape, a tenth of them; zeros behind."""
    axis_logs = np.zeros(SHAPE)
    shapes = problem.graph.detail[op].output_shapes
    if shapes:
        axes = shapes[0][:SHAPE]
        axis_logs[: len(axes)] = np.log1p(np.maximum(axes, 0)) / 10.0
    return axis_logs


def _distinct(
    src: Int[np.ndarray, "E"], dst: Int[np.ndarray, "E"]
) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """Each pair once, sorted; none from a node to itself."""
    apart = src != dst
    pairs = np.unique(np.stack([src[apart], dst[apart]], axis=1), axis=0)
    return pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)


SIZES = (32, 128, *OP_SIZES)
"""Sizes to which the nodes of problems are padded."""


class PaddedNodes(NamedTuple):
    """The nodes of a problem, padded."""

    feature: Float[Any, "N F"]
    src: Int[Any, "P"]
    dst: Int[Any, "P"]
    edge: Bool[Any, "P"]  # False: padding
    legal: Bool[Any, "N D"]  # where a node may go; padding nowhere


class Parsing(NamedTuple):
    """The groups of a graph's nodes."""

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
    """The layers."""

    def __init__(self, config: HsdagConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        self.enter = nnx.List(_mlp(NUM_FEATURES, width, width, rngs))
        self.before = nnx.LayerNorm(width, rngs=rngs)
        self.after = nnx.LayerNorm(width, rngs=rngs)
        self.gcn = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(config.gnn_layers)])
        self.edge = nnx.List(_mlp(width, width, 1, rngs))
        self.pool = nnx.List(_mlp(width, width, width, rngs))
        self.head = nnx.List(_mlp(width, width, config.max_devices, rngs))

    def start(self, view: PaddedNodes) -> Float[Array, "N H"]:
        """The first state of every episode."""
        return _through(self.enter, jnp.asarray(view.feature))

    def embed(
        self, view: PaddedNodes, state: Float[Array, "N H"]
    ) -> tuple[Float[Array, "N H"], Float[Array, "P"]]:
        """Embeddings of the nodes, and the scores of the edges.

        Padding edges join the last node, which is padding, to itself.
        """
        h, src, dst = self.before(state), jnp.asarray(view.src), jnp.asarray(view.dst)
        ends = {"senders": jnp.concatenate([src, dst]), "receivers": jnp.concatenate([dst, src])}
        sizes = {"n_node": jnp.array([len(h)]), "n_edge": jnp.array([2 * len(src)])}
        graph: Any = jraph.GraphsTuple(nodes=h, edges=None, globals=None, **ends, **sizes)
        layer: Any
        for layer in self.gcn:
            graph = jraph.GraphConvolution(layer, add_self_edges=True)(graph)
            graph = graph._replace(nodes=jax.nn.relu(graph.nodes))
        h = self.after(h + graph.nodes)
        return h, jax.nn.sigmoid(_through(self.edge, h[src] * h[dst])[:, 0])

    def finish(
        self,
        view: PaddedNodes,
        state: Float[Array, "N H"],
        h: Float[Array, "N H"],
        score: Float[Array, "P"],
        parsed: Parsing,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N H"]]:
        """(logits of the groups, the next state) from the embeddings, the scores and the groups.

        Groups have a row each, in rows 0.. of as many as there are nodes.
        """
        count, part = len(h), jnp.asarray(parsed.part)
        first, second = self.pool
        mean = jraph.segment_mean(h, part, count)
        inner = jraph.segment_mean(jax.nn.relu(first(h)), part, count)
        tied, of = jnp.asarray(parsed.kept).astype(h.dtype), part[view.src]
        ties = jraph.segment_sum(tied, of, count)
        strength = jraph.segment_sum(tied * score, of, count) / jnp.maximum(ties, 1.0)
        # A node on its own has no edge to be strong by.
        z = mean + jnp.where(ties > 0, strength, 1.0)[:, None] * second(inner)
        return _through(self.head, z), state + z[part]

    def replay(
        self, view: PaddedNodes, state: Float[Array, "N H"], parsed: Parsing
    ) -> Float[Array, "N D"]:
        """The logits of one step again, with the groups as they were."""
        return self.finish(view, state, *self.embed(view, state), parsed)[0]


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(part: Callable[..., Any], config: HsdagConfig, params: Params, *arguments: Any) -> Any:
    """A method of the network, compiled, such as `HsdagNetwork.embed`, with these weights."""
    return part(network(config, params), *arguments)
