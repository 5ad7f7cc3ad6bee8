"""Random problems of the two objectives of Tarnawski et al. 2020, and slow answers to them."""

import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import UNLIMITED_BYTES, Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import Problem, make_problem


def load_problem(
    rng: np.random.Generator,
    num_ops: int = 6,
    accelerators: int = 2,
    cpus: int = 1,
    objective: str = "max_load",
    training: bool = False,
    memory_bytes: int = UNLIMITED_BYTES,
) -> Problem:
    """Whole-number times full of ties, some ops colocated, some weights tied, some ops barred.

    With `training`, every second forward op or so has a backward op beside it, along reversed
    edges, and some backward ops have no forward op of their own.
    """
    edges = [(a, b) for b in range(num_ops) for a in range(b) if rng.random() < 1.5 / num_ops]
    group = list(range(num_ops))
    for op in range(1, num_ops):
        if rng.random() < 0.15:
            group[op] = group[int(rng.integers(op))]
    backward = [False] * num_ops
    if training:
        chosen = [op for op in range(num_ops) if rng.random() < 0.7]
        mirror = {op: num_ops + i for i, op in enumerate(reversed(chosen))}
        edges += [(op, m) for op, m in mirror.items() if rng.random() < 0.7]
        edges += [(mirror[b], mirror[a]) for a, b in edges if a in mirror and b in mirror]
        group += [num_ops + m if rng.random() < 0.3 else group[op] for op, m in mirror.items()]
        backward += [True] * len(chosen)
    n = len(group)
    devices = [
        Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0, memory_bytes=memory_bytes)
        for i in range(accelerators)
    ] + [Device(f"c{i}", "cpu", {"default": 1.0}, 1.0) for i in range(cpus)]
    weight_id = [int(rng.integers(n)) if rng.random() < 0.2 else i for i in range(n)]
    graph = make_graph(
        "random",
        [f"o{i}" for i in range(n)],
        ["Op"] * n,
        [(i, 1) for i in range(n)],
        edges,
        weight_bytes=rng.integers(0, 4, n)[weight_id],
        weight_id=weight_id,
        colocate=group,
        is_backward=backward,
    )
    fast = rng.integers(0, 6, n).astype(float)
    slow = fast * 3 + rng.integers(0, 4, n)
    compute_s = np.stack([fast] * accelerators + [slow] * cpus, axis=1)
    if cpus and rng.random() < 0.3:
        compute_s[int(rng.integers(n)), :accelerators] = np.inf
    sent_s = rng.integers(0, 4, graph.num_tensors) * float(rng.choice([0.25, 1.0]))
    return make_problem(graph, make_cluster("random", devices), compute_s, objective, sent_s=sent_s)


def assignments(problem: Problem) -> Iterator[Int[np.ndarray, "N"]]:
    """Every assignment that allows each group its device."""
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    for chosen in itertools.product(*choices):
        yield np.array(chosen)[problem.group]


def is_pipeline(
    device: Int[np.ndarray, "M"], src: Int[np.ndarray, "A"], dst: Int[np.ndarray, "A"]
) -> bool:
    """Whether the devices of elements can be ordered so that every arc leads forward."""
    arcs = {(a, b) for a, b in zip(device[src].tolist(), device[dst].tolist(), strict=True)}
    arcs = {(a, b) for a, b in arcs if a != b}
    while arcs:
        first = {a for a, _ in arcs} - {b for _, b in arcs}
        if not first:
            return False
        arcs = {(a, b) for a, b in arcs if a not in first}
    return True
