"""Placing for vLLM: one stretch of whole layers on each GPU, in any order of the GPUs."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdp.cluster.types import Cluster
from gdp.commands.accelerate import PlannedPlacement
from gdp.commands.block_plans import (
    MAX_ORDERS,
    MEMORY_SHARES,
    ModuleBlocks,
    Row,
    best_row,
    first_that_fits,
    module_blocks,
    orders_by_kind,
)
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, InfeasibleError, of_kind
from gdp.exporters.vllm import layer_row
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement, make_placement
from gdp.sim.objectives import find_objective


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
    throughput of least period, over all orders of unlike GPUs.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the model has no single row of layers.
    """
    constraints = of_kind(constraints, Constraints, "constraints")
    if whole or constraints.together or constraints.whole:
        raise ArgumentError(
            "--for vllm keeps layers whole by itself: leave out --granularity and --together"
        )
    machine = resident(cluster)
    if all(device.is_cpu for device in machine.devices):
        raise InfeasibleError(f"cluster {cluster.name!r} has no GPU, and vLLM needs one here")
    row = layer_row(graph)
    block = row.layer.clip(0, row.num_layers - 1)
    base, _label = resolve_costs(costs, machine, graph)
    blocks = module_blocks(graph, machine, block, base, constraints)
    pipelined = find_objective(objective).pipelined

    def placement(share: float) -> Placement | None:
        memory_bytes = machine.memory_bytes - int(share * blocks.tensor_bytes)
        best = _best_stretches(blocks, machine, memory_bytes, pipelined=pipelined)
        if not best:
            return None
        device = np.full(graph.num_ops, machine.host)
        for start, stop, where in best:
            device[(block >= start) & (block < stop)] = where
        device[graph.is_io] = machine.host
        return make_placement(graph, machine, device, made_by="gdp vllm")

    result = first_that_fits(
        graph, machine, map(placement, MEMORY_SHARES), "no GPU holds even one of its layers",
        method="vllm", objective=objective, costs=costs,
    )  # fmt: skip
    return PlannedPlacement(result, machine, costs)


def _best_stretches(
    blocks: ModuleBlocks, cluster: Cluster, memory_bytes: np.ndarray, *, pipelined: bool
) -> Row:
    """The best row over all orders; empty where nothing fits."""
    seconds = np.where(blocks.weight_bytes[:, :, None] <= memory_bytes, blocks.seconds, np.inf)
    latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
    link_s = latency * blocks.cut_tensors + blocks.cut_bytes / rate
    join = np.maximum if pipelined else np.add
    orders = itertools.islice(orders_by_kind(cluster), MAX_ORDERS)
    plans = [best_row(order, seconds, link_s, join) for order in orders]
    return min(plans, key=lambda plan: plan[0].real)[1]
