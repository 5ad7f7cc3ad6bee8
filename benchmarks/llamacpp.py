"""Does llama.cpp take as long as gdp says, and are gdp's flags the best ones?

    python -m benchmarks.llamacpp [--spin 0.5] [--runs 4] [--tiny] [MODEL ...]

Cores of this machine are lent to llama.cpp by its RPC server in the place of GPUs: the processor
(core 0), `rpc0` on the same core, `rpc1` on core 1, which it shares with a spinner of fixed duty.
Models have random weights. Each is tuned (`gdp tune`), then flags are swept: `-ngl`, `-ts` and, in
mixtures, `-ot`. Predictions of the costs that were learned stand beside llama.cpp's own seconds of
prompt and decode; gdp's flags, the sweep's best and llama.cpp's default are measured in turn at the
end. Nothing else may run meanwhile. Needs llama-cpp-python, built with -DGGML_RPC=ON.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from jaxtyping import Float, Int

import gdp
from benchmarks.tables import between, geomean, head, line
from benchmarks.tune import spinning
from gdp.api.generation import generation_answer
from gdp.cluster.presets import device_preset
from gdp.cluster.types import Cluster, make_cluster
from gdp.costs.base import CostModel
from gdp.graph.op_graph import OpGraph
from gdp.importers.gguf_header import import_gguf
from gdp.measure.measuring import Measured, Measuring, measure
from gdp.measure.statistics import MIN_BLOCKS, Estimate, estimate
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.llamacpp.flags import Slots, flags_of, slots_of
from gdp.targets.llamacpp.run import (
    RPC_KIND,
    LlamaContender,
    Tokens,
    Worker,
    cores_of,
    default_arguments,
)

VOCABULARY = 8192
DRAWN_ROWS = 256
"""Rows of a matrix that are drawn; the others repeat them, which no kernel can tell."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model of llama's architecture."""

    name: str
    kind: str  # how products are stored
    layers: int
    width: int
    inner: int  # of the feed-forward, of each expert in a mixture
    heads: int
    key_heads: int
    experts: int = 0
    used: int = 2

    @property
    def parameters(self) -> float:
        """Billions of weights."""
        keys = self.width * self.key_heads // self.heads
        block = 2 * self.width * (self.width + keys)
        block += 3 * self.width * self.inner * max(self.experts, 1)
        return (self.layers * block + 2 * VOCABULARY * self.width) / 1e9


SIZES = (
    ModelSize("dense", "F16", 12, 768, 2048, 12, 4),
    ModelSize("dense", "Q8_0", 16, 1024, 4096, 16, 4),
    ModelSize("dense", "Q4_K", 16, 1536, 6144, 12, 4),
    ModelSize("mixture", "Q8_0", 12, 768, 1024, 12, 4, experts=8),
    ModelSize("mixture", "Q4_K", 12, 1024, 1536, 16, 4, experts=8),
)
TINY = ModelSize("dense", "Q8_0", 4, 256, 512, 4, 2)
"""To see whether all works."""


def packed(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random weights as they are stored: quantised by the gguf package, or for Q4_K, to which it
    cannot quantise, random blocks of that form."""
    gguf = import_gguf()
    stored = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    columns, total = shape[-1], int(np.prod(shape[:-1]))
    count = min(DRAWN_ROWS, total)
    if kind == "Q4_K":
        drawn = rng.integers(0, 256, (count, columns // block, size), dtype=np.uint8)
        scale = np.float16(0.02 / columns**0.5)
        # The two scales of a block: of its weights, which are 0 to 15 times 0 to 63, and of the
        # minima that are taken from them.
        drawn[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
        drawn = drawn.reshape(count, -1)
    else:
        plain = rng.standard_normal((count, columns), dtype=np.float32) / np.float32(columns**0.5)
        drawn = gguf.quants.quantize(plain, stored).view(np.uint8)
    whole = np.tile(drawn, (-(-total // count), 1))[:total]
    return np.ascontiguousarray(whole).reshape(*shape[:-1], -1)


def write_model(path: Path, size: ModelSize, seed: int = 0, hollow: bool = False) -> Path:
    """Write the file of a model with weights drawn with a seed; a hollow one, which takes no room
    on a disk, has none."""
    gguf, rng = import_gguf(), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, size)

    def add(name: str, draw: Callable[[], np.ndarray], shape: tuple[int, ...], kind: str) -> None:
        stored = gguf.GGMLQuantizationType[kind]
        if not hollow:
            writer.add_tensor(name, draw(), raw_dtype=stored)
            return
        block, bytes_ = gguf.GGML_QUANT_SIZES[stored]
        held = (*shape[:-1], shape[-1] // block * bytes_)
        writer.add_tensor_info(name, held, np.dtype(np.uint8), int(np.prod(held)), raw_dtype=stored)

    def product(name: str, *shape: int) -> None:
        add(f"{name}.weight", lambda: packed(rng, size.kind, shape), shape, size.kind)

    def norm(name: str) -> None:
        add(f"{name}.weight", lambda: np.ones(size.width, np.float32), (size.width,), "F32")

    def router(name: str, shape: tuple[int, int]) -> None:
        add(name, lambda: rng.standard_normal(shape, dtype=np.float32), shape, "F32")

    keys = size.width * size.key_heads // size.heads
    product("token_embd", VOCABULARY, size.width)
    norm("output_norm")
    product("output", VOCABULARY, size.width)
    for layer in range(size.layers):
        at, many = f"blk.{layer}.", (size.experts,) if size.experts else ()
        norm(at + "attn_norm")
        norm(at + "ffn_norm")
        product(at + "attn_q", size.width, size.width)
        product(at + "attn_k", keys, size.width)
        product(at + "attn_v", keys, size.width)
        product(at + "attn_output", size.width, size.width)
        if size.experts:
            router(f"{at}ffn_gate_inp.weight", (size.experts, size.width))
        end = "_exps" if size.experts else ""
        product(f"{at}ffn_gate{end}", *many, size.inner, size.width)
        product(f"{at}ffn_up{end}", *many, size.inner, size.width)
        product(f"{at}ffn_down{end}", *many, size.width, size.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if hollow:
        writer.write_ti_data_to_file()
        whole = sum(
            t.nbytes + writer.data_alignment for own in writer.tensors for t in own.values()
        )
        os.truncate(path, path.stat().st_size + whole)
    else:
        writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, size: ModelSize) -> None:
    """The fields of the header."""
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.layers)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.key_heads)
    writer.add_feed_forward_length(size.inner)
    writer.add_context_length(4096)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    if size.experts:
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(size.used)


PROMPT, NEW = 64, 16
SHARES = (1.0, 0.75, 0.5, 0.0)
"""Of the layers on lent cores, that the first of the two gets."""


def lent_cores() -> Cluster:
    """The processor's first core, and two cores that are lent, as datasheets have them."""
    core = replace(device_preset("cpu-core", "cpu"), dispatch_s=1.5e-4)
    kinds = (RPC_KIND, f"{RPC_KIND}-shared")
    lent = [replace(core, name=f"rpc{i}", kind=k, dispatch_s=3e-4) for i, k in enumerate(kinds)]
    return make_cluster(
        "lent cores", [core, *lent], default_bytes_per_s=2e9, default_latency_s=1e-4
    )


def swept(graph: OpGraph, slots: Slots, cluster: Cluster) -> dict[str, Placement]:
    """Placements by the flags that say them."""
    count, found = len(slots.layers), {}
    for on_gpus, first in itertools.product((0, count // 4, count // 2, count), SHARES):
        split = count - on_gpus + round(on_gpus * first)
        device = np.zeros(graph.num_ops, np.int64)
        for slot in range(count - on_gpus, count):
            device[slots.layers[slot]] = device[slots.experts[slot]] = 1 if slot < split else 2
        for away in (0, 2) if on_gpus and any(map(len, slots.experts)) else (0,):
            own = device.copy()
            for ops in slots.experts[::away] if away else ():
                own[ops] = 0
            placement = make_placement(graph, cluster, own)
            flags = flags_of(graph, placement, cluster)
            told = f"-ngl {flags.n_gpu_layers} -ts {','.join(map(str, flags.tensor_split))}"
            found[told + (" -ot" if flags.override_tensor else "")] = placement
    return found


@dataclass(frozen=True)
class Timed:
    """Predicted and measured tokens per second of both phases."""

    flags: str
    predicted: tuple[float, float]
    measured: tuple[Estimate, Estimate]

    @property
    def off(self) -> tuple[float, float]:
        """Shares by which the predictions missed."""
        both = zip(self.predicted, self.measured, strict=True)
        return tuple(abs(p / m.value - 1) for p, m in both)  # pyright: ignore[reportReturnType]

    @property
    def request_s(self) -> float:
        """Measured seconds of a request."""
        return PROMPT / self.measured[0].value + NEW / self.measured[1].value


@dataclass(eq=False)
class Bench:
    """One model under one worker."""

    path: Path
    graph: OpGraph
    cluster: Cluster
    worker: Worker
    costs: CostModel

    def contender(self, name: str, placement: Placement | None) -> LlamaContender:
        """A placement, or llama.cpp's default, loaded under a name."""
        words = (
            default_arguments(self.graph, self.cluster) if placement is None
            else flags_of(self.graph, placement, self.cluster).arguments()
        )  # fmt: skip
        self.worker.ask("load", name, model=str(self.path), arguments=words, ends=[], seed=0)
        return LlamaContender(self.worker, name, Tokens(PROMPT, NEW, 0), [])

    def predicted(self, placement: Placement) -> tuple[float, float]:
        """Tokens per second of the prompt and of decoding."""
        question = Question(self.graph, self.cluster, costs=self.costs)
        answer = generation_answer(question, placement, solve.simulate(question, placement))
        assert answer is not None
        return PROMPT / answer.first_token_s, answer.tokens_per_s

    def timed(self, flags: str, placement: Placement) -> Timed:
        """Predicted beside measured, of a sample for each block of an interval."""
        own = self.contender("swept", placement)
        for _ in range(MIN_BLOCKS + 1):
            answer = self.worker.ask("sample", "swept", tokens=own.tokens)
            own.phases.append((answer["prompt_s"], answer["steps_s"]))
        reads, steps = (np.array(phase) for phase in zip(*own.phases[1:], strict=True))
        return Timed(
            flags, self.predicted(placement),
            (estimate((PROMPT / reads).tolist()), estimate((NEW / steps).tolist())),
        )  # fmt: skip


def benched(path: Path, runs: int, seconds: float) -> tuple[list[Timed], dict[str, Measured]]:
    """The sweep, and gdp's flags, the sweep's best and llama.cpp's default measured in turn."""
    spec, cluster = gdp.Generation(path, prompt=PROMPT, new=NEW), lent_cores()
    tuned = gdp.tune(spec, cluster, runs=runs, keep=False, measuring=Measuring(seconds=seconds))
    graph, cores = gdp.load(spec), cores_of(cluster)
    worker = Worker(cores[0], cores[1:])
    try:
        bench = Bench(path, graph, cluster, worker, tuned.costs)
        placements = swept(graph, slots_of(graph), cluster)
        rows = [bench.timed(flags, placement) for flags, placement in placements.items()]
        best = min(rows, key=lambda row: row.request_s)
        finals = {"gdp": tuned.placement, best.flags: placements[best.flags], "default": None}
        loaded = {name: bench.contender(name, placement) for name, placement in finals.items()}
        return rows, measure(loaded, Measuring(seconds=2 * seconds))
    finally:
        worker.close()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    ranks: Int[np.ndarray, "2 K"] = np.argsort(np.argsort([a, b]))
    return float(np.corrcoef(ranks)[0, 1])


def told(name: str, rows: Sequence[Timed], finals: dict[str, Measured]) -> Iterator[str]:
    """Lines of a model's table."""
    yield f"\n## {name}\n"
    yield head(
        "flags | prompt tokens/s: predicted | measured | off | decode: predicted | measured | off"
    )
    for row in rows:
        cells = [
            cell
            for p, m, off in zip(row.predicted, row.measured, row.off, strict=True)
            for cell in (f"{p:.1f}", between(m.value, m.low, m.high), f"{off:.0%}")
        ]
        yield line(row.flags, *cells)
    own = finals["gdp"].latency
    yield "\n" + ", ".join(
        f"request by {flags}: {m.latency.value * 1e3:.1f} ms "
        f"({m.latency.low * 1e3:.1f} to {m.latency.high * 1e3:.1f})"
        for flags, m in finals.items()
    )
    for flags, other in finals.items():
        if flags != "gdp":
            ratio = own.value / other.latency.value
            low, high = own.low / other.latency.high, own.high / other.latency.low
            yield f"seconds of gdp's flags over {flags}: {ratio:.3f} ({low:.3f} to {high:.3f})"


def _summary(found: dict[str, tuple[list[Timed], dict[str, Measured]]]) -> Iterator[str]:
    """Lines over all models."""
    rows = [row for own, _ in found.values() for row in own]
    for k, phase in enumerate(("prompt", "decode")):
        off: Float[np.ndarray, "K"] = np.array([row.off[k] for row in rows])
        ranks = [
            rank_correlation([r.predicted[k] for r in own], [r.measured[k].value for r in own])
            for own, _ in found.values()
        ]
        yield (
            f"{phase}: off {np.median(off):.1%} in the median, {off.max():.0%} at worst, of "
            f"{len(off)} flags; rank correlation {np.mean(ranks):.2f} in the mean of models, "
            f"{min(ranks):.2f} at worst"
        )
    for what, is_default in (("the sweep's best", False), ("llama.cpp's default", True)):
        ratios = [
            finals["gdp"].latency.value / other.latency.value
            for _, finals in found.values()
            for name, other in finals.items()
            if name != "gdp" and (name == "default") == is_default
        ]
        yield (
            f"seconds of gdp's flags over {what}: {geomean(ratios):.3f}, {max(ratios):.3f} at worst"
        )


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--spin", default=0.5, show_default=True, help="Share of core 1 of the spinner.")
@click.option("--runs", default=4, show_default=True, help="Of tuning each model.")
@click.option("--seconds", default=6.0, show_default=True, help="Of measuring finalists, at most.")
@click.option("--tiny", is_flag=True, help="One tiny model: does all work?")
def main(models: Sequence[str], spin: float, runs: int, seconds: float, tiny: bool) -> None:
    sizes = {f"{s.name}-{s.parameters:.2f}B-{s.kind}": s for s in ((TINY,) if tiny else SIZES)}
    if unknown := set(models) - set(sizes):
        raise click.UsageError(f"no model {min(unknown)!r}; there are {', '.join(sizes)}")
    chosen: dict[str, ModelSize] = {n: sizes[n] for n in models} if models else sizes
    found = {}
    folder = Path(tempfile.mkdtemp(prefix="llamacpp-"))
    os.environ["GDP_DATA_DIR"] = str(folder)  # nothing is known of this machine
    try:
        with spinning(spin):
            for name, size in chosen.items():
                path = write_model(folder / f"{name}.gguf", size)
                found[name] = benched(path, runs, seconds)
                path.unlink()
                print("\n".join(told(name, *found[name])), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + "\n".join(_summary(found)))


if __name__ == "__main__":
    main()
