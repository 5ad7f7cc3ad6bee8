"""Is what gdp says of this machine's accelerator true before anything was measured on it?

    python -m benchmarks.accelerator [--cluster box.toml] [--limit 8GiB] [-o FILE] [MODEL ...]
    python -m benchmarks.accelerator --device cpu --tiny        # a rehearsal
    python -m benchmarks.accelerator --cluster box.toml --measured FILE     # predicts again

Models have random weights and run as PyTorch runs them. Modules (of `benchmarks.models`, in float32
and bfloat16) run whole on the accelerator. Language models read a prompt and write some tokens,
with their cache: alone on the accelerator, then with less memory there than the weights take, as
gdp's map for accelerate says and as accelerate's own map does. GGUF files (`--gguf`) are executed
by llama.cpp the same way, under the limit by gdp's flags and by the rules that people use: as many
whole layers on the GPU as fit, and for a mixture its experts on the processor. Predictions are
those of the costs that ship, with those of the datasheet beside them. Seconds are medians, waited
for, after a warm-up.
"""

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import gdp
from benchmarks.models import TINY, TORCH, torch_model
from benchmarks.tables import head
from gdp.api.generation import generation_answer
from gdp.base.units import format_bytes, format_seconds, parse_bytes
from gdp.cluster.file import load_cluster
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.importers.pytorch.model import TorchModel
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.sim.objectives import Score
from gdp.targets.hf_accelerate.device_map import device_map
from gdp.targets.hf_accelerate.plan import balanced_map
from gdp.targets.modules import torch_module

COSTS = {"ships": None, "datasheet": "datasheet"}
DRAWN = 1 << 20
"""Values of a weight that are drawn; the others repeat them, which no kernel can tell."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "dtype": "float16"},
    "llama-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16"},
    "qwen-moe": {  # 14.3 billion weights, 2.7 of them for each token
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_experts": 60,
        "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": 8192, "dtype": "bfloat16"},
    TINY: {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "dtype": "float32"},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A number of seconds, told and measured."""

    model: str
    way: str  # how it was placed
    part: str  # of the model's work
    measured_s: float = 0.0
    told: Mapping[str, float] = field(default_factory=dict)  # seconds, by name of the costs
    note: str = ""
    peak_bytes: int = 0  # on the accelerator, measured
    told_bytes: int = 0


@dataclass(frozen=True)
class Bench:
    """The machine, and how long it is measured."""

    cluster: Cluster
    device: Any  # torch's
    prompt: int
    new: int
    seconds: float
    kept: Mapping[tuple[str, str, str], float] | None = None  # measured before, by row
    kept_bytes: Mapping[tuple[str, str, str], int] | None = None  # and its peaks

    def wait(self) -> None:
        """Until the accelerator has nothing to do."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_s(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, in so many runs as fit, after two for warming up."""

        def once() -> float:
            self.wait()
            start_s = time.perf_counter()
            call()
            self.wait()
            return time.perf_counter() - start_s

        first = [once() for _ in range(2)][-1]
        runs = int(np.clip(self.seconds / max(first, 1e-6), 3, 200))
        return float(np.median([once() for _ in range(runs)]))

    def peak_bytes(self) -> int:
        """Of tensors, the most that were on the accelerator since `free`."""
        import torch

        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def free(self) -> None:
        """Memory of models that are gone."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def modules(bench: Bench, size: str) -> Iterator[Row]:
    """Each module whole on the accelerator, in both types."""
    import torch

    for name in TORCH:
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            try:
                made = torch_model(name, size)
                inputs = {
                    k: v.to(dtype) if hasattr(v, "is_floating_point") and v.is_floating_point()
                    else v for k, v in made.kwargs.items()
                }  # fmt: skip
                module = made.module.to(dtype)
                told = alone(TorchModel(name, module, (), inputs, {"name": name}).trace().graph,
                             bench.cluster)  # fmt: skip
                if bench.kept is not None:
                    measured = bench.kept[name, f"alone, {kind}", "one call"]
                else:
                    module = module.to(bench.device)
                    here = {
                        k: v.to(bench.device) if hasattr(v, "to") else v for k, v in inputs.items()
                    }
                    with torch.inference_mode():
                        measured = bench.median_s(lambda m=module, i=here: m(**i))
                yield Row(name, f"alone, {kind}", "one call", measured, told)
            except Exception as error:  # the others are measured all the same
                yield Row(name, f"alone, {kind}", "one call", note=failed(error))
            bench.free()


def alone(graph: OpGraph, cluster: Cluster) -> dict[str, float]:
    """Latency of a graph on the accelerator, by each of the costs."""
    device = np.where(graph.is_io, cluster.host, accelerator_of(cluster))
    placement = make_placement(graph, cluster, device)
    return {
        name: solve.simulate(Question(graph, cluster, costs=costs), placement).latency_s
        for name, costs in COSTS.items()
    }


def accelerator_of(cluster: Cluster) -> int:
    return next(i for i, n in enumerate(cluster.accelerator_numbers) if n is not None)


def language_model(bench: Bench, name: str, limit: int) -> Iterator[Row]:
    """A language model alone and under a limit of the accelerator's memory."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        asked = gdp.Generation(folder, prompt=bench.prompt, new=bench.new)
        yield from _generated(bench, name, "alone", asked, bench.cluster)
        card = accelerator_of(bench.cluster)
        devices = [
            replace(d, memory_bytes=limit, reserve_bytes=0) if i == card else d
            for i, d in enumerate(bench.cluster.devices)
        ]
        less = replace(bench.cluster, devices=tuple(devices))
        yield from _generated(bench, name, "gdp's map", asked, less)
        yield from _generated(bench, name, "accelerate's map", asked, less)


def told_peak(cluster: Cluster, score: Score, streamed_bytes: int) -> int:
    """Bytes that are told of the accelerator: those that rest there, and of weights that rest
    elsewhere the most that are under way at once."""
    return int(score.peak_bytes[accelerator_of(cluster)]) + streamed_bytes


def _generated(
    bench: Bench, name: str, way: str, asked: gdp.Generation, cluster: Cluster
) -> Iterator[Row]:
    """The first token and a step, by both costs and measured."""
    try:
        search = gdp.Search(seconds=3.0)
        told: dict[str, dict[str, float]] = {"first token": {}, "step": {}}
        result, peak = None, 0
        for label, costs in COSTS.items():
            found = gdp.place(asked, cluster, target="accelerate", costs=costs, search=search)
            result = result or found
            placement = found.placement
            if way == "accelerate's map":
                own = balanced_map(torch_module(asked), found.question.graph, cluster)
                placement = make_placement(
                    found.question.graph, found.question.cluster, dict(own or {})
                )
            elif label != "ships":
                placement = result.placement
            score = solve.simulate(found.question, placement)
            peak = told_peak(found.question.cluster, score, result.placement.streamed_bytes)
            answer = generation_answer(found.question, placement, score)
            assert answer is not None
            told["first token"][label] = answer.first_token_s
            told["step"][label] = answer.token_s
        assert result is not None
        if bench.kept is not None:
            measured = {part: bench.kept[name, way, part] for part in told}
        else:
            measured = _measured(bench, name, _map(way, asked, result, cluster))
        taken = bench.peak_bytes()
        if bench.kept_bytes is not None:
            taken = bench.kept_bytes[name, way, "step"]
        for part, seconds in measured.items():
            yield Row(name, way, part, seconds, told[part], "", taken, peak)
    except Exception as error:
        traceback.print_exc()
        yield Row(name, way, "", note=failed(error))
    bench.free()


def _map(way: str, asked: gdp.Generation, result: Result, cluster: Cluster) -> dict[str, Any]:
    """The device map of a way."""
    module = torch_module(asked)
    if way == "alone":
        return {"": 0}
    if way == "accelerate's map":
        return dict(balanced_map(module, result.question.graph, cluster) or {})
    return dict(device_map(result.question.graph, result.placement, result.question.cluster,
                           module))  # fmt: skip


def _measured(bench: Bench, name: str, entries: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the prompt and of a step with its cache, the median of all steps."""
    import torch
    from accelerate import dispatch_model

    module = _drawn(name, bench.device if set(entries.values()) == {0} else torch.device("cpu"))
    if len(set(entries.values())) > 1 and bench.device.type == "cuda":
        module = dispatch_model(module, dict(entries))
    vocabulary = CONFIGS[name]["vocab_size"]
    ids = torch.arange(bench.prompt, device=bench.device).remainder(vocabulary)[None]

    def step(tokens: Any, past: Any) -> Any:
        made = module(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        return made.logits[:, -1:].argmax(-1), made.past_key_values

    seconds = []
    with torch.inference_mode():
        first = bench.median_s(lambda: step(ids, None))
        token, past = step(ids, None)
        for _ in range(bench.new):
            bench.wait()
            start_s = time.perf_counter()
            token, past = step(token, past)
            bench.wait()
            seconds.append(time.perf_counter() - start_s)
    return {"first token": first, "step": float(np.median(seconds))}


def _drawn(name: str, device: Any) -> Any:
    """The model with random weights on a device."""
    import torch
    import transformers
    from accelerate import init_empty_weights

    own = dict(CONFIGS[name])
    kind, dtype = own.pop("architectures")[0], getattr(torch, own["dtype"])
    config = transformers.AutoConfig.for_model(own.pop("model_type"), **own)
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            module = getattr(transformers, kind)(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    some = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02
    some = some.to(device, dtype)
    for part in module.modules():
        for key, empty in part.named_parameters(recurse=False):
            tensor = torch.empty(empty.shape, dtype=dtype, device=device)
            for piece in tensor.view(-1).split(DRAWN):
                piece.copy_(some[: piece.numel()])
            part.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))
    module.tie_weights()
    if device.type != "cpu":
        module = module.to(device)  # its buffers
    return module


def failed(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def told(rows: list[Row]) -> Iterator[str]:
    """The table."""
    yield head("model | placed | part | measured | ships | datasheet | peak, told", 3)
    for row in rows:
        if row.note:
            yield f"| {row.model} | {row.way} | {row.part} | {row.note} | | | |"
            continue
        off = [
            "-" if s is None else f"{format_seconds(s)} ({s / row.measured_s - 1:+.0%})"
            for s in (row.told.get(name) for name in COSTS)
        ]
        bytes_ = f"{format_bytes(row.peak_bytes)}, {format_bytes(row.told_bytes)}"
        cells = " | ".join(
            [row.model, row.way, row.part, format_seconds(row.measured_s), *off, bytes_]
        )
        yield f"| {cells} |"


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--cluster", "machine", default=None, help="TOML of this machine; default: seen.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--limit", default="8GiB", help="Memory of the accelerator, in the second part.")
@click.option("--prompt", default=512)
@click.option("--new", default=16)
@click.option("--seconds", default=1.0, help="Of measuring each call.")
@click.option(
    "--measured", type=click.Path(path_type=Path, exists=True), default=None, metavar="FILE",
    help="An earlier output: nothing is run, and its seconds stand beside predictions of today.",
)  # fmt: skip
@click.option("--gguf", is_flag=True, help="GGUF files by llama.cpp, and nothing else.")
@click.option("--no-modules", is_flag=True, help="Language models alone.")
@click.option("--tiny", is_flag=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None)
def main(
    models: tuple[str, ...], machine: str | None, device: str, limit: str, prompt: int, new: int,
    seconds: float, measured: Path | None, gguf: bool, no_modules: bool, tiny: bool,
    output: Path | None,
) -> None:  # fmt: skip
    import torch

    size, names = (TINY, (TINY,)) if tiny else ("full", models or tuple(CONFIGS)[:3])
    cluster = load_cluster(machine if machine or device == "cuda" else "cpu+t4")
    kept = peaks = None
    if measured is not None:
        device = "cpu"
        earlier = json.loads(measured.read_text(encoding="utf-8"))["rows"]
        kept = {(r["model"], r["way"], r["part"]): r["measured_s"] for r in earlier}
        peaks = {(r["model"], r["way"], r["part"]): r["peak_bytes"] for r in earlier}
    bench = Bench(cluster, torch.device(device), 32 if tiny else prompt, new, seconds, kept, peaks)
    rows: list[Row] = []
    bytes_ = parse_bytes("600KB" if tiny else limit)

    def made() -> Iterator[Row]:
        if gguf:
            from benchmarks.accelerator_gguf import GGUF, GGUF_TINY, gguf_model

            for own in GGUF_TINY if tiny else GGUF:
                yield from gguf_model(bench, own)
            return
        if not no_modules:
            yield from modules(bench, size)
        for name in names:
            yield from language_model(bench, name, bytes_)

    for row in made():
        rows.append(row)
        click.echo(list(told([row]))[-1])
        if output is not None:  # after each, as time may end
            about = {
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "torch": str(torch.__version__), "rows": [asdict(r) for r in rows],
            }  # fmt: skip
            output.write_text(json.dumps(about, indent=1), encoding="utf-8")
    click.echo("\n".join(told(rows)))


if __name__ == "__main__":
    main()
