"""Runs a pipeline of diffusers as a plan says, each component on its devices.

    python run.py MODEL --prompt "a lighthouse at dusk" [-o image.png] [--seed 0]

`MODEL` is a folder of diffusers or a name on the hub. The plan lies beside this file (plan.json).
Needs torch and diffusers alone.
"""

import argparse
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with all tensors inside it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(x, change) for x in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(x, change) for x in value)
    if isinstance(value, Mapping):  # outputs of models are mappings of their fields
        parts = {key: mapped(x, change) for key, x in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if hasattr(value, "latent_dist") or hasattr(value, "sample"):
        for name, part in vars(value).items():
            setattr(value, name, mapped(part, change))
    return value


def moved(value: Any, device: str) -> Any:
    """A value with all tensors inside it on a device."""
    return mapped(value, lambda tensor: tensor.to(device))


class Resting:
    """Weights in host memory that a device gets while they are needed; nothing is copied back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = [*module.parameters(), *module.buffers()]
        self.rest = [tensor.data for tensor in self.tensors]

    def bring(self, device: str) -> None:
        """The weights on the device."""
        for tensor, data in zip(self.tensors, self.rest, strict=True):
            tensor.data = data.to(device, copy=True)

    def leave(self) -> None:
        """The weights at rest again."""
        for tensor, data in zip(self.tensors, self.rest, strict=True):
            tensor.data = data


def wrap(
    module: torch.nn.Module, method: str, device: str, home: str | None,
    before: Callable[[], None] | None = None, after: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Call a method of a module with its tensors on the module's device, and send its results home
    (None: leave them)."""
    inner = getattr(module, method)

    @functools.wraps(inner)
    def call(*args: Any, **named: Any) -> Any:
        if before is not None:
            before()
        result = inner(*moved(args, device), **moved(named, device))
        if after is not None:
            after()
        return result if home is None else moved(result, home)

    setattr(module, method, call)


class Turns:
    """The component that is on its device while it runs: it leaves when any other one is called."""

    def __init__(self) -> None:
        self.there: Resting | None = None

    def enter(self, rest: Resting | None, device: str) -> None:
        """A component is called: its weights come, if they rest; others that moved leave."""
        if self.there is not rest:
            if self.there is not None:
                self.there.leave()
            if rest is not None:
                rest.bring(device)
            self.there = rest


def by_blocks(module: torch.nn.Module, entry: Mapping[str, Any]) -> None:
    """Blocks on their devices; those that rest in host memory are sent when they run."""
    main = entry["devices"][0]
    for path, device in entry["blocks"].items():
        block = module.get_submodule(path)
        if device == "host":
            rest = Resting(block)
            wrap(block, "forward", main, None, functools.partial(rest.bring, main), rest.leave)
        else:
            block.to(device)
            wrap(block, "forward", device, None)
    kept = {id(t) for path in entry["blocks"] for t in module.get_submodule(path).parameters()}
    kept |= {id(t) for path in entry["blocks"] for t in module.get_submodule(path).buffers()}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in kept:
            tensor.data = tensor.data.to(main)
    # Blocks leave their results where they are; modules after them are on the main device.
    for path, part in module.named_modules():
        outside = path and not any(
            path == b or path.startswith(f"{b}.") or b.startswith(f"{path}.")
            for b in entry["blocks"]
        )
        if outside and not list(part.children()):
            wrap(part, "forward", main, None)


def place(pipe: Any, plan: Mapping[str, Any]) -> None:
    """Put the components of a pipeline where the plan says."""
    home, turns = plan["home"], Turns()
    for entry in plan["components"]:
        module, device = getattr(pipe, entry["name"]), entry["devices"][0]
        rest = None
        if entry["residence"] == "moved":
            rest = Resting(module)
        elif entry["residence"] == "blocks sent":
            from diffusers.hooks.group_offloading import apply_group_offloading

            on_gpu = device.startswith("cuda")
            apply_group_offloading(
                module, torch.device(device), torch.device("cpu"), num_blocks_per_group=1,
                use_stream=on_gpu, record_stream=on_gpu,
            )  # fmt: skip
        elif entry["blocks"]:
            by_blocks(module, entry)
        else:
            module.to(device)
        enter = functools.partial(turns.enter, rest, device)
        wrap(module, entry["method"], device, home, enter)
    if plan["tiling"]:
        pipe.vae.enable_tiling()
    if plan["slicing"]:
        pipe.vae.enable_slicing()
    # Pipelines make latents on the device that they take for that of all components.
    own = {"_execution_device": property(lambda _: torch.device(home))}
    pipe.__class__ = type(pipe.__class__.__name__, (pipe.__class__,), own)


def arguments(pipe: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the plan that the pipeline's call has."""
    known = inspect.signature(pipe.__call__).parameters
    return {name: value for name, value in plan["call"].items() if name in known}


def parsed(text: str | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", default="")
    return parser.parse_args()


def loaded(model: str) -> tuple[Any, dict[str, Any]]:
    """(pipeline in host memory, plan beside this file)."""
    import diffusers

    plan = json.loads((Path(__file__).parent / "plan.json").read_text())
    kind = getattr(diffusers, plan["class"])
    return kind.from_pretrained(model, torch_dtype=getattr(torch, plan["dtype"])), plan


def made(pipe: Any, plan: Mapping[str, Any], given: argparse.Namespace) -> Any:
    """Images or videos of the prompt, after a line with their seconds."""
    began = time.perf_counter()
    generator = torch.Generator("cpu").manual_seed(given.seed)
    result = pipe(given.prompt, generator=generator, **arguments(pipe, plan))
    print(f"{time.perf_counter() - began:.2f} s; predicted {plan['seconds']:.2f} s")
    return result


def save(result: Any, output: str, first: int = 0) -> None:
    """Write the images or videos, numbered from `first` on."""
    if hasattr(result, "images"):
        for i, image in enumerate(result.images, first):
            image.save(_numbered(output or "image.png", i))
    else:
        from diffusers.utils.export_utils import export_to_video

        for i, frames in enumerate(result.frames, first):
            export_to_video(frames, _numbered(output or "video.mp4", i))


def _numbered(name: str, i: int) -> str:
    path = Path(name)
    return name if i == 0 else str(path.with_stem(f"{path.stem}-{i}"))


def main() -> None:
    """Load, place, run and save."""
    given = parsed(__doc__)
    pipe, plan = loaded(given.model)
    place(pipe, plan)
    save(made(pipe, plan, given), given.output)


if __name__ == "__main__":
    main()
