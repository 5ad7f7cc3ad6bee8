"""Runs a pipeline of diffusers on several devices that compute each denoising pass together.

    torchrun --nproc-per-node N run.py MODEL --prompt "a lighthouse at dusk" [-o image.png]

The plan lies beside this file (plan.json), with the program that places components on each device.
Copies that share a batch take the seeds after the given one. Needs torch and diffusers alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gdp.api.diffusion.runner import loaded, made, mapped, parsed, place, save


def compute_together(denoiser: Any, plan: dict[str, Any], mesh: DeviceMesh) -> None:
    """Divide the tokens of a denoiser by Ulysses and ring, and the pair of guidance."""
    import diffusers

    ulysses, ring = plan["ulysses"], plan["ring"]
    if ulysses * ring > 1:
        # A ring merges results by their log-sum-exp, which this backend of torch returns.
        denoiser.set_attention_backend("_native_flash" if ring > 1 else "native")
        degrees = diffusers.ContextParallelConfig(  # pyright: ignore[reportPrivateImportUsage]
            ring_degree=ring, ulysses_degree=ulysses, mesh=mesh["ring", "ulysses"],
            ulysses_anything=plan["uneven"] and ring == 1,
            ring_anything=plan["uneven"] and ulysses == 1,
        )  # fmt: skip
        denoiser.enable_parallelism(config=degrees)
    if plan["guidance"] > 1:
        guide = guide_by_calls if plan["guides_by"] == "calls" else guide_by_batch
        guide(denoiser, mesh["guidance"])


def guide_by_batch(denoiser: Any, halves: DeviceMesh) -> None:
    """Compute one half of each call's batch, and exchange the results: a call holds the samples
    without the prompt before those with it."""
    inner, half = denoiser.forward, halves.get_local_rank()

    def call(*args: Any, **named: Any) -> tuple[torch.Tensor]:
        samples = _first(args, named).shape[0]

        def own(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.dim() == 0 or tensor.shape[0] != samples
            return tensor if whole else tensor.chunk(2)[half]

        return (torch.cat(_of_both(inner(*mapped(args, own), **mapped(named, own))[0], halves)),)

    denoiser.forward = call


def guide_by_calls(denoiser: Any, halves: DeviceMesh) -> None:
    """Compute one of each two calls, and exchange the results in the second one: until then the
    pipeline holds the first one's result without reading it."""
    inner, half = denoiser.forward, halves.get_local_rank()
    held: list[torch.Tensor] = []

    def call(*args: Any, **named: Any) -> tuple[torch.Tensor]:
        turn = len(held)
        result = inner(*args, **named)[0] if turn == half else torch.empty_like(_first(args, named))
        if turn == 0:
            held.append(result)
            return (result,)
        first = held.pop()
        of_first, of_second = _of_both(result if half else first, halves)
        first.copy_(of_first)
        return (of_second,)

    denoiser.forward = call


def _first(args: Any, named: dict[str, Any]) -> torch.Tensor:
    """The latent of a call, its first tensor."""
    return next(value for value in (*args, *named.values()) if torch.is_tensor(value))


def _of_both(own: torch.Tensor, halves: DeviceMesh) -> list[torch.Tensor]:
    """The tensors of both halves, in their order."""
    both = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(2)]
    dist.all_gather(both, own.contiguous(), group=halves.get_group())
    return both


def main() -> None:
    """Load on each device, compute together, save once."""
    given = parsed(__doc__)
    dist.init_process_group()  # NCCL for GPUs, gloo for processors
    pipe, plan = loaded(given.model)
    device = plan["cards"][dist.get_rank()]
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    own = [c | {"devices": [device]} for c in plan["components"]]
    place(pipe, plan | {"home": device, "components": own})
    names = ("copies", "guidance", "ring", "ulysses")
    mesh = init_device_mesh(
        torch.device(device).type, tuple(plan[n] for n in names), mesh_dim_names=names
    )
    for name in plan["denoisers"]:
        compute_together(getattr(pipe, name), plan, mesh)
    copy = mesh.get_local_rank("copies")
    first = copy * plan["call"]["num_images_per_prompt"]
    given.seed += first
    result = made(pipe, plan, given)
    if not any(mesh.get_local_rank(name) for name in names[1:]):
        save(result, given.output, first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
