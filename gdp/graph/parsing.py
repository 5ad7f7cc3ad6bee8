"""Groups of nodes from scores of edges: the graph parsing algorithm.

Every node keeps its best edge, and what hangs together by kept edges is a group. How many groups
there are is not set beforehand. Song et al. 2024, Graph Parsing Networks, arXiv 2402.14393; HSDAG
(arXiv 2405.14185), equations 8 to 10. Axes: N nodes, P edges, read in both directions.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.graph.groups import components


def best_edges(
    score: Float[np.ndarray, "P"],
    src: Int[np.ndarray, "P"],
    dst: Int[np.ndarray, "P"],
    least: float = -np.inf,
) -> Bool[np.ndarray, "P"]:
    """The edges that are the best of one of their ends, at least; of equal ones the first.

    They form a forest: edges are in one strict order, and the worst edge of a cycle would be the
    best of neither of its ends. Edges from a node to itself, and those that score below `least`,
    are never kept.

    >>> best_edges(np.array([3.0, 1.0, 2.0]), np.array([0, 1, 2]), np.array([1, 2, 3]))
    array([ True, False,  True])
    """
    kept = np.zeros(len(score), dtype=bool)
    order = np.argsort(-score, kind="stable")
    order = order[(src[order] != dst[order]) & (score[order] >= least)]
    ends = np.stack([src[order], dst[order]], axis=1).reshape(-1)
    kept[order[np.unique(ends, return_index=True)[1] // 2]] = True
    return kept


def parse(
    score: Float[np.ndarray, "P"],
    src: Int[np.ndarray, "P"],
    dst: Int[np.ndarray, "P"],
    num_nodes: int,
    least: float = -np.inf,
) -> Int[np.ndarray, "N"]:
    """The group of every node, ids 0.. in order of first appearance. O(P log P).

    >>> parse(np.array([3.0, 1.0, 2.0]), np.array([0, 1, 2]), np.array([1, 2, 3]), 4)
    array([0, 0, 1, 1])
    """
    kept = best_edges(score, src, dst, least)
    return components(src[kept], dst[kept], num_nodes)
