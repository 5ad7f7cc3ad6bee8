"""Placing for Hugging Face accelerate: legal device maps only.

accelerate moves whole modules, runs them in the order of the code, and streams weights on "cpu" or
"disk" to its main device at every use. So modules that may not be split stay whole, CPUs compute
nothing, and where the accelerators are too small, weights are offloaded.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp import api
from gdp.cluster.types import Cluster
from gdp.commands.peer_plans import accelerate_peer, beside
from gdp.constraints import Constraints, outermost, streamed_bytes
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import Streamed, main_device, resident, with_offload
from gdp.errors import ArgumentError, InfeasibleError, of_kind
from gdp.graph.op_graph import OpGraph
from gdp.models import Model
from gdp.prepare import requests_in_flight
from gdp.result import Result

GRANULARITIES = ("op", "module", "layer")
OFFLOADS = ("cpu", "disk", "none")
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
"""Up to the first number of a module path: one element of a list of layers."""


@dataclass(frozen=True, eq=False)
class PlannedPlacement:
    """A result with the cluster and the costs that it holds for, those of offloading included."""

    result: Result
    cluster: Cluster
    costs: CostModel | str | Path | None


def whole_modules(module: Any, graph: OpGraph, granularity: str) -> tuple[str, ...]:
    """Paths of the modules that stay in one piece; `module` is the PyTorch module, or None.

    "module": those that hold weights themselves and those whose class a PyTorch model names in
    `_no_split_modules`; "layer": each element of a list of layers in addition; "op": none.
    """
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"no granularity {granularity!r}; there are {', '.join(GRANULARITIES)}")
    if granularity == "op":
        return ()
    paths = set(_weight_holders(graph) if module is None else kept_modules(module))
    if granularity == "layer":
        paths |= {match[0] for scope in graph.scope if (match := _BLOCK.match(scope))}
    return tuple(sorted(path for path in paths if outermost(path, paths) == path))


def kept_modules(module: Any) -> Iterable[str]:
    """Paths of modules that accelerate cannot split: with weights of their own, or named by the
    model in `_no_split_modules`."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if path and (own or type(part).__name__ in classes):
            yield path


def _weight_holders(graph: OpGraph) -> Iterable[str]:
    return {s for s, b in zip(graph.scope, graph.weight_bytes, strict=True) if s and b}


def plan_accelerate(
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Model | None = None,
    module: Any = None,
    whole: tuple[str, ...] = (),
    offload: str | None = None,
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    **placing: Any,
) -> PlannedPlacement:
    """The best legal map: on the accelerators alone where the model fits, otherwise with weights
    that rest in host memory, or there and on disk.

    The map that accelerate makes by itself, of a PyTorch `module`, is among the candidates.

    Raises:
        InfeasibleError: if nothing fits.
    """
    del model
    if offload not in (None, *OFFLOADS):
        raise ArgumentError(f"no offload {offload!r}; there are {', '.join(OFFLOADS)}")
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=tuple({*constraints.whole, *whole}))
    peer = accelerate_peer(module, graph, cluster)
    accelerators = resident(cluster)
    base, _ = resolve_costs(costs, accelerators)
    try:
        result = api.place(graph, accelerators, costs=costs, constraints=constraints, **placing)
        result = beside(result, peer, graph, accelerators, costs)
        return PlannedPlacement(result, accelerators, costs)
    except InfeasibleError:
        if offload == "none" or main_device(cluster) is None:
            raise
    # The main device keeps memory free for weights that stream.
    reserved = streamed_bytes(graph, constraints)
    offloading, streamed = cluster_with_offload(cluster, offload, reserved), Streamed(base)
    result = _with_room_for_caches(
        graph, offloading, costs=streamed, constraints=constraints, **placing
    )  # fmt: skip
    placement = replace(result.placement, streamed_bytes=reserved)
    result = beside(replace(result, placement=placement), peer, graph, accelerators, costs)
    return PlannedPlacement(result, offloading, streamed)


MOST_PLANS = 4
"""Plans that are made until the caches of what they offload have room."""


def _with_room_for_caches(
    graph: OpGraph, cluster: Cluster, costs: CostModel, objective: str = "latency", **placing: Any
) -> Result:
    """The best map whose main device has room for the caches of offloaded modules, too.

    Searches count caches where weights rest. Where that leaves too little room, they are told of
    less memory. The bound is that of the first search: it allows more, so it holds, unless host
    memory lacks room for the caches.

    Raises:
        InfeasibleError: if nothing fits.
    """
    main, kept = main_device(cluster), 0
    placing |= {"costs": costs, "objective": objective}
    first = result = api.place(graph, cluster, **placing)
    if not graph.cache_bytes.any():
        return first
    weights = int((graph.weight_bytes - graph.cache_bytes).sum())
    for _ in range(MOST_PLANS):
        score = api.simulate(graph, result.placement, cluster, objective=objective, costs=costs)
        if score.feasible:
            held = replace(result.score, peak_bytes=score.peak_bytes)
            return replace(
                result, score=held, bound_s=min(first.bound_s, result.value_s),
                bound_by=first.bound_by,
                proven_optimal=first.bound_s >= result.value_s * (1 - 1e-9)
                or (result is first and first.proven_optimal),
            )  # fmt: skip
        # A module that gives way leaves its cache behind.
        count = requests_in_flight(graph, cluster, objective)
        leaves = count * int(graph.cache_bytes.sum()) / max(weights, 1)
        kept += int(score.overflow_bytes * (1 + leaves)) + 1
        devices = [
            replace(device, memory_bytes=max(1, device.memory_bytes - kept))
            if d == main
            else device
            for d, device in enumerate(cluster.devices)
        ]
        result = api.place(graph, replace(cluster, devices=tuple(devices)), **placing)
    raise InfeasibleError(
        f"the caches of offloaded modules stay on {cluster.device_names[main or 0]}, which has no "
        "room for them; ask for fewer tokens or requests"
    )


def cluster_with_offload(cluster: Cluster, offload: str | None, reserved_bytes: int = 0) -> Cluster:
    """The cluster with devices for weights in host memory, and with "disk" on disk, too."""
    targets = ("cpu", "disk") if offload == "disk" else ("cpu",)
    return with_offload(cluster, targets, reserved_bytes)
