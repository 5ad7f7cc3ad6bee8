"""Predictions of llama.cpp beside the rates of whole requests that users of consumer devices sent.

    python -m benchmarks.measured_world requests --rows community_llmfit.csv

`--rows` is a CSV file with columns device, n_gpus, engine, model, output_tokens_mean,
request_ms_mean and ttft_ms_mean. Rows count of llama.cpp and Ollama on one accelerator with a
preset, of dense models and mixtures of `SIZES` in Q4_K_M that fit it. The measured seconds of a
token are those of the request, without its first token where that was timed, over its tokens; the
prompts, some tens of tokens, are not known. The median counts of rows of one device and model.
"""

import csv
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.measured_world.llama import (
    Size,
    machine_with,
    pass_seconds,
    preset_of,
    write_header,
)
from benchmarks.tables import head
from gdp.costs.llamacpp import NEWEST

PROMPT = 40
"""Tokens assumed of a prompt."""
FILLED = 0.9
"""Share of a device's memory above which a model is taken to lie on the processor, too."""
SIZES: Mapping[str, Size] = {
    r"(llama-3\.2-1b|llama3\.2:1b)": Size(16, 2048, 8192, 32, 8, 128256, 64, tied=True),
    r"(llama-3\.2-3b|llama3\.2:3b)": Size(28, 3072, 8192, 24, 8, 128256, tied=True),
    r"smollm2-1\.7b": Size(24, 2048, 8192, 32, 32, 49152, tied=True),
    r"qwen3-1\.7b": Size(28, 2048, 6144, 16, 8, 151936, 128, tied=True),
    r"qwen3-4b": Size(36, 2560, 9728, 32, 8, 151936, 128, tied=True),
    r"qwen2\.5-coder-3b": Size(36, 2048, 11008, 16, 2, 151936, tied=True),
    r"mistral-7b": Size(32, 4096, 14336, 32, 8, 32768),
    r"(qwen2\.5-(coder-)?7b|deepseek-r1-distill-qwen-7b)": Size(28, 3584, 18944, 28, 4, 152064),
    r"(meta-llama-3\.1-8b|deepseek-r1-distill-llama-8b|llama3\.1:8b)":
        Size(32, 4096, 14336, 32, 8, 128256),
    r"(qwen3-8b|qwen3:8b)": Size(36, 4096, 12288, 32, 8, 151936, 128),
    r"yi-1\.5-9b": Size(48, 4096, 11008, 32, 4, 64000),
    r"(qwen2\.5-(coder-)?14b|deepseek-r1-distill-qwen-14b)":
        Size(48, 5120, 13824, 40, 8, 152064),
    r"qwen3-14b": Size(40, 5120, 17408, 40, 8, 151936, 128),
    r"ministral-3:(3b)": Size(26, 3072, 9216, 32, 8, 131072, 128, tied=True),
    r"ministral-3:(8b)": Size(34, 4096, 14336, 32, 8, 131072, 128),
    r"ministral-3:(14b)": Size(40, 5120, 16384, 32, 8, 131072, 128),
    r"codestral-22b": Size(56, 6144, 16384, 48, 8, 32768),
    r"(mistralai_)?mistral-small-(3\.2-)?24b|devstral:24b":
        Size(40, 5120, 32768, 32, 8, 131072, 128),
    r"qwen3-30b-a3b": Size(48, 2048, 768, 32, 4, 151936, 128, False, 128, 8),
    r"(qwen_)?qwen3\.5-9b": Size(32, 4096, 12288, 16, 4, 248320, 256, linear=(16, 32)),
    r"(qwen_)?qwen3\.[56]-27b": Size(64, 5120, 17408, 24, 4, 248320, 256, linear=(16, 48)),
    r"(qwen_)?qwen3\.[56]-35b-a3b":
        Size(40, 2048, 512, 16, 2, 248320, 256, False, 256, 8, 512, (16, 32)),
    r"sicariussicariistuff_assistant_pepe_8b": Size(32, 4096, 14336, 32, 8, 128256),
    r"sicariussicariistuff_assistant_pepe_70b": Size(80, 8192, 28672, 64, 8, 128256),
}  # fmt: skip
"""Sizes by the beginning of a model's name, from the configurations that their makers published."""


class Request(NamedTuple):
    """Requests of one model on one device."""

    preset: str
    model: str
    size: Size
    tokens: int
    token_s: float  # median


def requests(path: Path) -> Iterator[Request]:
    """Rows that count."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            preset, model = preset_of(row["device"].replace("Apple ", "")), row["model"].lower()
            name = next((name for name in SIZES if re.match(name, model)), None)
            packed = row["engine"] == "ollama" or "q4_k_m" in model
            if preset and name and packed and row["n_gpus"] == "1" and "mlx" not in model:
                tokens, first_ms = float(row["output_tokens_mean"]), row["ttft_ms_mean"]
                ms = float(row["request_ms_mean"]) - float(first_ms or 0.0)
                found[preset, name].append((tokens, ms / 1e3 / tokens))
    for (preset, name), rows in sorted(found.items()):
        tokens, token_s = np.median(rows, axis=0)
        yield Request(preset, name, SIZES[name], int(tokens), float(token_s))


def predicted_s(request: Request, folder: Path) -> float | None:
    """Seconds of a token; None where the model does not fit the device."""
    size, cluster = request.size, machine_with(request.preset, None)
    path = folder / f"{size.layers} {size.width} {size.inner} {size.words}.gguf"
    if not path.exists():
        write_header(path, size, "Q4_K_M")
    if path.stat().st_size > FILLED * cluster.memory_bytes[-1]:
        return None
    return pass_seconds(f"{path}?ubatch=512", cluster, PROMPT, request.tokens, NEWEST)[1]


def lines(rows: list[tuple[Request, float]]) -> Iterator[str]:
    """Each row, and errors by device."""
    yield head("device | model | ms of a token | measured | ratio", 2)
    groups: dict[str, list[float]] = defaultdict(list)
    for request, own_s in rows:
        ratio = own_s / request.token_s
        groups["all"].append(ratio)
        groups[request.preset].append(ratio)
        yield (
            f"| {request.preset} | {request.model.replace('|', ', ')} | {1e3 * own_s:.2f} | "
            f"{1e3 * request.token_s:.2f} | {ratio:.2f} |"
        )
    for name, ratios in groups.items():
        off = np.abs(np.array(ratios) - 1)
        yield (
            f"{name}: {len(off)} models; error {np.median(off):.1%}, mean {off.mean():.1%}, worst "
            f"{off.max():.0%}; predicted over measured {np.median(ratios):.2f}"
        )


@click.command("requests", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
def main(rows: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="requests-") as root:
        asked = [(request, predicted_s(request, Path(root))) for request in requests(rows)]
        click.echo("\n".join(lines([(r, own_s) for r, own_s in asked if own_s is not None])))
