"""Placing for Hugging Face accelerate, such that the answer is a legal device map.

accelerate moves whole modules, runs them in the order of the code, and streams what lies on "cpu"
or "disk" to its main device at every use. So modules that may not be split stay whole, CPUs
compute nothing, and where the accelerators are too small, weights are offloaded.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp import api
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints, outermost, whole_labels
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import Streamed, main_device, resident, with_offload
from gdp.costs.roofline import roofline
from gdp.errors import InfeasibleError, of_kind
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import Model, is_traced, spec_of, traced_model
from gdp.posed import room_bytes
from gdp.result import Result

GRANULARITIES = ("op", "module", "layer")
OFFLOADS = ("cpu", "disk", "none")
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
"""Up to the first number of a module path: one element of a list of layers."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A result, and the cluster and costs that it was found with: those of offloading, too."""

    result: Result
    cluster: Cluster
    costs: CostModel | str | Path | None


def whole_modules(model: str | None, graph: OpGraph, granularity: str) -> tuple[str, ...]:
    """The paths of the modules that stay in one piece.

    "module": those that hold weights themselves, and those whose class the model names in
    `_no_split_modules`, where it is a PyTorch model; "layer": each element of a list of layers,
    too; "op": none.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"no granularity {granularity!r}; there are {', '.join(GRANULARITIES)}")
    if granularity == "op":
        return ()
    module = torch_module(model)
    paths = set(_holders(graph) if module is None else kept_modules(module))
    if granularity == "layer":
        paths |= {found[0] for scope in graph.scope if (found := _BLOCK.match(scope))}
    return tuple(sorted(path for path in paths if outermost(path, paths) == path))


def torch_module(model: Model | None) -> Any:
    """The PyTorch module of a spec or a traced model, None for other models."""
    from gdp.importers.pytorch.model import TorchModel

    found = traced_model(spec_of(model)) if model is not None and is_traced(model) else model
    return found.unwrapped if isinstance(found, TorchModel) else None


def kept_modules(module: Any) -> Iterable[str]:
    """Modules with weights of their own, which accelerate cannot split, and those that say so."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if path and (own or type(part).__name__ in classes):
            yield path


def _holders(graph: OpGraph) -> Iterable[str]:
    return {s for s, b in zip(graph.scope, graph.weight_bytes, strict=True) if s and b}


def room_for(
    runtime: str | None,
    cluster: Cluster,
    offload: str | None = None,
    constraints: Constraints | None = None,
) -> int:
    """`room_bytes` where a runtime executes the placement, which may offload weights."""
    if runtime == "accelerate" and offload != "none":
        targets = ("cpu", "disk") if offload == "disk" else ("cpu",)
        return room_bytes(with_offload(cluster, targets), constraints)
    return room_bytes(cluster if runtime is None else resident(cluster), constraints)


def place_for(
    runtime: str | None,
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: str | None = None,
    granularity: str | None = None,
    offload: str | None = None,
    **placing: Any,
) -> Placed:
    """`gdp.place`, or for a runtime; `model` tells which modules may not be split."""
    by_module = runtime in ("accelerate", "pipelining")
    granularity = granularity or ("module" if by_module else "op")
    if by_module and granularity == "op":
        raise ValueError(f"{runtime} goes by whole modules: granularity module or layer")
    whole = whole_modules(model, graph, granularity)
    if runtime == "accelerate":
        return place_for_accelerate(
            graph, cluster, whole=whole, offload=offload or "cpu", **placing
        )
    if runtime in ("llamacpp", "pipelining") and placing.get("method", "auto") != "auto":
        raise ValueError(f"--for {runtime} is planned by one program, not by {placing['method']!r}")
    if runtime == "llamacpp":
        from gdp.commands.llamacpp import place_for_llamacpp

        if granularity != "op":
            raise ValueError("llama.cpp's flags move blocks and experts: leave out --granularity")
        said = ("objective", "costs", "constraints")
        found = place_for_llamacpp(graph, cluster, **{k: placing[k] for k in said if k in placing})
        return Placed(found, cluster, placing.get("costs") or roofline)
    if runtime == "pipelining":
        from gdp.commands.pipelining import place_for_pipelining, torch_boundaries

        said = ("objective", "costs", "constraints")
        found = place_for_pipelining(
            graph, cluster, list(torch_boundaries(model, graph, whole)),
            simplicity=placing.get("search", Search()).simplicity,
            **{k: placing[k] for k in said if k in placing},
        )  # fmt: skip
        return Placed(found, resident(cluster), placing.get("costs"))
    constraints = of_kind(placing.pop("constraints", None), Constraints, "constraints")
    constraints = replace(constraints, whole=(*constraints.whole, *whole))
    found = api.place(graph, cluster, constraints=constraints, **placing)
    return Placed(found, cluster, placing.get("costs"))


def place_for_accelerate(
    graph: OpGraph,
    cluster: Cluster,
    *,
    whole: tuple[str, ...] = (),
    offload: str = "cpu",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    **placing: Any,
) -> Placed:
    """The best legal map: on the accelerators alone where the model fits, else with weights that
    rest in host memory, or there and on disk. Raises `InfeasibleError` where nothing fits."""
    if offload not in OFFLOADS:
        raise ValueError(f"no offload {offload!r}; there are {', '.join(OFFLOADS)}")
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=tuple({*constraints.whole, *whole}))
    base, _ = resolve_costs(costs, resident(cluster))
    alone = resident(cluster)
    try:
        found = api.place(graph, alone, costs=costs, constraints=constraints, **placing)
        return Placed(found, alone, costs)
    except InfeasibleError:
        if offload == "none" or main_device(cluster) is None:
            raise
    machine, room = offload_cluster(graph, cluster, constraints, offload)
    streamed = Streamed(base)
    found = api.place(graph, machine, costs=streamed, constraints=constraints, **placing)
    placement = replace(found.placement, streamed_bytes=room)
    return Placed(replace(found, placement=placement), machine, streamed)


def offload_cluster(
    graph: OpGraph, cluster: Cluster, constraints: Constraints, offload: str
) -> tuple[Cluster, int]:
    """The cluster with offload devices, and the bytes that the main device keeps free for what
    streams: the largest module that stays whole, and the tensors of its costliest op."""
    targets = ("cpu", "disk") if offload == "disk" else ("cpu",)
    room = streamed_bytes(graph, constraints)
    return with_offload(cluster, targets, room), room


def streamed_bytes(graph: OpGraph, constraints: Constraints) -> int:
    """Bytes of the largest module that stays whole, each weight once, and of the tensors that one
    op reads and makes."""
    labels = whole_labels(constraints, graph)
    first = np.unique(graph.weight_id, return_index=True)[1]
    weights = np.bincount(labels[first], graph.weight_bytes[first])
    tensors = np.bincount(graph.use_op, graph.tensor_bytes[graph.use_tensor], graph.num_ops)
    tensors += np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops)
    return int(weights.max(initial=0) + tensors.max(initial=0))
