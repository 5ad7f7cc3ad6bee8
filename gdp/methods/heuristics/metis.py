"""Balanced minimum cut: METIS over the groups, through the optional pymetis."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import MissingExtraError
from gdp.base.terminal import redirect_native_stdout
from gdp.base.version import install_command
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.priorities import upward_rank
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import (
    compile_once,
    expand,
    group_held_bytes,
    group_seconds,
    nearest_allowed,
)
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of

# METIS sums integer weights; this keeps sums of a whole graph within 31 bits.
_TOTAL_WEIGHT = 1 << 28


def metis(problem: Problem, search: Search) -> Answer:
    """Parts of balanced work and little traffic between them; the best of many simulated.

    Karypis and Kumar 1998, doi 10.1137/S1064827595287997. Vertices are groups of ops that must
    share a device, weighted by work or by work and memory; edges carry the bytes exchanged. It is
    blind to direction, so it suits throughput more than latency. Tried with 2 to D parts, shares by
    the devices' speed or memory. Needs pymetis, else raises `MissingExtraError`.
    """
    library = pymetis_library()
    compile_once("metis", metis, problem.objective)
    clock = search.budget()
    candidates = metis_assignments(problem, library, search.seed)
    return repair_and_select(problem, search, candidates, "metis", clock)


def pymetis_library() -> Any:
    """The optional package; `MissingExtraError` where it is not installed."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingExtraError(
            f"method 'metis' needs pymetis: {install_command('metis')}"
        ) from error
    return pymetis


def metis_assignments(problem: Problem, library: Any, seed: int) -> Iterator[Assignment]:
    """The parts that `metis` chooses from."""
    rank = upward_rank(problem) if objective_of(problem).ordered else None
    movable = np.flatnonzero(problem.group_allowed.sum(axis=1) > 1)
    start, neighbour, weight = _adjacency(problem, movable)
    seconds = group_seconds(problem)
    finite = np.where(np.isfinite(seconds), seconds, 0.0)[movable]
    held = group_held_bytes(problem).sum(axis=0)
    work = finite.mean(axis=1)
    # Relative speeds: one over the time for all that a device can run.
    total, speed = finite.sum(axis=0), np.ones(problem.num_devices)
    if total.max() > 0:
        speed = 1.0 / np.where(total > 0, total, total.max() * 1e3)
    memory = problem.cluster.divided_bytes.astype(float)
    by_speed = np.argsort(-speed, kind="stable")
    by_memory = np.argsort(-memory, kind="stable")
    plans = [(by_speed[:k], speed, work) for k in range(problem.num_devices, 1, -1)]
    if held.any():
        plans += [(by_memory[:k], memory, held[movable]) for k in range(problem.num_devices, 1, -1)]
    fastest = nearest_allowed(problem, np.full(problem.num_groups, by_speed[0]))
    if len(movable) < 2 or problem.num_devices < 2:
        yield Assignment(expand(problem, fastest))
        return
    for devices, share, vertex in plans:
        part = _partition(library, start, neighbour, weight, vertex, share[devices], seed)
        group_device = fastest.copy()
        group_device[movable] = devices[part]
        device = expand(problem, nearest_allowed(problem, group_device))
        yield Assignment(device)
        if rank is not None:
            yield Assignment(device, rank)


def _adjacency(
    problem: Problem, movable: Int[np.ndarray, "M"]
) -> tuple[Int[np.ndarray, "S"], Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """The undirected graph of the movable groups as CSR, with bytes as integer weights."""
    graph, count = problem.graph, len(movable)
    number = np.full(problem.num_groups, -1, dtype=np.int64)
    number[movable] = np.arange(count)
    src, dst = graph.edges
    u, v = number[problem.group[src]], number[problem.group[dst]]
    kept = (u >= 0) & (v >= 0) & (u != v)
    size = problem.sent_bytes[graph.use_tensor][kept].astype(float)
    u, v = u[kept], v[kept]
    key = np.concatenate([u * count + v, v * count + u])
    pair, which = np.unique(key, return_inverse=True)
    both = np.bincount(which, np.concatenate([size, size]), len(pair))
    scale = _TOTAL_WEIGHT / max(float(both.sum()), 1.0)
    weight = np.maximum(1, both * min(scale, 1.0)).astype(np.int64)
    return np.searchsorted(pair, np.arange(count + 1) * count), pair % max(count, 1), weight


def _partition(
    library: Any,
    start: Int[np.ndarray, "S"],
    neighbour: Int[np.ndarray, "P"],
    weight: Int[np.ndarray, "P"],
    vertex: np.ndarray,
    share: Float[np.ndarray, "K"],
    seed: int,
) -> Int[np.ndarray, "M"]:
    """A part for every group, sized by the shares."""
    # Where nothing weighs anything, everything weighs the same.
    vertex = vertex if vertex.sum() > 0 else np.ones(len(vertex))
    scale = _TOTAL_WEIGHT / float(vertex.sum())
    options = library.Options(seed=seed % (1 << 31))
    with redirect_native_stdout():
        _, part = library.part_graph(
            len(share),
            library.CSRAdjacency(start, neighbour),
            vweights=(vertex * scale).astype(np.int64).tolist(),
            eweights=weight.tolist(),
            tpwgts=(share / share.sum()).tolist(),
            options=options,
        )
    return np.array(part, dtype=np.int64)
