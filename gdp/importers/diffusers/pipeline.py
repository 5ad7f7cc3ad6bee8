"""A diffusion pipeline as components with graphs: text encoders, denoiser and decoder."""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OUTPUT, OpGraph
from gdp.importers.diffusers.classes import PIPELINES, PipelineClass
from gdp.importers.diffusers.decoders import DECODERS, factors_of
from gdp.importers.diffusers.denoisers import DENOISERS
from gdp.importers.diffusers.encoders import ENCODERS
from gdp.importers.diffusers.request import MediaRequest
from gdp.importers.diffusers.spec import PipelineConfig, pipeline_config
from gdp.importers.diffusers.tracing import ComponentCall, trace_component

Role = Literal["encode", "denoise", "decode"]
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True, eq=False)
class Component:
    """A component of a pipeline, and the work of one pass of it.

    The work of a pass is `calls` times the graph: two calls where guidance calls a denoiser twice
    or encodes a second prompt, as many as there are tiles and chunks of frames where a decoder
    works part by part (smaller ones count in proportion). Memory beside weights is that of one
    call and of the results of all.
    """

    name: str  # in the pipeline: "text_encoder_2", "transformer", "vae"
    role: Role
    class_name: str
    parameters: int
    weight_bytes: int  # of all weights, those too that no pass reads, such as a VAE's encoder
    graph: OpGraph  # of one call
    passes: int  # of one request: the steps of a denoiser, else 1
    calls: float  # of the graph in a pass
    output_bytes: int  # of a pass, to the next component
    blocks: tuple[tuple[str, int], ...]  # repeated blocks by module path, with weight bytes


@dataclass(frozen=True, eq=False)
class DiffusionPipeline:
    """A pipeline and a request, as components in the order in which they run."""

    name: str
    class_name: str
    components: tuple[Component, ...]
    request: MediaRequest  # with the defaults of the pipeline
    guided: bool  # by a second prompt, whose denoising doubles the work
    notes: tuple[str, ...]


def load_pipeline(spec: str, request: MediaRequest, dtype: str = "bfloat16") -> DiffusionPipeline:
    """The components of a pipeline for a request; nothing is downloaded, no code of others is run.

    Args:
        spec: `hf:DIR` with a `model_index.json`, `hf:ORG/NAME` of the hub's cache, or
            `diffusers:NAME`.
        request: Images or videos to make.
        dtype: Type of weights and activations, where the request names no other.

    Raises:
        ModelError: the pipeline cannot be read, or does not make what is requested.
        MissingExtraError: diffusers or transformers is not installed.
    """
    config = pipeline_config(spec)
    row = PIPELINES[config.class_name]
    _require_components(config, row)
    request = request.by_default(config.steps or row.steps, row.guidance)
    latent = _latent_shape(config, row, request)
    guided = row.guides_by != "distilled" and (request.guidance or 0.0) > 1.0
    about = _About(config, row, request, latent, guided, dtype)
    components = tuple(
        about.component(name, role, steps) for name, role, steps in _roles(config, row, request)
    )
    return DiffusionPipeline(
        config.name, config.class_name, components, request, guided, about.notes()
    )


def _require_components(config: PipelineConfig, row: PipelineClass) -> None:
    """Refuse a pipeline without a denoiser or decoder, and classes of no table."""
    for name in (row.denoisers[0], "vae"):
        if name not in config.components:
            raise ModelError(
                f"{config.name}: a {config.class_name} needs a {name}, which is missing"
            )
    for name, component in config.components.items():
        known = DECODERS if name == "vae" else DENOISERS if name in row.denoisers else ENCODERS
        if component.class_name not in known:
            raise ModelError(
                f"{config.name}: gdp does not know the class {component.class_name[:60]} of "
                f"{name}; it knows {', '.join(known)}"
            )
        if name not in row.prompts and known is ENCODERS:
            raise ModelError(f"{config.name}: a {config.class_name} has no component {name}")


def _roles(
    config: PipelineConfig, row: PipelineClass, request: MediaRequest
) -> list[tuple[str, Role, int]]:
    """Name, role and passes of the components, in the order in which they run."""
    encoders = [name for name in row.prompts if name in config.components]
    denoisers = [name for name in row.denoisers if name in config.components]
    steps = [request.steps]
    if len(denoisers) == 2:
        first = round(request.steps * row.boundary)
        steps = [first, request.steps - first]
    return [
        *((name, "encode", 1) for name in encoders),
        *((name, "denoise", count) for name, count in zip(denoisers, steps, strict=True)),
        ("vae", "decode", 1),
    ]


def _latent_shape(
    config: PipelineConfig, row: PipelineClass, request: MediaRequest
) -> tuple[int, ...]:
    """(batch, channels, frames of a video, rows, columns) of the latent; raises `ModelError` for
    sizes that the pipeline does not make."""
    vae = config.components["vae"]
    factors = factors_of(vae.class_name, vae.document)
    multiple = factors.spatial * row.multiple
    for name in ("width", "height"):
        size = getattr(request, name)
        if size % multiple:
            near = max(multiple, round(size / multiple) * multiple)
            raise ModelError(
                f"{config.name}: {name} {size} is no multiple of {multiple}, such as {near}"
            )
    if request.is_video and not row.is_video:
        raise ModelError(f"{config.name} makes images; ask with --image instead of --video")
    if (request.frames - 1) % factors.temporal:
        near = (request.frames - 1) // factors.temporal * factors.temporal + 1
        raise ModelError(
            f"{config.name}: frames must be one more than a multiple of {factors.temporal}, such "
            f"as {near} or {near + factors.temporal}, got {request.frames}"
        )
    frames = (request.frames - 1) // factors.temporal + 1
    has_time = factors.temporal > 1
    area = (request.height // factors.spatial, request.width // factors.spatial)
    return (request.batch, factors.channels, *((frames,) if has_time else ()), *area)


class _About(NamedTuple):
    """All that the components of a request depend on."""

    config: PipelineConfig
    row: PipelineClass
    request: MediaRequest
    latent: tuple[int, ...]
    guided: bool
    dtype: str

    def tokens(self, name: str) -> int:
        """Tokens of a prompt, without those of a template."""
        count = self.row.prompts[name]
        is_longest = count == max(self.row.prompts.values())
        return self.request.prompt if self.request.prompt and is_longest else count

    def component(self, name: str, role: Role, passes: int) -> Component:
        """One component, of its trace."""
        own, request = self.config.components[name], self.request
        batch, calls = request.batch, 1.0
        prompts: tuple[int, ...] = ()
        dtype = self.dtype
        if role == "encode":
            dropped = self.row.dropped if name == "text_encoder" else 0
            prompts, dtype = (self.tokens(name), dropped), request.encoder_dtype or dtype
            calls += self.guided and self.row.has_negative
        elif role == "denoise":
            prompts = tuple(self.tokens(n) for n in self.row.prompts if n in self.config.components)
            batch *= 2 if self.guided and self.row.guides_by == "batch" else 1
            calls += self.guided and self.row.guides_by == "calls"
        else:
            dtype = request.decoder_dtype or dtype
        shape = (batch, *self.latent[1:]) if role != "encode" else (batch, 1, 1)
        traced, parts = trace_component(ComponentCall(
            f"{self.config.name}: {name}", own.class_name, own.document, dtype, shape, prompts,
            request if role == "decode" else None,
        ))  # fmt: skip
        graph = traced.graph
        return Component(
            name, role, own.class_name, traced.parameters or 0,
            int(graph.weight_bytes[graph.weight_holders()].sum()), graph, passes,
            calls * parts, self._output_bytes(role, graph, dtype) , _blocks(graph),
        )  # fmt: skip

    def _output_bytes(self, role: Role, graph: OpGraph, dtype: str) -> int:
        """Bytes of the result of a pass: states of the prompts, a latent, or pixels."""
        if role == "encode":
            outputs = np.flatnonzero(graph.has_type((OUTPUT,)))
            read = np.unique(graph.use_tensor[np.isin(graph.use_op, outputs)])
            passes = 2 if self.guided and self.row.has_negative else 1
            return int(graph.tensor_bytes[read].sum()) * passes
        bits = 4 if dtype == "float32" else 2
        if role == "denoise":
            return math.prod(self.latent) * bits
        request = self.request
        return request.batch * request.frames * request.width * request.height * 3 * bits

    def notes(self) -> tuple[str, ...]:
        """Assumptions about the request, in sentences."""
        notes = []
        if not self.row.pads and not self.request.prompt:
            longest = max(self.row.prompts.values())
            notes.append(
                f"prompts of a {self.config.class_name} are not padded: {longest} tokens, its "
                "longest, are assumed; prompt=N says another number"
            )
        if all(name in self.config.components for name in self.row.denoisers[1:]) and (
            len(self.row.denoisers) > 1
        ):
            notes.append(
                "each of the two denoisers is assumed to take half of the steps: where they change "
                "depends on the scheduler's shift"
            )
        return tuple(notes)


def _blocks(graph: OpGraph) -> tuple[tuple[str, int], ...]:
    """Weight bytes of the outermost members of lists of modules, in the order of the graph."""
    sizes: dict[str, int] = {}
    for op in np.sort(graph.weight_holders()).tolist():
        found = _BLOCK.match(graph.scope[op])
        if found is not None and graph.weight_bytes[op]:
            sizes[found[0]] = sizes.get(found[0], 0) + int(graph.weight_bytes[op])
    return tuple(sizes.items())
