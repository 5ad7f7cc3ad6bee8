"""Transformers models from a configuration alone: no weights, no hub, no code of others.

A spec is `hf:PATH`, or `hf:PATH?task=causal-lm&batch=1&sequence=512&decode`, where PATH is a
`config.json` or a folder that holds one, and what is left out is the default; with
`max_num_batched_tokens=2048` it is the model as vLLM computes it. The steps, one module each:
`spec` (spec and file), `check` (limits, code taken out), `build` (the class of transformers without
weights), `tasks` (its inputs), `phases` (one pass, a step of decoding, a request).
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

from gdp.base.terminal import stage
from gdp.base.units import format_bytes
from gdp.graph.op_graph import OpGraph
from gdp.graph.serving import Served
from gdp.importers.huggingface.build import build_model, countable, read_config
from gdp.importers.huggingface.check import attention_of, without_quantisation
from gdp.importers.huggingface.dtype import bytes_of_files, loaded_config, type_note
from gdp.importers.huggingface.phases import (
    ConfigTask,
    GeneratingModel,
    HuggingFaceModel,
    decoding_step,
    generating_model,
    longest_of,
    reserved,
)
from gdp.importers.huggingface.spec import PREFIX, ConfigSpec
from gdp.importers.huggingface.tasks import (
    GENERATES,
    encodes,
    fix_ropes,
    prompt_inputs,
    require_generating,
    require_task,
    task_of,
)
from gdp.importers.program import Traced
from gdp.importers.pytorch.closed import closed, import_transformers
from gdp.importers.pytorch.export import import_torch
from gdp.importers.pytorch.phases import Phase, Scaling
from gdp.importers.pytorch.quantised import (
    cache_bits,
    experts_left,
    quantised_options,
    quantization_of,
)
from gdp.importers.pytorch.sizes import Sizes
from gdp.importers.pytorch.trace_cache import cache_trace, find_facts, find_trace, key_of

LARGER = 1.15
"""Times the bytes of a checkpoint's files that its weights are said to take, from which on it is
worth a word: layers that predict further tokens are in files and in no graph."""


def huggingface_model(text: str, device: str = "meta", *, whole: bool = True) -> HuggingFaceModel:
    """The model of a spec with its inputs: on the meta device, elsewhere with random weights.

    Nothing is downloaded, no code beside the configuration is run, and attention is torch's own,
    whatever the configuration asks for. Without `whole` the model can be traced but not executed:
    the inputs of a step of decoding are made when it is traced, of a cut model if that can be.
    """
    spec, path, given, document, _ = loaded_config(text)
    scheme = quantization_of(document, spec.quantize, str(path))
    stage("importing torch and transformers")
    torch = import_torch()
    with closed():
        transformers = import_transformers()
        config = read_config(transformers, path, given, document)
        task = spec.task or task_of(config)
        require_task(config, task, text)
        if spec.decode or spec.new:
            require_generating(config, task, text)
        asked = ConfigTask(torch, transformers, config, task, text)
        stage(f"building the {config.model_type} model without weights")
        with torch.device(device):
            model = build_model(transformers, config, task, text, attention_of(given, path))
            if spec.decode or spec.new:
                fix_ropes(model)
            quantised = {} if scheme is None else quantised_options(model, scheme, text)
            with countable(text):
                inputs = _inputs(torch, asked, model, spec)
    key = _key(spec, document)
    name = _name(type(model).__name__, spec)
    if spec.new:

        def request_at(other: ConfigSpec) -> GeneratingModel:
            other_name = _name(type(model).__name__, other)
            made = generating_model(asked, model, other, other_name, "", whole=False)
            return _of_request(made, other, document, task)

        with countable(text), closed():
            request = generating_model(asked, model, spec, name, key, whole=whole)
            request = _of_request(request, spec, document, task)
            request = replace(request, facts_key=_facts_key(spec, document))
            if not encodes(model):
                request = _scalable(request, spec, document, request_at)
            return _stored_as(request, quantised, scheme)
    if not spec.decode:
        phase = HuggingFaceModel(text, model, (), inputs, {"name": name}, key=key)
        return _stored_as(_with_program(phase, spec, document, task), quantised, scheme)

    def decoding() -> HuggingFaceModel:
        with countable(text), closed():
            return decoding_step(asked, model, spec.batch, spec.sequence, spec.sequence)

    phase = decoding() if whole else HuggingFaceModel(text, model)
    phase = replace(phase, options={**phase.options, "name": f"{name} decode"}, key=key)
    phase = _with_program(replace(phase, again=decoding), spec, document, task)
    return _stored_as(phase, quantised, scheme)


def _inputs(torch: Any, asked: ConfigTask, model: Any, spec: ConfigSpec) -> dict[str, Any]:
    config, task = asked.config, asked.task
    if task == "image-classification" or (task not in GENERATES and hasattr(config, "image_size")):
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.empty(spec.batch, channels, height, width)}
    shape = (spec.batch, spec.sequence)
    if task not in GENERATES:
        return {"input_ids": torch.zeros(shape, dtype=torch.long)}
    return prompt_inputs(model, config, shape, spec.sequence, asked.text) | {"use_cache": False}


def loading_note(text: str, graph: OpGraph) -> str:
    """Type that the graph of a spec is loaded in where its configuration does not name it, experts
    that its quantisation leaves at 16 bits, and files that hold fewer bytes than the graph, in a
    sentence; "" for other models, and where there is nothing to tell."""
    if not text.startswith(PREFIX):
        return ""
    spec, path, _, document, _ = loaded_config(text)
    scheme = quantization_of(document, spec.quantize, str(path))
    first = graph.weight_holders().tolist()
    own = graph.weight_bytes - graph.cache_bytes
    left = experts_left(((graph.scope[op], int(own[op])) for op in first), scheme)
    planned_bytes, files = int(own[first].sum()), ""
    file_bytes = 0 if spec.quantize else bytes_of_files(path.parent)
    if file_bytes and planned_bytes > LARGER * file_bytes:
        files = (
            f"by its configuration the weights take {format_bytes(planned_bytes)}, but the files "
            f"of the checkpoint hold {format_bytes(file_bytes)}: they are stored in fewer bits "
            "than it says, or it belongs to another model"
        )
    return "; ".join(filter(None, (type_note(text), left, files)))


def longest_named(text: str) -> int:
    """Maximum context length in the configuration file of a spec; 0 if absent, which transformers
    may know. Loads neither torch nor transformers."""
    if not text.startswith(PREFIX):
        return 0
    document = loaded_config(text).document
    part = document.get("text_config")
    if document.get("is_encoder_decoder"):
        return 0
    try:
        return longest_of(SimpleNamespace(**(part if isinstance(part, dict) else document)))
    except (AttributeError, TypeError):  # of a form that transformers refuses
        return 0


def find_huggingface_trace(text: str) -> Traced | None:
    """The trace of a spec where one is kept, or follows from those of other sizes; takes neither
    torch nor transformers."""
    spec, _, _, document, _ = loaded_config(text)
    found = find_trace(_key(spec, document)) or _scaled_trace(text, spec, document)
    return found and reserved(found, spec.request)


def _scaled_trace(text: str, spec: ConfigSpec, document: Mapping[str, Any]) -> Traced | None:
    """The trace of a request by programs of other sizes that are kept; None without them."""
    facts = find_facts(_facts_key(spec, document)) if spec.new else None
    if facts is None:
        return None
    served_as, options = _served_as(spec, facts.task, document), dict(facts.options)
    step = HuggingFaceModel(
        text, None, options=options, served=served_as and served_as._replace(tokens=1)
    )
    model = GeneratingModel(
        text, None, options=options | {"name": _name(facts.name, spec)}, step=step,
        request=spec.request, longest=facts.longest, task=facts.task, served=served_as,
    )  # fmt: skip
    model = _scalable(model, spec, document, None)
    scalings = (model.scaling, model.step and model.step.scaling)
    read, listed = (scaling and scaling.program(make=False) for scaling in scalings)
    if read is None or listed is None:
        return None
    traced = model.joint(read, listed, facts)
    cache_trace(_key(spec, document), traced)
    return traced


def _name(of_class: str, spec: ConfigSpec) -> str:
    """Name of the graph of a spec."""
    name = f"{of_class} {spec.batch}x{spec.prompt or spec.sequence}"
    name += f" {spec.quantize}" if spec.quantize else ""
    return f"{name}+{spec.new}" if spec.new else name


def _facts_key(spec: ConfigSpec, document: Mapping[str, Any]) -> str:
    return key_of(document, ("about", spec.task, spec.quantize))


def _prompt_key(spec: ConfigSpec, document: Mapping[str, Any], task: str) -> str:
    """Digest of the program of a prompt: how weights are stored and whether an engine fuses ops is
    not among what it depends on, nor is how many tokens follow."""
    return key_of(
        without_quantisation(document), ("program", task, spec.batch, "prompt", spec.prompt)
    )


def _step_key(spec: ConfigSpec, document: Mapping[str, Any], task: str) -> str:
    parts = ("program", task, spec.batch, "steps", spec.prompt, spec.new)
    return key_of(without_quantisation(document), parts)


def _scalable(
    model: GeneratingModel, spec: ConfigSpec, document: Mapping[str, Any],
    request_at: Callable[[ConfigSpec], GeneratingModel] | None,
) -> GeneratingModel:  # fmt: skip
    """A request whose programs may follow from those of other sizes; without `request_at` from kept
    ones alone."""

    def prompt_of(sizes: Sizes) -> ConfigSpec:
        return replace(spec, batch=sizes.batch, prompt=sizes.tokens, requests=0, context=0)

    def step_of(sizes: Sizes) -> ConfigSpec:  # at the mean context of two new tokens
        return replace(prompt_of(sizes), prompt=sizes.tokens - 1, new=2)

    def step_at(sizes: Sizes) -> Phase:
        assert request_at is not None
        step = request_at(step_of(sizes)).step
        assert step is not None
        return step

    task, make = model.task, request_at is not None
    prompt = Scaling(
        Sizes(spec.batch, spec.prompt), lambda sizes: _prompt_key(prompt_of(sizes), document, task),
        phase_at=(lambda sizes: request_at(prompt_of(sizes))) if request_at is not None else None,
    )  # fmt: skip
    step = Scaling(
        Sizes(spec.batch, spec.prompt + max(1, spec.new // 2)),
        lambda sizes: _step_key(step_of(sizes), document, task),
        grows=(spec.prompt + spec.new, model.longest), phase_at=step_at if make else None,
    )  # fmt: skip
    assert model.step is not None
    return replace(model, scaling=prompt, step=replace(model.step, scaling=step))


def _of_request(
    model: GeneratingModel, spec: ConfigSpec, document: Mapping[str, Any], task: str
) -> GeneratingModel:
    """The phases of a request with the digests of their programs."""
    assert model.step is not None
    served_as = _served_as(spec, task, document, encodes(model.model))
    step = replace(
        model.step, program_key=_step_key(spec, document, task),
        served=served_as and served_as._replace(tokens=1),
    )  # fmt: skip
    return replace(
        model, step=step, program_key=_prompt_key(spec, document, task), served=served_as
    )


def _with_program(
    phase: HuggingFaceModel, spec: ConfigSpec, document: Mapping[str, Any], task: str
) -> HuggingFaceModel:
    """A single phase with the digest of its program."""
    parts = ("program", task, spec.batch, "step" if spec.decode else "all", spec.sequence)
    return replace(
        phase, program_key=key_of(without_quantisation(document), parts),
        served=_served_as(spec, task, document, encodes(phase.model)),
    )  # fmt: skip


def _served_as(
    spec: ConfigSpec, task: str, document: Mapping[str, Any], has_encoder: bool = False
) -> Served | None:
    """Sizes of the prompt, or the only phase, for an engine; None where torch computes it."""
    if not spec.max_num_batched_tokens or task not in GENERATES:
        return None
    tokens = spec.prompt or (1 if spec.decode else spec.sequence)
    # What an encoder reads is never divided.
    at_once = max(spec.max_num_batched_tokens, spec.batch * tokens if has_encoder else 0)
    bits = 0 if spec.quantize else cache_bits(document)
    if spec.kv_cache_dtype:
        bits = 8 if spec.kv_cache_dtype == "fp8" else 0
    return Served(tokens, spec.batch, at_once, bits)


def _key(spec: ConfigSpec, document: Mapping[str, Any]) -> str:
    return key_of(document, astuple(spec)[1:-2])


def _stored_as(
    model: HuggingFaceModel, quantised: Mapping[str, Any], scheme: Mapping[str, Any] | None
) -> HuggingFaceModel:
    """The model, and each phase of a request, with its weights stored as they are quantised."""
    if not quantised:
        return model
    options = {**model.options, **quantised}
    if isinstance(model, GeneratingModel) and model.step is not None:
        step = _stored_as(model.step, quantised, scheme)
        return replace(model, options=options, scheme=scheme, step=step)
    return replace(model, options=options, scheme=scheme)
