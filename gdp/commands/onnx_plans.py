"""Placing for the runtimes of ONNX models: plans that they can follow, for the objective asked for.

ONNX Runtime gets a sub-model a piece, and follows any placement. OpenVINO's HETERO compiles one
subgraph a device and runs each at one go, so that a plan enters each device once.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp import api
from gdp.cluster.types import Cluster
from gdp.commands.accelerate import PlannedPlacement
from gdp.commands.block_plans import (
    MAX_ORDERS,
    MEMORY_SHARES,
    best_row,
    module_blocks,
    orders_by_kind,
)
from gdp.constraints import Constraints, allowed_mask
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.errors import InfeasibleError, PlacementError, of_kind
from gdp.exporters.openvino_plan import hetero_plan
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate, Search
from gdp.placement import Placement, check, make_placement
from gdp.sim.objectives import find_objective

MAX_CUTS = 256
"""Places between ops where a row of pieces may be cut: those over which the fewest bytes pass."""
_METHODS = ("blocks", "pipeline_dp")
"""Of pipelines: their plans enter most devices once."""


def plan_freely(
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Any = None,
    module: Any = None,
    whole: tuple[str, ...] = (),
    offload: str | None = None,
    constraints: Constraints | None = None,
    **placing: Any,
) -> PlannedPlacement:
    """The best placement of all: ONNX Runtime can follow any."""
    del model, module, offload
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=(*constraints.whole, *whole))
    result = api.place(graph, cluster, constraints=constraints, **placing)
    return PlannedPlacement(result, cluster, placing.get("costs"))


def plan_openvino(
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Any = None,
    module: Any = None,
    whole: tuple[str, ...] = (),
    offload: str | None = None,
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
    del model, module, offload
    find_objective(objective)
    started_s = time.perf_counter()
    search = of_kind(search, Search, "search")
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, replicas=False, whole=tuple({*constraints.whole, *whole}))
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
    for method in _METHODS:
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
    """Devices of the rows of least latency, and of least period, with less and less memory for
    weights."""
    base, _ = resolve_costs(costs, cluster, graph)
    cuts = _cuts(graph)
    block = np.searchsorted(cuts, np.arange(graph.num_ops), side="right")
    blocks = module_blocks(graph, cluster, block, base, constraints)
    latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
    link_s = latency * blocks.cut_tensors + blocks.cut_bytes / rate
    orders = list(itertools.islice(orders_by_kind(cluster), MAX_ORDERS))
    seen: set[bytes] = set()
    for join, share in itertools.product((np.add, np.maximum), MEMORY_SHARES):
        memory_bytes = cluster.memory_bytes - int(share * blocks.tensor_bytes)
        fits = blocks.weight_bytes[:, :, None] <= memory_bytes
        seconds = np.where(fits, blocks.seconds, np.inf)
        value, row = min(
            (best_row(order, seconds, link_s, join) for order in orders), key=lambda r: r[0].real
        )
        if not np.isfinite(value):
            continue
        devices = np.full(graph.num_ops, cluster.host)
        for start, stop, where in row:
            devices[(block >= start) & (block < stop)] = where
        devices[graph.is_io] = cluster.host
        if (key := devices.tobytes()) not in seen:
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
