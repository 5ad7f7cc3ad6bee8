"""Seconds from a command to its answer: the first after installing, and every later one.

    python benchmarks/first_answer.py [--case run|place|train|heft|serve|fit|image] [--repeat 5]

Whole processes, `python -m gdp`, with caches in a fresh folder: cold, then the median of the warm
ones; wall-clock seconds and CPU seconds, those of processes started by it included. Installing is
not part of either, nor is compiling libraries to bytecode, which pip does when it installs and uv
with `--compile-bytecode` alone: otherwise the first run of a case compiles thousands of modules,
and the second counts. `py-spy record -s -- python -m gdp ...` shows where the seconds go.
"""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "data/corpus/multi_modal/multi_modal-layers4-training.json.gz"
INCEPTION = ["onnx:light_inception_v2", "--cluster", "2xcpu-core"]
LLAMA = [f"hf:{ROOT / 'examples/llama-7b'}", "--for", "vllm"]
RESNET = ["onnx:light_resnet50", "--cluster", "2xcpu-core", "--objective", "throughput"]
IMAGE, CLIP, FILM = "1024x1024", "832x480x81,tiling", "1280x720x129,tiling"
PIPELINES = {
    "FLUX.1-dev": IMAGE, "stable-diffusion-3.5-medium": IMAGE,
    "stable-diffusion-3.5-large": IMAGE, "stable-diffusion-xl-base-1.0": IMAGE,
    "PixArt-Sigma": IMAGE, "SANA1.5-1.6B": IMAGE, "HunyuanDiT-v1.2": IMAGE, "Qwen-Image": IMAGE,
    "Wan2.1-T2V-1.3B": CLIP, "Wan2.1-T2V-14B": CLIP, "HunyuanVideo": FILM,
    "CogVideoX-2b": "720x480x49,tiling", "CogVideoX1.5-5B": "1360x768x81,tiling",
}  # fmt: skip
"""Requests to pipelines of diffusers: the case `image` is all of them."""
CASES: dict[str, list[str]] = {
    # The README's first command.
    "run": ["run", *RESNET, "--max-memory", "core0=90MB,core1=90MB"],
    "place": ["place", *INCEPTION, "--method", "policy"],
    "train": ["place", str(ROOT / TRAINING), "--cluster", "4xa100-nvlink", "--method", "policy"],
    "heft": ["place", *INCEPTION, "--method", "heft"],
    # Both need the extra `torch`.
    "serve": [
        "place",
        *LLAMA,
        "--cluster",
        "cpu+4xrtx3090",
        "--traffic",
        "concurrency=32,prompt=1024,new=128",
    ],
    "fit": [
        "fit",
        *LLAMA,
        "--clusters",
        "cpu+t4,cpu+rtx4090,cpu+2xrtx3090",
        "--prompt",
        "1024,2048",
        "--quantize",
        "none,nf4",
    ],
}


@contextlib.contextmanager
def _caches() -> Iterator[dict[str, str]]:
    """An environment with empty caches, in which Python keeps bytecode as it does for users."""
    with tempfile.TemporaryDirectory(prefix="gdp-first-") as folder:
        own = {"NUMBA_CACHE_DIR": f"{folder}/numba", "GDP_CACHE_DIR": f"{folder}/gdp"}
        yield {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | own


def pipeline_arguments(name: str) -> list[str]:
    """The question about a pipeline on two cards."""
    size = PIPELINES[name]
    option = "--video" if size.partition(",")[0].count("x") == 2 else "--image"
    return ["place", f"diffusers:{name}", option, size, "--cluster", "cpu+2xrtx4090"]


def _timed_run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one process and of all that it waits for."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def measure(arguments: list[str], repeat: int) -> dict[str, Any]:
    """One cold process and the median of several warm ones."""
    command = [sys.executable, "-m", "gdp", *arguments]
    with _caches() as environment:
        cold = _timed_run(command, environment)
        warm = [_timed_run(command, environment) for _ in range(repeat)]
    return {
        "command": " ".join(["gdp", *arguments]),
        "cold": cold,
        "warm": {key: median(row[key] for row in warm) for key in cold},
    }


@click.command()
@click.option(
    "--case", "cases", type=click.Choice([*CASES, "image"]), multiple=True, help="Default: all."
)
@click.option("--repeat", type=int, default=5, show_default=True, help="Warm processes.")
def main(cases: tuple[str, ...], repeat: int) -> None:
    """Print the table."""
    questions: list[list[str]] = []
    for name in cases or (*CASES, "image"):
        questions += map(pipeline_arguments, PIPELINES) if name == "image" else [CASES[name]]
    for question in questions:
        row = measure(question, repeat)
        click.echo(row["command"])
        for kind in ("cold", "warm"):
            click.echo(f"  {kind}: {row[kind]['wall_s']:.2f} s, CPU {row[kind]['cpu_s']:.2f} s")


if __name__ == "__main__":
    main()
