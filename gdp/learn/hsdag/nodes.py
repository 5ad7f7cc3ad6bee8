"""HSDAG's configuration and the nodes it sees of a problem: chains of ops that share a device.

Colocation: an op that is the only reader of its only producer joins it (the paper's appendix G).
Features: mean of the one-hot op types, output shape, in- and out-degree (one-hot), fractal
dimension (equation 4), position in topological order as a number and as sinusoids (equation 5).
Axes: N ops, M nodes, P edges, D devices, F features.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.graph.groups import all_per_group, components, merge_ids, sum_per_group
from gdp.policy.view.features import NUM_OP_TYPES
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem


@dataclass(frozen=True)
class HsdagConfig:
    """The network and its training. `published()` is the paper's, as far as it says."""

    width: int = 64
    gnn_layers: int = 2
    passes: int = 1  # of parsing at most, each over the groups of the one before
    least_groups: int = 2  # a pass that would leave fewer is not taken
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
        for name in ("width", "gnn_layers", "passes", "least_groups", "steps", "samples", "epochs"):
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
        width=128, passes=1, steps=20, samples=1, epochs=4, rate=1e-4, discount=0.95,
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

    def devices(self, wanted: Int[np.ndarray, "... M"]) -> Int[np.ndarray, "... N"]:
        """The device of every op: the one wanted for its node, or the fastest where that may not
        be."""
        may = self.allowed[np.arange(self.count), wanted]
        return np.where(may, wanted, self.fastest)[..., self.node_of]


def make_nodes(problem: Problem, config: HsdagConfig) -> ColocatedNodes:
    """The nodes of a problem, with the features that the configuration leaves in."""
    node_of = colocated(problem)
    src, dst = _distinct(*(node_of[end] for end in problem.graph.edges))
    allowed = all_per_group(problem.allowed, node_of)
    seconds = sum_per_group(arrays_of(problem).compute_s, node_of)
    feature = _features(problem, node_of, src, dst, config)
    fastest = np.where(allowed, seconds, np.inf).argmin(axis=1)
    return ColocatedNodes(node_of, src, dst, allowed, fastest, feature)


def colocated(problem: Problem) -> Int[np.ndarray, "N"]:
    """The node of every op: chains of only children of only parents, and what must stay together.

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
    """sin and cos of pos / 10000^(2i / size), in turn: equation 5."""
    angle = position[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(len(position), -1)


def _features(
    problem: Problem,
    node_of: Int[np.ndarray, "N"],
    src: Int[np.ndarray, "P"],
    dst: Int[np.ndarray, "P"],
    config: HsdagConfig,
) -> Float[np.ndarray, "M F"]:
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
    return np.concatenate(
        [
            sum_per_group(kind, node_of) / size,
            config.output_shape * np.stack([_shape(problem, op) for op in last.tolist()]),
            config.structure * np.concatenate([*one_hot, fractal[:, None]], axis=1),
            config.node_id * np.concatenate([index[:, None] / count, sinusoids(index)], axis=1),
        ],
        axis=1,
    ).astype(np.float32)


def _shape(problem: Problem, op: int) -> Float[np.ndarray, "S"]:
    """The logarithms of an op's output shape, a tenth of them; zeros behind."""
    told = np.zeros(SHAPE)
    shapes = problem.graph.detail[op].output_shapes
    if shapes:
        axes = shapes[0][:SHAPE]
        told[: len(axes)] = np.log1p(np.maximum(axes, 0)) / 10.0
    return told


def _distinct(
    src: Int[np.ndarray, "E"], dst: Int[np.ndarray, "E"]
) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """Each pair once, sorted; none from a node to itself."""
    apart = src != dst
    pairs = np.unique(np.stack([src[apart], dst[apart]], axis=1), axis=0)
    return pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
