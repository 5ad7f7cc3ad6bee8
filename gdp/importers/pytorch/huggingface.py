"""Transformers models from a configuration alone: no weights, no hub, no code of others.

A spec is `hf:PATH`, or `hf:PATH?task=causal-lm&batch=1&sequence=512&decode`, where PATH is a
`config.json` or a folder that holds one, and what is left out is the default; with
`max_num_batched_tokens=2048` it is the model as vLLM computes it. The steps, one module each:
`config_spec` (spec and file), `config_check` (limits, code taken out), `config_model` (the class of
transformers without weights), `config_phases` (one pass, a step of decoding, a request).
"""

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from gdp.graph.op_graph import OpGraph
from gdp.graph.serving import Served
from gdp.importers.program import Traced
from gdp.importers.pytorch.closed import closed, import_transformers
from gdp.importers.pytorch.config_check import attention_of, without_quantisation
from gdp.importers.pytorch.config_model import build_model, countable, read_config
from gdp.importers.pytorch.config_phases import (
    ConfigTask,
    GeneratingModel,
    HuggingFaceModel,
    decoding_step,
    generating_model,
    reserved,
)
from gdp.importers.pytorch.config_spec import PREFIX, ConfigSpec
from gdp.importers.pytorch.config_tasks import (
    GENERATES,
    encodes,
    fix_ropes,
    prompt_inputs,
    require_generating,
    require_task,
    task_of,
)
from gdp.importers.pytorch.config_type import loaded_config, type_note
from gdp.importers.pytorch.export import import_torch
from gdp.importers.pytorch.quantised import (
    cache_bits,
    experts_left,
    quantised_options,
    quantization_of,
)
from gdp.importers.pytorch.trace_cache import find_trace, key_of
from gdp.terminal import stage


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
    name = f"{type(model).__name__} {spec.batch}x{spec.prompt or spec.sequence}"
    name += f" {spec.quantize}" if spec.quantize else ""
    if spec.new:
        with countable(text), closed():
            request = generating_model(asked, model, spec, f"{name}+{spec.new}", key, whole)
            return _stored_as(_with_programs(request, spec, document, task), quantised, scheme)
    if not spec.decode:
        phase = HuggingFaceModel(text, model, (), inputs, {"name": name}, key=key)
        return _stored_as(_with_programs(phase, spec, document, task), quantised, scheme)

    def decoding() -> HuggingFaceModel:
        with countable(text), closed():
            return decoding_step(asked, model, spec.batch, spec.sequence, spec.sequence)

    phase = decoding() if whole else HuggingFaceModel(text, model)
    phase = replace(phase, options={**phase.options, "name": f"{name} decode"}, key=key)
    phase = _with_programs(replace(phase, again=decoding), spec, document, task)
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
    """Type that the graph of a spec is loaded in where its configuration does not name it, and
    experts that its quantisation leaves at 16 bits, in a sentence; "" for other models, and where
    there is nothing to tell."""
    if not text.startswith(PREFIX):
        return ""
    spec, path, _, document, _ = loaded_config(text)
    scheme = quantization_of(document, spec.quantize, str(path))
    first = graph.weight_holders().tolist()
    own = graph.weight_bytes - graph.cache_bytes
    left = experts_left(((graph.scope[op], int(own[op])) for op in first), scheme)
    return "; ".join(filter(None, (type_note(text), left)))


def find_huggingface_trace(text: str) -> Traced | None:
    """The trace of a spec where one is kept; takes neither torch nor transformers."""
    spec, _, _, document, _ = loaded_config(text)
    found = find_trace(_key(spec, document))
    is_served = spec.max_num_batched_tokens > 0
    return found and reserved(found, spec.request, is_served=is_served)


def _with_programs(
    phase: HuggingFaceModel, spec: ConfigSpec, document: Mapping[str, Any], task: str
) -> HuggingFaceModel:
    """The phase, and the step of a request, with the digests of their programs: how weights are
    stored and whether an engine fuses ops is not among what these depend on, nor is it for a prompt
    how many tokens follow."""
    dense = without_quantisation(document)

    def key(*tokens: object) -> str:
        return key_of(dense, ("program", task, spec.batch, *tokens))

    served_as = _served_as(spec, phase.model, task, document)
    if isinstance(phase, GeneratingModel) and phase.step is not None:
        step = replace(
            phase.step, program_key=key("steps", spec.prompt, spec.new),
            served=served_as and served_as._replace(tokens=1),
        )  # fmt: skip
        return replace(
            phase, step=step, program_key=key("prompt", spec.prompt), served=served_as
        )  # fmt: skip
    program_key = key("step" if spec.decode else "all", spec.sequence)
    return replace(phase, program_key=program_key, served=served_as)


def _served_as(
    spec: ConfigSpec, model: Any, task: str, document: Mapping[str, Any]
) -> Served | None:
    """Sizes of the prompt, or the only phase, for an engine; None where torch computes it."""
    if not spec.max_num_batched_tokens or task not in GENERATES:
        return None
    tokens = spec.prompt or (1 if spec.decode else spec.sequence)
    # What an encoder reads is never divided.
    at_once = max(spec.max_num_batched_tokens, spec.batch * tokens if encodes(model) else 0)
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
