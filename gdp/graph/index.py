"""Index arithmetic: inverted orders, and the entries of each owner listed."""

import numpy as np
from jaxtyping import Int


def inverse(order: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """The position of each index in an order of all of them.

    >>> inverse(np.array([2, 0, 1]))
    array([1, 2, 0])
    """
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return position


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
