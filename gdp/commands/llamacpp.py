"""Placing for llama.cpp, such that its flags can say the answer.

The blocks are a row: a first stretch on the CPU, then one stretch on each GPU, in order, and the
experts of any block may lie on the CPU. A program over stretches finds the plan whose ops and
transfers take least, one after the other, which is what a chain of blocks does; the simulator then
judges it as any other placement.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from gdp import api
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints, allowed_mask
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.roofline import roofline
from gdp.errors import InfeasibleError, PlacementError, of_kind
from gdp.exporters.llamacpp import Slots, slots_of
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement, make_placement
from gdp.result import Result


@dataclass(frozen=True)
class _Plan:
    """Some stretches: what they take, what they put on the CPU, and where each slot begins."""

    seconds: float = 0.0
    cpu_bytes: int = 0
    device: tuple[int, ...] = ()  # of each slot
    away: tuple[int, ...] = ()  # slots whose experts are on the CPU

    def then(self, after: "_Plan") -> "_Plan":
        return _Plan(
            self.seconds + after.seconds, self.cpu_bytes + after.cpu_bytes,
            self.device + after.device, self.away + after.away,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Pieces:
    """What each piece takes on each device. Axis S: slots."""

    cluster: Cluster
    cpu: int
    layer_s: Float[np.ndarray, "S D"]
    experts_s: Float[np.ndarray, "S D"]
    layer_bytes: Int[np.ndarray, "S"]
    expert_bytes: Int[np.ndarray, "S"]
    room: Int[np.ndarray, "D"]  # bytes for weights and caches
    tensor_bytes: int  # at most so many are alive at once
    flow_bytes: int  # between blocks
    logits_bytes: int
    away_bytes: Int[np.ndarray, "S 2"]  # to the experts, and back

    def move_s(self, src: int, dst: int, size: int) -> float:
        link = self.cluster
        return 0.0 if src == dst else float(
            link.link_latency_s[src, dst] + size / link.link_bytes_per_s[src, dst]
        )  # fmt: skip


def place_for_llamacpp(
    graph: OpGraph,
    cluster: Cluster,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
) -> Result:
    """The best plan that llama.cpp's flags can say. Costs are datasheet numbers unless given: the
    shipped calibrations are of other runtimes.

    Raises `InfeasibleError` where nothing fits, and `PlacementError` for other graphs.
    """
    if objective != "latency":
        raise ValueError(f"--for llamacpp plans the latency of one pass, not {objective}")
    constraints = of_kind(constraints, Constraints, "constraints")
    if constraints.together or constraints.whole:
        raise ValueError("--for llamacpp keeps blocks whole by itself: leave out --together")
    costs = roofline if costs is None else resolve_costs(costs, cluster)[0]
    slots = slots_of(graph)
    pieces = _pieces(graph, cluster, slots, costs, constraints)
    said = "a device is too small or forbidden"
    # How much of the memory tensors take is known once a plan is simulated.
    for share, frugal in ((0.0, False), (0.5, False), (1.0, False), (1.0, True)):
        plan = _best(replace(pieces, room=pieces.room - int(share * pieces.tensor_bytes)), frugal)
        if plan is None:
            continue
        placement = _placed(graph, cluster, slots, pieces.cpu, plan)
        score = api.simulate(graph, placement, cluster, costs=costs)
        if score.feasible:
            return replace(api.judged(graph, placement, cluster, costs=costs), method="llamacpp")
        said = str(score)
    raise InfeasibleError(f"{graph.name!r} does not fit on cluster {cluster.name!r}: {said}")


def _placed(graph: OpGraph, cluster: Cluster, slots: Slots, cpu: int, plan: _Plan) -> Placement:
    device = np.full(graph.num_ops, cpu)
    device[graph.is_io] = cluster.host
    for slot, where in enumerate(plan.device):
        device[slots.layers[slot]] = where
        device[slots.experts[slot]] = cpu if slot in plan.away else where
    return make_placement(graph, cluster, device, made_by="gdp llamacpp")


def _pieces(
    graph: OpGraph, cluster: Cluster, slots: Slots, costs: CostModel, constraints: Constraints
) -> _Pieces:
    cpus = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    if not cpus:
        raise PlacementError(f"llama.cpp needs a CPU; cluster {cluster.name!r} has none")
    cpu = cluster.host if cluster.host in cpus else cpus[0]
    seconds = costs(graph, cluster)
    seconds = seconds + [d.dispatch_s if d.dispatch_per == "op" else 0.0 for d in cluster.devices]
    seconds = np.where(allowed_mask(constraints, graph, cluster), seconds, np.inf)
    if not np.isfinite(seconds[slots.embedding, cpu]).all():
        raise InfeasibleError(
            f"llama.cpp keeps token_embd on the CPU, and {cluster.device_names[cpu]!r} is forbidden"
        )
    made = np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops).astype(np.int64)
    largest = max(
        int(made[layer].sum() + made[experts].sum())
        for layer, experts in zip(slots.layers, slots.experts, strict=True)
    )
    flow = int(made[slots.embedding].sum())
    room = cluster.memory_bytes.copy()
    room[cpu] -= int(graph.weight_bytes[slots.embedding].sum())

    def summed(values: np.ndarray, pieces: Sequence[Int[np.ndarray, "_"]]) -> np.ndarray:
        return np.array([values[ops].sum(axis=0) for ops in pieces])

    return _Pieces(
        cluster=cluster, cpu=cpu,
        layer_s=summed(seconds, slots.layers), experts_s=summed(seconds, slots.experts),
        layer_bytes=summed(graph.weight_bytes, slots.layers),
        expert_bytes=summed(graph.weight_bytes, slots.experts),
        room=room, tensor_bytes=largest + 2 * flow, flow_bytes=flow,
        logits_bytes=int(made[slots.layers[-1][-1]]),
        away_bytes=np.array([_crossing(graph, ops) for ops in slots.experts]),
    )  # fmt: skip


def _crossing(graph: OpGraph, ops: Int[np.ndarray, "M"]) -> tuple[int, int]:
    """Bytes that some ops read from others, and that others read from them."""
    inside = np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    src, dst = graph.edges
    into = np.unique(graph.use_tensor[~inside[src] & inside[dst]])
    out = np.unique(graph.use_tensor[inside[src] & ~inside[dst]])
    return int(graph.tensor_bytes[into].sum()), int(graph.tensor_bytes[out].sum())


def _best(pieces: _Pieces, frugal: bool) -> _Plan | None:
    """The plan of least seconds, or with `frugal` of the fewest bytes on the CPU; None where no
    stretches fit the GPUs. O(G^2 S^2) stretches of G GPUs and S slots."""
    cluster, cpu, slots = pieces.cluster, pieces.cpu, len(pieces.layer_bytes)
    row = [cpu, *(d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu)]

    def value(plan: _Plan) -> tuple[float, float]:
        seconds, size = plan.seconds, float(plan.cpu_bytes)
        return (size, seconds) if frugal else (seconds, size)

    stretch = functools.cache(functools.partial(_stretch, pieces, frugal))

    @functools.cache
    def rest(place: int, start: int, before: int) -> _Plan | None:
        """Of the slots from `start` on, on the devices of the row from `place` on."""
        if start == slots:
            return _Plan(pieces.move_s(before, cluster.host, pieces.logits_bytes))
        if place == len(row):
            return None
        device, found = row[place], []
        if (none_here := rest(place + 1, start, before)) is not None:
            found.append(none_here)
        arrive = _Plan(pieces.move_s(before, device, pieces.flow_bytes))
        for stop in range(start + 1, slots + 1):
            here = stretch(device, start, stop)
            if here is None:
                break
            after = rest(place + 1, stop, device)
            if after is not None:
                found.append(arrive.then(here).then(after))
        return min(found, key=value, default=None)

    return rest(0, 0, cpu)


def _least_to_free(needed_bytes: int, items: dict[int, tuple[float, int]]) -> list[int]:
    """Items (seconds, bytes) that free at least so many bytes for few seconds: those of the fewest
    seconds per byte until it is enough, less those that are then superfluous, or the one cheapest
    item that is enough alone. At most twice the least seconds (greedy for the covering knapsack).
    """
    chosen: list[int] = []
    freed = 0
    for item in sorted(items, key=lambda i: items[i][0] / items[i][1]):
        if freed >= needed_bytes:
            break
        chosen.append(item)
        freed += items[item][1]
    for item in sorted(chosen, key=lambda i: -items[i][0]):
        if freed - items[item][1] >= needed_bytes:
            chosen.remove(item)
            freed -= items[item][1]
    enough = [item for item, (_, size) in items.items() if size >= needed_bytes]
    if needed_bytes <= 0 or not enough:
        return chosen
    alone = min(enough, key=lambda i: items[i][0])
    return [alone] if items[alone][0] < sum(items[i][0] for i in chosen) else chosen


def _stretch(pieces: _Pieces, frugal: bool, device: int, start: int, stop: int) -> _Plan | None:
    """Slots on one device; of a GPU too small, with experts on the CPU, those first that cost
    least per byte. None where that does not fit either."""
    span = np.arange(start, stop)
    seconds = float((pieces.layer_s + pieces.experts_s)[span, device].sum())
    size = int((pieces.layer_bytes + pieces.expert_bytes)[span].sum())
    where = (device,) * len(span)
    cpu = pieces.cpu
    if device == cpu:
        fits = np.isfinite(seconds) and size <= pieces.room[cpu]
        return _Plan(seconds, size, where) if fits else None
    seconds = float(pieces.layer_s[span, device].sum())
    owned = [int(s) for s in span if pieces.expert_bytes[s] > 0]
    here_s = {s: float(pieces.experts_s[s, device]) for s in owned}
    away_s = {
        s: float(pieces.experts_s[s, cpu])
        + pieces.move_s(device, cpu, int(pieces.away_bytes[s, 0]))
        + pieces.move_s(cpu, device, int(pieces.away_bytes[s, 1]))
        for s in owned
    }
    if any(here_s[s] == away_s[s] == np.inf for s in owned):
        return None
    extra_s = {s: away_s[s] - here_s[s] for s in owned}
    away = [s for s in owned if here_s[s] == np.inf or (extra_s[s] < 0 and not frugal)]
    size -= int(pieces.expert_bytes[away].sum())
    others = {s: (extra_s[s], int(pieces.expert_bytes[s])) for s in owned if s not in away}
    gone = _least_to_free(size - int(pieces.room[device]), others)
    away += gone
    size -= int(pieces.expert_bytes[gone].sum())
    seconds += sum(away_s[s] if s in away else here_s[s] for s in owned)
    if size > pieces.room[device] or not np.isfinite(seconds):
        return None
    return _Plan(seconds, int(pieces.expert_bytes[away].sum()), where, tuple(sorted(away)))
