"""A placement as vLLM's uneven pipeline: how many layers each GPU holds, and the longest context.

vLLM cuts a decoder's row of layers into one stretch a rank (`get_pp_indices` of its
`vllm/distributed/utils.py`): `VLLM_PP_LAYER_PARTITION` says how many layers each has. Ranks take
GPUs in the order of `CUDA_VISIBLE_DEVICES`; the first holds what comes before the layers, the last
what comes behind them. One share of memory holds for all GPUs (vllm-project/vllm#49816), and the
rank with the fewest blocks of cache decides for all (vllm-project/vllm#6115).
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.costs.offload import is_offload
from gdp.errors import PlacementError
from gdp.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.graph.generation import STEP, request_of
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement
from gdp.units import format_seconds

TENSOR_PARALLEL = (
    "plans are of whole ops: splitting each layer over N GPUs reads their memories at once, in at "
    "least bytes / (N * bandwidth) a token, and is not among the answers"
)
UNTRIED = "vLLM was not run with this: the form is that of its source and documentation"
QUANTIZED_WHEN_LOADED = {"fp8": "fp8", "nf4": "bitsandbytes", "nf4-double": "bitsandbytes"}
"""Value of `--quantization` for schemes of `--quantize` that vLLM applies to weights of 16 bits; of
the others it reads checkpoints that are stored so."""
_LAYER = re.compile(r"^(.*?)\.(\d+)(?=\.|$)")
"""List of layers and number of the layer, of a module path."""
_SMALL = 0.01
"""Of a layer's weights: smaller modules, such as norms and rotary tables, follow their rank."""


def tensor_parallel(graph: OpGraph, cluster: Cluster, flag: str = "") -> str:
    """Bound of splitting every layer over the GPUs, in a sentence that names the flag; "" where
    there is one GPU."""
    gpus = [d for d in cluster.devices if not d.is_cpu and d.supported != frozenset()]
    if len(gpus) < 2:
        return ""
    stepping = graph.repeats > 1
    step = stepping if stepping.any() else np.ones(graph.num_ops, dtype=bool)
    slowest = min(device.bytes_per_s for device in gpus)
    least_s = float(graph.memory_traffic_bytes[step].sum()) / (len(gpus) * slowest)
    what = "a step of decoding" if stepping.any() else "a pass"
    how = f"{flag} {len(gpus)} takes" if flag else f"{len(gpus)} GPUs take"
    return f"{TENSOR_PARALLEL}: {how} at least {format_seconds(least_s)} for {what} here"


TENSOR_PARALLEL_FLAG = "vLLM's --tensor-parallel-size"


class LayerRow(NamedTuple):
    """A decoder as ranks of vLLM divide it. Axes: N ops."""

    layer: Int[np.ndarray, "N"]  # number of its layer; -1 before all, `num_layers` behind all
    fixed: Int[np.ndarray, "_"]  # ops with weights that decide where a stretch lies
    num_layers: int


@dataclass(frozen=True)
class VllmOptions:
    """Environment and arguments of `vllm serve`."""

    partition: tuple[int, ...]  # layers of each rank
    gpus: tuple[int, ...]  # of each rank, by number in the order of the PCI bus
    gpu_memory_utilization: float
    max_model_len: int  # tokens
    quantize: str = ""  # scheme of `--quantize` that the plan stands on; "": weights as they are
    at_once: int = 0  # tokens of one pass that the plan has memory for; 0 where it says none

    def environment(self) -> dict[str, str]:
        """Variables by name."""
        order = {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)),
        }
        parts = ",".join(map(str, self.partition))
        return order | ({"VLLM_PP_LAYER_PARTITION": parts} if len(self.gpus) > 1 else {})

    def arguments(self) -> list[str]:
        """Arguments behind `vllm serve MODEL`."""
        method = QUANTIZED_WHEN_LOADED.get(self.quantize)
        return [
            "--pipeline-parallel-size", str(len(self.gpus)),
            "--gpu-memory-utilization", f"{self.gpu_memory_utilization:.2f}",
            "--max-model-len", str(self.max_model_len),
            *(["--max-num-batched-tokens", str(self.at_once)] if self.at_once else []),
            *(["--quantization", method] if method else []),
        ]  # fmt: skip

    def why(self) -> dict[str, str]:
        """A sentence for each of them."""
        reasons = {
            "CUDA_DEVICE_ORDER": "numbers are those of nvidia-smi, not those of the fastest first",
            "CUDA_VISIBLE_DEVICES": "ranks take these GPUs in this order",
            "VLLM_PP_LAYER_PARTITION": "so many layers on each of these GPUs",
            "--pipeline-parallel-size": "a rank for each GPU of the plan",
            "--gpu-memory-utilization": "the share that the fullest reserve leaves; vLLM knows one "
            "for all GPUs",
            "--max-model-len": "the context that was asked for, or the longest one whose cache has "
            "room on every GPU beside its weights, of one sequence, within what the model was made "
            "for",
            "status": UNTRIED,
        }  # fmt: skip
        if self.at_once:
            reasons["--max-num-batched-tokens"] = (
                "prompts are computed in chunks of so many tokens, for whose tensors the plan has "
                "room"
            )
        if self.quantize in QUANTIZED_WHEN_LOADED:
            reasons["--quantization"] = (
                f"the plan stands on weights stored as {self.quantize} (--quantize)"
            )
        elif self.quantize:
            reasons["model"] = (
                f"the plan stands on weights stored as {self.quantize} (--quantize), which vLLM "
                "does not make itself: serve a checkpoint that is stored so, which it recognises"
            )
        if len(self.gpus) > 1:
            reasons["tensor parallelism"] = f"{TENSOR_PARALLEL}; --tensor-parallel-size is the flag"
        return {k: v for k, v in reasons.items() if not k.isupper() or k in self.environment()}


def layer_row(graph: OpGraph) -> LayerRow:
    """Layers of the ops of a decoder; `PlacementError` where there is no single row of layers."""
    matches = [_LAYER.match(scope) for scope in graph.scope]
    held: dict[str, int] = {}
    for match, size in zip(matches, graph.weight_bytes, strict=True):
        if match is not None:
            held[match[1]] = held.get(match[1], 0) + int(size)
    rows = sorted((path for path in held if held[path]), key=lambda path: -held[path])
    rivals = [path for path in rows[1:] if held[path] > _SMALL * held[rows[0]]]
    if not rows or rivals:
        what = " and ".join(map(repr, [*rows[:1], *rivals])) or "none"
        raise _cannot(f"it divides one row of layers, and the model has {what}")
    layer = np.full(graph.num_ops, -1)
    inside = np.array([match is not None and match[1] == rows[0] for match in matches])
    layer[inside] = [
        int(match[2]) for match in matches if match is not None and match[1] == rows[0]
    ]
    count = int(layer.max()) + 1
    stepping = np.array([name.startswith(STEP) for name in graph.op_names])
    for phase in (stepping, ~stepping):
        last = np.flatnonzero(inside & phase).max(initial=0)
        layer[phase & ~inside & (np.arange(graph.num_ops) > last)] = count
    size = np.bincount(layer[inside], graph.weight_bytes[inside], count)
    large = graph.weight_bytes > _SMALL * float(size.min())
    return LayerRow(layer, np.flatnonzero(large & ~graph.is_io), count)


def vllm_options(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    peak_bytes: Int[np.ndarray, "D"],
    longest: int | None = None,
    quantize: str = "",
    at_once: int = 0,
) -> VllmOptions:
    """The options of a placement of a request.

    Args:
        graph: Of a generation (`--generate`): its caches say what a token of context takes.
        placement: Of this graph.
        cluster: Its devices.
        peak_bytes: That each device holds at once, as simulated.
        longest: Context that the model was made for; None where nothing says it.
        quantize: Scheme of `--quantize` that the plan stands on; "" for none.
        at_once: Tokens of one pass that the plan stands on; 0 for none.

    Raises:
        PlacementError: vLLM cannot follow the placement, in one line with the reason.
    """
    request = request_of(graph)
    if request is None:
        raise PlacementError(
            "vLLM is told a longest context, for which the plan needs caches: place the model with "
            "--generate prompt=2048,new=256"
        )
    row = layer_row(graph)
    ranks, partition = _stretches(graph, placement, cluster, row)
    share = min(_usable(cluster, d) for d in ranks)
    moved = _tied_bytes(graph, placement, row, ranks)
    tokens = []
    for d in ranks:
        mine = graph.weight_holders(np.flatnonzero(placement.device == d))
        cache = int(graph.cache_bytes[mine].sum())
        held = int(peak_bytes[d]) - cache + (moved if d == ranks[-1] else 0)
        room = share * cluster.devices[d].total_bytes - held
        per_token = cache / request.held / request.batch
        tokens.append(room / per_token if per_token else math.inf)
    planned = request.held
    if min(tokens) < planned:
        raise PlacementError(
            f"vLLM takes one share of memory of all GPUs, {share:.0%} here, which leaves cache for "
            f"{max(int(min(tokens)), 0)} tokens of context, and the plan is for {planned}; limit "
            "each GPU to a like share (--max-memory, --reserve), or ask for less"
        )
    # A model of nothing but states has a cache that does not grow.
    most = min(*tokens, max(planned, longest) if longest else math.inf)
    most = planned if math.isinf(most) or request.context else most
    numbers = cluster.accelerator_numbers
    gpus = tuple(int(numbers[d] or 0) for d in ranks)
    return VllmOptions(partition, gpus, share, int(most), quantize, at_once)


def _stretches(
    graph: OpGraph, placement: Placement, cluster: Cluster, row: LayerRow
) -> tuple[list[int], tuple[int, ...]]:
    """Device of each rank, and its number of layers."""
    where: dict[int, int] = {}
    names = cluster.device_names
    for op in row.fixed.tolist():
        d, layer = int(placement.device[op]), int(row.layer[op])
        if is_offload(cluster.devices[d]) or cluster.devices[d].is_cpu:
            raise _cannot(f"{graph.scope[op]!r} lies on {names[d]!r}, and it computes on GPUs")
        if 0 <= layer < row.num_layers and where.setdefault(layer, d) != d:
            raise _cannot(f"layer {layer} lies on {names[where[layer]]!r} and on {names[d]!r}")
    order = [where[layer] for layer in range(row.num_layers)]
    ranks = [d for i, d in enumerate(order) if i == 0 or order[i - 1] != d]
    if len(set(ranks)) < len(ranks):
        again = next(d for i, d in enumerate(ranks) if d in ranks[:i])
        raise _cannot(f"{names[again]!r} has two stretches of layers, and a rank has one")
    tied = _tied(graph, row)
    for op in row.fixed.tolist():
        layer, end = int(row.layer[op]), ranks[0] if row.layer[op] < 0 else ranks[-1]
        if not 0 <= layer < row.num_layers and placement.device[op] != end and op not in tied:
            raise _cannot(
                f"{graph.scope[op]!r} lies on {names[int(placement.device[op])]!r}, and it is with "
                f"the {'first' if layer < 0 else 'last'} layers, on {names[end]!r}"
            )
    return ranks, tuple(order.count(d) for d in ranks)


def _tied(graph: OpGraph, row: LayerRow) -> set[int]:
    """Ops behind the layers whose weight is one of those before them: the last rank has a copy."""
    before = set(graph.weight_id[row.fixed[row.layer[row.fixed] < 0]].tolist())
    behind = row.fixed[row.layer[row.fixed] == row.num_layers]
    return {int(op) for op in behind if int(graph.weight_id[op]) in before}


def _tied_bytes(graph: OpGraph, placement: Placement, row: LayerRow, ranks: Sequence[int]) -> int:
    """Bytes of the copies that the plan does not count."""
    copies = {
        int(graph.weight_id[op]): int(graph.weight_bytes[op])
        for op in _tied(graph, row)
        if placement.device[op] != ranks[-1]
    }
    return sum(copies.values())


def with_one_share(cluster: Cluster) -> Cluster:
    """The cluster whose GPUs have the memory that vLLM takes of each: one share of all for all."""
    gpus = [d for d, device in enumerate(cluster.devices) if not device.is_cpu]
    share = min((_usable(cluster, d) for d in gpus), default=1.0)
    devices = list(cluster.devices)
    for d in gpus:
        total_bytes = devices[d].total_bytes
        usable_bytes = min(int(share * total_bytes), devices[d].memory_bytes)
        if total_bytes < UNLIMITED_BYTES and usable_bytes > 0:
            devices[d] = replace(
                devices[d], memory_bytes=usable_bytes, reserve_bytes=total_bytes - usable_bytes
            )
    return replace(cluster, devices=tuple(devices))


def _usable(cluster: Cluster, d: int) -> float:
    """The share of a GPU's memory that its reserve leaves, in whole percents."""
    device = cluster.devices[d]
    return math.floor(100 * device.memory_bytes / device.total_bytes) / 100


def _cannot(why: str) -> PlacementError:
    return PlacementError(
        f"vLLM cannot follow this plan: {why}; place the model again with --for vllm"
    )


def export_vllm(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
    *,
    peak_bytes: Int[np.ndarray, "D"],
    longest: int | None = None,
    quantize: str = "",
    at_once: int = 0,
) -> list[Path]:
    """Write `vllm.json`, which says why each option is there, and environment and arguments as one
    line each for a shell; see `vllm_options`."""
    options = vllm_options(graph, placement, cluster, peak_bytes, longest, quantize, at_once)
    environment: Mapping[str, str] = options.environment()
    document = {
        "options": options, "environment": environment, "arguments": options.arguments(),
        "why": options.why(),
    }  # fmt: skip
    lines = {
        "environment.txt": " ".join(f"{name}={value}" for name, value in environment.items()),
        "arguments.txt": shlex.join(options.arguments()),
    }
    with new_contents(output, "export to vllm", overwrite) as folder:
        (folder / "vllm.json").write_bytes(indented_json(document) + b"\n")
        for name, line in lines.items():
            (folder / name).write_text(line + "\n")
    return [output / name for name in ("vllm.json", *lines)]
