"""Runs a pipeline of diffusers on several GPUs that compute each denoising pass together.

    torchrun --nproc-per-node N run.py MODEL --prompt "a lighthouse at dusk" [-o image.png]

The plan lies beside this file (plan.json), with the program that places components on each GPU.
Needs torch and diffusers alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gdp.api.diffusion.runner import arguments, place


def main() -> None:
    """Load on each GPU, compute together, save once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", default="")
    given = parser.parse_args()
    import diffusers

    plan = json.loads((Path(__file__).parent / "plan.json").read_text())
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    kind = getattr(diffusers, plan["class"])
    pipe = kind.from_pretrained(given.model, torch_dtype=getattr(torch, plan["dtype"]))
    own = [c | {"devices": [f"cuda:{rank}"]} for c in plan["components"]]
    place(pipe, plan | {"home": f"cuda:{rank}", "components": own})
    degrees = diffusers.ContextParallelConfig(  # pyright: ignore[reportPrivateImportUsage]
        ring_degree=plan["ring"], ulysses_degree=plan["ulysses"]
    )
    for name in plan["denoisers"]:
        denoiser = getattr(pipe, name)
        denoiser.set_attention_backend("flash" if plan["ring"] > 1 else "native")
        denoiser.enable_parallelism(config=degrees)
    began = time.perf_counter()
    generator = torch.Generator("cpu").manual_seed(given.seed)
    result = pipe(given.prompt, generator=generator, **arguments(pipe, plan))
    if rank == 0:
        print(f"{time.perf_counter() - began:.2f} s; predicted {plan['seconds']:.2f} s")
        if hasattr(result, "images"):
            result.images[0].save(given.output or "image.png")
        else:
            from diffusers.utils.export_utils import export_to_video

            export_to_video(result.frames[0], given.output or "video.mp4")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
