"""Gaps: sets of ops that are freed to be decoded again while everything else stays where it is.

Large neighbourhood search, Shaw 1998, doi 10.1007/3-540-49481-2_30. The policy fills a gap knowing
what came before and, through its features, where the ops that stay are.
"""

import numpy as np
from jaxtyping import Int

from gdp.methods.timing import timing
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem


def gap(
    problem: Problem, device: Int[np.ndarray, "N"], rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """Ops to place anew; how many is uniform in its logarithm, up to a quarter of the graph.

    One in three: a window of the decode order, the part of a window on one device, or the ops
    nearest to one in the graph. Groups are freed whole, so that no member closes the gap.
    """
    n = problem.num_ops
    length = int(np.exp(rng.uniform(0.0, np.log(max(n / 4.0, 2.0)))))
    kind = int(rng.integers(3))
    if kind == 2:
        ops = _near(arrays_of(problem), int(rng.integers(n)), length)
    else:
        first = int(rng.integers(max(1, n - length + 1)))
        ops = timing(problem).order[first : first + length]
        if kind == 1:
            ops = ops[device[ops] == device[ops[int(rng.integers(len(ops)))]]]
    return np.flatnonzero(np.isin(problem.group, problem.group[ops]))


def _near(a: Arrays, op: int, length: int) -> Int[np.ndarray, "M"]:
    """The ops nearest to one, breadth first over producers and readers."""
    found, queue = {op}, [op]
    for here in queue:
        if len(found) >= length:
            break
        tensors = a.out_tensor[a.out_start[here] : a.out_start[here + 1]]
        makers = a.producer[a.in_tensor[a.in_start[here] : a.in_start[here + 1]]].tolist()
        readers = [r for t in tensors for r in a.use_op[a.use_start[t] : a.use_start[t + 1]]]
        for other in (*makers, *readers):
            if other not in found and len(found) < length:
                found.add(int(other))
                queue.append(int(other))
    return np.fromiter(found, dtype=np.int64)
