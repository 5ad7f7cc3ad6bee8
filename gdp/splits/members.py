"""Splits of a placement: graph of a member, and seconds of the collectives.

Members of a split wait for each other behind each op, so that an op takes as long as on the slowest
of them, each with its own share, and its collectives besides.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import ModelError
from gdp.cluster.types import Cluster
from gdp.costs.measured.collectives import LIBRARY, collective_s
from gdp.costs.measured.host import ENGINE, HOSTS, Host, own_reduce_bytes, ranks_s
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, Split
from gdp.splits.division import Division, alone, division_of
from gdp.splits.sharding import Exchange, Shares, exchanges, member_graph

known_division = functools.lru_cache(maxsize=4)(division_of)
"""`division_of` of graphs that are asked for again and again."""


def why_undivided(graph: OpGraph) -> str:
    """Why gdp does not know how the layers of a graph divide; "" where it does."""
    try:
        known_division(graph)
    except ModelError as error:
        return str(error)
    return ""


@dataclass(frozen=True, eq=False)
class Divided:
    """A graph whose ops are divided. Axes: N ops, D devices."""

    graph: OpGraph  # as the first member of each split has it
    splits: tuple[Split, ...]
    exchange_s: Float[np.ndarray, "N D"]  # of one run of an op placed on the first member
    # As further members of splits of unlike shares have it, by device.
    others: Mapping[int, OpGraph] = field(default_factory=dict)

    def of_slowest(
        self, seconds: Float[np.ndarray, "M D"], is_io: Bool[np.ndarray, "M"]
    ) -> Float[np.ndarray, "M D"]:
        """Seconds of ops where those on the first member are of the slowest one; inputs and outputs
        of the model are on one device alone."""
        slowest = seconds.copy()
        for split in self.splits:
            together = seconds[:, list(split.devices)].max(axis=1)
            slowest[:, split.devices[0]] = np.where(is_io, slowest[:, split.devices[0]], together)
        return slowest


def divided(
    graph: OpGraph, cluster: Cluster, splits: Sequence[Split],
    device: Int[np.ndarray, "N"] | None = None, host: Host = HOSTS[ENGINE],
) -> Divided:  # fmt: skip
    """A graph as splits compute it.

    Args:
        graph: The whole one.
        cluster: Its devices.
        splits: Of one size, mode and shares where there is no `device`: then each may get any op.
        device: First member of the split, or the device, of each op.
        host: The engine, which adds up by kernels of its own.

    Raises:
        ModelError: The layers are of no known form, or do not divide so in whole units.
    """
    division = known_division(graph)
    n = graph.num_ops
    where = np.full(n, splits[0].devices[0]) if device is None else device
    held = _held(graph, splits, where)
    others = {d: held(d) for d in _further(graph, splits, where)}
    exchange_s = np.zeros((n, cluster.num_devices))
    collectives = exchanges(division)
    if graph.source == "gguf":
        host = host._replace(all_reduce=LIBRARY, is_bounded=False)
    for split in splits:
        exchange_s[:, split.devices[0]] = _exchange_s(cluster, split, collectives, n, host)
        if graph.request is not None and graph.request.is_served:
            exchange_s[:, split.devices[0]] += ranks_s(graph, len(split.devices))
    return Divided(held(splits[0].devices[0]), tuple(splits), exchange_s, others)


def held_graphs(graph: OpGraph, placement: Placement) -> tuple[OpGraph, ...]:
    """By device, the graph with the weights and caches that it holds: those of a rank where ops are
    sharded. Devices with identical parts share one object."""
    count = len(placement.device_names)
    if not placement.splits:
        return (graph,) * count
    held = _held(graph, placement.splits, placement.device)
    others = {d: held(d) for d in _further(graph, placement.splits, placement.device)}
    first = held(placement.splits[0].devices[0])
    return tuple(others.get(d, first) for d in range(count))


def _further(
    graph: OpGraph, splits: Sequence[Split], device: Int[np.ndarray, "N"]
) -> Iterator[int]:
    """Further members of splits, of those that hold other parts than the first."""
    lone = set(device[alone(graph)].tolist())
    for split in splits:
        if not split.is_even or split.devices[0] in lone:
            yield from split.devices[1:]


def _held(
    graph: OpGraph, splits: Sequence[Split], device: Int[np.ndarray, "N"]
) -> Callable[[int], OpGraph]:
    """Function from a device to the graph with its shard of each of its splits."""
    division = known_division(graph)
    # A device that neither computes nor holds any of it.
    fields = ("flop", "weight_bytes", "cache_bytes", "memory_traffic_bytes")
    nothing = {name: np.zeros_like(getattr(graph, name)) for name in fields}

    def held(d: int) -> OpGraph:
        graphs, which = [graph], np.zeros(graph.num_ops, dtype=np.int64)
        for split in splits:
            rank = split.devices.index(d) if d in split.devices else 0
            shares = Shares(split.parts, split.experts)
            which[device == split.devices[0]] = len(graphs)
            graphs.append(_member(division, shares, 0 if split.is_even else rank))
            if rank:
                which[alone(graph) & (device == split.devices[0])] = len(graphs)
                graphs.append(replace(graph, **nothing))
        return _picked(graphs, which)

    return held


@functools.lru_cache(maxsize=32)
def _member(division: Division, shares: Shares, rank: int) -> OpGraph:
    """The graph of a member, of equal shares that of the one that holds most."""
    if not shares.is_even or all(unit.total % shares.size == 0 for unit in division.units):
        return member_graph(division, shares, rank)
    # Pieces that are left over make some members larger.
    graphs = (member_graph(division, shares, rank) for rank in range(shares.size))
    return max(graphs, key=lambda graph: int(graph.weight_bytes.sum()))


def _exchange_s(
    cluster: Cluster, split: Split, collectives: Sequence[Exchange], num_ops: int, host: Host
) -> Float[np.ndarray, "N"]:
    """Seconds of the collectives behind one run of each op."""
    seconds, count = np.zeros(num_ops), len(split.devices)
    most = own_reduce_bytes(cluster.devices[split.devices[0]], count)
    for operation in {exchange.operation for exchange in collectives}:
        mine = [exchange for exchange in collectives if exchange.operation == operation]
        parts = np.array([exchange.parts for exchange in mine])
        sizes = np.array([exchange.size_bytes for exchange in mine]) / parts
        each = collective_s(cluster, split.devices, operation, sizes, host.all_reduce)
        if host.is_bounded and (sizes >= most).any():
            library_s = collective_s(cluster, split.devices, operation, sizes, LIBRARY)
            each = np.where(sizes >= most, library_s, each)
        np.add.at(seconds, [exchange.op for exchange in mine], parts * each)
    return seconds


def _picked(graphs: Sequence[OpGraph], which: Int[np.ndarray, "N"]) -> OpGraph:
    """The graph whose ops are each those of one of several graphs."""
    first = graphs[int(which[0])] if len(which) else graphs[0]
    if (which == which[:1]).all():
        return first
    at = np.arange(len(which))
    fields = ("flop", "memory_traffic_bytes", "weight_bytes", "cache_bytes")
    arrays = {name: np.stack([getattr(g, name) for g in graphs])[which, at] for name in fields}
    tensors = np.stack([g.tensor_bytes for g in graphs])
    of_maker = which[first.producer]
    return replace(
        first, **arrays, tensor_bytes=tensors[of_maker, np.arange(len(of_maker))],
        detail=tuple(graphs[k].detail[op] for op, k in enumerate(which.tolist())),
    )  # fmt: skip
