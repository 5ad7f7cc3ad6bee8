"""Segments: sub-models that a runtime executes when a placement is cut. Plain graph logic.

A runtime that runs cut models starts a segment when all its inputs exist and hands over its outputs
when it ends, so the graph of segments (the quotient) must have no cycle. Inputs and outputs of the
graph are segments of their own that nothing runs. Axes as in `gdp.graph.op_graph`; S segments.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.kernels.twin import PLAIN_OPS, compiled
from gdp.cluster.types import Cluster
from gdp.graph.groups import all_per_group, distinct, indexed, lists, sum_per_group
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph, topological_order
from gdp.problem.arrays import arrays_of, launches_with_dispatch
from gdp.problem.problem import Launches, Problem
from gdp.sim.turns import fill_hops, take_turns

_MAX_FINE_OPS = 10_000
"""Larger graphs get the fewest segments: finer ones take N * N / 4 bytes to find, 25 MB here."""
_MAX_TRIES = 600
"""Merges that `latency_segments` simulates at most; 600 of 100 segments take about a second."""


def segments(graph: OpGraph, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """A segment id for every op, in topological order, with as few segments as possible.

    Any acyclic quotient can be executed one segment after the other, so the fewest segments are the
    shortest sequence of devices of which each runs all that is ready for it. Two devices take
    turns: exact. More devices: the one whose ready ops are furthest from the exit, counted in
    changes of device, from every first device. O(D (N + E)).

    >>> tensors, uses = [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 3), (0, 2), (2, 3)]
    >>> g = make_graph("g", list("abcd"), ["X"] * 4, tensors, uses)
    >>> segments(g, np.array([0, 1, 0, 0]))
    array([0, 1, 0, 2])
    """
    n, num_devices = graph.num_ops, int(device.max()) + 1
    src, dst = _pairs_that_work(graph)
    start, index = lists(src, n)
    works = ~graph.is_io
    missing = np.bincount(dst, minlength=n)
    firsts = distinct(device[works & (missing == 0)])
    plain = n * (1 + len(firsts)) <= PLAIN_OPS

    def given(values: np.ndarray) -> Any:
        return values.tolist() if plain else values.copy()

    turns, hops_of = (take_turns, fill_hops) if plain else map(compiled, (take_turns, fill_hops))
    reader, on = given(dst[index]), given(device.astype(np.int64))
    start, works_ = given(start), given(works)
    hops = given(np.zeros(n, dtype=np.int64))
    hops_of(start, reader, on, hops)
    best, fewest = np.zeros(n, dtype=np.int64), int(works.sum()) + 1
    for first in firsts:
        head, farthest = map(given, np.zeros((2, num_devices), dtype=np.int64))
        following, turn = map(given, np.zeros((2, n), dtype=np.int64))
        count = turns(
            start, reader, given(missing), hops, on, works_, first, head, farthest, following, turn
        )
        if count < fewest:
            best, fewest = np.array(turn), count
    return _with_io(graph, best)


def latency_segments(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """A segment id for every op, in topological order, for the lowest simulated latency.

    The fewest segments make a reader on another device wait for work that it does not need. So the
    start is a cut so fine that nobody does (see `_finest`). Then segments that one device runs one
    after the other are merged wherever the simulated latency does not grow.
    """
    fewest = segments(problem.graph, device)
    if problem.num_ops > _MAX_FINE_OPS:
        return fewest
    finest = _finest(problem.graph, device)
    if finest.max() > fewest.max():
        merged = _merge(problem, finest, device)
        if _latency_s(problem, merged, device) < _latency_s(problem, fewest, device):
            return merged
    return fewest


def segment_problem(problem: Problem, segment: Int[np.ndarray, "N"]) -> Problem:
    """The problem with one op per segment, whose outputs leave when all of it has run.

    Every segment pays its device's `dispatch_s` once where the device dispatches segments, and
    once per op where it dispatches ops. Tensors inside a segment vanish.
    """
    cluster = problem.cluster.with_dispatch(problem.cluster.segment_dispatch_s)
    once = tuple(replace(device, dispatch_per="op") for device in cluster.devices)
    compute_s, machine = arrays_of(problem).compute_s, replace(cluster, devices=once)
    return _contract(problem, segment, compute_s, machine, launches_with_dispatch(problem))


def segment_values(
    values: Int[np.ndarray, "N"], segment: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "S"]:
    """The smallest value of each segment's ops: its device."""
    smallest = np.full(int(segment.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(smallest, segment, values)
    return smallest


def _pairs_that_work(graph: OpGraph) -> tuple[Int[np.ndarray, "E"], Int[np.ndarray, "E"]]:
    """(maker, reader) of the uses between ops that work: inputs and outputs left out."""
    src, dst = graph.edges
    kept = ~graph.is_io[src] & ~graph.is_io[dst]
    return src[kept], dst[kept]


def _finest(graph: OpGraph, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Ops of one device share a segment when they wait for the same ops of other devices, and the
    same ops of other devices wait for them: then no device waits longer than without a cut.

    Acyclic: if segments P and Q of two devices read from each other, p1 -> q1 and q2 -> p2, then q2
    is before p2, so before p1, which waits for the same; so p1 is after q2, and so after q1, which
    the same ops wait for; but q1 reads p1. Longer circles likewise.
    """
    where = device.tolist()
    readers: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for a, b in zip(*(ends.tolist() for ends in _pairs_that_work(graph)), strict=True):
        readers[a].append(b)
    before, after = [0] * graph.num_ops, [0] * graph.num_ops  # sets of ops, as bits
    elsewhere = [0] * (max(where) + 1)  # [d]: all ops that are not on device d
    for op, d in enumerate(where):
        elsewhere[d] |= 1 << op
    elsewhere = [((1 << graph.num_ops) - 1) ^ own for own in elsewhere]
    for op in range(graph.num_ops):
        for reader in readers[op]:
            before[reader] |= before[op] | 1 << op
    for op in range(graph.num_ops - 1, -1, -1):
        for reader in readers[op]:
            after[op] |= after[reader] | 1 << reader
    waits = [(d, before[op] & elsewhere[d], after[op] & elsewhere[d]) for op, d in enumerate(where)]
    label = indexed(waits)[1]
    return _with_io(graph, np.array(label, dtype=np.int64))


def _with_io(graph: OpGraph, label: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Ids in topological order from any labels; every graph input and output gets its own."""
    label = np.where(graph.is_io, int(label.max(initial=0)) + 1 + np.arange(graph.num_ops), label)
    return _in_order(graph, label)


def _in_order(graph: OpGraph, label: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Labels renumbered in topological order: inputs first, outputs last, ties by first op."""
    kind = graph.has_type((OUTPUT,)).astype(int) - graph.has_type((INPUT,))
    _, where, ids = np.unique(label, return_index=True, return_inverse=True)
    preference = np.lexsort((where, kind[where]))
    ids = np.argsort(preference)[ids]
    src, dst = graph.edges
    cross = ids[src] != ids[dst]
    pairs = distinct(ids[src[cross]] * len(where) + ids[dst[cross]])
    order = topological_order(len(where), pairs // len(where), pairs % len(where))
    if len(order) < len(where):
        raise ValueError("the segments depend on each other in a circle")
    return np.argsort(order)[ids]


def border_tensors(
    graph: OpGraph, inside: Bool[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "I"], Int[np.ndarray, "O"]]:
    """Tensors that some ops read from others, and that others read from them."""
    src, dst = graph.edges
    into = distinct(graph.use_tensor[~inside[src] & inside[dst]])
    return into, distinct(graph.use_tensor[inside[src] & ~inside[dst]])


def _contract(
    problem: Problem,
    segment: Int[np.ndarray, "N"],
    compute_s: Float[np.ndarray, "N D"],
    cluster: Cluster,
    launches: Launches | None,
) -> Problem:
    """The problem with one op per segment, at the given costs."""
    graph = problem.graph
    count = int(segment.max()) + 1
    src, dst = graph.edges
    crosses = segment[src] != segment[dst]
    kept = distinct(graph.use_tensor[crosses])
    kept = kept[np.argsort(segment[graph.producer[kept]], kind="stable")]
    number = np.zeros(graph.num_tensors, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    _, first = np.unique(segment, return_index=True)
    held = graph.weight_holders(owner=segment)  # tied weights count once in a segment
    io = graph.is_io[first]
    quotient = make_graph(
        graph.name,
        [graph.op_names[op] if io[s] else f"segment {s}" for s, op in enumerate(first)],
        [graph.op_types[op] if io[s] else "Segment" for s, op in enumerate(first)],
        np.column_stack([segment[graph.producer[kept]], graph.held_bytes[kept]]),
        np.column_stack([number[graph.use_tensor[crosses]], segment[dst[crosses]]]),
        flop=np.bincount(segment, graph.flop, count),
        memory_traffic_bytes=np.bincount(segment, graph.memory_traffic_bytes, count),
        weight_bytes=np.bincount(segment[held], graph.weight_bytes[held], count),
        tensor_names=[graph.tensor_names[t] for t in kept], source=graph.source,
    )  # fmt: skip
    # Ids are topological and tensors sorted by producer, so that make_graph keeps both orders.
    sent_s = None if problem.sent_s is None else problem.sent_s[kept]
    # Where the segments are is decided, so that nothing needs to be checked or tied together.
    return Problem(
        quotient,
        cluster,
        sum_per_group(compute_s, segment),
        problem.objective,
        all_per_group(problem.allowed, segment),
        np.arange(count),
        problem.sent_bytes[kept],
        problem.origin.coarser(segment),
        sent_s,
        unit=problem.unit,
        launches=launches and launches.of_parts(segment),
    )


def _latency_s(
    problem: Problem, segment: Int[np.ndarray, "N"], device: Int[np.ndarray, "N"]
) -> float:
    from gdp.sim.latency import simulate

    whole = segment_problem(problem, segment)
    return simulate(whole, segment_values(device, segment)).latency_s


def _merge(
    problem: Problem, segment: Int[np.ndarray, "N"], device: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Segments merged with the next one on their device wherever latency does not grow."""
    from gdp.sim.latency import simulate

    cut = segment_problem(problem, segment)
    where = segment_values(device, segment)
    tries, improved = 0, True
    while improved:
        improved = False
        schedule = simulate(cut, where)
        latency_s = schedule.latency_s
        now = np.arange(cut.num_ops)  # [id at the start of this pass]: the id it has become
        for a, b in _neighbours(cut.graph, where, schedule.start_s):
            if tries == _MAX_TRIES:
                return segment
            if _depends_through_others(cut.graph, now[a], now[b]):
                continue
            tries += 1
            label = np.arange(cut.num_ops)
            label[now[b]] = now[a]
            label = _in_order(cut.graph, label)
            fewer = _contract(cut, label, cut.compute_s, cut.cluster, cut.launches)
            there = segment_values(where, label)
            merged_s = simulate(fewer, there).latency_s
            if merged_s <= latency_s:
                cut, where, latency_s = fewer, there, merged_s
                now, segment, improved = label[now], label[segment], True
    return segment


def _neighbours(
    graph: OpGraph, device: Int[np.ndarray, "N"], start_s: Float[np.ndarray, "N"]
) -> list[tuple[int, int]]:
    """Pairs of ops that one device runs one after the other."""
    by_start = np.lexsort((start_s, device))
    by_start = by_start[~graph.is_io[by_start]]
    return [(int(a), int(b)) for a, b in itertools.pairwise(by_start) if device[a] == device[b]]


def _depends_through_others(graph: OpGraph, a: int | np.integer, b: int | np.integer) -> bool:
    """True if a path with another op on it joins a to b, so that merging them makes a cycle."""
    first, last = min(a, b), max(a, b)  # ids are topological: no path leads back
    src, dst = graph.edges
    reached = np.zeros(graph.num_ops, dtype=bool)
    reached[dst[(src == first) & (dst != last)]] = True
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):  # uses are sorted by reader
        if reached[u]:
            reached[v] = True
    return bool(reached[last])
