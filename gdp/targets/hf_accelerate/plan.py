"""Placing for Hugging Face accelerate: legal device maps only.

accelerate moves whole modules, runs them in the order of the code, and streams weights on "cpu" or
"disk" to its main device at every use. So modules that may not be split stay whole, CPUs compute
nothing, and where the accelerators are too small, weights are offloaded.
"""

import glob
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.base.units import format_bytes
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.types import Cluster
from gdp.costs.default import resolve_costs
from gdp.costs.offload import (
    KINDS,
    Streamed,
    main_device,
    resident,
    weight_way_s,
    with_offload,
)
from gdp.graph.groups import merge_ids, sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import layer_row
from gdp.methods.shares import RESIDENT_SHARE
from gdp.placement.constraints import Pin, streamed_bytes, together_ids
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result, with_bound
from gdp.sim.objectives import find_objective
from gdp.targets.modules import torch_model, torch_module, with_whole_modules
from gdp.targets.peers import Peer, beside, broken_constraint
from gdp.targets.rows import MEMORY_SHARES, balance_memory, layer_costs

OFFLOADS = ("cpu", "disk", "none")


def plan_accelerate(question: Question) -> Result:
    """The best legal map: on the accelerators alone where the model fits, otherwise with weights
    offloaded to host memory or disk. Where streaming a module may be faster than computing it on
    one of the cards, both are searched, so that an additional card never worsens the answer.

    The map that accelerate makes by itself, of a PyTorch module, is among the candidates.

    Raises:
        InfeasibleError: if nothing fits.
    """
    if question.offload not in (None, *OFFLOADS):
        raise ArgumentError(f"no offload {question.offload!r}; there are {', '.join(OFFLOADS)}")
    question = with_whole_modules(question)
    peer = accelerate_peer(torch_module(question.model), question.graph, question.cluster)
    # One clock for all searches of the answer; building the module is none of them.
    search = replace(question.search, clock=question.search.budget())
    question = replace(question, search=search)
    if question.offload == "none" or main_device(question.cluster) is None:
        return _without_offload(question, peer, 1.0)
    graph, cluster = question.graph, resident(question.cluster)
    excess_s = _excess_s(question)
    if excess_s.max(initial=0.0) > 0:
        memory_bytes = cluster.devices[main_device(question.cluster) or 0].memory_bytes
    else:
        memory_bytes = sum(cluster.memory_bytes[cluster.computes & ~cluster.streams].tolist())
    # One budget for both searches: a model that hardly fits keeps half of it for offloading.
    first = np.unique(graph.weight_id, return_index=True)[1]
    hardly = int(graph.weight_bytes[first].sum()) > HARDLY * memory_bytes
    try:
        result = _without_offload(question, peer, RESIDENT_SHARE if hardly else 1.0)
    except InfeasibleError:
        return _with_offload(question, peer)
    if excess_s[np.arange(graph.num_ops), result.placement.device].sum() <= 0:
        return result  # streaming in place of the other cards would win nothing
    try:
        return _faster(result, _with_offload(question, peer))
    except InfeasibleError:
        return result


def _without_offload(question: Question, peer: Peer, share: float) -> Result:
    """The best map on the accelerators alone, by a share of the clock; `InfeasibleError` where none
    is found."""
    question = _with_pins_of_root(replace(question, cluster=resident(question.cluster)))
    return balance_memory(beside(_searched(question, share), peer), _even_maps(question))


def _with_offload(question: Question, peer: Peer) -> Result:
    """The best map with offloaded weights, by the rest of the clock."""
    # The main device keeps memory free for weights that stream.
    reserved = streamed_bytes(question.graph, question.constraints)
    base, _ = resolve_costs(question.costs, resident(question.cluster), question.graph)
    offloading = cluster_with_offload(question.cluster, question.offload, reserved)
    _require_room_of_root(question.graph, offloading)
    question = _with_pins_of_root(replace(question, cluster=offloading, costs=Streamed(base)))
    result = _searched(question, 1.0)
    placement = replace(result.placement, streamed_bytes=reserved)
    result = beside(replace(result, placement=placement), peer, reserved)
    code = torch_model(question.model)
    if code is not None and (note := code.options.get("offloaded")):
        result = replace(result, notes=(*result.notes, note))
    return result


def _faster(held: Result, streamed: Result) -> Result:
    """The better one of maps without and with offloaded weights; the bound is that of both."""
    best, other = (streamed, held) if streamed.value_s < held.value_s else (held, streamed)
    lower = min(held, streamed, key=lambda result: result.bound_s)
    best = replace(
        best, candidates=(*other.candidates, *best.candidates),
        evaluations=held.evaluations + streamed.evaluations,
        seconds=held.seconds + streamed.seconds,
    )  # fmt: skip
    return with_bound(best, lower.bound_s, lower.bound_by)


def _excess_s(question: Question) -> Float[np.ndarray, "N D"]:
    """Upper bound of the seconds saved by streaming a module to the main device instead of placing
    it on a card, at the first op of the module (N ops, D devices).

    A card's seconds less the main device's, less the time to stream the module's bytes at the
    cheapest rate of any module. 0 where streaming cannot pay: cards are identical, or the period
    counts streaming and resident modules as two devices.
    """
    graph, cluster = question.graph, resident(question.cluster)
    excess_s = np.zeros((graph.num_ops, cluster.num_devices))
    computes, main = cluster.computes, main_device(cluster)
    cards = [cluster.devices[d] for d in np.flatnonzero(computes)]
    distinct = {(card.kind, card.bytes_per_s) for card in cards}
    if main is None or len(distinct) < 2 or find_objective(question.objective).pipelined:
        return excess_s
    model, _ = resolve_costs(question.costs, cluster, graph)
    module = merge_ids(graph.colocate, together_ids(question.constraints, graph))
    seconds = model(graph, cluster) * graph.repeats[:, None]
    seconds[graph.is_io] = 0.0
    seconds = sum_per_group(np.where(computes, seconds, 0.0), module)
    link_s = weight_way_s(graph, cluster, main, KINDS["cpu"]) * graph.repeats
    link_s = np.bincount(module, np.where(graph.is_io, 0.0, link_s))
    held = np.bincount(module, np.where(graph.rests, 0, graph.weight_bytes - graph.cache_bytes))
    streams = (held > 0) & (link_s > 0)
    if streams.any():
        cheapest = float((link_s[streams] / held[streams]).min())
        saved_s = seconds - seconds[:, [main]] - cheapest * held[:, None]
        counted = streams[:, None] & computes & (np.arange(len(computes)) != main)
        modules, first = np.unique(module, return_index=True)
        excess_s[first] = np.where(counted, saved_s, 0.0)[modules]
    return excess_s


def _ops_of_root(graph: OpGraph) -> Int[np.ndarray, "M"]:
    """Ops that read parameters of the root module itself; none where no module is known.
    accelerate's hook on the root module moves these to its main device, and streams none."""
    own = np.flatnonzero((graph.weight_bytes > graph.cache_bytes) & ~graph.is_io)
    paths = [graph.scope[op] for op in own.tolist()]
    return own[[not path for path in paths]] if any(paths) else own[:0]


def _with_pins_of_root(question: Question) -> Question:
    """The question with the ops of the root module's parameters pinned to the main device, and
    their producers through ops without a module, too: accelerate moves the inputs of modules, not
    those of ops between them."""
    graph, cluster, constraints = question.graph, question.cluster, question.constraints
    if cluster.computes.sum() == 1:
        return question  # and ops of unlike demands would not be fused
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
    computing = (names[main], *(names[d] for d in np.flatnonzero(cluster.streams)))
    pins = [Pin(glob.escape(graph.op_names[op]), (names[main],)) for op in own]
    pins += [Pin(glob.escape(graph.op_names[op]), computing) for op in near]
    return replace(question, constraints=replace(constraints, pins=(*constraints.pins, *pins)))


def _require_room_of_root(graph: OpGraph, cluster: Cluster) -> None:
    held = int(graph.weight_bytes[graph.weight_holders(_ops_of_root(graph))].sum())
    main = cluster.devices[main_device(cluster) or 0]
    if held > main.memory_bytes:
        raise InfeasibleError(
            f"parameters of the model itself, beside its modules, take {format_bytes(held)}, and "
            f"accelerate streams none of those: {main.name} holds {format_bytes(main.memory_bytes)}"
            " beside what streams; put them into a module of their own"
        )


def _even_maps(question: Question) -> Iterator[Placement]:
    """Memory-balanced pipeline partitions of a decoder's layers; none of other models."""
    try:
        row = layer_row(question.graph)
        blocks = layer_costs(question, row.layer.clip(0, row.num_layers - 1))
    except (PlacementError, InfeasibleError):
        return
    join = np.maximum if find_objective(question.objective).pipelined else np.add
    for share in MEMORY_SHARES:
        placement = blocks.placement(blocks.memory_balanced_partition(share, join), "gdp auto")
        if placement and not broken_constraint(placement, question):
            yield placement


HARDLY = 0.8
"""Share of the accelerators' memory that weights and caches take of a model that may not fit."""


def _searched(question: Question, share: float) -> Result:
    """The answer of a search with a share of the budget that is left."""
    # Seconds are shared; evaluations are counted in each search by itself.
    clock = question.search.budget()
    search = replace(question.search, clock=clock if share == 1.0 else clock.part(share))
    return solve.solve(replace(question, search=search))


def cluster_with_offload(cluster: Cluster, offload: str | None, reserved_bytes: int = 0) -> Cluster:
    """The cluster with devices for weights in host memory, and with "disk" on disk, too."""
    targets = ("cpu", "disk") if offload == "disk" else ("cpu",)
    return with_offload(cluster, targets, reserved_bytes)


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
    numbers = numbers_on_machine(cluster)
    if all(number is None for number in numbers):
        return None
    try:
        from accelerate.utils import get_balanced_memory, infer_auto_device_map
    except ImportError:
        return None
    memory: dict[int | str, int] = {
        n: cluster.devices[d].memory_bytes
        for d, n in enumerate(numbers)
        if n is not None and cluster.computes[d]
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
