"""Predictions of llama.cpp beside the rates that llama-bench measured on one card.

    python -m benchmarks.measured_world llama --rows llama_bench.csv

`--rows` is a CSV file with columns devices, n_devices, kind, engine, backend, model, quantisation,
size_gib, n_ubatch, flash_attention, build, test, prompt_or_gen_tokens, depth_tokens, tokens_per_s
and note. Rows count that lie whole on one card that gdp has a preset of, under a backend of its
maker or Vulkan, of llama.cpp itself and of models of `SIZES`, each as a GGUF header with the
quantisation's types. A prompt behind a context takes what a longer one takes beyond the context
alone; a token is read with the mean context of its run. All layers lie on the card.

Costs are the default of GGUF files, kernels of llama.cpp, for builds of before July 2024 the ones
that those had, and with flash attention where a row says so. Beside them stands the factor by which
they were off on the card's other models, fitted to these, for each test; and datasheets.

Pairs: of two cards that ran one model and test, or of two models on one card, the faster one.
"""

import csv
import itertools
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

import gdp
from benchmarks.tables import geomean, head
from gdp.api.generation import generation_answer
from gdp.base.errors import ClusterError
from gdp.cluster.file import with_backend
from gdp.cluster.presets import cluster_preset, preset_of_model
from gdp.cluster.types import BACKENDS, Cluster
from gdp.costs.base import roofline
from gdp.costs.default import DATASHEET
from gdp.costs.llama_backends import memory_of
from gdp.costs.llamacpp import BEFORE_JULY_2024, NEWEST, Build, LlamaCosts
from gdp.costs.measured.costs import covers
from gdp.costs.measured.network import shipped_network
from gdp.graph.op_graph import OpGraph
from gdp.importers.gguf_header import import_gguf
from gdp.placement.placement import make_placement
from gdp.question.models import Generation, load
from gdp.question.question import Question

LEFT_OUT = "proxy|spill|fault|sequences together|file not certain|quantisation and lengths"
"""In the notes of rows of other things than a prompt or tokens of one sequence on a sound card."""
FIRST_OF_JULY_2024 = 3260
"""Number of a build."""
ALIKE = 0.05
"""Log of the rates of two runs that count as equally fast."""


@dataclass(frozen=True)
class Size:
    """Sizes of a language model."""

    layers: int
    width: int
    inner: int  # of the feed-forward, of each expert in a mixture
    heads: int
    key_heads: int
    words: int
    head: int = 0  # 0: width over heads
    tied: bool = False
    experts: int = 0
    used: int = 0
    shared: int = 0  # inner numbers of what every token computes beside the experts
    # Every fourth block attends; the others have a gated delta net of so many heads of keys and
    # values.
    linear: tuple[int, int] = ()  # pyright: ignore[reportAssignmentType]
    window: int = 0  # tokens that all but every sixth block see; 0: all see all
    full_key_heads: int = 0  # of those blocks, where they have others; counted in heads of one size

    @property
    def head_size(self) -> int:
        """Numbers of a head."""
        return self.head or self.width // self.heads


_LLAMA_8B = Size(32, 4096, 14336, 32, 8, 128256)
SIZES: Mapping[str, Size] = {
    r"llama 7B": Size(32, 4096, 11008, 32, 32, 32000),
    r"llama 13B": Size(40, 5120, 13824, 40, 40, 32000),
    r"llama (3 )?8B": _LLAMA_8B, r"llama 3 70B": Size(80, 8192, 28672, 64, 8, 128256),
    r"qwen2-5-1-5b": Size(28, 1536, 8960, 12, 2, 151936, tied=True),
    r"qwen2 7B": Size(28, 3584, 18944, 28, 4, 152064),
    r"Qwen2\.5-Coder-32B": Size(64, 5120, 27648, 40, 8, 152064),
    r"qwen3 8B": Size(36, 4096, 12288, 32, 8, 151936, 128),
    r"qwen3 14B": Size(40, 5120, 17408, 40, 8, 151936, 128),
    r"Qwen3-32B": Size(64, 5120, 25600, 64, 8, 151936, 128),
    r"(qwen3moe 30B|Qwen3-30B)": Size(48, 2048, 768, 32, 4, 151936, 128, False, 128, 8),
    r"Ministral-3-3B": Size(26, 3072, 9216, 32, 8, 131072, 128, tied=True),
    r"(mistral3 8B|Ministral-3-8B)": Size(34, 4096, 14336, 32, 8, 131072, 128),
    r"(mistral3 14B|Ministral-3-14B)": Size(40, 5120, 16384, 32, 8, 131072, 128),
    r"Mistral-Small-24B": Size(40, 5120, 32768, 32, 8, 131072, 128),
    r"Codestral-22B": Size(56, 6144, 16384, 48, 8, 32768),
    r"gemma3 27B": Size(62, 5376, 21504, 32, 16, 262208, 128, tied=True, window=1024),
    r"gemma-?4[ -]26B": Size(
        30, 2816, 704, 16, 8, 262144, 256, True, 128, 8, 2112, window=1024, full_key_heads=4),
    r"(qwen3[568] 27B|Qwen3\.6-27B)": Size(64, 5120, 17408, 24, 4, 248320, 256, linear=(16, 48)),
    r"(Qwen3\.5-9B|qwen35 9B)": Size(32, 4096, 12288, 16, 4, 248320, 256, linear=(16, 32)),
    r"(qwen3[56]moe 35B|Ornith-1\.0-35B)": Size(
        40, 2048, 512, 16, 2, 248320, 256, False, 256, 8, 512, (16, 32)),
    r"(Qwen3\.5-122B|qwen35moe 122B)": Size(
        48, 3072, 1024, 32, 2, 248320, 256, False, 256, 8, 1024, (16, 64)),
    r"(qwen3next 80B|Qwen3-Coder-Next)": Size(
        48, 2048, 512, 16, 2, 151936, 256, False, 512, 10, 512, (16, 32)),
    r"olmoe 7B": Size(16, 2048, 1024, 16, 16, 50304, experts=64, used=8),
}  # fmt: skip
"""Sizes by the beginning of a model's name, from the configurations that their makers published."""
WITHOUT_SUPERBLOCKS = {
    "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""What llama.cpp takes for rows that are no multiple of 256 numbers."""
STATE = 128
"""Numbers of a head of gated delta nets."""
KINDS: Mapping[str, tuple[str, str, str]] = {
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"), "Q5_0": ("Q5_0", "Q5_0", "Q6_K"),
    "Q5_1": ("Q5_1", "Q5_1", "Q6_K"), "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"), "F16": ("F16", "F16", "F16"),
    "BF16": ("BF16", "BF16", "BF16"), "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"), "Q3_K_S": ("Q3_K", "Q3_K", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "IQ4_XS", "Q6_K"), "IQ4_NL": ("IQ4_NL", "IQ4_NL", "Q6_K"),
    "Q3_K_M": ("Q3_K", "Q5_K", "Q6_K"), "Q4_K_S": ("Q4_K", "Q4_K", "Q6_K"),
}  # fmt: skip
"""Types of products, of the half of values and feed-forwards that llama.cpp keeps finer, and of the
output, by the name of a quantisation."""


@dataclass(frozen=True)
class Bench:
    """One row of llama-bench, whose repeats are merged by their median."""

    preset: str
    model: str
    kind: str  # quantisation
    backend: str
    test: str  # pp or tg
    tokens: int
    depth: int
    ubatch: int = 512
    build: Build = NEWEST
    rate: float = 0.0  # tokens/s

    @property
    def asked(self) -> tuple[str, str, str, int, int]:
        """All but the card."""
        return self.model, self.kind, self.test, self.tokens, self.depth


def preset_of(name: str) -> str | None:
    """The preset of a card by the name that a table gives it."""
    return preset_of_model(re.sub(r"^(?=M\d)", "Apple ", name))


def size_of(model: str) -> Size | None:
    """The sizes of a model by its name."""
    return next((size for name, size in SIZES.items() if re.match(name, model)), None)


def kind_of(quantisation: str) -> str | None:
    """The key of `KINDS` that is nearest to a quantisation's name."""
    name = quantisation.replace(" - Medium", "_M").replace(" - Small", "_S").upper()
    plain = re.sub(r"^UD-|[ (].*$", "", name).replace("K_XL", "K_M").replace("K_L", "K_M")
    plain = {"Q8_K_M": "Q8_0", "Q6_K_M": "Q6_K", "Q5_K_S": "Q5_K_M"}.get(plain, plain)
    return plain if plain in KINDS else None


def benches(path: Path) -> list[Bench]:
    """The rows that are asked."""
    groups: dict[Bench, list[float]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            kind, preset = kind_of(row["quantisation"]), preset_of(row["devices"])
            backend = row["backend"].split(",")[0].lower()
            if (
                (row["kind"], row["n_devices"], row["engine"]) != ("gpu", "1", "llama.cpp")
                or row["test"] not in ("pp", "tg") or re.search(LEFT_OUT, row["note"])
                or preset is None or kind is None or size_of(row["model"]) is None
                or not _computes(preset, backend)
            ):  # fmt: skip
                continue
            key = Bench(
                preset, row["model"], kind, backend, row["test"],
                int(row["prompt_or_gen_tokens"]), int(row["depth_tokens"] or 0),
                int(row["n_ubatch"] or 512) if row["test"] == "pp" else 512, build_of(row),
            )  # fmt: skip
            groups[key].append(float(row["tokens_per_s"]))
    return [replace(key, rate=float(np.median(rates))) for key, rates in groups.items()]


def _computes(preset: str, backend: str) -> bool:
    """True where a backend is for the GPUs of a preset's maker."""
    try:
        return backend in BACKENDS and bool(machine_with(preset, backend))
    except ClusterError:
        return False


def build_of(row: Mapping[str, str]) -> Build:
    """The kernels of a row's build; llama-bench has flash attention only where it is asked."""
    number = re.search(r"\((\d+)\)", row["build"])
    old = "2024" in row["build"] or (number is not None and int(number[1]) < FIRST_OF_JULY_2024)
    build = BEFORE_JULY_2024 if old else NEWEST
    return replace(build, flash=row["flash_attention"] == "1")


def tensors(size: Size, kind: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape (outputs first) and type of every tensor of a model."""
    plain, finer, output = KINDS[kind]
    queries, keys = size.heads * size.head_size, size.key_heads * size.head_size
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    found["token_embd.weight"] = ((size.words, size.width), output if size.tied else plain)
    if not size.tied:
        found["output.weight"] = ((size.words, size.width), output)
    found["output_norm.weight"] = ((size.width,), "F32")
    many, ending = ((size.experts,), "_exps") if size.experts else ((), "")
    for i in range(size.layers):
        # `use_more_bits` of llama.cpp: the first and last eighth of the layers, else every third.
        eighth = size.layers // 8
        more = i < eighth or i >= 7 * size.layers // 8 or (i - eighth) % 3 == 2
        wide = finer if more else plain
        twice = 2 if size.linear else 1  # queries come with a gate
        shapes = {
            "attn_norm": ((size.width,), "F32"), "ffn_norm": ((size.width,), "F32"),
            "attn_q": ((twice * queries, size.width), plain),
            "attn_k": ((keys, size.width), plain),
            "attn_v": ((keys, size.width), wide), "attn_output": ((size.width, queries), plain),
            f"ffn_gate{ending}": ((*many, size.inner, size.width), plain),
            f"ffn_up{ending}": ((*many, size.inner, size.width), plain),
            f"ffn_down{ending}": ((*many, size.width, size.inner), wide),
        }  # fmt: skip
        if size.linear and i % 4 != 3:
            for part in ("q", "k", "v", "output"):
                del shapes[f"attn_{part}"]
            shapes |= _delta_net(size, plain)
        if size.shared:
            name = "_shexp" if size.linear else ""
            shapes |= {
                f"ffn_gate{name}": ((size.shared, size.width), plain),
                f"ffn_up{name}": ((size.shared, size.width), plain),
                f"ffn_down{name}": ((size.width, size.shared), wide),
            }
        if size.experts:
            shapes["ffn_gate_inp"] = ((size.experts, size.width), "F32")
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
    return found


def _delta_net(size: Size, plain: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensors of a gated delta net, whose heads have 128 numbers."""
    keys, values = (heads * STATE for heads in size.linear)
    count = size.linear[1]
    return {
        "attn_qkv": ((2 * keys + values, size.width), plain),
        "attn_gate": ((values, size.width), plain), "ssm_out": ((size.width, values), plain),
        "ssm_beta": ((count, size.width), plain), "ssm_alpha": ((count, size.width), plain),
        "ssm_conv1d": ((2 * keys + values, 4), "F32"), "ssm_norm": ((STATE,), "F32"),
    }  # fmt: skip


def write_header(path: Path, size: Size, kind: str) -> int:
    """Write the GGUF file of a model, its weights a hole; bytes of the weights."""
    gguf = import_gguf()
    hybrid = "qwen35moe" if size.experts else "qwen35"
    plain = "qwen3moe" if size.experts else "llama"
    writer = gguf.GGUFWriter(path, hybrid if size.linear else "gemma3" if size.window else plain)
    writer.add_block_count(size.layers)
    writer.add_embedding_length(size.width)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(size.heads)
    full = size.full_key_heads or size.key_heads
    writer.add_head_count_kv([full if i % 6 == 5 else size.key_heads for i in range(size.layers)])
    if size.window:
        writer.add_sliding_window(size.window)
    writer.add_key_length(size.head_size)
    writer.add_value_length(size.head_size)
    writer.add_context_length(1 << 17)
    writer.add_vocab_size(size.words)
    if size.experts:
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(size.used)
        writer.add_expert_feed_forward_length(size.inner)
    if size.linear:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(size.linear[1] * STATE)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_group_count(size.linear[0])
    total = 0
    for name, (shape, wanted) in tensors(size, kind).items():
        stored = wanted if shape[-1] % 256 == 0 else WITHOUT_SUPERBLOCKS.get(wanted, wanted)
        type_ = gguf.GGMLQuantizationType[stored]
        block, held = gguf.GGML_QUANT_SIZES[type_]
        nbytes = int(np.prod(shape)) // block * held
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=type_)
        total += nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    # Each tensor begins at a multiple of 32 bytes.
    os.truncate(path, path.stat().st_size + total + 64 * len(tensors(size, kind)))
    return total


@cache
def machine_with(preset: str, backend: str | None) -> Cluster:
    """A card behind a processor, or a machine of its own, under a backend."""
    alone = cluster_preset(preset)
    # Unified memory is that of the device's own processor.
    unified = alone.devices[0].is_unified
    return with_backend(alone if unified else cluster_preset(f"cpu+{preset}"), backend)


@dataclass(frozen=True)
class Asker:
    """Predictions of rates, by models whose headers lie in a folder."""

    folder: Path

    def rate(self, bench: Bench, datasheets: bool = False) -> float:
        """Predicted tokens/s of a row."""
        build = None if datasheets else bench.build
        if bench.test == "tg":
            return 1.0 / self._seconds(bench, max(bench.depth, 1), bench.tokens, build)[1]
        whole = self._seconds(bench, bench.depth + bench.tokens, 1, build)[0]
        before = self._seconds(bench, bench.depth, 1, build)[0] if bench.depth else 0.0
        return bench.tokens / (whole - before)

    def _seconds(
        self, bench: Bench, prompt: int, new: int, build: Build | None
    ) -> tuple[float, float]:
        """Seconds to the first token, and of each one after it; of datasheets without a build."""
        size = size_of(bench.model)
        assert size is not None
        path = self.folder / f"{size.layers} {size.width} {bench.kind}.gguf"
        if not path.exists():
            write_header(path, size, bench.kind)
        machine = machine_with(bench.preset, bench.backend)
        return pass_seconds(f"{path}?ubatch={bench.ubatch}", machine, prompt, new, build)


@cache
def _graph(spec: str, prompt: int, new: int) -> OpGraph:
    return load(Generation(spec, prompt=prompt, new=new))


@cache
def pass_seconds(
    spec: str, cluster: Cluster, prompt: int, new: int, build: Build | None
) -> tuple[float, float]:
    """Seconds to the first token, and of each one after it, of a model that lies whole on the last
    device; of datasheets without a build."""
    graph = _graph(spec, prompt, new)
    costs = DATASHEET if build is None else costs_of(build)
    card = cluster.num_devices - 1
    device = np.where(graph.is_io, cluster.host, card)
    placement = make_placement(graph, cluster, device)
    score = gdp.simulate(graph, placement, cluster, costs=costs)
    answer = generation_answer(Question(graph, cluster, costs=costs), placement, score)
    assert answer is not None
    return answer.first_token_s, answer.token_s


def costs_of(build: Build) -> LlamaCosts:
    """Kernels of a build, with the network that ships."""
    shipped = shipped_network()
    if shipped is None:
        raise click.UsageError("no network of kernels ships with this installation")
    return LlamaCosts(shipped[0], roofline, build)


def others(rows: list[Bench], predicted: np.ndarray) -> np.ndarray:
    """Predictions times the factor by which those of the same card, backend and test are off on its
    other models; nan where it ran no other."""
    off = np.array([row.rate for row in rows]) / predicted
    found = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        near = [
            off[j]
            for j, other in enumerate(rows)
            if (other.preset, other.backend, other.test) == (row.preset, row.backend, row.test)
            and (other.model, other.kind) != (row.model, row.kind)
        ]
        if near:
            found[i] = predicted[i] * geomean(near)
    return found


def pairs(rows: list[Bench], predicted: np.ndarray, by: str) -> str:
    """Share of pairs that differ in the card, or in the model, whose faster one is named, and the
    mean loss where the predicted best is taken."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if np.isfinite(predicted[i]):
            own = row.asked if by == "card" else (row.preset, row.backend, row.asked[2:])
            groups[own].append(i)
    right = total = 0
    lost: list[float] = []
    for members in groups.values():
        for i, j in itertools.combinations(members, 2):
            differs = getattr(rows[i], "preset" if by == "card" else "asked") != getattr(
                rows[j], "preset" if by == "card" else "asked"
            )
            if differs and abs(np.log(rows[i].rate / rows[j].rate)) > ALIKE:
                total += 1
                right += (rows[i].rate > rows[j].rate) == (predicted[i] > predicted[j])
        if len(members) > 1:
            best = max(members, key=lambda i: predicted[i])
            lost.append(1 - rows[best].rate / max(rows[i].rate for i in members))
    if not total:
        return "no pairs"
    return f"{right / total:.1%} of {total} pairs right, {np.mean(lost):.1%} lost in the mean"


def told(rows: list[Bench], columns: Mapping[str, np.ndarray], worst: int) -> Iterator[str]:
    """Errors by test, card and model, the worst rows, and pairs."""
    measured = np.array([row.rate for row in rows])
    yield head("rows | | " + " | ".join(f"{name}: median, mean, worst" for name in columns))
    for test in ("tg", "pp"):
        of_test = np.array([row.test == test for row in rows])
        groups = {"all": of_test}
        for name in dict.fromkeys(itertools.chain(*zip(*map(_groups, rows), strict=True))):
            groups[name] = of_test & [name in _groups(r) for r in rows]
        for name, own in groups.items():
            if own.any():
                cells = [_errors(values[own], measured[own]) for values in columns.values()]
                yield f"| {test}, {name} | {own.sum()} | {' | '.join(cells)} |"
    for name, values in columns.items():
        both = (f"{by}s: {pairs(rows, values, by)}" for by in ("card", "model"))
        yield f"{name}: {'; '.join(both)}"
    first = next(iter(columns.values()))
    for i in np.argsort(-np.abs(np.log(first / measured)))[:worst]:
        row = rows[i]
        yield (
            f"{row.model} {row.kind} on {row.preset} ({row.backend}), {row.test} {row.tokens} at "
            f"{row.depth}: {first[i]:.1f} tokens/s, measured {row.rate:.1f}"
        )


def _groups(row: Bench) -> tuple[str, ...]:
    """Groups whose errors are told: kind of memory, backend, build, card, model."""
    device = machine_with(row.preset, row.backend).devices[-1]
    age = "since July 2024" if row.build.fused else "before July 2024"
    context = " behind a context" if row.depth else ""
    return (
        f"memory: {memory_of(device)}", f"backend: {row.backend}{context}", f"builds {age}",
        f"{row.preset}, {row.backend}", f"{row.model} {row.kind}",
    )  # fmt: skip


def _errors(predicted: np.ndarray, measured: np.ndarray) -> str:
    known = np.isfinite(predicted)
    if not known.any():
        return "-"
    ratio = predicted[known] / measured[known]
    off = np.abs(ratio - 1)
    return f"{np.median(off):.1%}, {off.mean():.1%}, {off.max():.0%} ({geomean(ratio):.2f})"


@click.command("llama", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--worst", type=click.IntRange(0), default=5, help="Rows that are listed.")
def main(rows: Path, worst: int) -> None:
    asked = benches(rows)
    with tempfile.TemporaryDirectory(prefix="measured-llama-") as root:
        asker = Asker(Path(root))
        own = np.array([asker.rate(row) for row in asked])
        plain = np.array([asker.rate(row, datasheets=True) for row in asked])
    known = np.array([covers(machine_with(row.preset, row.backend).devices[-1]) for row in asked])
    columns = {
        "kernels of llama.cpp": own, "and its other models": others(asked, own),
        "datasheets": plain, "kernels, cards of the network": np.where(known, own, np.nan),
        "datasheets, the same cards": np.where(known, plain, np.nan),
    }  # fmt: skip
    click.echo("\n".join(told(asked, columns, worst)))
