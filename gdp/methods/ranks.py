"""Priorities of ops, and the mean costs they are made of. Axes: N ops, T tensors."""

import numpy as np
from jaxtyping import Float, Int

from gdp.graph.index import inverse
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of


def upward_rank(problem: Problem) -> Int[np.ndarray, "N"]:
    """HEFT's priorities as ranks 0..N-1, the first to run being 0; ties in topological order."""
    a = arrays_of(problem)
    return as_rank(-longest_s(a, mean_compute_s(a), mean_send_s(a)))


def longest_s(
    a: Arrays, op_s: Float[np.ndarray, "N"], send_s: Float[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    """Seconds from the start of each op to the end, on the longest path, transfers included."""
    from gdp.methods.path_kernels import fill_upward_ranks

    seconds = np.zeros(len(op_s))
    fill_upward_ranks(a, op_s, send_s, seconds)
    return seconds


def as_rank(key: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Ranks 0..N-1 in ascending order of a key, ties by op id.

    >>> as_rank(np.array([3.0, 1.0, 1.0]))
    array([2, 0, 1])
    """
    return inverse(np.argsort(key, kind="stable"))


def mean_compute_s(a: Arrays) -> Float[np.ndarray, "N"]:
    """The mean of an op's seconds over the devices that may run it."""
    may = a.group_allowed[a.group]
    return np.where(may, a.compute_s, 0.0).sum(axis=1) / may.sum(axis=1)


def mean_send_s(a: Arrays) -> Float[np.ndarray, "T"]:
    """The mean over all links of a tensor's seconds on it; zero where there is one device."""
    off = ~np.eye(len(a.latency_s), dtype=bool)
    if not off.any():
        return np.zeros(len(a.tensor_bytes))
    return a.latency_s[off].mean() + a.tensor_bytes * (1.0 / a.bytes_per_s[off]).mean()


def ranks_to_try(problem: Problem) -> list[Int[np.ndarray, "N"] | None]:
    """Priorities that differ in what they keep alive; one where they change nothing."""
    if not objective_of(problem).ordered:
        return [None]
    return [None, upward_rank(problem), np.arange(problem.num_ops), depth_first_rank(problem)]


def depth_first_rank(problem: Problem) -> Int[np.ndarray, "N"]:
    """Ranks of a depth-first topological order, which uses what was made last first.

    It keeps few tensors alive where branches are long, as breadth-first order does not. O(N + E).
    """
    a = arrays_of(problem)
    waits = np.diff(a.in_start).tolist()
    readers = [a.use_op[a.use_start[t] : a.use_start[t + 1]] for t in a.out_tensor]
    first = a.out_start.tolist()
    stack = [i for i in range(problem.num_ops - 1, -1, -1) if waits[i] == 0]
    order: list[int] = []
    while stack:
        op = stack.pop()
        order.append(op)
        for x in range(first[op + 1] - 1, first[op] - 1, -1):
            for reader in readers[x][::-1].tolist():
                waits[reader] -= 1
                if waits[reader] == 0:
                    stack.append(reader)
    return inverse(np.array(order))
