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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy
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
from gdp.targets.options import (
    ADDRESSES,
    Option,
    Row,
    arguments,
    given,
    reasons,
    variables,
    write_commands,
)
from gdp.targets.vllm.rules import BITSANDBYTES_LEFT, DEPRECATED, TRITON, VLLM

UNTRIED = "vLLM was not run with this; the parser of vLLM 0.33.0 reads it"
QUANTIZED_WHEN_LOADED = {"fp8": "fp8", "nf4": "bitsandbytes", "nf4-double": "bitsandbytes"}
"""Value of `--quantization` for schemes of `--quantize` that vLLM applies to weights of 16 bits; of
the others it reads checkpoints that are stored so."""
FIRST_PORT = 8000
"""Of several servers on one machine; the further ones take those that follow."""
FURTHER_PORTS: Mapping[str, int] = {"": 0, "prefill": 100, "decode": 200}
"""Of servers that serve a part of each request, beyond `FIRST_PORT`."""
SIDE_PORT, MOST_GPUS = 5600, 8
"""First port on which servers tell each other where their caches are, and ports of each."""
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

    def variables(self) -> list[Option]:
        """Variables of the environment."""
        parts, staged = ",".join(map(str, self.partition)), len(self.partition) > 1
        # A server takes one of these ports for each of its GPUs at most.
        side = SIDE_PORT + MOST_GPUS * (self.port - FIRST_PORT)
        here = self.nodes[self.node] if self.machines else ""
        sent = (
            ("UCX_NET_DEVICES", "all", "caches go over whatever links there are"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", side,
             "servers tell each other there where their caches are"),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", here,
             f"others reach it there from their machines: {ADDRESSES}"),
        )  # fmt: skip
        return given(
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID",
             "numbers are those of nvidia-smi, not those of the fastest first"),
            ("CUDA_VISIBLE_DEVICES", self.visible(), "ranks take these GPUs in this order"),
            ("VLLM_PP_LAYER_PARTITION", staged and parts, "so many layers in each stage"),
            *(sent if self.role else ()),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Variables by name."""
        return variables(self.variables())

    def options(self) -> list[Option]:
        """Options behind `vllm serve MODEL`."""
        quantization = QUANTIZED_WHEN_LOADED.get(self.quantize)
        return given(
            ("--pipeline-parallel-size", len(self.partition),
             "stages of the plan, one after the other"),
            ("--tensor-parallel-size", self.tensor > 1 and self.tensor,
             "so many GPUs divide the heads and columns of each layer"),
            ("--data-parallel-size", self.data > 1 and self.data,
             "copies of the model, which take requests in turn"),
            ("--enable-expert-parallel", self.experts, "each of these has whole experts"),
            ("--gpu-memory-utilization", f"{self.gpu_memory_utilization:.2f}",
             "the share that the fullest reserve leaves; vLLM knows one for all GPUs"),
            ("--max-model-len", str(self.max_model_len),
             "the context that was asked for, or the longest one whose cache has room on every GPU "
             "beside its weights, of one sequence, within what the model was made for"),
            ("--max-num-batched-tokens", self.at_once,
             "prompts are computed in chunks of so many tokens, for whose tensors the plan has "
             "room"),
            ("--quantization", quantization,
             f"the plan stands on weights stored as {self.quantize} (--quantize)"),
            ("--allow-deprecated-quantization", self.kind in DEPRECATED,
             f"vLLM reads weights in {self.kind} only where it is told to"),
            ("--kv-cache-dtype", self.kv_cache_dtype,
             "type of the keys and values that the plan has room for"),
            ("--dtype", self.dtype,
             "the type that was planned, which all GPUs compute: vLLM would ask the first one of "
             "each process alone"),
            ("--attention-backend", self.mixed and TRITON,
             "the kernels that all these GPUs have: vLLM would take those of the first one"),
            ("--port", not self.node and self.port, ""),
            *(self._of_several_machines() if len(self.nodes) > 1 else ()),
            *(self._sending_caches() if self.role else ()),
            *(() if self.draft is None else self._drafting(self.draft)),
        )  # fmt: skip

    def arguments(self) -> list[str]:
        """The options as arguments."""
        return arguments(self.options())

    def _of_several_machines(self) -> tuple[Row, ...]:
        """Options by which the processes of a server find each other; those behind the first answer
        no requests."""
        return (
            ("--nnodes", len(self.nodes),
             "the GPUs are on so many machines: start a line on each, with its own environment; "
             f"{ADDRESSES}"),
            ("--node-rank", str(self.node), ""), ("--master-addr", self.nodes[0], ""),
            ("--headless", self.node > 0, ""),
        )  # fmt: skip

    def _sending_caches(self) -> tuple[Row, ...]:
        """Of vLLM's connectors the one that it documents for groups of unlike sizes; a key each
        instead of JSON, whose quotes a shell would keep where arguments come from a file."""
        return (
            ("--kv-transfer-config.kv_connector", "NixlConnector",
             f"disaggregated serving: these GPUs {self.role}, and KV caches are sent between them "
             "(NixlConnector does not tell producers from consumers)"),
            ("--kv-transfer-config.kv_role", "kv_both", ""),
        )  # fmt: skip

    def _drafting(self, draft: DraftModel) -> tuple[Row, ...]:
        """Options of speculative decoding."""
        named = "--speculative-config"
        return (
            (f"{named}.method", "draft_model",
             "a small model drafts so many tokens a pass, on the same GPUs and divided alike; its "
             "memory is part of --gpu-memory-utilization, and --max-model-len counts the caches of "
             "the large model alone: lower it where vLLM says so"),
            (f"{named}.model", draft_name(draft), ""),
            (f"{named}.num_speculative_tokens", draft.tokens, ""),
            (f"{named}.draft_tensor_parallel_size", self.tensor, ""),
            (f"{named}.quantization", QUANTIZED_WHEN_LOADED.get(scheme_of(draft)), ""),
            (f"{named}.use_heterogeneous_vocab", self.other_words and "true", ""),
        )  # fmt: skip

    def why(self) -> dict[str, str]:
        """Reasons by name, with those that belong to no option."""
        first, plugin = self.commands[0], VLLM.plugins.get(self.kind)
        scheme = "" if self.draft is None else scheme_of(self.draft)
        shared = ", as those of one server (--data-parallel-size) would share their experts"
        rows = (
            ("status", True, UNTRIED),
            ("model", self.quantize and self.quantize not in QUANTIZED_WHEN_LOADED,
             f"the plan stands on weights stored as {self.quantize} (--quantize), which vLLM does "
             "not make itself: serve a checkpoint that is stored so, which it recognises"),
            ("plugin", plugin,
             f"vLLM has {self.kind} in {plugin} since {BITSANDBYTES_LEFT}: pip install {plugin} "
             "beside it"),
            ("use_heterogeneous_vocab", self.other_words,
             "the models have vocabularies of other sizes, which vLLM refuses without it "
             "(`verify_equal_vocab_size_if_draft_model`); it drafts greedily by the words that "
             "both have"),
            ("draft", scheme and scheme not in QUANTIZED_WHEN_LOADED,
             f"the plan stands on a small model stored as {scheme}, which vLLM does not make "
             "itself: name a checkpoint that is stored so"),
            ("servers", not self.role and len(self.servers) > 1,
             "copies of the model, which take requests in turn: a server each behind a balancer"
             + shared * self.mixture),
            ("servers", self.role,
             "a copy of the model each, behind a proxy that sends a request to a prefill server, "
             "then to a decode server"),
        )  # fmt: skip
        return reasons([*first.variables(), *first.options(), *given(*rows)])


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
    graph: OpGraph, placement: Placement, cluster: Cluster, peak_bytes: Int[np.ndarray, "D"],
    longest: int | None = None,
) -> VllmOptions:  # fmt: skip
    """The options that follow from a placement of a request, without those of its question.

    Args:
        graph: Of a generation (`--generate`): its caches say what a token of context takes.
        placement: Of this graph.
        cluster: Its devices.
        peak_bytes: That each device holds at once, as simulated.
        longest: Context that the model was made for; None where nothing says it.

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
        partition, tuple(int(numbers[d] or 0) for d in used), share, int(most), tensor=tensor,
        data=data, experts=any(split.experts for split in placement.splits),
        mixture=bool(graph.has_kernel(EXPERTS).any()),
        machines=tuple(cluster.device_names[at[d]] for d in used) if several else (),
        mixed=len({has_bfloat16(cluster.devices[d]) for d in used}) > 1,
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
