"""Files that run the plan of a pipeline: Python for diffusers, and options of other programs.

diffusers computes sequence parallelism of models that say how (`_cp_plan`); `xdit` of xfuser 0.7
that of models it names, by degrees as arguments (`xfuser/config/args.py`,
`xfuser/model_executor/models/runner_models`). stable-diffusion.cpp takes a device for each module
(docs/backend.md: `--backend te=cpu,vae=cuda0`), and ComfyUI's loaders of ComfyUI-MultiGPU one each
(`device`).
"""

import os
import shlex
from pathlib import Path
from typing import Any

from gdp.api.diffusion.answer import PipelineAnswer, PlacedComponent
from gdp.api.diffusion.parallel import attentions
from gdp.base.errors import PlacementError
from gdp.base.files.writing import OverwritePolicy, indented_json, new_contents
from gdp.importers.diffusers.classes import PIPELINES
from gdp.targets.torch_devices import torch_names

KIND = "pipeline"
DIFFUSERS_PARALLEL = frozenset(
    ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")
)
"""Denoisers with `_cp_plan` in diffusers 0.42."""
XDIT = {
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
    "stable-diffusion-3.5-large": "stabilityai/stable-diffusion-3.5-large",
    "Qwen-Image": "Qwen/Qwen-Image", "HunyuanVideo": "tencent/HunyuanVideo",
    "Wan2.1-T2V-14B": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
}  # fmt: skip
"""Models of `register_model` in xfuser 0.7 by name: it runs no folders. Of these only Stable
Diffusion 3.5 has `use_cfg_parallel`."""
SD_CPP = {
    "text_encoder": "te", "text_encoder_2": "te", "text_encoder_3": "te", "vae": "vae",
    "transformer": "diffusion", "unet": "diffusion",
}  # fmt: skip
"""Modules of stable-diffusion.cpp by component."""
SD_CPP_PIPELINES = frozenset((
    "FluxPipeline", "StableDiffusion3Pipeline", "StableDiffusionXLPipeline",
    "StableDiffusionPipeline", "QwenImagePipeline", "WanPipeline",
))  # fmt: skip
"""Pipelines that stable-diffusion.cpp computes, too."""


def export_pipeline(
    answer: PipelineAnswer, output: str | os.PathLike[str], force: bool = False
) -> list[str]:
    """Write the files of an answer to a folder; returns their names.

    Raises:
        TargetError: The folder holds anything but such files, unless `force`.
        PlacementError: Nothing fits, so that there is no plan.
    """
    plan = answer.plan
    if plan is None:
        raise PlacementError("nothing fits, so that there is no plan to export")
    files = {
        "plan.json": indented_json(plan_of(answer)) + b"\n",
        "answer.json": indented_json(answer.to_json()) + b"\n",
    }
    # Programs that load the weights of a model as they are published hold 16 bits.
    plain = not any(p.priced.scheme for p in plan.placed)
    if plan.cards:
        if plain and runs_together(answer):
            # The two programs lie in one folder.
            inside = (b"from gdp.api.diffusion.runner import", b"from runner import")
            files["run.py"] = source("parallel_runner.py").replace(*inside)
            files["runner.py"] = source("runner.py")
        if plain and (command := xdit_command(answer)):
            files["xdit.sh"] = command.encode()
    else:
        if plain:
            files["run.py"] = source("runner.py")
        files["comfyui.json"] = indented_json(comfyui(answer)) + b"\n"
        is_split = any(len(p.way.devices) > 1 for p in plan.placed)
        if answer.pipeline.class_name in SD_CPP_PIPELINES and not is_split:
            files["sd-cpp.sh"] = sd_cpp(answer).encode()
    with new_contents(output, KIND, OverwritePolicy(force=force)) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return list(files)


def runs_together(answer: PipelineAnswer) -> bool:
    """True where diffusers divides the tokens of the denoisers by the plan's degrees."""
    plan = answer.plan
    assert plan is not None
    degrees = plan.degrees
    classes = {p.priced.component.class_name for p in plan.placed if p.role == "denoise"}
    mixed = degrees.ulysses > 1 and degrees.ring > 1  # which divide even tokens alone
    return degrees.sequence == 1 or (
        classes <= DIFFUSERS_PARALLEL and not (mixed and is_uneven(answer))
    )


def is_uneven(answer: PipelineAnswer) -> bool:
    """True where the cards may not divide the tokens of the prompt or of the latent."""
    pipeline, plan = answer.pipeline, answer.plan
    assert plan is not None
    row = PIPELINES[pipeline.class_name]
    graphs = [c.graph for c in pipeline.components if c.role == "denoise"]
    counts = {layer.input_shapes[0][2] for graph in graphs for layer in attentions(graph)}
    counts.add(pipeline.request.prompt or max(row.prompts.values()))
    return not row.pads or any(n % plan.degrees.sequence for n in counts)


def source(name: str) -> bytes:
    """A program that is written as it stands."""
    return (Path(__file__).parent / name).read_bytes()


def plan_of(answer: PipelineAnswer) -> dict[str, Any]:
    """The plan as the programs read it."""
    plan, request = answer.plan, answer.pipeline.request
    assert plan is not None
    names = torch_names(answer.cluster)
    denoiser = next(p for p in plan.placed if p.role == "denoise")
    class_name, batch = answer.pipeline.class_name, request.batch // plan.degrees.copies
    # Qwen-Image guides by a scale of its own, and only away from a prompt that is given.
    away = {"true_cfg_scale": request.guidance, "negative_prompt": " "}
    has_away = class_name == "QwenImagePipeline" and answer.pipeline.guided
    return {
        "class": class_name, "dtype": answer.dtype, "seconds": plan.seconds,
        "home": names[plan.cards[0] if plan.cards else denoiser.way.devices[0]],
        "cards": [names[d] for d in plan.cards], **plan.degrees._asdict(),
        "guides_by": PIPELINES[class_name].guides_by,
        "uneven": plan.degrees.sequence > 1 and is_uneven(answer),
        "tiling": request.tiling, "slicing": request.slicing,
        "denoisers": [p.name for p in plan.placed if p.role == "denoise"],
        "components": [_entry(p, names) for p in plan.placed],
        "call": {
            "width": request.width, "height": request.height, "num_frames": request.frames,
            "num_inference_steps": request.steps, "guidance_scale": request.guidance,
            "num_images_per_prompt": batch, "num_videos_per_prompt": batch,
            **(away if has_away else {}),
        },
    }  # fmt: skip


def _entry(placed: PlacedComponent, names: list[str]) -> dict[str, Any]:
    """A component as the program places it."""
    way, blocks = placed.way, {}
    if way.residence == "split":
        paths = [path for path, _ in placed.priced.component.blocks]
        devices = [names[d] for d, n in zip(way.devices, way.blocks, strict=True) for _ in range(n)]
        devices += ["host"] * (len(paths) - len(devices))
        blocks = dict(zip(paths, devices, strict=True))
    return {
        "name": placed.name, "method": "decode" if placed.role == "decode" else "forward",
        "residence": way.residence, "devices": [names[d] for d in way.devices], "blocks": blocks,
    }  # fmt: skip


def xdit_command(answer: PipelineAnswer) -> str:
    """A shell script that runs xDiT with the degrees of the plan; "" where it does not run it."""
    plan, request = answer.plan, answer.pipeline.request
    assert plan is not None
    model = XDIT.get(Path(answer.pipeline.name).name.removesuffix("-Diffusers"))
    guides = plan.degrees.guidance == 1 or answer.pipeline.class_name == "StableDiffusion3Pipeline"
    if model is None or not guides or plan.degrees.copies > 1:
        return ""
    names = torch_names(answer.cluster)
    cards = ",".join(names[d].removeprefix("cuda:") for d in plan.cards)
    words = [
        "env", f"CUDA_VISIBLE_DEVICES={cards}", "xdit", "--model", model, "--prompt", '"$PROMPT"',
        "--ulysses_degree", str(plan.degrees.ulysses), "--ring_degree", str(plan.degrees.ring),
        *(["--use_cfg_parallel"] * (plan.degrees.guidance > 1)),
        "--width", str(request.width), "--height", str(request.height),
        *(["--num_frames", str(request.frames)] if request.is_video else []),
        "--num_inference_steps", str(request.steps),
        "--guidance_scale", f"{request.guidance or 0:g}",
        *(["--enable_tiling"] * request.tiling),
    ]  # fmt: skip
    return _script(words, "PROMPT: what to draw")


def sd_cpp(answer: PipelineAnswer) -> str:
    """A shell script that runs stable-diffusion.cpp with a device for each module."""
    plan, request = answer.plan, answer.pipeline.request
    assert plan is not None
    names = [name.replace(":", "") for name in torch_names(answer.cluster)]
    runs: dict[str, str] = {}
    rests: dict[str, str] = {}
    for placed in plan.placed:
        module = SD_CPP.get(placed.name)
        if module is not None:
            runs[module] = names[placed.way.devices[0]]
            if placed.way.residence in ("moved", "blocks sent") or placed.way.sent_blocks:
                rests[module] = "cpu"
    words = [
        "sd-cli", '"$@"', "-M", "vid_gen" if request.is_video else "img_gen", "-p", '"$PROMPT"',
        "-W", str(request.width), "-H", str(request.height), "--steps", str(request.steps),
        *(["--video-frames", str(request.frames)] if request.is_video else []),
        # Models that were distilled for a scale read it, and are computed once a step.
        "--cfg-scale", f"{request.guidance or 0:g}" if answer.pipeline.guided else "1",
        *([] if answer.pipeline.guided else ["--guidance", f"{request.guidance or 0:g}"]),
        *(["--batch-count", str(request.batch)] if request.batch > 1 else []),
        "--backend", ",".join(f"{module}={device}" for module, device in runs.items()),
        *(["--params-backend", ",".join(f"{m}={d}" for m, d in rests.items())] if rests else []),
        "--diffusion-fa", *(["--vae-tiling"] * request.tiling),
    ]  # fmt: skip
    return _script(
        words, "arguments: the files, such as --diffusion-model FILE --vae FILE --t5xxl FILE"
    )


def _script(words: list[str], comment: str) -> str:
    quoted = (word if word.startswith('"$') else shlex.quote(word) for word in words)
    return f"#!/bin/sh\n# {comment}\nexec {' '.join(quoted)}\n"


def comfyui(answer: PipelineAnswer) -> dict[str, Any]:
    """Loaders of ComfyUI-MultiGPU and their devices, to be set in a workflow."""
    plan = answer.plan
    assert plan is not None
    names = torch_names(answer.cluster)
    encoders = [p for p in plan.placed if p.role == "encode"]
    loaders = {1: "CLIPLoaderMultiGPU", 2: "DualCLIPLoaderMultiGPU", 3: "TripleCLIPLoaderMultiGPU"}
    nodes: dict[str, Any] = {}
    if encoders:
        # One loader has one device: that of the largest encoder.
        largest = max(encoders, key=lambda p: p.priced.weight_bytes)
        nodes[loaders[len(encoders)]] = {"device": names[largest.way.devices[0]]}
    for p in plan.placed:
        device = names[p.way.devices[0]]
        if p.role == "decode":
            nodes["VAELoaderMultiGPU"] = {"device": device}
        elif p.role == "denoise" and p.way.residence in ("whole", "moved"):  # ComfyUI moves models
            nodes["UNETLoaderMultiGPU"] = {"device": device}
        elif p.role == "denoise":
            parts, way = p.priced.part_bytes, p.way
            divided = way.residence == "split"
            first = int(parts[0] + parts[1 : 1 + way.blocks[0]].sum()) if divided else 0
            away = p.priced.weight_bytes - first
            donor = names[p.way.devices[1]] if len(p.way.devices) > 1 else "cpu"
            nodes["UNETLoaderDisTorch2MultiGPU"] = {
                "compute_device": device, "virtual_vram_gb": round(away / 1e9, 1),
                "donor_device": donor,
            }  # fmt: skip
    return nodes
