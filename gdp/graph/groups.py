"""Indices and ids: orders inverted, entries listed by owner, groups merged, parsed and summed over.

Axes: N ops or nodes, G groups, whose ids are 0..G-1; P edges, which are read in both directions.
"""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

T = TypeVar("T", bound=Hashable)


def inverse(order: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """The position of each index in an order of all of them.

    >>> inverse(np.array([2, 0, 1]))
    array([1, 2, 0])
    """
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return position


def distinct(values: Shaped[np.ndarray, "E"]) -> Shaped[np.ndarray, "K"]:
    """The different values, in ascending order.

    `np.unique` alone puts them into a hash table first (NumPy 2.3 and later), which takes forty
    times as long where most differ.

    >>> distinct(np.array([3, 1, 3]))
    array([1, 3])
    """
    ordered = np.sort(values, axis=None)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def alike(*columns: Shaped[np.ndarray, "N"]) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "N"]]:
    """(first of each different row, number of the row of each), in order of first appearance.

    `np.unique` of rows compares them as structures, which takes ten times as long.

    >>> alike(np.array([5, 2, 5, 5]), np.array([0, 0, 1, 0]))
    (array([0, 1, 2]), array([0, 1, 2, 0]))
    """
    order = np.lexsort(columns)
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        sorted_ = column[order]
        new[1:] |= sorted_[1:] != sorted_[:-1]
    first = order[new]
    by_place = np.argsort(first)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = inverse(by_place)[np.cumsum(new) - 1]
    return first[by_place], number


def indexed(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """(distinct values in order of first appearance, index of each value among them).

    >>> indexed("aba")
    (['a', 'b'], [0, 1, 0])
    """
    index: dict[T, int] = {}
    indices = [index.setdefault(value, len(index)) for value in values]
    return list(index), indices


def starts(sizes: Int[np.ndarray, "K"]) -> Int[np.ndarray, "S"]:
    """The first index of each of consecutive lists of these sizes, and the end of the last."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def lists(
    owner: Int[np.ndarray, "E"], num_owners: int
) -> tuple[Int[np.ndarray, "S"], Int[np.ndarray, "E"]]:
    """(start, index): the positions of each owner's entries, in order.

    >>> lists(np.array([1, 0, 1]), 3)
    (array([0, 1, 3, 3]), array([1, 0, 2]))
    """
    index = np.argsort(owner, kind="stable").astype(np.int64)
    return starts(np.bincount(owner, minlength=num_owners)), index


def merge_ids(
    first: Int[np.ndarray, "N"], second: Int[np.ndarray, "N"] | None
) -> Int[np.ndarray, "N"]:
    """Group ids 0..G-1 such that ops sharing an id in either array share a group.

    Ids are in order of first appearance, so that equal partitions get equal ids.

    >>> merge_ids(np.array([5, 5, 7, 9]), np.array([0, 1, 1, 2]))
    array([0, 0, 0, 1])
    """
    labels = np.unique(first, return_inverse=True)[1]
    if second is not None:
        other = np.unique(second, return_inverse=True)[1] + len(first)
        labels = components(labels, other, 2 * len(first))[labels]
    _, where, ids = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(where))[ids]


def components(
    src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"], num_nodes: int
) -> Int[np.ndarray, "N"]:
    """The connected component of every node, ids 0.. in order of first appearance.

    >>> components(np.array([3, 1]), np.array([1, 2]), 5)
    array([0, 1, 1, 1, 2])
    """
    root = np.arange(num_nodes)
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    while len(src):
        # Roots hook onto the least root beside them, then every way to a root is made one step
        # (Shiloach and Vishkin 1982, doi 10.1016/0196-6774(82)90008-6).
        least = np.minimum(src, dst)
        np.minimum.at(root, src, least)
        np.minimum.at(root, dst, least)
        while (root != (above := root[root])).any():
            root = above
        src, dst = root[src], root[dst]
        apart = src != dst
        src, dst = src[apart], dst[apart]
    # A root is the least node of its component, so components appear in the order of their roots.
    return (np.cumsum(root == np.arange(num_nodes)) - 1)[root]


def joined(part: Int[np.ndarray, "N"], ids: Int[np.ndarray, "N"]) -> Int[np.ndarray, "G"]:
    """For each part 0..G-1 an id that it shares with the parts to which ops of one id tie it.

    >>> joined(np.array([0, 0, 1, 2]), np.array([7, 8, 8, 9]))
    array([0, 0, 1])
    """
    lead = np.unique(part, return_index=True)[1]
    return merge_ids(merge_ids(part, ids)[lead], None)


def first_members(group: Int[np.ndarray, "N"]) -> Int[np.ndarray, "G"]:
    """The first member of every group, of ids 0..G-1."""
    return np.unique(group, return_index=True)[1]


def sum_per_group(values: np.ndarray, group: Int[np.ndarray, "N"]) -> np.ndarray:
    """The values [N, ...] summed over the ops of each group; inf stays inf.

    >>> sum_per_group(np.array([[1.0], [2.0], [3.0]]), np.array([0, 1, 0]))
    array([[4.],
           [2.]])
    """
    total = np.zeros((int(group.max()) + 1, *values.shape[1:]))
    np.add.at(total, group, values)
    return total


def all_per_group(
    allowed: Bool[np.ndarray, "N D"], group: Int[np.ndarray, "N"]
) -> Bool[np.ndarray, "G D"]:
    """True where it is true of all ops of a group."""
    every = np.ones((int(group.max()) + 1, allowed.shape[1]), dtype=bool)
    np.logical_and.at(every, group, allowed)
    return every


def best_edges(
    score: Float[np.ndarray, "P"],
    src: Int[np.ndarray, "P"],
    dst: Int[np.ndarray, "P"],
    least: float = -np.inf,
) -> Bool[np.ndarray, "P"]:
    """The edges that are the best of at least one of their ends; the first among equals.

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
    """Groups of nodes by graph parsing: every node keeps its best edge, and the components of the
    kept edges are the groups, whose number is not set beforehand. O(P log P).

    Song et al. 2024, Graph Parsing Networks, arXiv 2402.14393; HSDAG (arXiv 2405.14185), equations
    8 to 10. Ids 0.. are in order of first appearance.

    >>> parse(np.array([3.0, 1.0, 2.0]), np.array([0, 1, 2]), np.array([1, 2, 3]), 4)
    array([0, 0, 1, 1])
    """
    kept = best_edges(score, src, dst, least)
    return components(src[kept], dst[kept], num_nodes)
