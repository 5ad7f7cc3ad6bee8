"""A placement as a layout of vLLM: its parallel sizes, layers of each stage, the longest context.

vLLM cuts a decoder's row of layers into one stretch a stage (`get_pp_indices` of its
`vllm/distributed/utils.py`): `VLLM_PP_LAYER_PARTITION` says how many layers each has. GPUs are
taken in the order of `CUDA_VISIBLE_DEVICES`: those that divide a stage follow each other, then the
stages of a copy, then the copies (`initialize_model_parallel` of
`vllm/distributed/parallel_state.py`). Copies within one server (`--data-parallel-size`) are apart
for dense models alone: those of a mixture divide its experts among all of their GPUs and go
through them in step (vLLM's page on data parallel deployment), so that copies with experts of
their own are servers of their own. The first stage holds what comes before the layers, the last
what comes behind them. One share of memory holds for all GPUs (vllm-project/vllm#49816), and the
rank with the fewest blocks of cache decides for all (vllm-project/vllm#6115).
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.cluster.machines import machines, numbers_on_machine
from gdp.cluster.table import has_bfloat16
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import Request
from gdp.importers.spec import ModelSpec
from gdp.methods.chain import LayerRow, layer_row
from gdp.ops.rule import EXPERTS
from gdp.placement.placement import DraftModel, Placement
from gdp.splits.members import held_graphs
from gdp.targets.vllm.rules import BITSANDBYTES_LEFT, TRITON, VLLM

UNTRIED = "vLLM was not run with this: the form is that of its source and documentation"
QUANTIZED_WHEN_LOADED = {"fp8": "fp8", "nf4": "bitsandbytes", "nf4-double": "bitsandbytes"}
"""Value of `--quantization` for schemes of `--quantize` that vLLM applies to weights of 16 bits; of
the others it reads checkpoints that are stored so."""
FIRST_PORT = 8000
"""Of several servers on one machine; the further ones take those that follow."""
FURTHER_PORTS: Mapping[str, int] = {"": 0, "prefill": 100, "decode": 200}
"""Of servers that serve a part of each request, beyond `FIRST_PORT`."""
SENDS_CACHES = (
    "--kv-transfer-config.kv_connector", "NixlConnector",
    "--kv-transfer-config.kv_role", "kv_both",
)  # fmt: skip
"""Of vLLM's connectors the one that it documents for groups of unlike sizes; a key each instead of
JSON, whose quotes a shell would keep where arguments come from a file."""
SIDE_PORT, MOST_GPUS = 5600, 8
"""First port on which servers tell each other where their caches are, and ports of each."""
ADDRESSES = "put the address of a machine in the place of its name"
_DRAFT = re.compile(r"(?:hf:)?+(?!-)([^\s?]+)(?:\?\S*)?")
"""A model that drafts. Arguments are split at spaces, and none may be a flag of its own."""


@dataclass(frozen=True)
class VllmOptions:
    """Environment and arguments of `vllm serve`."""

    partition: tuple[int, ...]  # layers of each stage
    gpus: tuple[int, ...]  # by number in the order of the PCI bus: copies, their stages, members
    gpu_memory_utilization: float
    max_model_len: int  # tokens
    quantize: str = ""  # scheme of `--quantize` that the plan stands on; "": weights as they are
    at_once: int = 0  # tokens of one pass that the plan has memory for; 0 where it says none
    tensor: int = 1  # GPUs that divide each stage
    data: int = 1  # copies of the model
    experts: bool = False  # whole experts on each GPU
    mixture: bool = False  # the model has experts, which copies in one server would share
    port: int = 0  # of the server; 0: vLLM's own
    role: str = ""  # "prefill" or "decode" of disaggregated serving
    draft: DraftModel | None = None
    machines: tuple[str, ...] = ()  # of each GPU; () where the cluster has one
    node: int = 0  # among the machines of a server
    dtype: str = ""  # of weights; "": vLLM's own choice
    mixed: bool = False  # GPUs are of before and after Ampere, which have kernels of their own
    kind: str = ""  # of quantisation of the weights
    other_words: bool = False  # the model that drafts has a vocabulary of another size
    kv_cache_dtype: str = ""  # of `CACHE_TYPES`, where the plan stands on one

    @property
    def servers(self) -> "tuple[VllmOptions, ...]":
        """The options of each server: one, or one for each copy of a mixture, of groups between
        which caches are sent, and of copies on several machines."""
        first = FIRST_PORT + FURTHER_PORTS[self.role]
        apart = self.mixture or len(set(self.machines)) > 1
        if not self.role and (self.data < 2 or not apart):
            return (self,)
        size = len(self.gpus) // self.data
        return tuple(
            replace(
                self, gpus=self.gpus[k * size : (k + 1) * size], data=1, port=first + k,
                machines=self.machines[k * size : (k + 1) * size],
            )
            for k in range(self.data)
        )  # fmt: skip

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines of a server, in the order of its ranks."""
        return tuple(dict.fromkeys(self.machines))

    @property
    def commands(self) -> "tuple[VllmOptions, ...]":
        """The options of each command: one for each machine of each server."""
        return tuple(
            replace(server, node=node)
            for server in self.servers for node in range(max(1, len(server.nodes)))
        )  # fmt: skip

    def command(self) -> dict[str, Any]:
        """Environment and arguments, with the machine on which they are for."""
        where = {"machine": self.nodes[self.node]} if self.machines else {}
        return where | {"environment": self.environment(), "arguments": self.arguments()}

    def visible(self) -> str:
        """Numbers of the GPUs of this machine, as `CUDA_VISIBLE_DEVICES` lists them."""
        at = self.machines or ("",) * len(self.gpus)
        here = self.nodes[self.node] if self.machines else ""
        return ",".join(str(gpu) for gpu, m in zip(self.gpus, at, strict=True) if m == here)

    def environment(self) -> dict[str, str]:
        """Variables by name."""
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.visible()}
        parts = ",".join(map(str, self.partition))
        order |= {"VLLM_PP_LAYER_PARTITION": parts} if len(self.partition) > 1 else {}
        if self.role:
            # A server takes one of these ports for each of its GPUs at most.
            side = SIDE_PORT + MOST_GPUS * (self.port - FIRST_PORT)
            order |= {"UCX_NET_DEVICES": "all", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
            if self.machines:
                order["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.nodes[self.node]
        return order

    def arguments(self) -> list[str]:
        """Arguments behind `vllm serve MODEL`."""
        method = QUANTIZED_WHEN_LOADED.get(self.quantize)
        return [
            "--pipeline-parallel-size", str(len(self.partition)),
            *(["--tensor-parallel-size", str(self.tensor)] if self.tensor > 1 else []),
            *(["--data-parallel-size", str(self.data)] if self.data > 1 else []),
            *(["--enable-expert-parallel"] if self.experts else []),
            "--gpu-memory-utilization", f"{self.gpu_memory_utilization:.2f}",
            "--max-model-len", str(self.max_model_len),
            *(["--max-num-batched-tokens", str(self.at_once)] if self.at_once else []),
            *(["--quantization", method] if method else []),
            *(["--kv-cache-dtype", self.kv_cache_dtype] if self.kv_cache_dtype else []),
            *(["--dtype", self.dtype] if self.dtype else []),
            *(["--attention-backend", TRITON] if self.mixed else []),
            *(["--port", str(self.port)] if self.port and not self.node else []),
            *(self._of_several_machines() if len(self.nodes) > 1 else []),
            *(SENDS_CACHES if self.role else []),
            *([] if self.draft is None else self._drafting(self.draft)),
        ]  # fmt: skip

    def _of_several_machines(self) -> list[str]:
        """Arguments by which the processes of a server find each other; those behind the first
        answer no requests."""
        return [
            "--nnodes", str(len(self.nodes)), "--node-rank", str(self.node),
            "--master-addr", self.nodes[0], *(["--headless"] if self.node else []),
        ]  # fmt: skip

    def _drafting(self, draft: DraftModel) -> list[str]:
        """Arguments of speculative decoding."""
        name = draft_name(draft)
        method = QUANTIZED_WHEN_LOADED.get(scheme_of(draft))
        return [
            "--speculative-config.method", "draft_model", "--speculative-config.model", name,
            "--speculative-config.num_speculative_tokens", str(draft.tokens),
            "--speculative-config.draft_tensor_parallel_size", str(self.tensor),
            *([] if method is None else ["--speculative-config.quantization", method]),
            *(["--speculative-config.use_heterogeneous_vocab", "true"] if self.other_words else []),
        ]  # fmt: skip

    def why(self) -> dict[str, str]:
        """A sentence for each of them."""
        reasons = {
            "CUDA_DEVICE_ORDER": "numbers are those of nvidia-smi, not those of the fastest first",
            "CUDA_VISIBLE_DEVICES": "ranks take these GPUs in this order",
            "VLLM_PP_LAYER_PARTITION": "so many layers in each stage",
            "--pipeline-parallel-size": "stages of the plan, one after the other",
            "--gpu-memory-utilization": "the share that the fullest reserve leaves; vLLM knows one "
            "for all GPUs",
            "--max-model-len": "the context that was asked for, or the longest one whose cache has "
            "room on every GPU beside its weights, of one sequence, within what the model was made "
            "for",
            "UCX_NET_DEVICES": "caches go over whatever links there are",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "servers tell each other there where their caches are",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "others reach it there from their machines: "
            f"{ADDRESSES}",
            "status": UNTRIED,
        }  # fmt: skip
        if self.at_once:
            reasons["--max-num-batched-tokens"] = (
                "prompts are computed in chunks of so many tokens, for whose tensors the plan has "
                "room"
            )
        if self.kv_cache_dtype:
            reasons["--kv-cache-dtype"] = "type of the keys and values that the plan has room for"
        if self.quantize in QUANTIZED_WHEN_LOADED:
            reasons["--quantization"] = (
                f"the plan stands on weights stored as {self.quantize} (--quantize)"
            )
        elif self.quantize:
            reasons["model"] = (
                f"the plan stands on weights stored as {self.quantize} (--quantize), which vLLM "
                "does not make itself: serve a checkpoint that is stored so, which it recognises"
            )
        if self.kind == "bitsandbytes":
            reasons["plugin"] = (
                f"vLLM has bitsandbytes in {VLLM.plugins[self.kind]} since {BITSANDBYTES_LEFT}: "
                f"pip install {VLLM.plugins[self.kind]} beside it"
            )
        if self.dtype:
            reasons["--dtype"] = (
                "the type that was planned, which all GPUs compute: vLLM would ask the first one "
                "of each process alone"
            )
        if self.mixed:
            reasons["--attention-backend"] = (
                "the kernels that all these GPUs have: vLLM would take those of the first one"
            )
        if self.tensor > 1:
            reasons["--tensor-parallel-size"] = (
                "so many GPUs divide the heads and columns of each layer"
            )
        if self.experts:
            reasons["--enable-expert-parallel"] = "each of these has whole experts"
        if self.draft is not None:
            reasons["--speculative-config"] = (
                "a small model drafts so many tokens a pass, on the same GPUs and divided alike; "
                "its memory is part of --gpu-memory-utilization, and --max-model-len counts the "
                "caches of the large model alone: lower it where vLLM says so"
            )
            if self.other_words:
                reasons["use_heterogeneous_vocab"] = (
                    "the models have vocabularies of other sizes, which vLLM refuses without it "
                    "(`verify_equal_vocab_size_if_draft_model`); it drafts greedily by the words "
                    "that both have"
                )
            scheme = scheme_of(self.draft)
            if scheme and scheme not in QUANTIZED_WHEN_LOADED:
                reasons["draft"] = (
                    f"the plan stands on a small model stored as {scheme}, which vLLM does not "
                    "make itself: name a checkpoint that is stored so"
                )
        if self.role:
            reasons["--kv-transfer-config"] = (
                f"disaggregated serving: these GPUs {self.role}, and KV caches are "
                "sent between them (NixlConnector does not tell producers from consumers)"
            )
            reasons["servers"] = (
                "a copy of the model each, behind a proxy that sends a request to a prefill "
                "server, then to a decode server"
            )
        elif len(self.servers) > 1:
            reasons["servers"] = (
                "copies of the model, which take requests in turn: a server each behind a balancer"
                + (
                    ", as those of one server (--data-parallel-size) would share their experts"
                    if self.mixture else ""
                )
            )  # fmt: skip
        elif self.data > 1:
            reasons["--data-parallel-size"] = "copies of the model, which take requests in turn"
        if any(len(own.nodes) > 1 for own in self.servers):
            reasons["--nnodes"] = (
                "the GPUs are on so many machines: start a line on each, with its own environment; "
                f"{ADDRESSES}"
            )
        given = self.commands[0].environment()
        return {k: v for k, v in reasons.items() if not k.isupper() or k in given}


def draft_name(draft: DraftModel) -> str:
    """Name or path of a draft model as an argument; raises `PlacementError` if it is not a single
    word."""
    name = _DRAFT.fullmatch(draft.model)
    if name is None:
        raise PlacementError(
            "the name of a model that drafts must have no spaces and not begin with '-', got "
            f"{draft.model!r}"
        )
    return name[1]


def scheme_of(draft: DraftModel) -> str:
    """Quantisation scheme of a draft model's weights; "" for none."""
    scheme = ModelSpec.of(draft.model).options.get("quantize", "")
    return "" if scheme == "none" else scheme


def vllm_options(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    peak_bytes: Int[np.ndarray, "D"],
    longest: int | None = None,
    quantize: str = "",
    at_once: int = 0,
    role: str = "",
    draft: DraftModel | None = None,
    dtype: str = "",
    kind: str = "",
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
        role: "prefill" or "decode" of disaggregated serving; "" for both.
        draft: A small model that drafts tokens.
        dtype: Of the weights, where the plan stands on one; "" for vLLM's own choice.
        kind: Kind of quantisation of the weights (`gdp.targets.engine.kind_of`).

    Raises:
        PlacementError: vLLM cannot follow the placement, in one line with the reason.
    """
    request = graph.request
    if request is None:
        raise PlacementError(
            "vLLM is told a longest context, for which the plan needs caches: place the model with "
            "--generate prompt=2048,new=256"
        )
    row = layer_row(graph)
    leads, partition = _stretches(graph, placement, cluster, row)
    members, tensor, data = _gpus_of(placement, leads)
    at = machines(cluster)
    used = [
        d
        for group in members
        for d in sorted(group, key=lambda d: (at[d] != at[group[0]], at[d], d))
    ]
    share = min(_usable(cluster, d) for d in used)
    held = held_graphs(graph, placement)[leads[0]]
    moved = _tied_bytes(held, placement, row, leads)
    room_bytes = [
        share * min(cluster.devices[d].total_bytes for d in group)
        - int(peak_bytes[list(group)].max()) - moved * (lead == leads[-1])
        for group, lead in zip(members, leads * data, strict=True)
    ]  # fmt: skip
    room = _context_of(held, placement, request, leads * data, room_bytes)
    planned = request.held
    if room < planned:
        raise PlacementError(
            f"vLLM takes one share of memory of all GPUs, {share:.0%} here, which leaves cache for "
            f"{max(int(room), 0)} tokens of context, and the plan is for {planned}; limit "
            "each GPU to a like share (--max-memory, --reserve), or ask for less"
        )
    # A model of nothing but states has a cache that does not grow.
    most = min(room, max(planned, longest) if longest else math.inf)
    most = planned if math.isinf(most) or request.context else most
    numbers = numbers_on_machine(cluster)
    several = len({at[d] for d, own in enumerate(cluster.devices) if not own.is_cpu}) > 1
    return VllmOptions(
        partition, tuple(int(numbers[d] or 0) for d in used), share, int(most), quantize, at_once,
        tensor, data, any(split.experts for split in placement.splits),
        bool(graph.has_kernel(EXPERTS).any()), role=role, draft=draft,
        machines=tuple(cluster.device_names[at[d]] for d in used) if several else (),
        dtype=dtype, mixed=len({has_bfloat16(cluster.devices[d]) for d in used}) > 1, kind=kind,
    )  # fmt: skip


def _context_of(
    held: OpGraph, placement: Placement, request: Request, leads: Sequence[int],
    room_bytes: Sequence[float],
) -> float:  # fmt: skip
    """Tokens of the longest context whose caches have room in every stage.

    Args:
        held: The graph as GPUs hold it.
        placement: Of the whole one.
        request: That it is of.
        leads: First GPU of each stage of each copy.
        room_bytes: That each of these has left beside the caches that were planned.
    """
    longest = math.inf
    for lead, left in zip(leads, room_bytes, strict=True):
        mine = held.weight_holders(np.flatnonzero(placement.device == lead))
        cache = int(held.cache_bytes[mine].sum())
        if cache:
            of_token = cache / request.held / request.batch
            longest = min(longest, (left + cache) / of_token)
    return longest


def _gpus_of(placement: Placement, leads: Sequence[int]) -> tuple[list[tuple[int, ...]], int, int]:
    """(GPUs of every stage of every copy, GPUs of a stage, copies) from the first GPU of each
    stage."""
    copies = {team[0]: team for team in placement.teams}
    members = {split.devices[0]: split.devices for split in placement.splits}
    rows = [copies.get(lead, (lead,)) for lead in leads]
    groups = [[members.get(first, (first,)) for first in row] for row in rows]
    sizes = {len(group) for row in groups for group in row}
    modes = {split.experts for split in placement.splits}
    if not all(split.is_even for split in placement.splits):
        raise _cannot("GPUs have equal shares of a layer, and those of the plan are not")
    if len(sizes) > 1 or len({len(row) for row in rows}) > 1 or len(modes) > 1:
        raise _cannot("all its stages are divided and copied alike, and those of the plan are not")
    data = len(rows[0])
    return [row[copy] for copy in range(data) for row in groups], sizes.pop(), data


def _stretches(
    graph: OpGraph, placement: Placement, cluster: Cluster, row: LayerRow
) -> tuple[list[int], tuple[int, ...]]:
    """Device of each rank, and its number of layers."""
    where: dict[int, int] = {}
    names = cluster.device_names
    for op in row.fixed.tolist():
        d, layer = int(placement.device[op]), int(row.layer[op])
        if cluster.streams[d] or cluster.is_cpu[d]:
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
    """The cluster whose GPUs have the memory that vLLM takes of each: one share of all for all that
    compute."""
    share = min((_usable(cluster, d) for d in cluster.gpus), default=1.0)
    devices = list(cluster.devices)
    for d in cluster.gpus:
        total_bytes = devices[d].total_bytes
        usable_bytes = min(int(share * total_bytes), devices[d].memory_bytes)
        if total_bytes < UNLIMITED_BYTES and usable_bytes > 0:
            devices[d] = replace(
                devices[d], memory_bytes=usable_bytes, reserve_bytes=total_bytes - usable_bytes
            )
    return replace(cluster, devices=tuple(devices))


def by_share(cluster: Cluster) -> list[Cluster]:
    """The cluster with one share for all GPUs, then without those that leave the smallest share, as
    long as that leaves any: a GPU that is not used takes no memory from the others."""
    shares = np.full(cluster.num_devices, 1.0)
    shares[list(cluster.gpus)] = [_usable(cluster, d) for d in cluster.gpus]
    least = sorted(set(shares[list(cluster.gpus)].tolist())) or [1.0]
    return [with_one_share(cluster.idling(shares < share)) for share in least]


def _usable(cluster: Cluster, d: int) -> float:
    """The share of a GPU's memory that its reserve leaves, in whole percents."""
    device = cluster.devices[d]
    return math.floor(100 * device.memory_bytes / device.total_bytes) / 100


def _cannot(why: str) -> PlacementError:
    return PlacementError(
        f"vLLM cannot follow this plan: {why}; place the model again with --for vllm"
    )


def export_vllm(
    options: VllmOptions, output: Path, overwrite: OverwritePolicy = OWN_FILES_ONLY
) -> list[Path]:
    """Write `vllm.json`, with the reason of each option, and environment and arguments as one line
    each for a shell; a line for each copy with a separate server, and for each machine of a server.
    """
    commands = [own.command() for own in options.commands]
    return write_commands("vllm", {"options": options}, commands, options.why(), output, overwrite)


def write_commands(
    engine: str, document: Mapping[str, Any], commands: Sequence[Mapping[str, Any]],
    why: Mapping[str, str], output: Path, overwrite: OverwritePolicy,
) -> list[Path]:  # fmt: skip
    """Write `ENGINE.json`, and environment and arguments of each command as a line for a shell."""
    whole = {**document, **commands[0], "why": why}
    whole |= {"servers": commands} if len(commands) > 1 else {}
    lines = {
        "environment.txt": "\n".join(
            " ".join(f"{name}={value}" for name, value in own["environment"].items())
            for own in commands
        ),
        "arguments.txt": "\n".join(shlex.join(own["arguments"]) for own in commands),
    }
    with new_contents(output, f"export to {engine}", overwrite) as folder:
        (folder / f"{engine}.json").write_bytes(indented_json(whole) + b"\n")
        for name, line in lines.items():
            (folder / name).write_text(line + "\n")
    return [output / name for name in (f"{engine}.json", *lines)]
