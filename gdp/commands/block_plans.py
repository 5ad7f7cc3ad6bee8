"""Placing for runtimes that cut a model into a row of blocks: torch's pipelines, vLLM and OpenVINO.

A dynamic program over stretches of blocks, one stretch a device, finds the best row for every order
of unlike devices; the simulator then judges it as any other placement. The memory that tensors take
is known once a plan is simulated, so plans with less and less memory for weights are tried.

A pipeline of torch.distributed.pipelining is cut where calls of modules begin; of the plans within
the share that simplicity may cost, the one that sends the fewest bytes is answered. vLLM's holds
whole layers. OpenVINO's HETERO compiles one subgraph a device and runs each at one go, so that a
plan enters each device once.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from gdp import api
from gdp.cluster.types import Cluster
from gdp.commands.accelerate import PlannedPlacement, torch_boundaries
from gdp.constraints import Constraints, allowed_mask
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, InfeasibleError, PlacementError, of_kind
from gdp.exporters.openvino_plan import hetero_plan
from gdp.exporters.vllm import TENSOR_PARALLEL, layer_row, with_one_share
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate, Search
from gdp.methods.simplify import SHARE
from gdp.models import Model, as_served
from gdp.ops.vllm import BATCHED_TOKENS, BATCHED_TOKENS_LARGE, LARGE_BYTES
from gdp.placement import Placement, check, make_placement
from gdp.prepare import prepare_problem
from gdp.problem.arrays import arrays_of
from gdp.result import Result
from gdp.sim.objectives import find_objective
from gdp.units import format_seconds

MAX_ORDERS = 2000
MAX_CUTS = 256
"""Places between ops where a row of pieces may be cut: those over which the fewest bytes pass."""
MEMORY_SHARES = (0.0, 0.5, 1.0)
"""Of the bytes that tensors may take, kept free of weights; tried in this order."""
EQUAL = 0.002
"""Share by which a row may be slower than the best and still count as equally fast."""
EVEN_STEPS = 8  # halvings of the share of memory that the fullest device may fill
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]
Row = list[tuple[int, int, int]]
"""(first block, block behind the last, device) of every stretch."""
PIPELINE_METHODS = ("blocks", "pipeline_dp")
"""Their plans enter most devices once."""


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
    tensor_bytes: int  # of the block that has most of them

    @cached_property
    def link_s(self) -> Float[np.ndarray, "D D C"]:
        """Seconds that the tensors over each cut take from one device to another."""
        cluster = self.cluster
        latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
        return latency * self.cut_tensors + self.cut_bytes / rate

    @cached_property
    def orders(self) -> list[tuple[int, ...]]:
        """The first `MAX_ORDERS` orders of the devices."""
        return list(itertools.islice(orders_by_kind(self.cluster), MAX_ORDERS))

    def fitting_s(self, share: float, fill: float = 1.0) -> Float[np.ndarray, "C C D"]:
        """`seconds`, inf where the weights take more than `fill` of the memory that a share of the
        tensors leaves."""
        memory_bytes = self.cluster.memory_bytes - int(share * self.tensor_bytes)
        fits = self.weight_bytes[:, :, None] <= fill * memory_bytes
        return np.where(fits, self.seconds, np.inf)

    def best_of_orders(self, share: float, join: Join, fill: float = 1.0) -> tuple[float, Row]:
        """Value and row of the best row over all orders of the devices; empty where none fits."""
        seconds, link_s = self.fitting_s(share, fill), self.link_s
        plans = (best_row(order, seconds, link_s, join) for order in self.orders)
        value, row = min(plans, key=lambda plan: plan[0].real)
        return value.real, row

    def even_row(self, share: float, join: Join) -> Row:
        """Of the rows that are as fast as the best, one whose fullest device is nearly as empty as
        can be; empty where nothing fits."""
        best_s, row = self.best_of_orders(share, join)
        least, most = 0.0, 1.0
        for _ in range(EVEN_STEPS if row else 0):
            fill = (least + most) / 2
            value_s, emptier = self.best_of_orders(share, join, fill)
            if emptier and value_s <= best_s * (1 + EQUAL):
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

    def placement(self, row: Row, made_by: str) -> Placement | None:
        """The placement of a row; None of an empty one."""
        if not row:
            return None
        return make_placement(self.graph, self.cluster, self.devices(row), made_by=made_by)


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
    """The best pipeline of a PyTorch module; see `best_pipeline`. A note says why one device has
    it all."""
    cuts, reason = torch_boundaries(model, graph, whole)
    result = best_pipeline(
        graph, cluster, list(cuts), objective=objective,
        costs=costs, constraints=constraints, simplicity=(search or Search()).simplicity,
    )  # fmt: skip
    used = np.unique(result.placement.device[~graph.is_io])
    usable = sum(device.supported != frozenset() for device in resident(cluster).devices)
    if len(used) == 1 and usable > 1:
        reason = reason or (
            f"of the pipelines over {len(cuts)} places where calls of modules begin none is faster "
            "than one device by more than a cut may cost"
        )
        result = replace(result, notes=(*result.notes, f"all on one device: {reason}"))
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
    block = np.searchsorted(np.array(sorted(cuts)), np.arange(graph.num_ops), side="right")
    blocks = module_blocks(graph, machine, block, costs, constraints)
    share_of_time = SHARE if simplicity is None else simplicity
    rows = (_pipeline_row(blocks, share, share_of_time) for share in MEMORY_SHARES)
    return first_that_fits(
        graph, machine, (blocks.placement(row, "gdp pipelining") for row in rows),
        "no device holds even one of its pieces",
        method="pipelining", objective=objective, costs=costs,
    )  # fmt: skip


def module_blocks(
    graph: OpGraph,
    cluster: Cluster,
    block: Int[np.ndarray, "N"],
    costs: CostModel | str | Path | None,
    constraints: Constraints,
) -> ModuleBlocks:
    """Seconds, weights and crossing bytes of all stretches of blocks; `block` ascends with ops."""
    costs, _ = resolve_costs(costs, cluster, graph)
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
    open_at = (block[graph.producer] < cut[:, None]) & (cut[:, None] <= last)
    op_bytes = np.bincount(graph.producer, graph.held_bytes, graph.num_ops)
    block_bytes = np.bincount(block, op_bytes, count)
    return ModuleBlocks(
        graph, cluster, block, stretch_s, _weight_bytes(graph, block, count),
        (open_at * graph.sent_bytes).sum(axis=1),
        (open_at * graph.repeats[graph.producer]).sum(axis=1), int(block_bytes.max()),
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


def _pipeline_row(blocks: ModuleBlocks, memory_share: float, simplicity: float) -> Row:
    """The row of stages that sends the fewest bytes among those of nearly the least period; empty
    where nothing fits."""
    seconds, link_s, orders = blocks.fitting_s(memory_share), blocks.link_s, blocks.orders
    least_s = min(best_row(order, seconds, link_s, np.maximum)[0].real for order in orders)
    if not np.isfinite(least_s):
        return []
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


def vllm_model(model: Model, cluster: Cluster) -> Model:
    """A configuration as vLLM computes it: attention fused, prompts in chunks of the tokens that
    `vllm serve` computes at once on the GPUs of a cluster. Other models as they are."""
    gpus = [device for device in resident(cluster).devices if not device.is_cpu]
    large = gpus and all(
        device.total_bytes >= LARGE_BYTES and not device.kind.startswith("a100") for device in gpus
    )
    return as_served(model, BATCHED_TOKENS_LARGE if large else BATCHED_TOKENS)


def plan_vllm(
    graph: OpGraph,
    cluster: Cluster,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    whole: Sequence[str] = (),
    **_: Any,
) -> PlannedPlacement:
    """The best plan that vLLM's pipeline can follow: of least seconds of a sample, or for
    throughput of least period, over all orders of unlike GPUs. Of plans that are equally fast one
    that spreads evenly: vLLM gives every rank the cache that the fullest one has room for.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the model has no single row of layers.
    """
    constraints = of_kind(constraints, Constraints, "constraints")
    if whole or constraints.together or constraints.whole:
        raise ArgumentError(
            "--for vllm keeps layers whole by itself: leave out --granularity and --together"
        )
    machine = with_one_share(resident(cluster))
    if all(device.is_cpu for device in machine.devices):
        raise InfeasibleError(f"cluster {cluster.name!r} has no GPU, and vLLM needs one here")
    row = layer_row(graph)
    block = row.layer.clip(0, row.num_layers - 1)
    blocks = module_blocks(graph, machine, block, costs, constraints)
    join = np.maximum if find_objective(objective).pipelined else np.add
    rows = (blocks.even_row(share, join) for share in MEMORY_SHARES)
    result = first_that_fits(
        graph, machine, (blocks.placement(row, "gdp vllm") for row in rows),
        "no GPU holds even one of its layers", method="vllm", objective=objective, costs=costs,
    )  # fmt: skip
    if note := _tensor_parallel(graph, machine):
        result = replace(result, notes=(*result.notes, note))
    return PlannedPlacement(result, machine, costs)


def _tensor_parallel(graph: OpGraph, cluster: Cluster) -> str:
    """Bound of splitting every layer over the GPUs, in a sentence; "" where there is one GPU."""
    gpus = [device for device in cluster.devices if not device.is_cpu]
    if len(gpus) < 2:
        return ""
    stepping = graph.repeats > 1
    step = stepping if stepping.any() else np.ones(graph.num_ops, dtype=bool)
    slowest = min(device.bytes_per_s for device in gpus)
    least_s = float(graph.memory_traffic_bytes[step].sum()) / (len(gpus) * slowest)
    what = "a step of decoding" if stepping.any() else "a pass"
    return (
        f"{TENSOR_PARALLEL}: vLLM's --tensor-parallel-size {len(gpus)} takes at least "
        f"{format_seconds(least_s)} for {what} here"
    )


def plan_openvino(
    graph: OpGraph,
    cluster: Cluster,
    *,
    whole: tuple[str, ...] = (),
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    constraints: Constraints | None = None,
    **_: Any,
) -> PlannedPlacement:
    """The best plan with one piece a device: each device alone, the shortest row of pieces along
    the ops' order (a dynamic program over the cuts), and the plans of pipeline methods.

    Raises:
        InfeasibleError: if no such plan fits.
    """
    find_objective(objective)
    started_s = time.perf_counter()
    search = of_kind(search, Search, "search")
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=tuple({*constraints.whole, *whole}))
    rows: list[Candidate] = []
    best: tuple[float, Placement] | None = None
    for name, placement in _plans(graph, cluster, costs, search, constraints):
        since_s = time.perf_counter()
        if reason := _refusal(graph, cluster, constraints, placement):
            rows.append(Candidate(name, None, None, None, False, 0.0, reason))
            continue
        score = api.simulate(graph, placement, cluster, objective=objective, costs=costs)
        rows.append(
            Candidate(name, score.latency_s, score.period_s, score.value_s, score.feasible,
                      time.perf_counter() - since_s, "" if score.feasible else str(score))
        )  # fmt: skip
        if score.feasible and (best is None or score.value_s < best[0]):
            best = score.value_s, placement
    if best is None:
        raise InfeasibleError(
            f"{graph.name!r} does not fit on cluster {cluster.name!r} with one piece a device"
        )
    result = api.evaluated(graph, best[1], cluster, objective=objective, costs=costs)
    result = replace(
        result, method="openvino", candidates=tuple(rows), seed=search.seed,
        evaluations=len(rows), seconds=time.perf_counter() - started_s,
    )  # fmt: skip
    return PlannedPlacement(result, cluster, costs)


def _refusal(
    graph: OpGraph, cluster: Cluster, constraints: Constraints, placement: Placement
) -> str:
    """Why OpenVINO cannot follow a plan, or the constraints forbid it; "" where neither is so."""
    if faults := check(placement, graph, cluster):
        return faults[0]
    allowed = allowed_mask(constraints, graph, cluster)
    if not allowed[np.arange(graph.num_ops), placement.device].all():
        return "the constraints forbid it"
    try:
        hetero_plan(graph, placement.device, placement.device_names)
    except PlacementError:
        return "it enters a device twice"
    return ""


def _plans(
    graph: OpGraph, cluster: Cluster, costs: CostModel | str | Path | None, search: Search,
    constraints: Constraints,
) -> Iterator[tuple[str, Placement]]:  # fmt: skip
    """Plans by name that mostly have one piece a device."""
    for d, device in enumerate(cluster.devices):
        alone = np.where(graph.is_io, cluster.host, d)
        yield f"all on {device.name}", make_placement(graph, cluster, alone, made_by="gdp openvino")
    if not (constraints.whole or constraints.together):
        for k, devices in enumerate(_rows(graph, cluster, costs, constraints)):
            placement = make_placement(graph, cluster, devices, made_by="gdp openvino")
            yield f"row of pieces {k + 1}", placement
    for method in PIPELINE_METHODS:
        try:
            result = api.place(
                graph, cluster, objective="throughput", method=method, costs=costs, search=search,
                constraints=constraints,
            )  # fmt: skip
        except InfeasibleError:
            continue
        yield method, replace(result.placement, made_by="gdp openvino")


def _rows(
    graph: OpGraph, cluster: Cluster, costs: CostModel | str | Path | None,
    constraints: Constraints,
) -> Iterator[Int[np.ndarray, "N"]]:  # fmt: skip
    """Devices of the rows of least latency, and of least period, with less and less memory."""
    block = np.searchsorted(_cuts(graph), np.arange(graph.num_ops), side="right")
    blocks = module_blocks(graph, cluster, block, costs, constraints)
    seen: set[bytes] = set()
    for join, share in itertools.product((np.add, np.maximum), MEMORY_SHARES):
        row = blocks.best_of_orders(share, join)[1]
        devices = blocks.devices(row)
        if row and (key := devices.tobytes()) not in seen:
            seen.add(key)
            yield devices


def _cuts(graph: OpGraph) -> Int[np.ndarray, "C"]:
    """Ops before which a row may be cut: those over which the fewest bytes pass, ascending."""
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor, graph.use_op)
    change = np.zeros(graph.num_ops + 1)
    read = last >= 0
    np.add.at(change, graph.producer[read] + 1, graph.tensor_bytes[read])
    np.add.at(change, last[read] + 1, -graph.tensor_bytes[read])
    passing = change.cumsum()[1 : graph.num_ops]
    return np.sort(1 + np.argsort(passing, kind="stable")[:MAX_CUTS])
