"""Contiguous blocks: the human-expert rule, one stretch of the model after the other per device."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.intervals import tightened
from gdp.methods.priorities import upward_rank
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import (
    compile_once,
    expand,
    group_held_bytes,
    group_seconds,
    nearest_allowed,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import is_host, same
from gdp.sim.objectives import objective_of

_MAX_ORDERS = 24  # orders of unlike devices that are tried; fewer on huge graphs
_HALVINGS = 50
_MAX_CUTS = 500  # candidate cut points of the exact pipeline split


def blocks(problem: Problem, search: Search) -> Answer:
    """Contiguous blocks of the topological order, one per device; the best of many simulated.

    Blocks of equal time on 1, 2, ... D devices; blocks filled up to each device's memory, so that
    as few devices as possible are used; and blocks of equal shares of the memories. Before them for
    throughput the cut points of least largest stage, by dynamic programming (Tarnawski et al. 2020,
    arXiv 2006.16423, over one order instead of all down-sets), exact for the order where all links
    are alike, every channel serves one pair and tensors are read by the next stage alone; and for a
    request to a language model, whose ops take turns, those of least sum of stages.
    Unlike devices are tried in several orders. In training steps the sequence also runs over the
    forward ops alone, with each backward op beside the forward op it belongs to.
    """
    compile_once("blocks", blocks, problem.objective)
    clock = search.budget()
    return repair_and_select(problem, search, block_assignments(problem), "blocks", clock)


def block_assignments(problem: Problem) -> Iterator[Assignment]:
    """The assignments that `blocks` chooses from, the most promising first."""
    rank = upward_rank(problem) if objective_of(problem).ordered else None
    seen: set[bytes] = set()
    for sequence in sequences(problem):
        for group_device in _splits(problem, sequence):
            device = expand(problem, nearest_allowed(problem, group_device))
            key = device.astype(np.uint8).tobytes()
            if key not in seen:
                seen.add(key)
                yield Assignment(device)
                if rank is not None:
                    yield Assignment(device, rank)


def sequences(problem: Problem) -> list[Int[np.ndarray, "Q"]]:
    """Orders of the groups that can be cut: topological, and for training folded.

    Inputs and outputs of the graph, which sit on the host, are in none of them.
    """
    a, graph = arrays_of(problem), problem.graph
    work = np.flatnonzero(~graph.is_io[a.group_op[a.group_start[:-1]]])
    if not graph.is_backward.any():
        return [work]
    key = folded_place(problem)
    smallest = np.full(problem.num_groups, np.inf)
    np.minimum.at(smallest, problem.group, key)
    return [work[np.argsort(smallest[work], kind="stable")], work]


def folded_place(problem: Problem) -> Float[np.ndarray, "N"]:
    """Places on the forward pass: a backward op is where the last activation it reads was made.

    A backward op that reads none is where its earliest producer is, as gradients flow from the last
    layer to the first.
    """
    a, graph = arrays_of(problem), problem.graph
    place = np.arange(graph.num_ops, dtype=float)
    for op in np.flatnonzero(graph.is_backward):
        makers = a.producer[a.in_tensor[a.in_start[op] : a.in_start[op + 1]]]
        makers = makers[~graph.is_io[makers]]
        forward = makers[~graph.is_backward[makers]]
        if len(forward):
            place[op] = place[forward].max()
        elif len(makers):
            place[op] = place[makers].min()
    return place


def device_orders(problem: Problem) -> list[Int[np.ndarray, "D"]]:
    """At most `_MAX_ORDERS` orders of the devices that differ in more than names, fastest first."""
    kind = _alike(problem).argmax(axis=1)  # the first device that is alike
    seconds = _device_seconds(problem)
    fastest = np.argsort(seconds, kind="stable")
    if problem.num_devices <= 6:
        orders: Iterator[tuple[int, ...]] = itertools.permutations(fastest.tolist())
    else:
        host = problem.cluster.host
        rest = [d for d in range(problem.num_devices) if d != host]
        by_id = range(problem.num_devices)
        orders = iter(
            [tuple(fastest), tuple(fastest[::-1]), tuple(by_id), (host, *rest), (*rest, host)]
        )
    most = min(_MAX_ORDERS, max(4, 200_000 // problem.num_ops))
    seen: set[tuple[int, ...]] = set()
    kept: list[Int[np.ndarray, "D"]] = []
    for order in orders:
        signature = tuple(int(kind[d]) for d in order)
        if signature not in seen:
            seen.add(signature)
            kept.append(np.array(order, dtype=np.int64))
        if len(kept) >= most:
            break
    return kept


def _alike(problem: Problem) -> Bool[np.ndarray, "D D"]:
    """Devices of equal costs and memory whose links are equally fast, to whichever devices."""
    a, work = arrays_of(problem), ~problem.graph.is_io
    return same(
        a.compute_s[work],
        problem.allowed[work],
        a.segment_s,
        a.memory_bytes,
        np.sort(a.latency_s, axis=1).T,
        np.sort(a.bytes_per_s, axis=1).T,
        np.sort(a.bytes_per_s, axis=0),
        np.sort(problem.cluster.queues, axis=1).T,
        np.sort(problem.cluster.queues, axis=0),
        is_host(problem),
    )


def _device_seconds(problem: Problem) -> Float[np.ndarray, "D"]:
    """Seconds of each device for all that it can run, scaled up to everything."""
    seconds = group_seconds(problem)
    may = np.isfinite(seconds)
    fastest = seconds.min(axis=1)
    covered = np.where(may, fastest[:, None], 0.0).sum(axis=0)
    total = np.where(may, seconds, 0.0).sum(axis=0)
    return np.where(covered > 0, total / np.maximum(covered, 1e-300), np.inf)


def _splits(problem: Problem, sequence: Int[np.ndarray, "Q"]) -> Iterator[Int[np.ndarray, "G"]]:
    """A device for every group, for each way to cut the sequence."""
    seconds = np.where(np.isfinite(x := group_seconds(problem)), x, 0.0)[sequence]
    held = group_held_bytes(problem).sum(axis=0)
    work_s = _sums(seconds)
    bytes_up_to = _sums(held[sequence].astype(float)[:, None])[0]
    capacities = _capacities(problem)
    nowhere = np.full(problem.num_groups, problem.cluster.host, dtype=np.int64)

    def placed(order: Sequence[int], ends: Sequence[int]) -> Int[np.ndarray, "G"]:
        device = nowhere.copy()
        lengths = np.diff(ends, prepend=0)
        device[sequence] = np.repeat(order, lengths)
        return device

    orders, sums = device_orders(problem), (work_s.tolist(), bytes_up_to.tolist())
    if objective_of(problem).pipelined or (problem.graph.repeats != 1).any():
        for order, ends in _best_cuts(problem, sequence, orders, work_s, bytes_up_to):
            yield placed(order.tolist(), ends.tolist())
    for order in map(np.ndarray.tolist, orders):
        for used in range(problem.num_devices, 0, -1):
            # Full memories first, then with room left for activations.
            for capacity in capacities:
                for share in (1.0, 0.8, 0.5):
                    if ends := _balanced(*sums, order[:used], (capacity * share).tolist()):
                        yield placed(order[:used], ends)
                    if capacity.min() > bytes_up_to[-1]:
                        break
        for capacity in capacities:
            for share in (0.95, 0.8, 0.6) if capacity.min() <= bytes_up_to[-1] else ():
                if ends := _within(*sums, order, (capacity * share).tolist()):
                    yield placed(order, ends)
            yield placed(order, _equal_shares(bytes_up_to, capacity[order]).tolist())


def _capacities(problem: Problem) -> list[Float[np.ndarray, "D"]]:
    """The devices' memories, and with each memory that devices share divided among them; without
    room for the caches of other devices that would lie there, as far as these are known."""
    cluster = problem.cluster
    ways = [cluster.memory_bytes, cluster.divided_bytes] if len(cluster.pool_bytes) else []
    rooms = [way.astype(float) for way in ways or [cluster.memory_bytes]]
    held = group_held_bytes(problem)
    if not (cached := float(held[1:].sum())):
        return rooms
    # Of the caches, those of ops that do not fit where caches lie, by their share of the weights.
    usable, total = problem.group_allowed[held.any(axis=0)].any(axis=0), float(held.sum())
    beyond = max(0.0, total - cluster.room_bytes(usable & ~cluster.streams))
    away = min(1.0, beyond / max(total - cached, 1.0))
    lent = np.isin(np.arange(problem.num_devices), cluster.runs_on[usable & cluster.streams])
    return [np.where(lent, np.maximum(room - cached * x, 1.0), room)
            for room in rooms for x in dict.fromkeys((away, 1.0))]  # fmt: skip


def _sums(values: Float[np.ndarray, "Q K"]) -> Float[np.ndarray, "K B"]:
    """Sums of the rows before each place (B = Q + 1 of them), per column, from 0 to all."""
    sums = np.zeros((values.shape[1], len(values) + 1))
    np.cumsum(values.T, axis=1, out=sums[:, 1:])
    return sums


def _balanced(
    work_s: list[list[float]], bytes_up_to: list[float], order: list[int], room: list[float]
) -> list[int] | None:
    """Ends of blocks whose longest is shortest, each within its room, by bisection; None where that
    cannot be."""
    most_s = max(own[-1] * (1 + 1e-9) for own in work_s)
    within = partial(_within, work_s, bytes_up_to, order, room)
    if ends := within(most_s):
        return [ends, *tightened(most_s, within, _HALVINGS)][-1]
    return None


def _within(
    work_s: list[list[float]], bytes_up_to: list[float], order: list[int], room: list[float],
    limit_s: float = math.inf,
) -> list[int] | None:  # fmt: skip
    """Ends of the longest blocks of at most so many seconds and bytes; None where these leave a
    rest."""
    at, ends = 0, list[int]()
    for d in order:
        by_time = bisect_right(work_s[d], work_s[d][at] + limit_s, at)
        at = min(by_time, bisect_right(bytes_up_to, bytes_up_to[at] + room[d], at)) - 1
        ends.append(at)
    return ends if at == len(bytes_up_to) - 1 else None


def _equal_shares(
    bytes_up_to: Float[np.ndarray, "B"], capacity_bytes: Float[np.ndarray, "K"]
) -> Int[np.ndarray, "K"]:
    """Ends of blocks whose weights fill the same share of each memory."""
    wanted = np.cumsum(capacity_bytes) / capacity_bytes.sum() * bytes_up_to[-1]
    ends = np.searchsorted(bytes_up_to, wanted, side="left")
    ends[-1] = len(bytes_up_to) - 1
    return np.minimum(ends, len(bytes_up_to) - 1).astype(np.int64)


def _best_cuts(
    problem: Problem,
    sequence: Int[np.ndarray, "Q"],
    orders: list[Int[np.ndarray, "D"]],
    work_s: Float[np.ndarray, "D B"],
    bytes_up_to: Float[np.ndarray, "B"],
) -> Iterator[tuple[Int[np.ndarray, "D"], Int[np.ndarray, "D"]]]:
    """(order, ends) of the splits of least largest stage, for latency of least sum of stages, per
    order of the devices."""
    from gdp.methods.heuristics.blocks_kernels import best_cuts

    in_turn = not objective_of(problem).pipelined
    a = arrays_of(problem)
    cuts = _candidate_cuts(work_s)
    off, busy = ~np.eye(problem.num_devices, dtype=bool), problem.cluster.queues
    latency_s = float(np.where(busy, a.latency_s, 0.0)[off].mean()) if off.any() else 0.0
    s_per_byte = float(np.where(busy, 1.0 / a.bytes_per_s, 0.0)[off].mean()) if off.any() else 0.0
    tensors, sent_bytes, openers = block_inputs(problem, sequence, cuts)
    receive_s = tensors * latency_s + sent_bytes * s_per_byte
    for capacity in _capacities(problem):
        rooms = [capacity * share for share in (1.0, 0.8, 0.6, 0.4)]
        if in_turn:
            needed = _working_bytes(problem)
            rooms[1:1] = [capacity - needed, capacity - 2 * needed]
        for room in rooms:
            for order in orders:
                seconds, ends = best_cuts(
                    np.ascontiguousarray(work_s[:, cuts]), bytes_up_to[cuts], receive_s, openers,
                    order, a.segment_s, room, in_turn,
                )  # fmt: skip
                if np.isfinite(seconds):
                    yield order, cuts[ends]
            if capacity.min() > 4 * (bytes_up_to[-1] + problem.graph.held_bytes.sum()):
                break


def block_inputs(
    problem: Problem, sequence: Int[np.ndarray, "Q"], cuts: Int[np.ndarray, "K"]
) -> Int[np.ndarray, "3 K K"]:
    """Tensors that each block cuts[x]..cuts[y] receives, their bytes, and ops that open a segment
    in it: those that read any of these, an input of the graph, what is made later, or nothing."""
    from gdp.methods.heuristics.blocks_kernels import fill_block_inputs

    place = np.full(problem.num_groups, -1, dtype=np.int64)
    place[sequence] = np.arange(len(sequence))
    piece = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    reader = np.full(problem.graph.num_tensors, -1)
    changes = np.zeros((3, len(cuts) + 1, len(cuts) + 1), dtype=np.int64)
    fill_block_inputs(arrays_of(problem), sequence, place, piece, reader, *changes)
    return changes.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1]


def _working_bytes(problem: Problem) -> float:
    """The most bytes that one op reads and makes: room that weights have to leave."""
    graph = problem.graph
    touched = np.zeros(graph.num_ops)
    np.add.at(touched, graph.use_op, graph.held_bytes[graph.use_tensor])
    np.add.at(touched, graph.producer, graph.held_bytes)
    return float(touched.max(initial=0.0))


def _candidate_cuts(work_s: Float[np.ndarray, "D B"]) -> Int[np.ndarray, "K"]:
    """Places to cut: all where they are few, else evenly spaced in work and in number."""
    places = work_s.shape[1]
    if places <= _MAX_CUTS:
        return np.arange(places)
    share = work_s.sum(axis=0)
    by_work = np.searchsorted(share, np.linspace(0.0, share[-1], _MAX_CUTS // 2))
    by_place = np.linspace(0, places - 1, _MAX_CUTS // 2).astype(np.int64)
    return np.unique(np.concatenate([[0, places - 1], by_work, by_place])).astype(np.int64)
