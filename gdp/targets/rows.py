"""Rows of blocks: one stretch a device, the best over all orders of unlike devices.

A dynamic program over stretches of blocks finds the row; the simulator then judges it as any other
placement. The memory that tensors take is known once a plan is simulated, so rows with less and
less memory for weights are tried. Of rows that are equally fast an even one leaves the largest
share of its memory free on the fullest device.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from gdp import solve
from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster, fullness, nearly_full
from gdp.errors import InfeasibleError
from gdp.graph.op_graph import OpGraph
from gdp.methods.intervals import Join, Row, best_rows
from gdp.placement import Placement, Split, Teams, make_placement
from gdp.prepare import problem_of
from gdp.problem.arrays import arrays_of
from gdp.question import Question
from gdp.result import Result, counts_of, with_bound
from gdp.splits.members import Divided

MAX_ORDERS = 2000
MEMORY_SHARES = (0.0, 0.5, 1.0)
"""Of the bytes that tensors may take, kept free of weights; tried in this order."""
FINE_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Such shares where the first plan that fits is taken: with fewer of them, a little more memory led
from a plan that just fits to one that keeps half of that free."""
EQUAL = 0.002
"""Share by which a row may be slower than the best and still count as equally fast."""
ROOMY = 0.75
"""A plan on one device that is no fuller stays there: other devices would add transfers for room
that nobody misses."""
NEAR_ORDERS = 24
"""Orders of unlike devices, as fast as the best, among which an even row is looked for."""
SPREAD = "spread evenly"
"""Begins the note of a plan that was taken for its room."""
EVEN_STEPS = 8  # halvings of the share of memory that the fullest device may fill


@dataclass(frozen=True, eq=False)
class ModuleBlocks:
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

    def limited_to(self, usable: Sequence[int], every: bool = False) -> "ModuleBlocks":
        """These stretches, on some of the devices alone, or on `every` one of them."""
        return replace(self, usable=tuple(usable), every=every)

    def alone(self) -> "list[ModuleBlocks]":
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
        return [(value.real, row) for value, row in plans]

    def even_row(self, share: float, join: Join, equal: float = EQUAL) -> Row:
        """Of the rows that are as fast as the best, or slower by a share that still counts as
        `equal`, one whose fullest device is nearly as empty as can be; empty where nothing fits."""
        plans = self._rows_of(self.orders, share, join, 1.0)
        best_s, row = min(plans, key=lambda plan: plan[0])
        # Less memory makes no order faster.
        limit_s = best_s * (1 + equal)
        near = [o for o, (value_s, _) in zip(self.orders, plans, strict=True) if value_s <= limit_s]
        near = near[:NEAR_ORDERS]
        least, most = 0.0, 1.0
        for _ in range(EVEN_STEPS if row else 0):
            fill = (least + most) / 2
            value_s, emptier = min(self._rows_of(near, share, join, fill), key=lambda plan: plan[0])
            if emptier and value_s <= limit_s:
                most, row = fill, emptier
            else:
                least = fill
        return row

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


def module_blocks(
    question: Question, block: Int[np.ndarray, "N"], parts: Divided | None = None,
    usable: Sequence[int] | None = None,
) -> ModuleBlocks:  # fmt: skip
    """Seconds, weights and crossing bytes of all stretches of blocks.

    Args:
        question: Of its parts graph, cluster, costs and constraints count.
        block: Of each op, ascending with them.
        parts: The graph as splits divide it; seconds and bytes are those of a member.
        usable: Devices that get stretches; by default all that compute.
    """
    whole, cluster = question.graph, question.cluster
    # Stretches pay their dispatch as the stages of a pipeline do.
    problem = problem_of(replace(question, objective="throughput"), keep_apart=block, parts=parts)
    graph = whole if parts is None else parts.graph
    if usable is None:
        usable = np.flatnonzero(cluster.computes).tolist()
    flat = arrays_of(problem)
    count = int(block.max()) + 1
    per_op = np.where(problem.allowed, flat.compute_s, np.inf)
    per_op[flat.is_io] = 0.0
    fused_block = np.zeros(problem.num_ops, dtype=np.int64)
    fused_block[problem.origin.group_of] = block
    seconds = np.zeros((count, cluster.num_devices))
    np.add.at(seconds, fused_block, per_op)
    # Sums of stretches; what is not allowed would make all behind it inf minus inf.
    never = np.isinf(seconds)
    total = _prefix_sums(np.where(never, 0.0, seconds))
    stretch_s = total[None] - total[:, None] + flat.segment_s
    stretch_s[_prefix_sums(never)[None] > _prefix_sums(never)[:, None]] = np.inf
    stretch_s[np.tril_indices(count + 1)] = np.inf
    crosses = ~graph.is_io[graph.producer[graph.use_tensor]] & ~graph.is_io[graph.use_op]
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor[crosses], block[graph.use_op[crosses]])
    cut = np.arange(count + 1)
    open_at = (block[graph.producer] < cut[:, None]) & (cut[:, None] <= last)
    op_bytes = np.bincount(graph.producer, graph.held_bytes, graph.num_ops)
    block_bytes = np.bincount(block, op_bytes, count)
    return ModuleBlocks(
        whole, cluster, block, stretch_s, _weight_bytes(graph, block, count),
        (open_at * graph.sent_bytes).sum(axis=1),
        (open_at * graph.repeats[graph.producer]).sum(axis=1), block_bytes.astype(np.int64),
        tuple(usable), () if parts is None else parts.splits,
    )  # fmt: skip


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """Sum of the first k rows, for every k."""
    return np.concatenate([np.zeros_like(values[:1], dtype=float), values.cumsum(axis=0)])


def _weight_bytes(graph: OpGraph, block: np.ndarray, count: int) -> Int[np.ndarray, "C C"]:
    """Weight bytes of every stretch; a weight that several ops read counts once."""
    own = np.bincount(block, graph.weight_bytes, count)
    total = _prefix_sums(own[:, None])[:, 0]
    held = total[None] - total[:, None]
    seen: dict[int, int] = {}
    for op in np.flatnonzero(graph.weight_bytes):
        weight, here = int(graph.weight_id[op]), int(block[op])
        if weight in seen:
            held[: seen[weight] + 1, here + 1 :] -= graph.weight_bytes[op]
        seen[weight] = here
    return held.astype(np.int64)


def evened(result: Result, placements: Iterable[Placement | None]) -> Result:
    """The result, or one of some placements that is as fast and leaves a larger share of its memory
    free on the fullest device; simplicity 0 allows none that is slower at all."""
    question = result.question
    graph, cluster, simplicity = question.graph, question.cluster, question.simplicity
    slack = 0.0 if simplicity == 0.0 else EQUAL
    limit_s = result.value_s * (1 + slack)
    best, fullest = result, max(fullness(cluster, result.score.peak_bytes.tolist()))
    used = np.unique(result.placement.device[graph.weight_bytes > 0])
    if result.placement.teams or (len(used) < 2 and fullest <= ROOMY):
        return result
    for placement in filter(None, placements):
        score = solve.simulate(question, placement)
        full = max(fullness(cluster, score.peak_bytes.tolist()))
        if score.feasible and score.value_s <= limit_s and full < fullest:
            best, fullest = replace(result, placement=placement, score=score), full
    if best is result:
        return result
    before = max(fullness(cluster, result.score.peak_bytes.tolist()))
    cost = max(best.value_s / result.value_s - 1, 0.0) if result.value_s else 0.0
    note = (
        f"{SPREAD}: the fullest device is {fullest:.0%} full instead of {before:.0%}, which "
        f"costs {cost:.2%}: simplicity 0 answers the fastest plan"
    )
    told = [n for n in result.notes if n != nearly_full(cluster, result.score.peak_bytes.tolist())]
    full = nearly_full(cluster, best.score.peak_bytes.tolist())
    best = replace(
        best, notes=(*told, note, *([full] if full else [])), deviation_s=None,
        counts=counts_of(question, best.placement),
    )  # fmt: skip
    return with_bound(best, result.bound_s, result.bound_by)


def first_that_fits(
    question: Question, placements: Iterable[Placement | None], reason: str, method: str
) -> Result:
    """The first placement that fits in memory, evaluated; `InfeasibleError` where none does, with
    the reason that is given where there is no placement at all."""
    for placement in placements:
        if placement is None:
            continue
        result = solve.evaluate(question, placement)
        if result.score.feasible:
            return replace(result, method=method)
        reason = str(result.score)
    raise InfeasibleError(
        f"{question.graph.name!r} does not fit on cluster {question.cluster.name!r}: {reason}"
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
    """The kinds of machines none of whose devices was taken, without machines alike an earlier."""
    held = {m: sorted((*k[1:], left[k]) for k in kinds if k[0] == m) for m, *_ in kinds}
    first = {m for m in held if m == next(n for n in held if held[n] == held[m])}
    return (kind for kind in kinds if kind[0] in first)
