r"""A placement as llama.cpp's flags: which blocks lie on which GPU, and whose experts on the CPU.

What the flags say, by `load_tensors` of llama.cpp: the input embedding stays on the CPU. The blocks
and the output layer are a row of slots; the last `--n-gpu-layers` of them are on GPUs, cut into one
stretch a GPU in proportion to `--tensor-split`. `--override-tensor PATTERN=BUFFER` moves the
tensors in whose names the regular expression is found. A block's cache lies with its block.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.cluster.machines import machine_of
from gdp.cluster.types import Cluster
from gdp.costs.offload import is_sent, offloads, sends_weights
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.ops.llamacpp import BATCH, DRAFT, PROJECTOR, UBATCH
from gdp.placement.placement import DraftModel, Placement
from gdp.splits.division import alone
from gdp.targets.llamacpp.rules import MOST_GPUS, RPC_SERVER
from gdp.targets.options import Option, Row, arguments, given, reasons
from gdp.targets.target import ExportJob, StartCommand

ARGUMENTS = "arguments.txt"
_TOKENS, _TOKEN_BYTES = "tokens", 4  # the op of GGUF graphs that holds the tokens of a pass
RPC_PORT = 50052  # llama.cpp's default
_BLOCK = re.compile(r"^blk\.(\d+)(\.experts)?$")


@dataclass(frozen=True, eq=False)
class Slots:
    """The pieces that the flags move: ops by index."""

    embedding: Int[np.ndarray, "_"]  # and what takes a token: on the CPU always
    layers: Sequence[Int[np.ndarray, "_"]]  # of each block without its experts; last: the output
    experts: Sequence[Int[np.ndarray, "_"]]  # of each slot, empty where there are none
    projector: Int[np.ndarray, "_"]  # an image encoder with a file of its own, empty without one
    draft: Int[np.ndarray, "_"]  # a model that drafts, empty without one; its embedding is:
    draft_embedding: Int[np.ndarray, "_"]  # on the CPU, too

    @property
    def parts(self) -> "list[Int[np.ndarray, '_']]":
        """Parts with a file and a device of their own."""
        return [part for part in (self.projector, self.draft) if len(part)]


@dataclass(frozen=True)
class Flags:
    """Options of llama.cpp's command line."""

    n_gpu_layers: int
    tensor_split: tuple[int, ...]  # slots of each GPU; empty where there is one GPU at most
    override_tensor: tuple[str, ...]
    ctx_size: int  # tokens of all sequences, for which the cache was planned
    cache_type: str = "f16"  # of keys and of values, as planned
    planned_tokens: int = 1  # that the plan computes at once
    op_offload: bool = True  # weights on the CPU are sent to a GPU for a prompt
    rpc: tuple[str, ...] = ()  # machines that lend devices, by the name of their processor
    # The GPUs in their order, where some are on other machines, or some divide ops among them.
    device: tuple[str, ...] = ()
    ubatch_size: int = UBATCH  # most tokens of a prompt at once
    divides: bool = False  # the GPUs compute each op together, in the proportions of the split
    flash: bool = True  # flash attention
    outputs: int = 0  # rows of logits that are reserved; 0: those of a whole micro-batch
    mmproj: str = ""  # file of the image encoder
    mmproj_device: str = ""  # GPU that encodes images; empty: the processor
    draft: DraftModel | None = None  # a small model that drafts
    draft_device: str = ""  # GPU that has it; empty: the processor

    def options(self) -> list[Option]:
        """The options in their order, as `llama-cli --help` spells them."""
        count, ubatch = self.n_gpu_layers, min(self.ubatch_size, self.ctx_size)
        return given(
            ("--fit", "off", "llama.cpp changes nothing of this plan by itself; builds from before "
             "its pull request 16653 have no such flag: leave it out there"),
            ("--n-gpu-layers", str(count),
             f"the last {count} of the blocks and the output layer lie on GPUs" if count
             else "no block lies on a GPU"),
            ("--split-mode", self.divides and "tensor", "the GPUs compute each op together; builds "
             "from before pull request 19378 have no such mode"),
            ("--rpc", ",".join(f"{name}:{RPC_PORT}" for name in self.rpc),
             "put the address of each machine in the place of its name, and start "
             f"'{RPC_SERVER} --host ADDRESS --port {RPC_PORT}' there"),
            ("--device", ",".join(self.device),
             "the GPUs in the order of the plan; names are those of 'llama-cli --list-devices': "
             "ROCm0, Vulkan0 or MTL0 in the place of CUDA0"),
            ("--tensor-split", count and ",".join(map(str, self.tensor_split)),
             "shares of heads, columns and vocabulary, in the GPUs' order" if self.divides
             else "so many of these lie on each GPU, in the GPUs' order"),
            ("--override-tensor", ",".join(self.override_tensor),
             "the experts of these blocks lie on the CPU"),
            ("--ctx-size", str(self.ctx_size),
             "tokens of all sequences together, for which the plan has cache"),
            ("--cache-type-k", self.cache_type, "the type of cached keys that was planned"),
            ("--cache-type-v", self.cache_type, "the type of cached values that was planned"),
            self._attention(),
            ("--ubatch-size", str(ubatch),
             "so many tokens of a prompt are computed at once; the plan has room for the tensors "
             f"of {min(self.planned_tokens, ubatch)}, {self._logits()}"),
            ("--batch-size", ubatch > BATCH and ubatch, "so many at once need as many in a batch"),
            ("--no-op-offload", not self.op_offload,
             "for a prompt the CPU computes with its weights sooner than they reach a GPU"),
            ("--mmproj", self.mmproj, "the image encoder, with room in the plan"),
            ("--no-mmproj-offload", self.mmproj and not self.mmproj_device,
             "images are encoded on the CPU"),
            ("--mmproj-device", self.mmproj and self.mmproj_device,
             "the GPU that encodes images; builds from before pull request 23255 have no such "
             "flag: leave it out there and set MTMD_BACKEND_DEVICE to the same name"),
            *(() if self.draft is None else self._drafting(self.draft)),
        )  # fmt: skip

    def _attention(self) -> Row:
        """Flash attention, and why."""
        if self.divides:
            return "--flash-attn", "on", "tensor splits need it"
        if not self.flash:
            return "--flash-attn", "off", "the plan has room for the scores of a micro-batch"
        return "--flash-attn", "auto", (
            "on wherever the devices have it for this cache, as the plan has no room for scores of "
            "tokens by tokens; 'on' would move attention to the CPU in silence where one lacks it "
            "(ggml-org/llama.cpp#28456)"
        )  # fmt: skip

    def _logits(self) -> str:
        """Rows of logits that the plan has room for, in words."""
        if self.outputs:
            return (
                f"and logits of {self.outputs}, as llama-server and llama-cli reserve them since "
                "pull request 23861"
            )
        return (
            "and logits of so many, as all programs but llama-server and llama-cli reserve, and "
            "these before pull request 23861"
        )

    def _drafting(self, draft: DraftModel) -> tuple[Row, ...]:
        """The options of a draft model."""
        return (
            ("--model-draft", draft.model, "a small model that drafts tokens, with room in the "
             "plan"),
            ("--spec-type", "draft-simple", "it drafts one token after the other; builds without "
             "this flag draft with any --model-draft"),
            ("--spec-draft-n-max", str(draft.tokens), "so many a pass; older builds call it "
             "--draft-max"),
            ("--gpu-layers-draft", "all" if self.draft_device else "0",
             "all of its blocks lie there" if self.draft_device else "on the CPU"),
            ("--device-draft", self.draft_device, "the GPU that has it"),
        )  # fmt: skip

    def arguments(self) -> list[str]:
        """The options as arguments of a program."""
        return arguments(self.options())


def slots_of(graph: OpGraph) -> Slots:
    """The pieces of a graph; `PlacementError` if it was not read from a GGUF file."""
    blocks: dict[tuple[int, bool], list[int]] = {}
    outer: dict[str, list[int]] = {}
    matches = {scope: _BLOCK.match(scope) for scope in set(graph.scope)}
    ops_of = enumerate(graph.scope) if any(matches.values()) else ()  # others may have many ops
    for op, scope in ops_of:
        if indices := matches[scope]:
            blocks.setdefault((int(indices[1]), indices[2] is not None), []).append(op)
        elif not graph.is_io[op]:
            # In a generation, what takes the next token stays with the embedding on the CPU.
            outer.setdefault(scope or "token_embd", []).append(op)
    projector, draft = outer.pop(PROJECTOR, []), outer.pop(DRAFT, [])
    drafts_from = outer.pop(f"{DRAFT}.token_embd", [])
    if set(outer) != {"token_embd", "output_norm", "output"} or not blocks:
        raise PlacementError(f"graph {graph.name!r} was not read from a .gguf file; llama.cpp "
                             "follows placements of such files only")  # fmt: skip
    named = _attributes(graph).get("blocks", 0)
    count = max(*(block + 1 for block, _ in blocks), int(named))

    def ops(indices: Iterable[int]) -> Int[np.ndarray, "_"]:
        return np.array(sorted(indices), dtype=np.int64)

    return Slots(
        ops(outer["token_embd"]),
        [*(ops(blocks.get((i, False), [])) for i in range(count)),
         ops(outer["output_norm"] + outer["output"])],
        [*(ops(blocks.get((i, True), [])) for i in range(count)), ops([])],
        ops(projector), ops(draft), ops(drafts_from),
    )  # fmt: skip


def flags_of(graph: OpGraph, placement: Placement, cluster: Cluster) -> Flags:
    """The flags of a placement; `PlacementError` with the reason if they cannot express it."""
    if placement.splits:
        return _divided_flags(graph, placement, cluster)
    slots, device = slots_of(graph), placement.device
    order = [0 if n is None else 1 + n for n in cluster.accelerator_numbers]
    used = {int(d) for d in device[~graph.is_io]}
    gpus = [order[d] for d in _known_gpus(cluster, used)]
    if len(cpus := [cluster.device_names[d] for d in sorted(used) if order[d] == 0]) > 1:
        raise _cannot(f"ops lie on {' and '.join(cpus)}, and llama.cpp knows one CPU")
    unified = {d for d, own in enumerate(cluster.devices) if own.is_unified and d == cluster.host}
    embeddings = np.concatenate([slots.embedding, slots.draft_embedding])
    if any(order[d] and d not in unified for d in device[embeddings]):
        raise _cannot("llama.cpp keeps token_embd on the CPU (--cluster tells CPUs from GPUs)")
    at = _device_of_slots(graph, device, slots)
    places = [order[d] for d in at]
    if places != sorted(places):
        late = next(i for i in range(1, len(places)) if places[i] < places[i - 1])
        raise _cannot(
            f"blocks are on the CPU first, then on the GPUs in their order, but block {late} on "
            f"{cluster.device_names[at[late]]!r} follows one on "
            f"{cluster.device_names[at[late - 1]]!r}"
        )
    away = []
    for block, ops in enumerate(slots.experts):
        if len(ops) and (where := _one(graph, device, ops)) != at[block]:
            if order[where]:
                raise _cannot(f"experts of block {block} are on another GPU than the block")
            away.append(block)
    counts, lent = tuple(places.count(gpu) for gpu in gpus), _lent(cluster, used)
    flags = Flags(
        sum(counts), counts if len(gpus) > 1 else (), _overrides(graph, slots, away),
        _context(graph), *_planned(graph), op_offload=_sends_weights(graph, device, cluster),
        rpc=lent.get("rpc", ()), device=lent.get("device", ()), **_asked(graph),
    )  # fmt: skip
    return _with_parts(_named(flags), graph, device, slots, cluster)


def _named(flags: Flags) -> Flags:
    """The flags with as many GPUs as `--tensor-split` has entries for, by name where there are
    more."""
    if len(flags.tensor_split) <= MOST_GPUS:
        return flags
    if any(flags.tensor_split[MOST_GPUS:]):
        raise _cannot(f"--tensor-split has {MOST_GPUS} entries at most")
    names = flags.device or tuple(f"CUDA{k}" for k in range(MOST_GPUS))
    return replace(flags, tensor_split=flags.tensor_split[:MOST_GPUS], device=names[:MOST_GPUS])


def _known_gpus(cluster: Cluster, used: Collection[int]) -> list[int]:
    """The GPUs of the host, and those of machines that lend one that computes, in their order."""
    machines = {machine_of(cluster, d) for d in (*used, cluster.host)}
    return [
        d for d, number in enumerate(cluster.accelerator_numbers)
        if number is not None and machine_of(cluster, d) in machines
    ]  # fmt: skip


def _divided_flags(graph: OpGraph, placement: Placement, cluster: Cluster) -> Flags:
    """The flags of one tensor split that computes all blocks and the output."""
    slots, device = slots_of(graph), placement.device
    split, numbers = placement.splits[0], cluster.accelerator_numbers
    blocks = np.concatenate([*slots.layers, *slots.experts])
    if len(placement.splits) > 1 or (device[blocks] != split.devices[0]).any():
        raise _cannot("GPUs divide some of the blocks, and llama.cpp divides all or none")
    if any(numbers[d] is None for d in split.devices):
        raise _cannot("a processor computes a part of each op, and llama.cpp divides among GPUs")
    embeddings = np.concatenate([slots.embedding, slots.draft_embedding])
    if any(numbers[d] is not None for d in device[embeddings]):
        raise _cannot("llama.cpp keeps token_embd on the CPU (--cluster tells CPUs from GPUs)")
    if _lent(cluster, split.devices):
        raise _cannot("GPUs of several machines divide ops")
    if split.experts:
        raise _cannot("GPUs hold whole experts, and llama.cpp divides the columns of each")
    used = [f"CUDA{numbers[d]}" for d in split.devices]
    every = sum(number is not None for number in numbers)
    flags = Flags(
        len(slots.layers), split.parts, (), _context(graph), *_planned(graph),
        device=tuple(used) if len(used) < every else (), divides=True, **_asked(graph),
    )  # fmt: skip
    return _with_parts(flags, graph, device, slots, cluster)


def _with_parts(
    flags: Flags, graph: OpGraph, device: Int[np.ndarray, "N"], slots: Slots, cluster: Cluster
) -> Flags:
    """The flags with files and devices of the image encoder and the draft model, if present."""
    used = [int(d) for d in device[~graph.is_io]]

    def home(part: Int[np.ndarray, "_"]) -> str:
        where = _one(graph, device, part)
        number = cluster.accelerator_numbers[where]
        if number is None:
            return ""
        names, at = _lent(cluster, used).get("device"), _known_gpus(cluster, used).index(where)
        return names[at] if names else f"CUDA{number}"

    if len(slots.projector):
        file = str(graph.detail[int(slots.projector[0])].attributes["file"])
        flags = replace(flags, mmproj=file, mmproj_device=home(slots.projector))
    if len(slots.draft):
        flags = replace(flags, draft=draft_of(graph), draft_device=home(slots.draft))
    return flags


def draft_of(graph: OpGraph) -> DraftModel | None:
    """The draft model of a graph, if there is one."""
    given = _attributes(graph)
    return DraftModel(str(given["draft"]), int(given["drafts"])) if "draft" in given else None


def _attributes(graph: OpGraph) -> Mapping[str, Any]:
    """Attributes of the op that takes tokens: what the model's spec says."""
    op = graph.op_index.get(_TOKENS)
    return {} if op is None else graph.detail[op].attributes


def _context(graph: OpGraph) -> int:
    """Tokens of all sequences for which there is cache."""
    request = graph.request
    if request is not None and request.context:
        return request.batch * max(1, request.requests) * request.context
    tokens = next(d.attributes["context"] for d in graph.detail if "context" in d.attributes)
    return int(tokens)  # pyright: ignore[reportArgumentType]


def _lent(cluster: Cluster, used: Collection[int]) -> dict[str, tuple[str, ...]]:
    """Machines that lend the host GPUs that compute, and the names of all GPUs of these machines
    in their order."""
    home = machine_of(cluster, cluster.host)
    gpus = [machine_of(cluster, d) for d in _known_gpus(cluster, used)]
    far = list(dict.fromkeys(machine for machine in gpus if machine != home))
    if not far:
        return {}
    # A server's devices are numbered behind those of the servers before it.
    remote = iter(f"RPC{i}" for i in range(len(gpus)))
    numbers = {(m, k): next(remote) for m in far for k in range(gpus.count(m))}
    names, seen = [], dict.fromkeys(gpus, 0)
    for machine in gpus:
        k = seen[machine]
        names.append(f"CUDA{k}" if machine == home else numbers[machine, k])
        seen[machine] += 1
    return {"rpc": tuple(cluster.device_names[m] for m in far), "device": tuple(names)}


def _sends_weights(graph: OpGraph, device: Int[np.ndarray, "N"], cluster: Cluster) -> bool:
    """False if llama.cpp would send CPU weights to a GPU for a prompt and staying is faster."""
    here = [d for d, own in enumerate(cluster.devices) if own.is_cpu]
    sent = np.isin(device, here) & is_sent(graph)
    return not (sent.any() and sends_weights(cluster)) or offloads(graph, cluster)


def _planned(graph: OpGraph) -> tuple[str, int]:
    """Type of the cache, and tokens that are computed at once."""
    held = (
        d for d, kind, other in zip(graph.detail, graph.op_types, alone(graph), strict=True)
        if kind == "Attention" and not other
    )  # fmt: skip
    kind = next((str(d.attributes["stored"]).lower() for d in held), "f16")
    ids = np.flatnonzero(graph.producer == graph.op_index.get(_TOKENS, -1))
    return kind, int(graph.tensor_bytes[ids].max(initial=_TOKEN_BYTES)) // _TOKEN_BYTES


def _asked(graph: OpGraph) -> dict[str, Any]:
    """Fields set by the graph's spec: micro-batch sizes and flash attention."""
    attributes = _attributes(graph)
    return {
        "ubatch_size": attributes.get("ubatch", UBATCH), "flash": attributes.get("flash") != "off",
        "outputs": attributes.get("outputs", 0),
    }  # fmt: skip


def _device_of_slots(graph: OpGraph, device: Int[np.ndarray, "N"], slots: Slots) -> list[int]:
    """The device of every slot; a block without ops is where the next one is."""
    at = [_one(graph, device, slots.layers[-1])]
    for ops in slots.layers[-2::-1]:
        at.append(_one(graph, device, ops) if len(ops) else at[-1])
    return at[::-1]


def _one(graph: OpGraph, device: Int[np.ndarray, "N"], ops: Int[np.ndarray, "M"]) -> int:
    devices = np.unique(device[ops])
    if len(devices) > 1:
        raise _cannot(f"ops of {graph.scope[ops[0]]!r} lie on several devices")
    return int(devices[0])


def _overrides(graph: OpGraph, slots: Slots, away: Sequence[int]) -> tuple[str, ...]:
    """One pattern for all blocks whose experts are on the CPU. No comma: it separates patterns."""
    if not away:
        return ()
    names = {graph.op_names[op].split(".", 2)[2] for block in away for op in slots.experts[block]}
    parts = "|".join(sorted(name.removeprefix("ffn_").removesuffix("_exps") for name in names))
    return (rf"^blk\.({'|'.join(map(str, away))})\.ffn_({parts})_exps\.=CPU",)


def _cannot(why: str) -> PlacementError:
    return PlacementError(
        f"llama.cpp's flags cannot say this: {why}; place the model again with --for llamacpp"
    )


def export_llamacpp(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `llamacpp.json`, with the reason of each flag, and the flags as one line of arguments
    for a shell."""
    flags = flags_of(graph, placement, cluster)
    options = flags.options()
    document = {"flags": flags, "arguments": arguments(options), "why": reasons(options)}
    with new_contents(output, "export to llamacpp", overwrite) as folder:
        (folder / "llamacpp.json").write_bytes(indented_json(document) + b"\n")
        (folder / ARGUMENTS).write_text(shlex.join(flags.arguments()) + "\n")
    return [output / "llamacpp.json", output / ARGUMENTS]


def commands(job: ExportJob) -> list[StartCommand]:
    """llama.cpp's server with the flags of a placement."""
    flags = flags_of(job.question.graph, job.placement, job.question.cluster)
    file = ModelSpec.of(job.spec).path
    return [StartCommand(shlex.join(["llama-server", "--model", file, *flags.arguments()]))]


def export(job: ExportJob) -> list[Path]:
    """Write the flags of a placement; see `export_llamacpp`."""
    return export_llamacpp(*job.plan)
