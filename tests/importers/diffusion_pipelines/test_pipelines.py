"""The contract of every class of pipelines: graphs of the calls that diffusers makes."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers")

from gdp.graph.file import decode_graph, encode_graph
from gdp.importers.diffusers.classes import PIPELINES
from gdp.importers.diffusers.decoders import DECODERS, factors_of
from gdp.importers.diffusers.pipeline import DiffusionPipeline, load_pipeline
from gdp.importers.diffusers.request import MediaRequest
from tests.importers.diffusion_pipelines.tiny_pipelines import TINY, Tiny, saved

ROLES = ["encode", "denoise", "decode"]


def loaded(name: str, folder: Path, **more: Any) -> tuple[Tiny, DiffusionPipeline]:
    tiny = saved(name, folder)
    width, height, frames = tiny.size
    request = MediaRequest(width, height, frames, **{"steps": 4, **more})
    return tiny, load_pipeline(f"hf:{folder}", request, "float32")


@pytest.fixture(scope="module", params=list(PIPELINES))
def made(request: Any, tmp_path_factory: Any) -> tuple[str, Tiny, DiffusionPipeline]:
    """A tiny pipeline of each class, and what is loaded of its configurations."""
    return request.param, *loaded(request.param, tmp_path_factory.mktemp("pipeline"))


def test_there_is_a_tiny_pipeline_of_each_class() -> None:
    assert set(TINY) == set(PIPELINES)


@pytest.mark.slow
def test_components_are_those_of_the_modules(made: tuple[str, Tiny, DiffusionPipeline]) -> None:
    """Parameters, bytes and order are those of the modules that diffusers makes."""
    _, tiny, pipeline = made
    assert [c.name for c in pipeline.components] == list(tiny.components)
    roles = [ROLES.index(c.role) for c in pipeline.components]
    assert roles == sorted(roles)
    assert set(roles) == {0, 1, 2}
    for component in pipeline.components:
        module = tiny.components[component.name]
        assert component.parameters == sum(p.numel() for p in module.parameters())
        buffers = sum(b.nbytes for b in module.buffers())
        # Beside parameters and buffers stand constants that a trace holds, such as rotations.
        assert 0 <= component.weight_bytes - 4 * component.parameters <= buffers + (1 << 20)
        assert sum(size for _, size in component.blocks) <= component.weight_bytes
        for path, size in component.blocks:  # programs find them by these
            assert 0 < size <= sum(p.nbytes for p in module.get_submodule(path).parameters()) + 4096
        assert component.graph.flop.sum() > 0
        assert component.calls >= 1
        assert component.output_bytes > 0
        kept = decode_graph(encode_graph(component.graph), component.name)  # as traces are kept
        assert kept.digest == component.graph.digest
    assert sum(c.passes for c in pipeline.components if c.role == "denoise") == 4
    assert all(c.passes == 1 for c in pipeline.components if c.role != "denoise")


@pytest.mark.slow
def test_a_denoiser_reads_as_the_pipeline_calls_it(
    made: tuple[str, Tiny, DiffusionPipeline],
) -> None:
    """A run of the tiny pipeline reads tensors of the sizes that the graph's inputs have."""
    import diffusers
    import torch

    name, tiny, pipeline = made
    row = PIPELINES[name]
    wanted = inspect.signature(getattr(diffusers, name).__init__).parameters
    parts = {k: v.eval() for k, v in tiny.components.items() if not k.startswith("text_encoder")}
    ddim = row.denoisers == ("unet",) or name in ("HunyuanDiTPipeline", "PixArtSigmaPipeline")
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    if name == "CogVideoXPipeline":
        scheduler = diffusers.CogVideoXDDIMScheduler()
    elif ddim:
        scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    given = dict.fromkeys(k for k in wanted if k not in ("self", "kwargs", "args"))
    defaults = {k: p.default for k, p in wanted.items() if p.default is not p.empty}
    given = given | defaults | parts | {"scheduler": scheduler}
    if "requires_safety_checker" in given:
        given["requires_safety_checker"] = False
    pipe = getattr(diffusers, name)(**given)
    pipe.set_progress_bar_config(disable=True)
    seen: list[dict[str, Any]] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        names = list(inspect.signature(module.forward).parameters)
        seen.append({**dict(zip(names, args, strict=False)), **kwargs})

    denoiser = tiny.components[row.denoisers[0]]
    denoiser.register_forward_pre_hook(record, with_kwargs=True)
    width, height, frames = tiny.size
    more = {"num_frames": frames} if row.is_video else {}
    with torch.no_grad():
        pipe(width=width, height=height, num_inference_steps=2, output_type="latent", **tiny.call,
             **more)  # fmt: skip
    component = next(c for c in pipeline.components if c.role == "denoise")
    # Two steps, of two experts one each: a call or two in each.
    own_steps = len(seen) / component.calls
    assert own_steps in (1.0, 2.0)
    graph = component.graph
    inputs = {graph.op_names[i]: i for i in range(graph.num_ops) if graph.op_types[i] == "Input"}
    sizes = {name: _elements(graph, op) for name, op in inputs.items()}
    for key, value in _flat(seen[0]).items():
        if key in sizes and torch.is_tensor(value) and value.dim():
            assert sizes[key] == value.numel(), key
    assert {"hidden_states", "sample"} & sizes.keys() & seen[0].keys()


def _elements(graph: Any, op: int) -> int:
    (shape,) = graph.detail[op].output_shapes or ((),)
    return int(np.prod(shape))


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, value in given.items():
        if isinstance(value, dict):
            flat |= {f"{key}_{k}": v for k, v in value.items()}
        elif isinstance(value, tuple | list):
            flat |= {f"{key}_{i}": v for i, v in enumerate(value)}
        else:
            flat[key] = value
    return flat


@pytest.mark.parametrize("name", PIPELINES)
def test_defaults_are_those_of_the_call(name: str) -> None:
    """Steps, guidance and the longest prompt are what `__call__` says."""
    import diffusers

    row = PIPELINES[name]
    call = inspect.signature(getattr(diffusers, name).__call__).parameters
    assert call["num_inference_steps"].default == row.steps
    scale = "true_cfg_scale" if name == "QwenImagePipeline" else "guidance_scale"
    assert call[scale].default == row.guidance
    longest = call.get("max_sequence_length")
    if longest is not None:
        assert longest.default == max(row.prompts.values())


@pytest.mark.parametrize("name", DECODERS)
def test_factors_without_a_configuration_are_those_of_the_class(name: str) -> None:
    import diffusers
    import torch

    with torch.device("meta"):
        vae = getattr(diffusers, name)()
    factors = factors_of(name, {})
    assert factors == factors_of(name, vae.config)
    own = getattr(vae, "spatial_compression_ratio", None)
    assert own in (None, factors.spatial)
    config = vae.config
    assert getattr(config, "latent_channels", None) or config.z_dim == factors.channels
