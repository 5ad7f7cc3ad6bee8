"""Splits of a placement: graph of a member, and seconds of the collectives.

Members of a split have equal shares and wait for each other behind each op, so that an op takes as
long as on the slowest of them, and its collectives besides.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import Cluster
from gdp.costs.measured.collectives import collective_s
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement, Split
from gdp.splits.division import Division, division_of
from gdp.splits.sharding import Exchange, Shares, exchanges, member_graph

ENGINE = "vllm"
"""Engine whose collectives are counted."""
known_division = functools.lru_cache(maxsize=4)(division_of)
"""`division_of` of graphs that are asked for again and again."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A graph whose ops are divided. Axes: N ops, D devices."""

    graph: OpGraph  # as one member has it
    splits: tuple[Split, ...]
    exchange_s: Float[np.ndarray, "N D"]  # of one run of an op placed on the first member

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
    device: Int[np.ndarray, "N"] | None = None,
) -> Divided:  # fmt: skip
    """A graph as splits compute it.

    Args:
        graph: The whole one.
        cluster: Its devices.
        splits: Of one size and mode where there is no `device`: then each may get any op.
        device: First member of the split, or the device, of each op.

    Raises:
        ModelError: The layers are of no known form, or do not divide so in whole units.
    """
    division = known_division(graph)
    n, forms = graph.num_ops, sorted({(len(s.devices), s.experts) for s in splits})
    graphs = [_member(division, *form) for form in forms]
    which = np.zeros(n, dtype=np.int64)
    if device is not None:
        form_of = {s.devices[0]: 1 + forms.index((len(s.devices), s.experts)) for s in splits}
        which = np.array([form_of.get(d, 0) for d in device.tolist()], dtype=np.int64)
        graphs = [graph, *graphs]
    exchange_s = np.zeros((n, cluster.num_devices))
    told = exchanges(division)
    for split in splits:
        exchange_s[:, split.devices[0]] = _exchange_s(cluster, split, told, n)
    return Divided(_picked(graphs, which), tuple(splits), exchange_s)


def held_graph(graph: OpGraph, placement: Placement) -> OpGraph:
    """The graph with weights and caches that each device of a placement holds: those of a member
    where ops are divided."""
    if not placement.splits:
        return graph
    division = known_division(graph)
    graphs, which = [graph], np.zeros(graph.num_ops, dtype=np.int64)
    for split in placement.splits:
        which[placement.device == split.devices[0]] = len(graphs)
        graphs.append(_member(division, len(split.devices), split.experts))
    return _picked(graphs, which)


@functools.lru_cache(maxsize=32)
def _member(division: Division, size: int, experts: bool) -> OpGraph:
    """The graph of the member that holds most, of so many with equal shares."""
    shares = Shares((1,) * size, experts)
    if all(unit.total % size == 0 for unit in division.units):
        return member_graph(division, shares, 0)
    # Pieces that are left over make some members larger.
    graphs = (member_graph(division, shares, rank) for rank in range(size))
    return max(graphs, key=lambda graph: int(graph.weight_bytes.sum()))


def _exchange_s(
    cluster: Cluster, split: Split, told: Sequence[Exchange], num_ops: int
) -> Float[np.ndarray, "N"]:
    """Seconds of the collectives behind one run of each op."""
    seconds = np.zeros(num_ops)
    for operation in {exchange.operation for exchange in told}:
        mine = [exchange for exchange in told if exchange.operation == operation]
        parts = np.array([exchange.parts for exchange in mine])
        sizes = np.array([exchange.size_bytes for exchange in mine]) / parts
        each = collective_s(cluster, split.devices, operation, sizes, ENGINE)
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
