"""Rows of a sparse matrix as they are put together, and the tensors that may have to be sent.

Axes: G groups, K tensors between groups, U distinct (tensor, reading group), R rows.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.problem.problem import Problem


class Rows:
    """Triples of a sparse matrix, row by row."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.parts: list[tuple[Any, Any, Any]] = []
        self.b: list[Any] = []
        self.count = 0

    def more_columns(self, count: int) -> int:
        """Make new columns; the number of the first."""
        first = self.columns
        self.columns += count
        return first

    def add(self, row: Any, column: Any, value: Any, b: Any) -> None:
        """Entries of new rows, numbered from 0 here, with their right-hand sides."""
        self.parts.append((np.asarray(row) + self.count, np.asarray(column), np.asarray(value)))
        self.b.append(np.asarray(b, dtype=np.float64))
        self.count += len(self.b[-1])

    def matrix(self) -> tuple[Any, Float[np.ndarray, "R"]]:
        """The rows as a sparse matrix, and their right-hand sides."""
        from scipy.sparse import coo_array

        row = np.concatenate([part[0] for part in self.parts])
        column = np.concatenate([part[1] for part in self.parts])
        value = np.concatenate([part[2] for part in self.parts]).astype(np.float64)
        made = coo_array((value, (row, column)), shape=(self.count, self.columns))
        return made.tocsr(), np.concatenate(self.b)


class Cuts(NamedTuple):
    """Tensors that may be sent. Axis: U distinct (tensor, reading group)."""

    tensor: Int[np.ndarray, "K"]
    maker: Int[np.ndarray, "K"]  # group
    use_cut: Int[np.ndarray, "U"]  # which of these tensors
    use_group: Int[np.ndarray, "U"]


def cuts(problem: Problem) -> Cuts:
    """Every tensor read outside its producer's group, with the groups that read it."""
    graph, group = problem.graph, problem.group
    src, dst = graph.edges
    across = group[src] != group[dst]
    g = problem.num_groups
    key = np.unique(graph.use_tensor[across] * g + group[dst[across]])
    tensor, use_cut = np.unique(key // g, return_inverse=True)
    return Cuts(tensor, group[graph.producer[tensor]], use_cut, key % g)
