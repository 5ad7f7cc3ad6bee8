"""Pipeline partitions: consecutive layers per device, optimal over device orders.

A dynamic program over stretches of layers finds the row. Of rows that are equally fast a
memory-balanced one leaves the largest share of its memory free on the fullest device.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import PlacementError
from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE
from gdp.methods.intervals import Join, Row, best_rows, tightened
from gdp.placement.placement import Placement, Split, Teams, make_placement

MAX_ORDERS = 2000
NEAR_ORDERS = 24
"""Orders of unlike devices, as fast as the best, among which an even row is looked for."""
EQUAL = 0.002
"""Share by which a row may be slower than the best and still count as equally fast."""
_LAYER = re.compile(r"^(.*?)\.(\d+)(?=\.|$)")
"""List of layers and number of the layer, of a module path."""
_SMALL = 0.01
"""Of a layer's weights: smaller modules, such as norms and rotary tables, follow their rank."""


class LayerRow(NamedTuple):
    """A decoder as one row of layers, which ranks of runtimes divide. Axes: N ops."""

    layer: Int[np.ndarray, "N"]  # number of its layer; -1 before all, `num_layers` behind all
    fixed: Int[np.ndarray, "_"]  # ops with weights that decide where a stretch lies
    num_layers: int


def layer_row(graph: OpGraph) -> LayerRow:
    """Layers of the ops of a decoder; `PlacementError` where there is no single row of layers.

    Where layers keep caches, others are no rivals: those of an encoder of images, whose weights
    engines load beside the decoder's, whichever GPUs hold that."""
    matches = [_LAYER.match(scope) for scope in graph.scope]
    held: dict[str, int] = {}
    cached = set[str]()
    for match, size, cache in zip(matches, graph.weight_bytes, graph.cache_bytes, strict=True):
        if match is not None:
            held[match[1]] = held.get(match[1], 0) + int(size)
            cached |= {match[1]} if cache else set()
    rows = sorted((path for path in held if held[path]), key=lambda path: -held[path])
    rows = [path for path in rows if path in cached] or rows
    rivals = [path for path in rows[1:] if held[path] > _SMALL * held[rows[0]]]
    if not rows or rivals:
        what = " and ".join(map(repr, [*rows[:1], *rivals])) or "none"
        raise PlacementError(
            f"ranks divide one row of layers, and {graph.name!r} has {what}: place it for another "
            "runtime"
        )
    layer = np.full(graph.num_ops, -1)
    inside = np.array([match is not None and match[1] == rows[0] for match in matches])
    layer[inside] = [
        int(match[2]) for match in matches if match is not None and match[1] == rows[0]
    ]
    count = int(layer.max()) + 1
    stepping = graph.phase == DECODE
    for phase in (stepping, ~stepping):
        last = np.flatnonzero(inside & phase).max(initial=0)
        layer[phase & ~inside & (np.arange(graph.num_ops) > last)] = count
    size = np.bincount(layer[inside], graph.weight_bytes[inside], count)
    large = graph.weight_bytes > _SMALL * float(size.min())
    return LayerRow(layer, np.flatnonzero(large & ~graph.is_io), count)


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Seconds and bytes of stretches of a graph's blocks. Axes: N ops, C cuts between blocks, both
    ends included, D devices."""

    graph: OpGraph
    cluster: Cluster
    block: Int[np.ndarray, "N"]  # ascends with the ops
    seconds: Float[np.ndarray, "C C D"]  # from a cut to a later one; inf where not allowed
    weight_bytes: Int[np.ndarray, "C C"]
    cut_bytes: Int[np.ndarray, "C"]  # of tensors that cross each cut, in all passes
    cut_tensors: Int[np.ndarray, "C"]
    block_tensor_bytes: Int[np.ndarray, "B"]  # of each block
    usable: tuple[int, ...] = ()  # devices that get stretches: of each split the first
    splits: tuple[Split, ...] = ()
    every: bool = False  # all usable devices get one

    @cached_property
    def room_bytes(self) -> Int[np.ndarray, "D"]:
        """Memory of each device, or of the smallest member of its split."""
        rooms = self.cluster.memory_bytes.copy()
        for split in self.splits:
            rooms[split.devices[0]] = rooms[list(split.devices)].min()
        return rooms

    def limited_to(self, usable: Sequence[int], every: bool = False) -> "LayerCosts":
        """These stretches, on some of the devices alone, or on `every` one of them."""
        return replace(self, usable=tuple(usable), every=every)

    def alone(self) -> "list[LayerCosts]":
        """These stretches, on each of the devices alone."""
        return [self.limited_to([d]) for d in self.usable]

    @cached_property
    def scratch_bytes(self) -> Int[np.ndarray, "C C"]:
        """The most tensors of a block in every stretch, such as logits where the head is."""
        cuts = len(self.block_tensor_bytes) + 1
        most = np.zeros((cuts, cuts), dtype=np.int64)
        for start in range(cuts - 1):
            most[start, start + 1 :] = np.maximum.accumulate(self.block_tensor_bytes[start:])
        return most

    @cached_property
    def link_s(self) -> Float[np.ndarray, "D D C"]:
        """Seconds that the tensors over each cut take from one device to another."""
        cluster = self.cluster
        latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
        return latency * self.cut_tensors + self.cut_bytes / rate

    @cached_property
    def orders(self) -> list[tuple[int, ...]]:
        """The first `MAX_ORDERS` orders of the devices."""
        return list(itertools.islice(orders_by_kind(self.cluster, self.usable), MAX_ORDERS))

    def fitting_s(self, share: float, fill: float = 1.0) -> Float[np.ndarray, "C C D"]:
        """`seconds`, inf where weights and a share of the tensors of a stretch take more than the
        memory, or below 1 weights and tensors of a stretch more than `fill` of the memory."""
        held_bytes = self.weight_bytes + (share * self.scratch_bytes).astype(np.int64)
        fits = held_bytes[:, :, None] <= self.room_bytes
        if fill < 1.0:
            held_bytes = self.weight_bytes + self.scratch_bytes
            fits &= held_bytes[:, :, None] <= fill * self.room_bytes
        return np.where(fits, self.seconds, np.inf)

    def best_of_orders(self, share: float, join: Join, fill: float = 1.0) -> tuple[float, Row]:
        """Value and row of the best row over all orders of the devices; empty where none fits."""
        return min(self._rows_of(self.orders, share, join, fill), key=lambda plan: plan[0])

    def _rows_of(
        self, orders: Sequence[tuple[int, ...]], share: float, join: Join, fill: float
    ) -> list[tuple[float, Row]]:
        """Value and row of the best row of each order."""
        seconds = np.ascontiguousarray(np.moveaxis(self.fitting_s(share, fill), 2, 0))
        plans = best_rows(orders, lambda d: seconds[d], self.link_s, join, self.every)
        return [(value, row) for (value,), row in plans]

    def memory_balanced_partition(self, share: float, join: Join, equal: float = EQUAL) -> Row:
        """Of the rows that are as fast as the best, or slower by a share that still counts as
        `equal`, one whose fullest device is nearly as empty as can be; empty where nothing fits."""
        plans = self._rows_of(self.orders, share, join, 1.0)
        best_s, row = min(plans, key=lambda plan: plan[0])
        if not row:
            return row
        # Less memory makes no order faster.
        limit_s = best_s * (1 + equal)
        near = [o for o, (value_s, _) in zip(self.orders, plans, strict=True) if value_s <= limit_s]

        def filled(fill: float) -> Row | None:
            rows = self._rows_of(near[:NEAR_ORDERS], share, join, fill)
            value_s, emptier = min(rows, key=lambda plan: plan[0])
            return emptier if value_s <= limit_s else None

        return [row, *tightened(1.0, filled)][-1]

    def devices(self, row: Row) -> Int[np.ndarray, "N"]:
        """The device of every op in a row; inputs and outputs are on the host."""
        device = np.full(self.graph.num_ops, self.cluster.host)
        for start, stop, where in row:
            device[(self.block >= start) & (self.block < stop)] = where
        device[self.graph.is_io] = self.cluster.host
        return device

    def placement(
        self, row: Row, made_by: str, teams: Teams = (), splits: tuple[Split, ...] = ()
    ) -> Placement | None:
        """The placement of a row; None of an empty one."""
        if not row:
            return None
        device = self.devices(row)
        return make_placement(
            self.graph, self.cluster, device, made_by=made_by, teams=teams, splits=splits
        )


def orders_by_kind(cluster: Cluster, usable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Orders of some devices: those of one machine follow each other, as ranks of runtimes do;
    alike machines, and alike devices of one, stay in the cluster's order."""
    at = machines(cluster)
    like = {d: (at[d], int(cluster.alike[d])) for d in usable}

    def rest(left: "Counter[_Kind]", order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(usable):
            yield order
        kinds = [k for k, count in left.items() if count]
        here = [k for k in kinds if order and k[0] == at[order[-1]]]
        for kind in here or _of_unlike_machines(kinds, left):
            mine = [d for d in usable if like[d] == kind]
            taken = mine[len(mine) - left[kind]]
            yield from rest(left - Counter([kind]), (*order, taken))

    return rest(Counter(like[d] for d in usable), ())


_Kind = tuple[int, int]  # machine, class of device


def _of_unlike_machines(kinds: Sequence[_Kind], left: "Counter[_Kind]") -> Iterator[_Kind]:
    """One machine of each kind, none of whose devices was taken."""
    held = {m: sorted((*k[1:], left[k]) for k in kinds if k[0] == m) for m, *_ in kinds}
    first = {m for m in held if m == next(n for n in held if held[n] == held[m])}
    return (kind for kind in kinds if kind[0] in first)
