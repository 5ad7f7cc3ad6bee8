"""Placing for Hugging Face accelerate: legal device maps only.

accelerate moves whole modules, runs them in the order of the code, and streams weights on "cpu" or
"disk" to its main device at every use. So modules that may not be split stay whole, CPUs compute
nothing, and where the accelerators are too small, weights are offloaded.
"""

import glob
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gdp import solve
from gdp.clock import Clock, Phases
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.constraints import (
    Constraints,
    Pin,
    allowed_mask,
    outermost,
    streamed_bytes,
    together_ids,
)
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import (
    Streamed,
    is_offload,
    main_device,
    resident,
    with_offload,
)
from gdp.errors import (
    ArgumentError,
    GdpError,
    InfeasibleError,
    ModelError,
    PlacementError,
    of_kind,
)
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate, Search
from gdp.models import Model, is_traced, spec_of, traced_model
from gdp.placement import Placement, make_placement
from gdp.prepare import prepare_problem, requests_in_flight
from gdp.result import Result, with_bound
from gdp.sim.objectives import Score, find_objective
from gdp.targets.rows import MEMORY_SHARES, evened, module_blocks
from gdp.targets.vllm.export import layer_row
from gdp.units import format_bytes

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
    graph: OpGraph | None = None  # with the longest context, where that was asked for


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
    if offload not in (None, *OFFLOADS):
        raise ArgumentError(f"no offload {offload!r}; there are {', '.join(OFFLOADS)}")
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=tuple({*constraints.whole, *whole}))
    search = of_kind(placing.pop("search", None), Search, "search")
    peer = accelerate_peer(module, graph, cluster)
    accelerators = resident(cluster)
    held = _with_pins_of_root(constraints, graph, accelerators)
    question = _AccelerateQuestion(graph, held, search, search.budget(), placing)
    base, _ = resolve_costs(costs, accelerators)
    may_offload = offload != "none" and main_device(cluster) is not None
    # One budget for both searches: a model that hardly fits keeps half of it for offloading.
    share = RESIDENT_SHARE if may_offload and _hardly_fits(graph, accelerators) else 1.0
    try:
        result = question.place(accelerators, costs, share)
        result = beside(result, peer, graph, accelerators, costs, held)
        even = _even_maps(graph, accelerators, costs, held, result.objective)
        result = evened(result, even, graph, accelerators, costs, search.simplicity)
        return PlannedPlacement(result, accelerators, costs)
    except InfeasibleError:
        if not may_offload:
            raise
    # The main device keeps memory free for weights that stream.
    reserved = streamed_bytes(graph, constraints)
    offloading, streamed = cluster_with_offload(cluster, offload, reserved), Streamed(base)
    _require_room_of_root(graph, offloading)
    held = _with_pins_of_root(constraints, graph, offloading)
    result = _with_room_for_caches(replace(question, constraints=held), offloading, streamed)
    placement = replace(result.placement, streamed_bytes=reserved)
    result = replace(result, placement=placement)
    result = beside(result, peer, graph, offloading, streamed, held, reserved)
    code = _torch_model(model)
    if code is not None and (note := code.options.get("offloaded")):
        result = replace(result, notes=(*result.notes, note))
    return PlannedPlacement(result, offloading, streamed)


def _ops_of_root(graph: OpGraph) -> Int[np.ndarray, "M"]:
    """Ops that read parameters of the model's own, beside its parts; none where no module is known.
    accelerate's hook on the whole model takes these to its main device, and streams none."""
    own = np.flatnonzero((graph.weight_bytes > graph.cache_bytes) & ~graph.is_io)
    paths = [graph.scope[op] for op in own.tolist()]
    return own[[not path for path in paths]] if any(paths) else own[:0]


def _with_pins_of_root(constraints: Constraints, graph: OpGraph, cluster: Cluster) -> Constraints:
    """The constraints with pins of the ops of the model's own parameters to the main device. What
    they read, through ops without a module, is computed there, too: accelerate moves the inputs of
    modules, not those of ops between them."""
    if sum(device.supported != frozenset() for device in cluster.devices) == 1:
        return constraints  # and ops of unlike demands would not be fused
    main = main_device(cluster) or 0
    own = _ops_of_root(graph).tolist()
    src, dst = graph.edges
    makers: dict[int, list[int]] = defaultdict(list)
    for maker, reader in zip(src.tolist(), dst.tolist(), strict=True):
        makers[reader].append(maker)
    near: dict[int, None] = {}
    stack = list(own)
    while stack:
        for maker in makers[stack.pop()]:
            if not graph.is_io[maker] and maker not in near and maker not in own:
                near[maker] = None
                stack += [maker] * (not graph.scope[maker])
    names = cluster.device_names
    computing = (names[main], *(d.name for d in cluster.devices if is_offload(d)))
    pins = [Pin(glob.escape(graph.op_names[op]), (names[main],)) for op in own]
    pins += [Pin(glob.escape(graph.op_names[op]), computing) for op in near]
    return replace(constraints, pins=(*constraints.pins, *pins))


def _require_room_of_root(graph: OpGraph, cluster: Cluster) -> None:
    ops = _ops_of_root(graph)
    held = int(graph.weight_bytes[ops[np.unique(graph.weight_id[ops], return_index=True)[1]]].sum())
    main = cluster.devices[main_device(cluster) or 0]
    if held > main.memory_bytes:
        raise InfeasibleError(
            f"parameters of the model itself, beside its modules, take {format_bytes(held)}, and "
            f"accelerate streams none of those: {main.name} holds {format_bytes(main.memory_bytes)}"
            " beside what streams; put them into a module of their own"
        )


def _even_maps(
    graph: OpGraph, cluster: Cluster, costs: CostModel | str | Path | None,
    constraints: Constraints, objective: str,
) -> Iterator[Placement]:  # fmt: skip
    """Legal maps that spread the layers of a decoder evenly in one row; none of other models."""
    try:
        row = layer_row(graph)
        blocks = module_blocks(
            graph, cluster, row.layer.clip(0, row.num_layers - 1), costs, constraints
        )
    except (PlacementError, InfeasibleError):
        return
    join = np.maximum if find_objective(objective).pipelined else np.add
    for share in MEMORY_SHARES:
        placement = blocks.placement(blocks.even_row(share, join), "gdp auto")
        if placement and not _broken_constraint(placement, graph, cluster, constraints):
            yield placement


RESIDENT_SHARE = 0.5
"""Of the budget, for a search on the accelerators alone where the model may not fit them."""
HARDLY = 0.8
"""Share of the accelerators' memory that weights and caches take of a model that may not fit."""
TRY_SHARE = 0.6
"""Of the budget that is left, for each map that may lack room for caches; the last has the rest."""
MOST_PLANS = 4
"""Plans that are made until the caches of their offloaded modules have room."""


@dataclass(frozen=True, eq=False)
class _AccelerateQuestion:
    """A question that several searches answer in turn, on one budget."""

    graph: OpGraph
    constraints: Constraints
    search: Search
    clock: Clock
    placing: Mapping[str, Any]

    @property
    def objective(self) -> str:
        return self.placing.get("objective", "latency")

    def place(self, cluster: Cluster, costs: Any, share: float) -> Result:
        """Search with a share of the budget that is left."""
        # Seconds are shared; evaluations are counted in each search by itself.
        clock = self.clock if share == 1.0 else self.clock.part(share)
        search = replace(self.search, clock=clock)
        return solve.place(
            self.graph, cluster, costs=costs, constraints=self.constraints, search=search,
            **self.placing,
        )  # fmt: skip


def _resident_bytes(cluster: Cluster) -> int:
    """Memory of the accelerators together, which hold what is not offloaded."""
    return sum(
        device.memory_bytes for device in cluster.devices
        if device.supported != frozenset() and not is_offload(device)
    )  # fmt: skip


def _hardly_fits(graph: OpGraph, cluster: Cluster) -> bool:
    """True if weights and caches take so much of the accelerators that a search may find nothing;
    where they take more than all of it, that is known without a search."""
    first = np.unique(graph.weight_id, return_index=True)[1]
    return int(graph.weight_bytes[first].sum()) > HARDLY * _resident_bytes(cluster)


def _offloaded_caches(graph: OpGraph, cluster: Cluster, count: int) -> int:
    """Bytes of the caches of modules that do not fit the accelerators, by their share of the
    weights: where offloaded modules are computed, their caches stay."""
    first = np.unique(graph.weight_id, return_index=True)[1]
    caches = count * int(graph.cache_bytes[first].sum())
    weights = int((graph.weight_bytes - graph.cache_bytes)[first].sum())
    away = max(0, weights + caches - _resident_bytes(cluster))
    return math.ceil(caches * min(1.0, away / max(weights, 1)))


def _with_room_for_caches(
    question: _AccelerateQuestion, cluster: Cluster, costs: CostModel
) -> Result:
    """The best map whose main device has room for the caches of offloaded modules, too.

    Searches count caches where weights rest. So they are told of less memory: by the caches of all
    that cannot but be offloaded, and by more where that leaves too little room. The bound knows
    nothing of caches on the host, so it holds for every map.

    Raises:
        InfeasibleError: if nothing fits.
    """
    graph, objective = question.graph, question.objective
    if not graph.cache_bytes.any():
        return question.place(cluster, costs, 1.0)
    count = requests_in_flight(graph, cluster, objective)
    every = count * int(graph.cache_bytes.sum())
    main, kept = main_device(cluster), _offloaded_caches(graph, cluster, count)
    weights = int((graph.weight_bytes - graph.cache_bytes).sum())
    phases, evaluations = Phases(), 0
    for number in range(1, MOST_PLANS + 1):
        last = number == MOST_PLANS
        # With room for every cache none can lack it.
        smaller = _with_memory(cluster, main, -(every if last else min(kept, every)))
        try:
            result = question.place(smaller, costs, 1.0 if last else TRY_SHARE)
        except InfeasibleError:
            if number == 1:
                raise
            break
        phases.ended("planning", result.phases)
        evaluations += result.evaluations
        score = solve.simulate(graph, result.placement, cluster, objective=objective, costs=costs)
        if score.feasible:
            bound = _bound_beside_caches(question, cluster, costs, count, score.value_s)
            phases.ended("bound")
            held = replace(result.score, peak_bytes=score.peak_bytes)
            result = replace(
                result, score=held, evaluations=evaluations, phases=phases.seconds,
                seconds=sum(phases.seconds.values()),
            )  # fmt: skip
            return with_bound(result, *bound)
        # The next plan holds less than this one, which may have left room; and a module that gives
        # way leaves its cache behind.
        leaves = count * int(graph.cache_bytes.sum()) / max(weights, 1)
        spare = smaller.devices[main or 0].memory_bytes - int(result.score.peak_bytes[main or 0])
        kept += spare + int(score.overflow_bytes * (1 + leaves)) + 1
    raise InfeasibleError(
        f"the caches of offloaded modules stay on {cluster.device_names[main or 0]}, which has no "
        "room for them; ask for fewer tokens or requests"
    )


def _with_memory(cluster: Cluster, d: int | None, more_bytes: int) -> Cluster:
    """The cluster with more or less memory on a device."""
    devices = [
        replace(device, memory_bytes=max(1, device.memory_bytes + more_bytes)) if i == d else device
        for i, device in enumerate(cluster.devices)
    ]
    return replace(cluster, devices=tuple(devices))


def _bound_beside_caches(
    question: _AccelerateQuestion, cluster: Cluster, costs: CostModel, count: int, value_s: float
) -> tuple[float, str]:
    """The bound on a cluster whose offload devices have room for all caches beside the weights."""
    caches = count * int(question.graph.cache_bytes.sum())
    for d, device in enumerate(cluster.devices):
        if is_offload(device) and device.memory_bytes < UNLIMITED_BYTES:
            cluster = _with_memory(cluster, d, caches)
            pool = device.memory_pool
            for host, other in enumerate(cluster.devices):
                if pool and host != d and other.memory_pool == pool:
                    cluster = _with_memory(cluster, host, caches)
    prepared = prepare_problem(
        question.graph, cluster, question.objective, costs=costs,
        constraints=question.constraints, replicas=True,
    )  # fmt: skip
    return solve.bound_of(prepared, question.clock, value_s)


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
    constraints: Constraints | None = None,
    streamed_bytes: int = 0,
) -> Result:
    """The result with the peer's plan among its candidates, and a note that compares the two.

    A plan that fits, keeps the constraints and is faster becomes the answer. Where it streams
    weights it keeps `streamed_bytes` free for them, as the result does.
    """
    started_s = time.perf_counter()
    try:
        placement = peer.plan()
        if placement is None:
            return result
        placement = _renamed(placement, cluster)
        if streamed_bytes:
            placement = replace(placement, streamed_bytes=streamed_bytes)
        score = solve.simulate(graph, placement, cluster, objective=result.objective, costs=costs)
    except GdpError as error:
        row = Candidate(peer.name, None, None, None, False, time.perf_counter() - started_s,
                        str(error))  # fmt: skip
        return replace(result, candidates=(*result.candidates, row))
    refusal = "" if score.feasible else str(score)
    refusal = refusal or _broken_constraint(placement, graph, cluster, constraints)
    row = Candidate(
        peer.name, score.latency_s, score.period_s, score.value_s, not refusal,
        time.perf_counter() - started_s, refusal,
    )  # fmt: skip
    result = replace(result, candidates=(*result.candidates, row))
    if not refusal and score.value_s < result.value_s:
        return _instead(result, peer, placement, score, graph)
    note = compared(result.score, score, peer.title)
    return replace(result, notes=(*result.notes, note))


def _instead(
    result: Result, peer: Peer, placement: Placement, score: Score, graph: OpGraph
) -> Result:
    """The peer's plan as the result of the search that it beat."""
    ratio = result.value_s / score.value_s
    note = f"{peer.title}, {ratio:.{1 if ratio >= 1.1 else 3}f} times as fast as the searched plan"
    answer = replace(
        result, placement=placement, score=score, method=peer.name, notes=(note,),
        counts=solve.counts_of(graph, placement), deviation_s=None,
    )  # fmt: skip
    return with_bound(answer, result.bound_s, result.bound_by)


def _renamed(placement: Placement, cluster: Cluster) -> Placement:
    """The placement with the devices of a cluster; as it is where it uses another device."""
    names = {name: d for d, name in enumerate(cluster.device_names)}
    strange = {placement.device_names[d] for d in np.unique(placement.device)} - set(names)
    if not strange:
        number = np.array([names.get(name, 0) for name in placement.device_names])
        device = number[placement.device]
        return replace(placement, device_names=cluster.device_names, device=device)
    if any(map(is_offload, cluster.devices)):
        raise PlacementError(f"it uses {min(strange)}, which the question leaves out")
    return placement


def _broken_constraint(
    placement: Placement, graph: OpGraph, cluster: Cluster, constraints: Constraints | None
) -> str:
    """Why a peer's plan is no answer to the question; "" where it is one."""
    if placement.device_names != cluster.device_names:
        return "it offloads weights that need not be offloaded"
    constraints, device = of_kind(constraints, Constraints, "constraints"), placement.device
    allowed = allowed_mask(constraints, graph, cluster)
    if not allowed[np.arange(graph.num_ops), device].all():
        return "the constraints forbid it"
    together = together_ids(constraints, graph)
    if together is not None and any(
        len(np.unique(device[together == g])) > 1 for g in np.unique(together)
    ):
        return "it splits modules that stay whole"
    return ""


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


def torch_boundaries(
    model: Model | None, graph: OpGraph, whole: Sequence[str]
) -> tuple[dict[int, str], str]:
    """Ops where a PyTorch program can be cut, with the module path whose call begins there; where
    there are none, why.

    See `gdp.importers.pytorch.model`.

    Raises:
        ModelError: if the model is no PyTorch module for inference, or not that of the graph.
    """
    from gdp.importers.pytorch.model import boundaries, uncut_reason

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
    cuts = boundaries(recorded, whole)
    return cuts, "" if cuts else uncut_reason(recorded)
