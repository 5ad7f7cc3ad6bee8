"""Placing for Hugging Face accelerate: legal device maps only.

accelerate moves whole modules, runs them in the order of the code, and streams weights on "cpu" or
"disk" to its main device at every use. So modules that may not be split stay whole, CPUs compute
nothing, and where the accelerators are too small, weights are offloaded.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdp import api
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints, outermost, streamed_bytes
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import Streamed, main_device, resident, with_offload
from gdp.errors import ArgumentError, GdpError, InfeasibleError, ModelError, of_kind
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.models import Model, is_traced, spec_of, traced_model
from gdp.placement import Placement, make_placement
from gdp.prepare import requests_in_flight
from gdp.result import Result
from gdp.sim.objectives import Score

if TYPE_CHECKING:
    from gdp.importers.pytorch.model import TorchModel

GRANULARITIES = ("op", "module", "layer")
OFFLOADS = ("cpu", "disk", "none")
SAME = 0.005
"""Values that differ by a smaller share are called equal."""
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


class Peer(NamedTuple):
    """Another tool's way to place."""

    name: str  # of its row among the candidates
    title: str  # in sentences
    plan: Callable[[], Placement | None]  # None: nothing to compare with


def beside(
    result: Result,
    peer: Peer,
    graph: OpGraph,
    cluster: Cluster,
    costs: CostModel | str | Path | None,
) -> Result:
    """The result with the peer's plan among its candidates, and a note that compares the two."""
    started_s = time.perf_counter()
    try:
        placement = peer.plan()
        if placement is None:
            return result
        score = api.simulate(graph, placement, cluster, objective=result.objective, costs=costs)
    except GdpError as error:
        row = Candidate(peer.name, None, None, None, False, time.perf_counter() - started_s,
                        str(error))  # fmt: skip
        return replace(result, candidates=(*result.candidates, row))
    reason = "" if score.feasible else str(score)
    row = Candidate(
        peer.name, score.latency_s, score.period_s, score.value_s, score.feasible,
        time.perf_counter() - started_s, reason,
    )  # fmt: skip
    note = compared(result.score, score, peer.title)
    return replace(result, candidates=(*result.candidates, row), notes=(*result.notes, note))


def compared(own: Score, other: Score, title: str) -> str:
    """Comparison of a placement with that of another tool, in a sentence."""
    if not other.feasible:
        return f"{title} does not fit: {other.overflow_bytes / 2**30:.2f} GiB over device memory"
    ratio = other.value_s / own.value_s
    if abs(ratio - 1) < SAME:
        return f"as fast as {title}"
    return f"{ratio:.{1 if ratio >= 1.1 else 2}f} times as fast as {title}"


def accelerate_peer(module: Any, graph: OpGraph, cluster: Cluster) -> Peer:
    """The map that transformers takes under `device_map="auto"`, of a PyTorch module or None."""

    def plan() -> Placement | None:
        entries = None if module is None else balanced_map(module, graph, cluster)
        if not entries:
            return None
        return make_placement(graph, cluster, entries, made_by="accelerate infer_auto_device_map")

    return Peer("accelerate, auto", "accelerate's own map (device_map=auto)", plan)


def balanced_map(module: Any, graph: OpGraph, cluster: Cluster) -> Mapping[str, Any] | None:
    """The map of `infer_auto_device_map` over `get_balanced_memory`, for the memory of a cluster;
    None without accelerate or without accelerators. Quantised weights count as transformers has
    accelerate count them."""
    numbers = cluster.accelerator_numbers
    if all(number is None for number in numbers):
        return None
    try:
        from accelerate.utils import get_balanced_memory, infer_auto_device_map
    except ImportError:
        return None
    memory: dict[int | str, int] = {
        n: d.memory_bytes
        for n, d in zip(numbers, cluster.devices, strict=True)
        if n is not None and d.supported != frozenset()
    }
    memory["cpu"] = sum(d.memory_bytes for d in cluster.devices if d.is_cpu)
    kept: list[str] = list(getattr(module, "_no_split_modules", None) or ())
    log = logging.getLogger("accelerate.utils.modeling")
    silent, log.disabled = log.disabled, True  # it warns of disks, as the simulator does
    try:
        sizes: dict[str, Any] = {
            "no_split_module_classes": kept,
            "special_dtypes": _quantised_dtypes(module, graph),
        }
        balanced = get_balanced_memory(module, dict(memory), **sizes)
        return infer_auto_device_map(module, balanced, **sizes)
    finally:
        log.disabled = silent


def _quantised_dtypes(module: Any, graph: OpGraph) -> dict[str, Any]:
    """accelerate's type of every parameter that the graph stores in fewer bytes than the module:
    4 bits up to 6 bits a number, scales included, else 8, as quantisers of transformers choose."""
    from accelerate.utils import CustomDtype

    stored = defaultdict[str, int](int)
    for scope, size in zip(graph.scope, graph.weight_bytes.tolist(), strict=True):
        stored[scope] += size
    dtypes = {}
    for path, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        numbers = sum(weight.numel() for weight in own.values())
        dense = sum(weight.numel() * weight.element_size() for weight in own.values())
        if 0 < stored[path] <= QUANTISED * dense:
            dtype = CustomDtype.INT4 if stored[path] <= 0.75 * numbers else CustomDtype.FP8
            dtypes |= {f"{path}.{name}".lstrip("."): dtype for name in own}
    return dtypes


QUANTISED = 0.8
"""Share of its dense bytes up to which a module counts as quantised."""


def _torch_model(model: Model | None) -> "TorchModel | None":
    from gdp.importers.pytorch.model import TorchModel

    code = traced_model(spec_of(model)) if model is not None and is_traced(model) else model
    return code if isinstance(code, TorchModel) else None


def torch_module(model: Model | None) -> Any:
    """The PyTorch module of a spec or a traced model, None for other models."""
    code = _torch_model(model)
    return None if code is None else code.unwrapped


def torch_boundaries(model: Model | None, graph: OpGraph, whole: Sequence[str]) -> dict[int, str]:
    """Ops where a PyTorch program can be cut, with the module path whose call begins there.

    See `gdp.importers.pytorch.model`.

    Raises:
        ModelError: if the model is no PyTorch module for inference, or not that of the graph.
    """
    from gdp.importers.pytorch.model import boundaries

    code = _torch_model(model)
    if code is None:
        raise ModelError(
            "torch.distributed.pipelining cuts PyTorch modules: give python:package.module:function"
            " or hf:CONFIG"
        )
    if code.options.get("held"):
        raise ModelError(f"{code.name}: a pipeline of torch holds no caches between its samples")
    recorded = code.record()
    if recorded.graph.digest != graph.digest:
        raise ModelError(f"{code.name}: the module has changed since {graph.name!r} was traced")
    return boundaries(recorded, whole)
