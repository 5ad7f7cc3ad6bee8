"""Twelve questions of public threads about images and videos on several devices, answered.

    python -m benchmarks.pipelines [--only K]...

Each is what a user would type: `gdp place PIPELINE --image REQUEST --cluster MACHINE`. The
arithmetic beside the answers stands in docs/how-to/image-video.md.
"""

import time
from typing import NamedTuple

import click

from gdp.api.diffusion.place import place_pipeline
from gdp.cli.diffusion import pipeline_text


class Question(NamedTuple):
    """A thread, its machine and its request."""

    thread: str
    pipeline: str
    cluster: str
    image: str | None = None
    video: str | None = None
    quantize: str = ""


QUESTIONS = (
    Question("Comfy-Org/ComfyUI#4238", "FLUX.1-dev", "cpu+rtx4090", "1024x1024,steps=20"),
    Question("Comfy-Org/ComfyUI#8335", "FLUX.1-dev", "cpu+rtx3090+rtx3060", "1024x1024,steps=20"),
    Question("Comfy-Org/ComfyUI#1028", "stable-diffusion-xl-base-1.0", "cpu+2xt4",
             "1024x1024,steps=50"),
    Question("sd-webui-forge-classic#490", "stable-diffusion-3.5-large",
             "cpu+rtx5060ti+rtx3060", "1024x1024,steps=28"),
    Question("black-forest-labs/flux#120", "FLUX.1-dev", "cpu+l4", "1024x1024,steps=50"),
    Question("black-forest-labs/flux#92", "FLUX.1-schnell", "cpu+3xrtx3090", "1024x1024,steps=4"),
    Question("city96/ComfyUI-GGUF#435", "FLUX.1-dev", "cpu+2xt4", "1024x1024,steps=20",
             quantize="q8_0"),
    Question("huggingface/diffusers#6857", "stable-diffusion-xl-base-1.0", "cpu+2xrtx3070",
             "1024x1024,steps=50"),
    Question("Comfy-Org/ComfyUI#4165", "FLUX.1-dev", "m1-max", "1024x1024,steps=20"),
    Question("kijai/ComfyUI-WanVideoWrapper#562", "Wan2.1-T2V-14B", "cpu+rtx4090",
             video="832x480x81,steps=50,tiling"),
    Question("kijai/ComfyUI-CogVideoXWrapper#18", "CogVideoX1.5-5B", "cpu+rtx4090",
             video="1360x768x81,steps=50,tiling"),
    Question("komikndr/raylight#48", "Wan2.1-T2V-1.3B", "cpu+4xrtx5080",
             video="832x480x81,steps=20"),
)  # fmt: skip


@click.command(help=__doc__)
@click.option("--only", type=int, multiple=True, help="Number of a question, from 1.")
def main(only: tuple[int, ...]) -> None:
    """Print the answers."""
    for number, question in enumerate(QUESTIONS, start=1):
        if only and number not in only:
            continue
        began = time.perf_counter()
        answer = place_pipeline(
            f"diffusers:{question.pipeline}", question.cluster, image=question.image,
            video=question.video, quantize=question.quantize,
        )  # fmt: skip
        click.echo(f"{number}. {question.thread} ({time.perf_counter() - began:.1f} s)")
        click.echo(pipeline_text(answer) + "\n")


if __name__ == "__main__":
    main()
