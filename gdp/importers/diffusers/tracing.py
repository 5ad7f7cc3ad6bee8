"""Traces of components: built without weights, traced block by block, and kept."""

import functools
import inspect
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from gdp.base.errors import GdpError, MissingExtraError, ModelError
from gdp.base.files.disk_cache import read_cached, write_cached
from gdp.base.terminal import stage
from gdp.base.version import install_command
from gdp.importers.diffusers.decoders import decoder_call
from gdp.importers.diffusers.denoisers import DENOISERS, Latent
from gdp.importers.diffusers.encoders import ENCODERS, encoder_call
from gdp.importers.diffusers.request import MediaRequest
from gdp.importers.huggingface.build import countable
from gdp.importers.huggingface.phases import HuggingFaceModel
from gdp.importers.program import Traced
from gdp.importers.pytorch.closed import closed, error_line, import_transformers, not_at_hand
from gdp.importers.pytorch.export import import_torch
from gdp.importers.pytorch.trace_cache import TRACES, find_trace, keeps_traces, key_of


class ComponentCall(NamedTuple):
    """One call of a component."""

    where: str  # the component, in messages
    class_name: str
    document: Mapping[str, Any]
    dtype: str
    latent: tuple[int, ...]  # batch of the call, channels, frames of videos, rows, columns
    prompts: tuple[int, ...] = ()  # tokens of an encoder, or of all that a denoiser reads
    request: MediaRequest | None = None  # of a decoder


def trace_component(asked: ComponentCall) -> tuple[Traced, float]:
    """(trace of one call, calls in a pass): kept, or traced now.

    Raises:
        ModelError: the component cannot be built or traced.
        MissingExtraError: diffusers or transformers is not installed.
    """
    request = asked.request
    parts = (request.tiling, request.slicing) if request is not None else ()
    sizes = (asked.class_name, asked.dtype, asked.latent, asked.prompts, parts)
    key, count_key = (
        key_of(asked.document, (kind, _diffusers_version(), *sizes))
        for kind in ("diffusers", "calls of diffusers")
    )
    kept = find_trace(key)
    calls = 1.0 if request is None else _kept_calls(count_key)
    if kept is not None and calls is not None:
        return kept, calls
    stage(f"building {asked.where} without weights")
    torch = import_torch()
    with closed(), torch.device("meta"), countable(asked.where):
        model = build_component(asked)
        try:
            module, inputs, calls = _call(model, asked)
        except (RuntimeError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise ModelError(f"{asked.where}: {error_line(error)}") from error
    if request is not None and keeps_traces():
        write_cached(TRACES, count_key, json.dumps(calls).encode())
    label = f"{asked.where} {asked.class_name}"
    traced = HuggingFaceModel(
        label, module, (), inputs, {"name": label}, prefix="model", key=key
    ).trace()
    return traced, calls


def _kept_calls(key: str) -> float | None:
    data = read_cached(TRACES, key) if keeps_traces() else None
    try:
        return None if data is None else float(json.loads(data))
    except (ValueError, TypeError):
        return None


def _call(model: Any, asked: ComponentCall) -> tuple[Any, dict[str, Any], float]:
    """Module, inputs and number of the calls of a component."""
    import torch

    dtype = getattr(torch, asked.dtype)
    if asked.request is not None:
        return decoder_call(model, asked.request, asked.latent, dtype)
    batch, *_, rows, columns = asked.latent
    if asked.class_name in ENCODERS:
        return (*encoder_call(model, batch, sum(asked.prompts)), 1.0)
    frames = asked.latent[2] if len(asked.latent) == 5 else 1

    class Denoise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs, return_dict=False)[0]

    latent = Latent(batch, frames, rows, columns, asked.prompts, dtype)
    return Denoise().eval(), DENOISERS[asked.class_name](model.config, latent), 1.0


def build_component(asked: ComponentCall) -> Any:
    """The module of a component on torch's default device, in the type it is loaded in."""
    try:
        if asked.class_name in ENCODERS:
            model = _of_transformers(asked)
        else:
            model = _of_diffusers(asked)
    except GdpError:
        raise
    except Exception as error:  # whatever a class makes of a configuration
        missing = not_at_hand(error)
        reason = f"needs {missing}, and gdp downloads nothing" if missing else error_line(error)
        raise ModelError(f"{asked.where}: {asked.class_name} cannot be built: {reason}") from error
    return _in_type(model.eval(), asked.dtype)


def _of_transformers(asked: ComponentCall) -> Any:
    transformers = import_transformers()
    kept = {
        k: v for k, v in asked.document.items()
        if k not in ("dtype", "torch_dtype", "quantization_config", "architectures")
    }  # fmt: skip
    config = getattr(transformers, ENCODERS[asked.class_name])(**kept)
    return getattr(transformers, asked.class_name)(config)


def _of_diffusers(asked: ComponentCall) -> Any:
    try:
        import diffusers
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"pipelines need diffusers: {install_command('diffusers')}"
        ) from None
    cls = getattr(diffusers, asked.class_name)
    takes = inspect.signature(cls.__init__).parameters
    return cls(**{k: v for k, v in asked.document.items() if k in takes and k != "self"})


def _in_type(model: Any, dtype: str) -> Any:
    """A module in the type it is loaded in, with the parts that its class keeps in 32 bits."""
    import torch

    wide = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    wide = (
        (*wide, *kept)
        if dtype == "float16" or type(model).__module__.startswith("diffusers")
        else ()
    )
    torch.nn.Module.to(model, getattr(torch, dtype))
    tensors = (*model.named_parameters(), *model.named_buffers())
    for path, tensor in tensors:
        if tensor.is_floating_point() and any(part in wide for part in path.split(".")):
            tensor.data = tensor.data.to(torch.float32)
    return model


@functools.cache
def _diffusers_version() -> str:
    try:
        return metadata.version("diffusers")
    except metadata.PackageNotFoundError:
        return ""
