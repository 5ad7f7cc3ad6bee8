r"""A placement as llama.cpp's flags: which blocks lie on which GPU, and whose experts on the CPU.

What the flags say, by `load_tensors` of llama.cpp: the input embedding stays on the CPU. The blocks
and the output layer are a row of slots; the last `--n-gpu-layers` of them are on GPUs, cut into one
stretch a GPU in proportion to `--tensor-split`. `--override-tensor PATTERN=BUFFER` moves the
tensors in whose names the regular expression is found. A block's cache lies with its block.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.errors import PlacementError
from gdp.files.writing import OWN_FILES_ONLY, OverwritePolicy, new_contents
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement

ARGUMENTS = "arguments.txt"
_BLOCK = re.compile(r"^blk\.(\d+)(\.experts)?$")


@dataclass(frozen=True, eq=False)
class Slots:
    """The pieces that the flags move: ops by index."""

    embedding: Int[np.ndarray, "_"]
    layers: Sequence[Int[np.ndarray, "_"]]  # of each block without its experts; last: the output
    experts: Sequence[Int[np.ndarray, "_"]]  # of each slot, empty where there are none


@dataclass(frozen=True)
class Flags:
    """Options of llama.cpp's command line."""

    n_gpu_layers: int
    tensor_split: tuple[int, ...]  # slots of each GPU; empty where there is one GPU at most
    override_tensor: tuple[str, ...]
    ctx_size: int  # tokens of all sequences, for which the cache was planned

    def arguments(self) -> list[str]:
        """The options as arguments of a program."""
        arguments = ["--n-gpu-layers", str(self.n_gpu_layers)]
        if self.tensor_split and self.n_gpu_layers:
            arguments += ["--tensor-split", ",".join(map(str, self.tensor_split))]
        if self.override_tensor:
            arguments += ["--override-tensor", ",".join(self.override_tensor)]
        return [*arguments, "--ctx-size", str(self.ctx_size)]


def slots_of(graph: OpGraph) -> Slots:
    """The pieces of a graph; `PlacementError` if it was not read from a GGUF file."""
    blocks: dict[tuple[int, bool], list[int]] = {}
    outer: dict[str, list[int]] = {}
    for op, scope in enumerate(graph.scope):
        if indices := _BLOCK.match(scope):
            blocks.setdefault((int(indices[1]), indices[2] is not None), []).append(op)
        elif not graph.is_io[op]:
            outer.setdefault(scope, []).append(op)
    if set(outer) != {"token_embd", "output_norm", "output"} or not blocks:
        raise PlacementError(f"graph {graph.name!r} was not read from a .gguf file; llama.cpp "
                             "follows placements of such files only")  # fmt: skip
    count = max(block for block, _ in blocks) + 1

    def ops(indices: Iterable[int]) -> Int[np.ndarray, "_"]:
        return np.array(sorted(indices), dtype=np.int64)

    return Slots(
        ops(outer["token_embd"]),
        [*(ops(blocks.get((i, False), [])) for i in range(count)),
         ops(outer["output_norm"] + outer["output"])],
        [*(ops(blocks.get((i, True), [])) for i in range(count)), ops([])],
    )  # fmt: skip


def flags_of(graph: OpGraph, placement: Placement, cluster: Cluster) -> Flags:
    """The flags of a placement; `PlacementError` with the reason if they cannot express it."""
    slots, device = slots_of(graph), placement.device
    order = [0 if n is None else 1 + n for n in cluster.accelerator_numbers]
    gpus = range(max(order))
    used = {int(d) for d in device[~graph.is_io]}
    if len(cpus := [cluster.device_names[d] for d in sorted(used) if order[d] == 0]) > 1:
        raise _cannot(f"ops lie on {' and '.join(cpus)}, and llama.cpp knows one CPU")
    if order[int(device[slots.embedding[0]])]:
        raise _cannot("llama.cpp keeps token_embd on the CPU (--cluster tells CPUs from GPUs)")
    at = [_one(graph, device, ops) for ops in slots.layers]
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
    counts = tuple(places.count(1 + gpu) for gpu in gpus)
    context = next(d.attributes["context"] for d in graph.detail if "context" in d.attributes)
    return Flags(
        sum(counts), counts if len(gpus) > 1 else (), _overrides(graph, slots, away),
        int(context),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


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
    """Write `llamacpp.json`, and the flags as one line of arguments for a shell."""
    flags = flags_of(graph, placement, cluster)
    data = msgspec.json.encode({"flags": flags, "arguments": flags.arguments()})
    with new_contents(output, "export to llamacpp", overwrite) as folder:
        (folder / "llamacpp.json").write_bytes(msgspec.json.format(data, indent=1) + b"\n")
        (folder / ARGUMENTS).write_text(shlex.join(flags.arguments()) + "\n")
    return [output / "llamacpp.json", output / ARGUMENTS]
