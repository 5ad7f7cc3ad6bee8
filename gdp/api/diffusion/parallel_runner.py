"""Runs a pipeline of diffusers on several GPUs that compute each denoising pass together.

    torchrun --nproc-per-node N run.py MODEL --prompt "a lighthouse at dusk" [-o image.png]

The plan lies beside this file (plan.json), with the program that places components on each GPU.
Needs torch and diffusers alone.
"""

import torch
import torch.distributed as dist

from gdp.api.diffusion.runner import loaded, made, parsed, place, save


def main() -> None:
    """Load on each GPU, compute together, save once."""
    import diffusers

    given = parsed(__doc__)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    pipe, plan = loaded(given.model)
    own = [c | {"devices": [f"cuda:{rank}"]} for c in plan["components"]]
    place(pipe, plan | {"home": f"cuda:{rank}", "components": own})
    degrees = diffusers.ContextParallelConfig(  # pyright: ignore[reportPrivateImportUsage]
        ring_degree=plan["ring"], ulysses_degree=plan["ulysses"]
    )
    for name in plan["denoisers"]:
        denoiser = getattr(pipe, name)
        denoiser.set_attention_backend("flash" if plan["ring"] > 1 else "native")
        denoiser.enable_parallelism(config=degrees)
    result = made(pipe, plan, given)
    if rank == 0:
        save(result, given.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
