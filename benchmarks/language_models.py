"""Plans of language models beside accelerate's own map in the same simulator.

    python -m benchmarks.language_models [--seconds 3] [--boxes A,B] [--json FILE] [MODEL ...]
    python -m benchmarks.language_models --layouts [MODEL ...]

Six models of published sizes on four boxes: a prompt of 2048 tokens is read and 256 are written.
Every cell is `gdp place --generate prompt=2048,new=256 --for accelerate`: if it fits, tokens/s
while decoding, seconds to the first token and of the request, the gap to the proven bound, what
limits decode, seconds of accelerate's own map (`device_map="auto"`) over those of gdp's, whether
accelerate takes the exported map for the model on the meta device, and the seconds of placing. The
first box of a model pays for its trace, unless one is kept. Times are predictions.

`--layouts`: wall-clock and CPU seconds in which layouts of vLLM on eight GPUs of three kinds are
planned once the model is read, the least of three (`Llama 3 70B` has 80 layers).
"""

import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import gdp
from benchmarks.tables import head
from gdp.api.answer import answer
from gdp.api.ask import ask
from gdp.base.clock import Phases
from gdp.base.errors import GdpError, InfeasibleError
from gdp.cluster.presets import cluster_preset
from gdp.question.result import Result
from gdp.targets.hf_accelerate.device_map import device_map
from gdp.targets.modules import torch_module

PROMPT, NEW = 2048, 256
BOXES = "cpu+rtx3060,cpu+rtx4090,cpu+rtx4090+t4,cpu+2xrtx3090"
EIGHT = "cpu+4xa100+2xa6000+2xrtx4090"
MIXTURE = 40 * ["mamba"]
MIXTURE[5::10] = 4 * ["attention"]
# Sizes of the models named, of the Hugging Face Hub; written down without its files at hand.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {  # meta-llama/Llama-2-7b-hf
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "dtype": "float16"},
    "Mixtral 8x7B": {  # mistralai/Mixtral-8x7B-v0.1
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None,
        "rope_theta": 1e6, "dtype": "bfloat16"},
    "Llama 3 70B, nf4": {  # meta-llama/Meta-Llama-3-70B
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "dtype": "bfloat16"},
    "Granite 4 H Tiny": {  # ibm-granite/granite-4.0-h-tiny: 36 layers of Mamba 2, 4 of attention
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
        "shared_intermediate_size": 1024, "num_hidden_layers": 40, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6,
        "layer_types": MIXTURE, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "dtype": "bfloat16"},
    "DeepSeek V2 Lite": {  # deepseek-ai/DeepSeek-V2-Lite
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840, "dtype": "bfloat16"},
    "T5 11B": {  # google/t5-v1_1-xxl
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128,
        "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_decoder_layers": 24,
        "num_heads": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "decoder_start_token_id": 0, "dtype": "bfloat16"},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A model on a box; empty where it does not fit."""

    model: str
    box: str
    seconds: float
    fits: bool = False
    tokens_per_s: float = 0.0
    first_token_s: float = 0.0
    request_s: float = 0.0
    gap: float = 0.0
    limit: str = ""  # of decode, or what does not fit
    offloaded: float = 0.0  # share of the weights
    peer_s: float | None = None  # request under accelerate's own map; None: see `peer_why`
    peer_why: str = ""
    loads: str = ""  # "yes", or what accelerate says


def cell(model: str, box: str, folder: Path, seconds: float) -> Cell:
    """One placement for accelerate, judged."""
    scheme = "?quantize=nf4" if "nf4" in model else ""
    asked = gdp.Generation(f"{folder}{scheme}", prompt=PROMPT, new=NEW)
    machine, start_s = cluster_preset(box), time.perf_counter()
    try:
        search = gdp.Search(seconds=seconds)
        result = gdp.place(asked, machine, target="accelerate", search=search)
    except InfeasibleError as error:
        return Cell(model, box, time.perf_counter() - start_s, limit=str(error))
    spent_s = time.perf_counter() - start_s
    told_of = result.generation
    assert told_of is not None
    peer = next((c for c in result.candidates if c.method == "accelerate, auto"), None)
    away = [m.weights_bytes for m in told_of.memory if "offload" in m.device]
    return Cell(
        model, box, spent_s, fits=True, tokens_per_s=told_of.tokens_per_s,
        first_token_s=told_of.first_token_s, request_s=told_of.request_s, gap=result.gap,
        limit=told_of.limits[1], peer_s=peer.value_s if peer and peer.feasible else None,
        peer_why=peer.reason if peer else "accelerate makes no map",
        offloaded=sum(away) / sum(m.weights_bytes for m in told_of.memory),
        loads=loads(result, asked),
    )  # fmt: skip


def loads(result: Result, asked: gdp.Generation) -> str:
    """The word of accelerate on the exported map, of the model on the meta device."""
    from accelerate.utils import check_device_map

    module = torch_module(asked)
    try:
        question = result.question
        entries = device_map(question.graph, result.placement, question.cluster, module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_device_map(module, dict(entries))
    except (GdpError, ValueError, UserWarning) as error:
        return str(error)
    kept = set(getattr(module, "_no_split_modules", None) or ())
    whole = [path for path, part in module.named_modules() if type(part).__name__ in kept]
    torn = [p for p in whole if any(entry.startswith(f"{p}.") for entry in entries)]
    return f"splits {torn[0]}" if torn else "yes"


def told(cells: list[Cell]) -> Iterator[str]:
    """Lines of the table."""
    figures = "tokens/s | first token, s | request, s | gap | offloaded"
    yield head(f"model | box | {figures} | accelerate's own map | loads | seconds", left=2)
    for c in cells:
        start = f"| {c.model} | {c.box} |"
        if not c.fits:
            yield f"{start} does not fit | - | - | - | - | - | - | {c.seconds:.0f} |"
            continue
        ratio = "does not fit" if c.peer_s is None else f"{c.peer_s / c.request_s:.2f} times"
        yield (
            f"{start} {c.tokens_per_s:.3g} | {c.first_token_s:.3g} | {c.request_s:.3g} | "
            f"{c.gap:.1%} | {c.offloaded:.0%} | {ratio} | {c.loads} | {c.seconds:.0f} |"
        )
    for c in cells:
        why = f"; accelerate's own map: {c.peer_why}" if c.peer_why else ""
        yield f"{c.model}, {c.box}: {c.limit}{why}"


def layout_seconds(folder: Path) -> str:
    """Seconds of planning for vLLM on `EIGHT`, of a model that was read before."""
    asked = gdp.Generation(folder, prompt=PROMPT, new=NEW)
    spent, told = [], ""
    for _ in range(3):
        question = ask(asked, EIGHT, target="vllm")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        told = answer(question, Phases()).notes[-1]
        spent.append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    wall_s, cpu_s = np.min(spent, axis=0)
    return f"{wall_s:.2f} s, {cpu_s:.2f} CPU s on {EIGHT}: {told}"


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--seconds", default=3.0, show_default=True, help="Of search in a cell.")
@click.option("--boxes", default=BOXES, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File of all cells.")
@click.option("--layouts", is_flag=True, help="Seconds of planning layouts of vLLM instead.")
def main(
    models: tuple[str, ...], seconds: float, boxes: str, path: Path | None, layouts: bool
) -> None:
    if unknown := set(models) - set(CONFIGS):
        raise click.UsageError(f"no model {min(unknown)!r}; there are {', '.join(CONFIGS)}")
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="language-models-") as root:
        for model in models or CONFIGS:
            folder = Path(root) / model.replace(" ", "-").replace(",", "").lower()
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
            if layouts:
                click.echo(f"{model}: {layout_seconds(folder)}")
            for box in () if layouts else boxes.split(","):
                found = cell(model, box, folder, seconds)
                cells.append(replace(found, limit=found.limit.replace(f"{folder}", model)))
                click.echo(f"{model}, {box}: {found.seconds:.0f} s", err=True)
                if path is not None:
                    path.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n")
    if cells:
        click.echo("\n".join(told(cells)))


if __name__ == "__main__":
    main()
