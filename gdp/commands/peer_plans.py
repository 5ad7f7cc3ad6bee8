"""Plans that other tools make by themselves, simulated as yardsticks beside gdp's own.

"accelerate, auto" is `device_map="auto"` of transformers: accelerate's own `infer_auto_device_map`
over its balanced memory. "llama.cpp, fit" is the default of llama.cpp (`--fit on`, pull request
16653 of ggml-org/llama.cpp), whose rule is written again here, as the program itself measures real
devices.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gdp import api
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.errors import GdpError
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.placement import Placement, make_placement
from gdp.result import Result
from gdp.sim.objectives import Score

FIT_MARGIN_BYTES = 1 << 30
"""Kept free on each GPU: default of llama.cpp's `--fit-target`, 1024 MiB."""
SAME = 0.005
"""Values that differ by a smaller share are called equal."""


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


class FitSizes(NamedTuple):
    """Bytes that llama.cpp's fit counts. Axes: S slots (blocks, then the output), G GPUs."""

    dense: Int[np.ndarray, "S"]  # of each slot without its experts; caches included
    experts: Int[np.ndarray, "S"]
    memory: Int[np.ndarray, "G"]
    buffers: int  # of tensors, on each GPU


class FitPlan(NamedTuple):
    """A plan of llama.cpp's fit; the CPU is -1."""

    layers: Int[np.ndarray, "S"]  # GPU of each slot
    experts: Int[np.ndarray, "S"]  # of its experts


def fit_plan(sizes: FitSizes, margin_bytes: int = FIT_MARGIN_BYTES) -> FitPlan:
    """The plan of llama.cpp's `--fit` at the context that was asked for.

    1. Everything on the GPUs, in proportion to their memory, where that keeps the margin on each.
    2. Else GPUs are filled from the last to the first with slots from the last to the first; in a
       mixture of experts all experts stay on the CPU.
    3. Where all dense weights of a mixture fit so, GPUs take whole slots from the first on, as long
       as later GPUs have room for the dense rest; behind its whole slots the last GPU has the rest.

    Left out: reducing the context, and parts of one block on a GPU.
    """
    count, gpus = len(sizes.dense), len(sizes.memory)
    room = np.maximum(sizes.memory - margin_bytes - sizes.buffers, 0)
    full = sizes.dense + sizes.experts
    ends = np.cumsum(sizes.memory) / max(int(sizes.memory.sum()), 1)
    even = np.searchsorted(ends, np.arange(count) / count, side="right").clip(max=gpus - 1)
    if (np.bincount(even, full, gpus) <= room).all():
        return FitPlan(even, even)
    kept = sizes.dense if sizes.experts.any() else full
    layers = _back_to_front(kept, room)
    nowhere = np.full(count, -1)
    if not sizes.experts.any():
        return FitPlan(layers, layers)
    if (layers < 0).any():
        return FitPlan(layers, nowhere)
    experts, start = nowhere, 0
    for gpu in range(gpus):
        for stop in range(count, start, -1):
            rest = _back_to_front(kept[stop:], room[gpu + 1 :])
            shared = gpu == gpus - 1  # the last one keeps the dense rest as well
            held = full[start:stop].sum() + (kept[stop:].sum() if shared else 0)
            if held <= room[gpu] and (shared or (rest >= 0).all()):
                layers[start:stop] = experts[start:stop] = gpu
                layers[stop:] = gpu if shared else rest + gpu + 1
                start = stop
                break
    return FitPlan(layers, experts)


def _back_to_front(sizes: Int[np.ndarray, "S"], room: Int[np.ndarray, "G"]) -> Int[np.ndarray, "S"]:
    """GPU of each slot, -1 for the CPU, filled from the last slot and the last GPU."""
    layers, slot = np.full(len(sizes), -1), len(sizes)
    for gpu in range(len(room) - 1, -1, -1):
        free = int(room[gpu])
        while slot and sizes[slot - 1] <= free:
            slot -= 1
            free -= int(sizes[slot])
            layers[slot] = gpu
    return layers
