"""Costs of the stages of a pipeline on each class of devices.

A lane is something that is busy for every sample: a device, or a channel. A stage S costs the
busiest of its class's lanes, and each lane adds up the work of S or not, and one row of payments
of S for the tensors it cuts. On links these are a lane for the device, one for tensors that come in
and one for tensors that go out, or one for both where they share a channel. The simulator's period
is the largest over devices and channels, so the dearest stage is a lower bound of it where these
lanes are parts of one channel each. It is exact where a tensor has readers on one other device at
most, or channels belong to readers. An objective with another `Pricing` has its own program
(`Objective.programs`).

A stage has one device, or a group of identical ones, round-robin by sample. Tarnawski et al.,
NeurIPS 2020, arXiv 2006.16423, extend the program over down-sets to such replicated stages, as
PipeDream does (Narayanan et al. 2019, doi 10.1145/3341301.3359646): each of r devices of a class
serves every r-th sample, so that it is busy for 1 / r of the time of one device.
`gdp.sim.score` has the exact costs.

Axes: N ops, D devices, C classes of devices, K device groups, M elements, R rows, H hyperedges, L
lanes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import NO_CHANNEL
from gdp.graph.op_graph import INPUT
from gdp.methods.pipeline.elements import Contraction
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, is_host, same
from gdp.sim.objectives import objective_of

_MOST_STATES = 1024
_EVERY_SIZE = 24  # devices up to which groups of every size are tried


class ReplicaGroup(NamedTuple):
    """Devices of one stage, which take samples round-robin."""

    counts: tuple[int, ...]  # devices of each class
    like: int  # the class whose costs it has

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(self.counts)


@dataclass(frozen=True, eq=False)
class Hyperedge:
    """A hyperedge of one row: elements, the producer of the tensor, and the cost of cutting."""

    row: int
    pins: tuple[int, ...]  # ascending
    tail: int  # an element, or -1 for a graph input
    read_outside: bool  # a graph output reads it
    w_in: float  # paid by a stage that reads it and does not make it
    w_out: float  # paid by a stage that makes it and is not its only reader


class Lane(NamedTuple):
    """A device or channel that is busy for every sample of a stage."""

    works: bool  # whether it adds the stage's work
    row: int  # of the stage's payments, or -1
    shared: bool = False  # by the devices of the class, so that replicas do not divide it


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Classes of identical devices, and the costs of stages on them."""

    devices: tuple[tuple[int, ...], ...]  # of each class
    work_s: Float[np.ndarray, "C M"]  # 0 where barred
    barred: Bool[np.ndarray, "C M"]  # the element may not go there
    memory_bytes: Int[np.ndarray, "C"]
    lanes: tuple[tuple[Lane, ...], ...]  # of each class
    num_rows: int
    edges: tuple[Hyperedge, ...]
    is_bound: bool  # no placement in stages has a lower value than its dearest stage
    groups: tuple[ReplicaGroup, ...]  # of each class one device, then several
    has_all_groups: bool = True  # else some groups were left out


Pricing = Callable[[Problem, Contraction, bool], StageCosts]
"""(problem, contracted graph, whether several devices may serve a stage): what stages cost."""


def stage_costs(problem: Problem, contraction: Contraction, replicas: bool = False) -> StageCosts:
    """The costs of a problem's stages on links; a latency gets those of the matching pipeline.

    With `replicas` a stage may be given several devices of a class, round-robin by sample.
    """
    classes = device_classes(problem)
    lanes, rows, edges, is_bound = _pipeline_edges(problem, contraction, classes)
    is_bound &= objective_of(problem).pipelined
    return costs_of_lanes(problem, contraction, lanes, rows, edges, is_bound, replicas)


def costs_of_lanes(
    problem: Problem, contraction: Contraction, lanes: tuple[tuple[Lane, ...], ...], rows: int,
    edges: list[Hyperedge], is_bound: bool, replicas: bool = False,
) -> StageCosts:  # fmt: skip
    """The costs of stages by the lanes of each class of devices and the payments of their rows."""
    classes = device_classes(problem)
    m = contraction.num_elements
    work_s, barred = _work(problem, contraction.element, m, classes)
    groups, has_all = (
        find_replica_groups(problem, classes) if replicas else (single_devices(classes), True)
    )
    return StageCosts(
        devices=classes,
        work_s=work_s,
        barred=barred,
        memory_bytes=problem.cluster.memory_bytes[[c[0] for c in classes]].astype(np.int64),
        lanes=lanes,
        num_rows=rows,
        edges=_merge_equal(edges),
        is_bound=is_bound,
        groups=groups,
        has_all_groups=has_all,
    )


def op_group_costs(problem: Problem, costs: StageCosts) -> StageCosts:
    """The costs with groups of ops for elements, of any placement, contiguous or not."""
    work_s, barred = _work(problem, problem.group, problem.num_groups, costs.devices)
    return replace(costs, work_s=work_s, barred=barred)


def with_few_states(costs: StageCosts) -> StageCosts:
    """The costs without the slowest devices, where devices are so unlike that states are many.

    A state is the number of devices used of each class.
    """
    classes = [list(devices) for devices in costs.devices]
    slow = np.argsort(-np.where(costs.barred, costs.work_s.max(initial=0.0), costs.work_s).sum(1))
    while math.prod(len(devices) + 1 for devices in classes) > _MOST_STATES:
        next(classes[c] for c in slow if classes[c]).pop()
    have = np.array([len(devices) for devices in classes])
    # Single devices stay, first and in order.
    groups = tuple(
        group
        for k, group in enumerate(costs.groups)
        if k < len(classes) or (group.counts <= have).all()
    )
    return replace(costs, devices=tuple(map(tuple, classes)), groups=groups)


def _work(
    problem: Problem,
    owner: Int[np.ndarray, "N"],
    num_owners: int,
    classes: tuple[tuple[int, ...], ...],
) -> tuple[Float[np.ndarray, "C M"], Bool[np.ndarray, "C M"]]:
    """(seconds of the ops of each owner below `num_owners`, 0 where barred; barred) by class."""
    work_s = np.zeros((len(classes), num_owners + 1))
    barred = np.zeros((len(classes), num_owners + 1), dtype=bool)
    graph, cluster, opens = problem.graph, problem.cluster, _always_opens(problem)
    for c, devices in enumerate(classes):
        seconds = problem.compute_s[:, devices[0]].copy()
        pays = ~(graph.is_io | graph.rests) if cluster.launches_ops[devices[0]] else opens
        seconds[pays] += cluster.dispatch_s[devices[0]]
        allowed = problem.allowed[:, devices[0]] & np.isfinite(seconds)
        np.add.at(work_s[c], owner, np.where(allowed, seconds, 0.0))
        barred[c, owner[~allowed]] = True
    work_s[barred] = 0.0
    return work_s[:, :num_owners].copy(), barred[:, :num_owners].copy()


def _always_opens(problem: Problem) -> Bool[np.ndarray, "N"]:
    """Ops that open a segment wherever they are: they read nothing, or a graph input."""
    graph = problem.graph
    src, dst = graph.edges
    is_input = graph.has_type((INPUT,))
    opens = np.bincount(dst, minlength=graph.num_ops) == 0
    opens[dst[is_input[src]]] = True
    return opens & ~graph.is_io & ~graph.rests


def tensor_pins(
    problem: Problem, contraction: Contraction
) -> list[tuple[int, tuple[int, ...], int, bool]]:
    """(tensor, pins, tail, read outside) of every tensor that more than one element knows."""
    graph, element, m = problem.graph, contraction.element, contraction.num_elements
    readers: list[set[int]] = [set() for _ in range(graph.num_tensors)]
    for t, e in zip(graph.use_tensor.tolist(), element[graph.use_op].tolist(), strict=True):
        readers[t].add(e)
    rows = []
    for t, tail in enumerate(element[graph.producer].tolist()):
        known = readers[t] | {tail}
        if len(known) > 1:
            pins = tuple(sorted(known - {m}))
            rows.append((t, pins, -1 if tail == m else tail, m in readers[t]))
    return rows


def _pipeline_edges(
    problem: Problem, contraction: Contraction, classes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[Lane, ...], ...], int, list[Hyperedge], bool]:
    """Lanes, rows and hyperedges of the event simulator's pipeline, and whether they bound it."""
    lanes: list[tuple[Lane, ...]] = []
    edges: list[Hyperedge] = []
    rows: dict[tuple, int] = {}
    is_bound = True
    tensors = tensor_pins(problem, contraction)
    host, has_io = problem.cluster.host, bool(problem.graph.is_io.any())
    for devices in classes:
        d = devices[0]
        segment_s = float(problem.cluster.segment_dispatch_s[d])
        at_host = has_io and d == host
        out_latency, out_pace, in_latency, in_pace = link_prices(problem, d)
        wanted, bounds = _lane_kinds(problem, d)
        is_bound &= bounds
        own: list[Lane] = []
        for takes_in, takes_out in wanted:
            key = (
                at_host,
                takes_in and (in_latency, in_pace),
                takes_out and (out_latency, out_pace),
            )
            if key not in rows:
                rows[key] = len(rows)
                for t, pins, tail, read_outside in tensors:
                    size = float(problem.sent_bytes[t])
                    w_in = (in_latency + size * in_pace) * takes_in
                    w_out = (out_latency + size * out_pace) * takes_out * (tail >= 0)
                    if not at_host:
                        edges.append(Hyperedge(rows[key], pins, tail, read_outside, w_in, w_out))
                    elif tail >= 0 and len(pins) > 1:
                        edges.append(Hyperedge(rows[key], pins, tail, False, w_in, w_out))
            own.append(Lane(False, rows[key], _is_shared(problem, devices, takes_in, takes_out)))
        row = -1
        if segment_s > 0:
            key = ("segment", segment_s)
            if key not in rows:
                rows[key] = len(rows)
                edges += _segment_edges(problem, contraction, rows[key], segment_s)
            row = rows[key]
        lanes.append((Lane(True, row), *own))
    return tuple(lanes), max(1, len(rows)), edges, is_bound


def _lane_kinds(problem: Problem, d: int) -> tuple[list[tuple[bool, bool]], bool]:
    """The (takes in, takes out) of a device's transfer lanes, and whether they bound its channels.

    Incoming transfers over one channel are a lane, and so are outgoing ones. Over several channels
    they are none; where that holds both ways, one lane for each way is a guess. Transfers that do
    not queue keep nothing busy.
    """
    if problem.num_devices == 1:
        return [], True
    others = np.arange(problem.num_devices) != d
    channel = problem.cluster.channel
    into, out = set(channel[others, d].tolist()), set(channel[d, others].tolist())
    idle_in, idle_out = into == {NO_CHANNEL}, out == {NO_CHANNEL}
    if idle_in and idle_out:
        return [], True
    if len(into | out) == 1:
        return [(True, True)], True
    kinds = [(True, False)] * (len(into) == 1 and not idle_in)
    kinds += [(False, True)] * (len(out) == 1 and not idle_out)
    guess = [(True, False)] * (not idle_in) + [(False, True)] * (not idle_out)
    return kinds or guess, bool(kinds)


def _is_shared(problem: Problem, devices: tuple[int, ...], takes_in: bool, takes_out: bool) -> bool:
    """Test that all devices of a class use one channel for a lane, and no other for it."""
    others = ~np.eye(problem.num_devices, dtype=bool)
    channel = problem.cluster.channel
    used: set[int] = set()
    for d in devices:
        if takes_in:
            used |= set(channel[others[:, d], d].tolist())
        if takes_out:
            used |= set(channel[d, others[d]].tolist())
    return len(devices) > 1 and len(used - {NO_CHANNEL}) == 1


def _segment_edges(
    problem: Problem, contraction: Contraction, row: int, dispatch_s: float
) -> list[Hyperedge]:
    """One hyperedge per op that opens a segment when something it reads is made elsewhere."""
    graph, element, m = problem.graph, contraction.element, contraction.num_elements
    opens = _always_opens(problem)
    sources: dict[int, set[int]] = {}
    src, dst = graph.edges
    for a, op in zip(element[src].tolist(), dst.tolist(), strict=True):
        if not opens[op] and not graph.is_io[op] and element[op] < m:
            sources.setdefault(op, set()).add(a)
    edges = []
    for op, known in sources.items():
        tail = int(element[op])
        pins = tuple(sorted((known | {tail}) - {m}))
        if len(pins) > 1:
            edges.append(Hyperedge(row, pins, tail, False, 0.0, dispatch_s))
    return edges


def _merge_equal(edges: list[Hyperedge]) -> tuple[Hyperedge, ...]:
    """Hyperedges of the same pins and tail as one; those that cost nothing left out."""
    merged: dict[tuple, list[float]] = {}
    for edge in edges:
        if edge.w_in > 0 or edge.w_out > 0:
            # Where in and out cost the same it does not matter who the tail is.
            same = edge.w_in == edge.w_out and edge.tail >= 0
            tail = edge.pins[0] if same else edge.tail
            key = (edge.row, edge.pins, tail, edge.read_outside)
            sums = merged.setdefault(key, [0.0, 0.0])
            sums[0] += edge.w_in
            sums[1] += edge.w_out
    return tuple(
        Hyperedge(row, pins, tail, outside, w_in, w_out)
        for (row, pins, tail, outside), (w_in, w_out) in merged.items()
    )


def device_classes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Devices that may be exchanged for one another: same times, memory, rules and links."""
    return tuple(tuple(devices) for devices in classes_of(_alike(problem) & same(is_host(problem))))


def link_prices(problem: Problem, d: int) -> tuple[float, float, float, float]:
    """The cheapest (latency, seconds per byte) out of a device and into it."""
    if problem.num_devices == 1:
        return (0.0, 0.0, 0.0, 0.0)
    others = np.arange(problem.num_devices) != d
    latency, speed = problem.cluster.link_latency_s, problem.cluster.link_bytes_per_s
    return (
        float(latency[d, others].min()),
        float((1.0 / speed[d, others]).min()),
        float(latency[others, d].min()),
        float((1.0 / speed[others, d]).min()),
    )


def single_devices(classes: Sequence[Sequence[int]]) -> tuple[ReplicaGroup, ...]:
    """One device of each class, in their order."""
    ones = np.eye(len(classes), dtype=int)
    return tuple(ReplicaGroup(tuple(row), c) for c, row in enumerate(ones.tolist()))


def find_replica_groups(
    problem: Problem, classes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[ReplicaGroup, ...], bool]:
    """(every group, single devices first; whether groups of all sizes are among them).

    The host is a class of its own where the graph has inputs or outputs, as these stay there; it
    serves in groups of devices that are like it otherwise. Of many devices only groups of 2, 4, 8,
    ... and of the whole class are considered, so that the ways through the groups repeat soon.
    """
    alike = _alike(problem)
    # An op with work may have to be where an input or output of the graph is.
    group_of, io = problem.group, problem.graph.is_io
    host = None if np.isin(group_of[~io], group_of[io]).any() else problem.cluster.host
    every = problem.num_devices <= _EVERY_SIZE
    groups = list(single_devices(classes))
    for c, devices in enumerate(classes):
        kin = [k for k, own in enumerate(classes) if k != c and own == (host,)]
        kin = [k for k in kin if alike[devices[0], classes[k][0]]]
        for size in range(2, len(devices) + len(kin) + 1):
            if every or size.bit_count() == 1 or size >= len(devices):
                members = [{c: size}] * (size <= len(devices)) + [{c: size - 1, k: 1} for k in kin]
                for counts in members:
                    row = tuple(counts.get(k, 0) for k in range(len(classes)))
                    groups.append(ReplicaGroup(row, c))
    return tuple(groups), every


def largest_groups(groups: Sequence[ReplicaGroup], num_classes: int) -> Int[np.ndarray, "C"]:
    """The most devices that may share a stage with one of each class."""
    sizes = np.ones(num_classes, dtype=np.int64)
    for group in groups:
        members = np.array(group.counts) > 0
        sizes[members] = np.maximum(sizes[members], group.size)
    return sizes


def _alike(problem: Problem) -> np.ndarray:
    """Pairs of devices that cost any stage the same, inputs and outputs of the graph aside."""
    works = ~problem.graph.is_io
    return same(
        problem.compute_s[works],
        problem.allowed[works],
        problem.cluster.memory_bytes,
        problem.cluster.op_dispatch_s,
        problem.cluster.segment_dispatch_s,
        problem.cluster.is_cpu,
        np.array([link_prices(problem, d) for d in range(problem.num_devices)]).T,
        problem.cluster.queues.sum(axis=1),
        problem.cluster.queues.sum(axis=0),
    )
