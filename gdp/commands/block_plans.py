"""Placing for runtimes that cut a model into a row of blocks: llama.cpp and torch's pipelines.

A dynamic program over stretches of blocks, one stretch a device, finds the best row; the simulator
then judges it as any other placement. The memory that tensors take is known once a plan is
simulated, so plans with less and less memory for weights are tried.

llama.cpp's flags can express a first stretch on the CPU, then one on each GPU in their order, with
the experts of any block on the CPU; the plan has the least sum of compute and transfers, which is
what a chain of blocks takes. A pipeline of torch.distributed.pipelining is cut where calls of
modules begin; for every order of the devices the program finds the least period, and among the
plans within the share that simplicity may cost, the one that sends the fewest bytes is answered.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from gdp import api
from gdp.cluster.types import Cluster
from gdp.commands.accelerate import PlannedPlacement
from gdp.commands.code_models import torch_boundaries
from gdp.commands.peer_plans import FitSizes, Peer, beside, fit_plan
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, InfeasibleError, PlacementError, of_kind
from gdp.exporters.llamacpp import Slots, slots_of
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.methods.simplify import SHARE
from gdp.models import Model
from gdp.placement import Placement, make_placement
from gdp.prepare import prepare_problem
from gdp.problem.arrays import arrays_of
from gdp.result import Result

MAX_ORDERS = 2000
MEMORY_SHARES = (0.0, 0.5, 1.0)
"""Of the bytes that tensors may take, kept free of weights; tried in this order."""
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]
Row = list[tuple[int, int, int]]
"""(first block, block behind the last, device) of every stretch."""


def first_that_fits(
    graph: OpGraph, cluster: Cluster, placements: Iterable[Placement | None], reason: str,
    *, method: str, objective: str, costs: CostModel | str | Path | None,
) -> Result:  # fmt: skip
    """The first placement that fits in memory, evaluated; `InfeasibleError` where none does."""
    for placement in placements:
        if placement is None:
            continue
        result = api.evaluated(graph, placement, cluster, objective=objective, costs=costs)
        if result.score.feasible:
            return replace(result, method=method)
        reason = str(result.score)
    raise InfeasibleError(f"{graph.name!r} does not fit on cluster {cluster.name!r}: {reason}")


def best_row(
    order: Sequence[int],
    stage: Shaped[np.ndarray, "C C D"],
    link: Shaped[np.ndarray, "D D C"],
    join: Join,
) -> tuple[complex, Row]:
    """The best cover of all blocks by stretches on devices of this order. O(D C^2 + D^2 C).

    `join` combines the value of a row with that of its next link or stage: the sum, or the maximum.
    """
    blocks = stage.shape[0] - 1
    best: list[np.ndarray] = []  # of each device as the last: value of the blocks before j
    back: list[tuple[np.ndarray, np.ndarray]] = []  # where its stretch begins; the device before
    for k, device in enumerate(order):
        heads = [np.where(np.arange(blocks + 1) == 0, 0.0, np.inf)]
        heads += [join(best[b], link[order[b], device]) for b in range(k)]
        head, before = np.min(heads, axis=0), np.argmin(heads, axis=0) - 1
        values = join(head[:, None], stage[:, :, device])
        best.append(values.min(axis=0))
        back.append((values.argmin(axis=0), before))
    k = int(np.argmin([values[blocks] for values in best]))
    value, j = complex(best[k][blocks]), blocks
    row: Row = []
    while k >= 0 and np.isfinite(value):
        start = int(back[k][0][j])
        row.append((start, j, order[k]))
        j, k = start, int(back[k][1][start])
    return value, row[::-1]


@dataclass(frozen=True, eq=False)
class _LlamaBlocks:
    """Seconds and bytes of the pieces that llama.cpp's flags move. Axes: S slots, D devices."""

    cluster: Cluster
    cpu: int
    layer_s: Float[np.ndarray, "S D"]
    experts_s: Float[np.ndarray, "S D"]
    segment_s: Float[np.ndarray, "D"]  # the dispatch that is paid for every stretch, in all passes
    layer_bytes: Int[np.ndarray, "S"]
    expert_bytes: Int[np.ndarray, "S"]
    memory_bytes: Int[np.ndarray, "D"]  # for weights and caches
    tensor_bytes: int  # at most so many are alive at once
    crossings: int  # of a border in one sample: by the prompt, and by all steps together
    # Bytes of all passes together:
    flow_bytes: int  # between blocks
    logits_bytes: int
    away_bytes: Int[np.ndarray, "S 2"]  # to the experts, and back

    def move_s(self, src: int, dst: int, size: int) -> float:
        latency_s = self.cluster.link_latency_s * self.crossings
        return 0.0 if src == dst else float(
            latency_s[src, dst] + size / self.cluster.link_bytes_per_s[src, dst]
        )  # fmt: skip


def plan_llamacpp(
    graph: OpGraph,
    cluster: Cluster,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    whole: Sequence[str] = (),
    **_: Any,
) -> PlannedPlacement:
    """The best plan that llama.cpp's flags can express.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the graph was not read from a GGUF file.
    """
    if whole:
        raise ArgumentError("llama.cpp's flags move blocks and experts: leave out --granularity")
    if objective != "latency":
        raise ArgumentError(f"--for llamacpp plans the latency of one pass, not {objective}")
    constraints = of_kind(constraints, Constraints, "constraints")
    if constraints.together or constraints.whole:
        raise ArgumentError("--for llamacpp keeps blocks whole by itself: leave out --together")
    slots = slots_of(graph)
    blocks = _llama_blocks(graph, cluster, slots, costs, constraints)

    def placement(share: float, frugal: bool) -> Placement | None:
        memory_bytes = blocks.memory_bytes - int(share * blocks.tensor_bytes)
        device = _llama_devices(graph, slots, replace(blocks, memory_bytes=memory_bytes), frugal)
        return device if device is None else make_placement(
            graph, cluster, device, made_by="gdp llamacpp"
        )  # fmt: skip

    tries = [*((share, False) for share in MEMORY_SHARES), (MEMORY_SHARES[-1], True)]
    result = first_that_fits(
        graph, cluster, (placement(*how) for how in tries), "a device is too small or forbidden",
        method="llamacpp", objective=objective, costs=costs,
    )  # fmt: skip
    result = beside(result, _fit_peer(graph, cluster, slots, blocks), graph, cluster, costs)
    return PlannedPlacement(result, cluster, costs)


def even_row(graph: OpGraph, cluster: Cluster) -> Placement:
    """Blocks and output in equal shares on the CPU and each GPU, in the order of the flags."""
    slots, numbers = slots_of(graph), cluster.accelerator_numbers
    order = [numbers.index(None), *(d for d, n in enumerate(numbers) if n is not None)]
    device = np.full(graph.num_ops, order[0])
    device[graph.is_io] = cluster.host
    count = len(slots.layers)
    for slot, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
        device[layer] = device[experts] = order[slot * len(order) // count]
    return make_placement(graph, cluster, device, made_by="gdp llamacpp, even")


def _fit_peer(graph: OpGraph, cluster: Cluster, slots: Slots, blocks: _LlamaBlocks) -> Peer:
    """The plan that llama.cpp makes by itself."""
    gpus = [d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu]

    def plan() -> Placement | None:
        if not gpus:
            return None
        sizes = FitSizes(
            blocks.layer_bytes, blocks.expert_bytes, cluster.memory_bytes[gpus], blocks.tensor_bytes
        )
        fitted, where = fit_plan(sizes), np.array([*gpus, blocks.cpu])
        device = np.full(graph.num_ops, blocks.cpu)
        device[graph.is_io] = cluster.host
        for slot, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
            device[layer] = where[fitted.layers[slot]]
            device[experts] = where[fitted.experts[slot]]
        return make_placement(graph, cluster, device, made_by="llama.cpp's fit")

    return Peer("llama.cpp, fit", "llama.cpp's own plan (--fit on)", plan)


def _llama_blocks(
    graph: OpGraph, cluster: Cluster, slots: Slots, costs: CostModel | str | Path | None,
    constraints: Constraints,
) -> _LlamaBlocks:  # fmt: skip
    cpus = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    if not cpus:
        raise PlacementError(f"llama.cpp needs a CPU; cluster {cluster.name!r} has none")
    cpu = cluster.host if cluster.host in cpus else cpus[0]
    pieces = [slots.embedding, *slots.layers, *slots.experts]
    piece = np.full(graph.num_ops, len(pieces))
    for number, ops in enumerate(pieces):
        piece[ops] = number
    prepared = prepare_problem(
        graph, cluster, costs=costs, constraints=constraints, keep_apart=piece
    )
    problem, count = prepared.problem, len(slots.layers)
    per_op = [d.dispatch_s if d.dispatch_per == "op" else 0.0 for d in problem.cluster.devices]
    of_group = np.zeros(problem.num_ops, dtype=np.int64)
    of_group[prepared.group_of] = piece
    seconds = np.zeros((len(pieces) + 1, cluster.num_devices))
    np.add.at(seconds, of_group, np.where(problem.allowed, problem.compute_s + per_op, np.inf))
    if not np.isfinite(seconds[0, cpu]):
        raise InfeasibleError(
            f"llama.cpp keeps token_embd on the CPU, and {cluster.device_names[cpu]!r} is forbidden"
        )
    sent_bytes = np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops).astype(np.int64)
    largest = max(
        int(sent_bytes[layer].sum() + sent_bytes[experts].sum())
        for layer, experts in zip(slots.layers, slots.experts, strict=True)
    )
    flow, most = int(sent_bytes[slots.embedding].sum()), int(graph.repeats.max())
    memory_bytes = cluster.memory_bytes.copy()
    memory_bytes[cpu] -= int(graph.weight_bytes[slots.embedding].sum())

    def summed(values: np.ndarray, pieces: Sequence[Int[np.ndarray, "_"]]) -> np.ndarray:
        return np.array([values[ops].sum(axis=0) for ops in pieces])

    return _LlamaBlocks(
        cluster=problem.cluster, cpu=cpu, layer_s=seconds[1 : count + 1],
        experts_s=seconds[count + 1 : -1],
        segment_s=arrays_of(problem).segment_s * (1 if most == 1 else 2),
        layer_bytes=summed(graph.weight_bytes, slots.layers),
        expert_bytes=summed(graph.weight_bytes, slots.experts),
        memory_bytes=memory_bytes, tensor_bytes=largest + 2 * flow,
        crossings=1 if most == 1 else 2, flow_bytes=_crossing(graph, slots.embedding)[1],
        logits_bytes=_crossing(graph, slots.layers[-1])[1],
        away_bytes=np.array([_crossing(graph, ops) for ops in slots.experts]),
    )  # fmt: skip


def _crossing(graph: OpGraph, ops: Int[np.ndarray, "M"]) -> tuple[int, int]:
    """Bytes that some ops read from others, and that others read from them, in all passes."""
    size = graph.tensor_bytes * graph.repeats[graph.producer]
    inside = np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    src, dst = graph.edges
    into = np.unique(graph.use_tensor[~inside[src] & inside[dst]])
    out = np.unique(graph.use_tensor[inside[src] & ~inside[dst]])
    return int(size[into].sum()), int(size[out].sum())


def _llama_devices(
    graph: OpGraph, slots: Slots, blocks: _LlamaBlocks, frugal: bool
) -> Int[np.ndarray, "N"] | None:
    """Devices of the plan of least seconds, or with `frugal` of the fewest bytes on the CPU; None
    where no stretches fit the GPUs. O(D S^2) stretches."""
    cluster, cpu, count = blocks.cluster, blocks.cpu, len(blocks.layer_bytes)
    order = [cpu, *(d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu)]

    def value(seconds: float, cpu_bytes: int = 0) -> complex:
        """Complex numbers are ordered by the real part first."""
        return complex(cpu_bytes, seconds) if frugal else complex(seconds, cpu_bytes)

    stage = np.full((count + 1, count + 1, cluster.num_devices), np.inf, dtype=complex)
    for device in order:
        for start in range(1 if device == cpu else count):
            for stop in range(start + 1, count + 1):
                stretch = _llama_stretch(blocks, frugal, device, start, stop)
                if stretch is None:
                    break  # nor does a longer one fit
                seconds, cpu_bytes, _ = stretch
                seconds += float(blocks.segment_s[device])
                if start == 0:
                    seconds += blocks.move_s(cpu, device, blocks.flow_bytes)
                if stop == count:
                    seconds += blocks.move_s(device, cluster.host, blocks.logits_bytes)
                stage[start, stop, device] = value(seconds, cpu_bytes)
    link = np.zeros((cluster.num_devices, cluster.num_devices, count + 1), dtype=complex)
    for before, device in itertools.combinations(order, 2):
        link[before, device] = value(blocks.move_s(before, device, blocks.flow_bytes))
    _, row = best_row(order, stage, link, np.add)
    if not row:
        return None
    devices = np.full(graph.num_ops, cpu)
    devices[graph.is_io] = cluster.host
    for start, stop, where in row:
        stretch = _llama_stretch(blocks, frugal, where, start, stop)
        for slot in range(start, stop):
            devices[slots.layers[slot]] = where
            devices[slots.experts[slot]] = cpu if stretch and slot in stretch[2] else where
    return devices


def _least_to_free(needed_bytes: int, items: dict[int, tuple[float, int]]) -> list[int]:
    """Items (seconds, bytes) that free at least so many bytes for few seconds.

    Greedy for the covering knapsack, at most twice the least seconds: items of the fewest seconds
    per byte until they free enough, without those that are then superfluous; or the cheapest item
    that frees enough alone.
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


def _llama_stretch(
    blocks: _LlamaBlocks, frugal: bool, device: int, start: int, stop: int
) -> tuple[float, int, Sequence[int]] | None:
    """Seconds of slots on one device, bytes that they put on the CPU, and slots whose experts are
    there, if a GPU is too small; None if nothing fits."""
    span = np.arange(start, stop)
    seconds = float((blocks.layer_s + blocks.experts_s)[span, device].sum())
    size = int((blocks.layer_bytes + blocks.expert_bytes)[span].sum())
    cpu = blocks.cpu
    if device == cpu:
        fits = np.isfinite(seconds) and size <= blocks.memory_bytes[cpu]
        return (seconds, size, ()) if fits else None
    seconds = float(blocks.layer_s[span, device].sum())
    owned = [int(s) for s in span if blocks.expert_bytes[s] > 0]
    here_s = {s: float(blocks.experts_s[s, device]) for s in owned}
    away_s = {
        s: float(blocks.experts_s[s, cpu] + blocks.segment_s[[cpu, device]].sum())
        + blocks.move_s(device, cpu, int(blocks.away_bytes[s, 0]))
        + blocks.move_s(cpu, device, int(blocks.away_bytes[s, 1]))
        for s in owned
    }
    if any(here_s[s] == away_s[s] == np.inf for s in owned):
        return None
    extra_s = {s: away_s[s] - here_s[s] for s in owned}
    away = [s for s in owned if here_s[s] == np.inf or (extra_s[s] < 0 and not frugal)]
    size -= int(blocks.expert_bytes[away].sum())
    others = {s: (extra_s[s], int(blocks.expert_bytes[s])) for s in owned if s not in away}
    gone = _least_to_free(size - int(blocks.memory_bytes[device]), others)
    away += gone
    size -= int(blocks.expert_bytes[gone].sum())
    seconds += sum(away_s[s] if s in away else here_s[s] for s in owned)
    if size > blocks.memory_bytes[device] or not np.isfinite(seconds):
        return None
    return seconds, int(blocks.expert_bytes[away].sum()), away


@dataclass(frozen=True, eq=False)
class ModuleBlocks:
    """Seconds and bytes of stretches of a pipeline's blocks. Axes: C cuts between blocks, both ends
    included, D devices."""

    seconds: Float[np.ndarray, "C C D"]  # from a cut to a later one; inf where not allowed
    weight_bytes: Int[np.ndarray, "C C"]
    cut_bytes: Int[np.ndarray, "C"]  # of tensors that cross each cut, in all passes
    cut_tensors: Int[np.ndarray, "C"]
    tensor_bytes: int  # of the block that has most of them


def plan_pipelining(
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Model | None = None,
    whole: Sequence[str] = (),
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    search: Search | None = None,
    **_: Any,
) -> PlannedPlacement:
    """The best pipeline of a PyTorch module; see `best_pipeline`."""
    result = best_pipeline(
        graph, cluster, list(torch_boundaries(model, graph, whole)), objective=objective,
        costs=costs, constraints=constraints, simplicity=(search or Search()).simplicity,
    )  # fmt: skip
    return PlannedPlacement(result, resident(cluster), costs)


def best_pipeline(
    graph: OpGraph,
    cluster: Cluster,
    cuts: Sequence[int],
    *,
    objective: str = "throughput",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    simplicity: float | None = None,
) -> Result:
    """The plan of least period whose stages begin at some of the ops `cuts`: on the accelerators,
    or where there are none on the CPUs.

    Tensors that pass over a stage are charged to both links, so the plan is the best there is where
    none do. Devices of one kind are tried in the cluster's order only.

    Raises:
        InfeasibleError: if nothing fits.
    """
    if objective != "throughput":
        raise ArgumentError(
            f"--for pipelining plans pipelines, not {objective}: add --objective throughput"
        )
    constraints = constraints or Constraints()
    if constraints.together or constraints.whole:
        raise ArgumentError("--for pipelining cuts where modules begin: leave out --together")
    machine = resident(cluster)
    base, _ = resolve_costs(costs, machine, graph)
    block = np.searchsorted(np.array(sorted(cuts)), np.arange(graph.num_ops), side="right")
    blocks = module_blocks(graph, machine, block, base, constraints)

    if simplicity is None:
        simplicity = SHARE

    def placement(share: float) -> Placement | None:
        memory_bytes = machine.memory_bytes - int(share * blocks.tensor_bytes)
        row = _pipeline_row(blocks, machine, memory_bytes, simplicity)
        if row is None:
            return None
        device = np.full(graph.num_ops, machine.host)
        for start, stop, where in row:
            device[(block >= start) & (block < stop)] = where
        device[graph.is_io] = machine.host
        return make_placement(graph, machine, device, made_by="gdp pipelining")

    return first_that_fits(
        graph, machine, map(placement, MEMORY_SHARES), "no device holds even one of its pieces",
        method="pipelining", objective=objective, costs=costs,
    )  # fmt: skip


def module_blocks(
    graph: OpGraph,
    cluster: Cluster,
    block: Int[np.ndarray, "N"],
    costs: CostModel,
    constraints: Constraints,
) -> ModuleBlocks:
    """Seconds, weights and crossing bytes of all stretches of blocks; `block` ascends with ops."""
    prepared = prepare_problem(
        graph, cluster, "throughput", costs=costs, constraints=constraints, keep_apart=block
    )
    flat = arrays_of(prepared.problem)
    count = int(block.max()) + 1
    per_op = np.where(prepared.problem.allowed, flat.compute_s, np.inf)
    per_op[flat.is_io] = 0.0
    fused_block = np.zeros(prepared.problem.num_ops, dtype=np.int64)
    fused_block[prepared.group_of] = block
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
    passes = graph.repeats[graph.producer]
    open_at = ((block[graph.producer] < cut[:, None]) & (cut[:, None] <= last)) * passes
    op_bytes = np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops)
    block_bytes = np.bincount(block, op_bytes, count)
    return ModuleBlocks(
        stretch_s, _weight_bytes(graph, block, count), (open_at * graph.tensor_bytes).sum(axis=1),
        open_at.sum(axis=1), int(block_bytes.max()),
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


def _pipeline_row(
    blocks: ModuleBlocks, cluster: Cluster, memory_bytes: Int[np.ndarray, "D"], simplicity: float
) -> Row | None:
    """The row of stages that sends the fewest bytes among those of nearly the least period; None
    where nothing fits."""
    fits = blocks.weight_bytes[:, :, None] <= memory_bytes
    seconds = np.where(fits, blocks.seconds, np.inf)
    latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
    link_s = latency * blocks.cut_tensors + blocks.cut_bytes / rate
    orders = list(itertools.islice(orders_by_kind(cluster), MAX_ORDERS))
    least_s = min(best_row(order, seconds, link_s, np.maximum)[0].real for order in orders)
    if not np.isfinite(least_s):
        return None
    limit_s = least_s * (1 + simplicity) * (1 + 1e-9)
    allowed_links = np.where(link_s <= limit_s, blocks.cut_bytes.astype(float), np.inf)
    allowed = np.where(seconds <= limit_s, 0.0, np.inf)
    plans = [best_row(order, allowed, allowed_links, np.add) for order in orders]
    return min(plans, key=lambda plan: plan[0].real)[1]


def orders_by_kind(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of the devices that compute; devices of one kind stay in the cluster's order."""
    usable = [d for d, device in enumerate(cluster.devices) if device.supported != frozenset()]
    like = {d: (cluster.devices[d].kind, cluster.devices[d].memory_bytes) for d in usable}

    def rest(left: "Counter[tuple[str, int]]", order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(usable):
            yield order
        for kind in [k for k, count in left.items() if count]:
            mine = [d for d in usable if like[d] == kind]
            taken = mine[len(mine) - left[kind]]
            yield from rest(left - Counter([kind]), (*order, taken))

    return rest(Counter(like[d] for d in usable), ())
