"""Transformers models from a configuration alone: no weights, no hub, no code of others.

A spec is `hf:PATH`, or `hf:PATH?task=causal-lm&batch=1&sequence=512&decode`, where PATH is a
`config.json` or a folder that holds one, and what is left out is the default; with
`max_num_batched_tokens=2048` it is the model as vLLM computes it. Configurations are
checked before the classes of transformers see them, which build what a file asks for: 2**40 layers
never end, and a list of labels that long takes all memory before the first error.
"""

import inspect
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdp.errors import InfeasibleError, ModelError
from gdp.files.reading import Kind, is_file, is_folder, read_bytes
from gdp.graph.generation import (
    CacheGrowth,
    Request,
    generation_graph,
    with_context,
    with_requests,
)
from gdp.graph.op_graph import OpGraph
from gdp.graph.serving import Served, served
from gdp.importers.program import Results, Traced, batch_of, live_ops, request_tokens, spec_parts
from gdp.importers.pytorch.caches import (
    ARGUMENTS,
    ReadPrompt,
    as_encoded,
    growth_of,
    on_meta,
    read_prompt,
    refilled,
    states,
)
from gdp.importers.pytorch.closed import closed, error_line, import_transformers, not_at_hand
from gdp.importers.pytorch.config_tasks import (
    GENERATES,
    TASKS,
    encodes,
    fix_ropes,
    other_classes,
    prompt_inputs,
    require_generating,
    require_task,
    task_of,
)
from gdp.importers.pytorch.export import import_torch
from gdp.importers.pytorch.model import RecordedTorch, weights_by_path
from gdp.importers.pytorch.phases import Phase
from gdp.importers.pytorch.quantised import (
    cache_bits,
    experts_left,
    quantised_options,
    quantization_of,
    saved_bytes,
)
from gdp.importers.pytorch.repeated import Listed
from gdp.importers.pytorch.trace_cache import cache_trace, find_trace, key_of
from gdp.importers.pytorch.unread import storage_of, storages_read, unread_weights, with_unread
from gdp.ops.vllm import AT_ONCE
from gdp.terminal import stage
from gdp.units import format_bytes, whole_number

LOG = logging.getLogger(__name__)

PREFIX = "hf:"
ATTENTION = ("sdpa", "eager")
"""The implementations of attention that a configuration may ask for: torch's own."""
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_REMOVED = {
    *_ATTENTION_KEYS, "_attn_implementation_autoset", "auto_map", "trust_remote_code",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "use_kernels", "kernel_config",
}  # fmt: skip
"""Keys of a configuration that transformers never sees: code, and kernels by name."""

MOST_LAYERS, MOST_EXPERTS, MOST_LABELS = 1000, 1 << 15, 1 << 20
"""Several times the largest models there are."""
MOST_BYTES = 1 << 24
"""Of a configuration; those with the names of 20,000 classes take 1 MB."""
MOST_DEPTH = 64

_KIND = Kind("configuration of transformers", ModelError)
# Fields that say how often something is built, by name, and the most of it.
_COUNTS = (
    (re.compile(r"layers$|^n_layer$|^depths?$|_depth$|(^|_)(blocks?|stages|hidden_groups|group_num)$"),
     MOST_LAYERS),
    (re.compile(r"experts?$"), MOST_EXPERTS),
    (re.compile(r"^num_labels$|_classes$"), MOST_LABELS),
)  # fmt: skip
# One layer of several, which may be counted from the last: -1 is that.
_LAYER = re.compile(r"(?<!^n)_layer$|_feature_layers$")
_SIZES = {"image_size": 2, "num_channels": 2, "patch_size": MOST_DEPTH}
"""Fields that are a positive whole number, or a list of at most so many."""
_LARGEST = (1 << 31) - 1


_KEYS = frozenset((
    "task", "batch", "sequence", "decode", "prompt", "new", "quantize", "requests", "context",
    AT_ONCE,
))  # fmt: skip


@dataclass(frozen=True)
class ConfigSpec:
    """A configuration, the task, and the batch that its graph is of."""

    path: str
    task: str = ""  # "": by the architecture that the configuration names
    batch: int = 1
    sequence: int = 512  # tokens of the prompt; with `decode`, of the cache
    decode: bool = False  # one step of a model that has read `sequence` tokens
    prompt: int = 0  # tokens that are read before `new` ones are written; 0: one phase alone
    new: int = 0
    quantize: str = ""  # a scheme to try; "": that of the configuration
    # Tokens of a pass, where an engine computes the model (`gdp.graph.serving`); 0: torch does.
    max_num_batched_tokens: int = 0
    # Traces do not depend on these two, so that they are last:
    requests: int = 0  # in flight at once
    context: int = 0  # tokens that caches are reserved for; 0: those of prompt and new

    @property
    def request(self) -> Request:
        """The request that is asked for, of no tokens for one phase."""
        return Request(self.prompt, self.new, self.batch, self.requests, self.context)


def parse_config_spec(text: str) -> ConfigSpec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse_config_spec("hf:llama/config.json?batch=2&decode")  # doctest: +NORMALIZE_WHITESPACE
    ConfigSpec(path='llama/config.json', task='', batch=2, sequence=512, decode=True, prompt=0,
               new=0, quantize='', max_num_batched_tokens=0, requests=0, context=0)
    """
    form = "hf:PATH?task=TASK&batch=1&sequence=512&decode&quantize=SCHEME"
    path, given = spec_parts(text, form, _KEYS, PREFIX)
    task = given.get("task", "")
    if task and task not in TASKS:
        raise ModelError(f"no task {task!r}; there are {', '.join(TASKS)}")
    asked, scheme = request_tokens(given), given.get("quantize", "")
    at_once = whole_number(given.get(AT_ONCE, "1"))
    if at_once is None:
        raise ModelError(
            f"{AT_ONCE} must be a positive whole number below 2**31, got {given[AT_ONCE]!r}"
        )
    at_once = at_once if AT_ONCE in given else 0
    return ConfigSpec(
        path, task, *batch_of(given), asked.prompt, asked.new, scheme, at_once, asked.requests,
        asked.context,
    )  # fmt: skip


def config_file(spec: str) -> Path:
    """The configuration file of a spec: a path, else a model of that name in the local cache of
    the Hugging Face hub. Raises `ModelError` where there is none."""
    name = parse_config_spec(spec).path
    path = Path(name)
    path = path / "config.json" if is_folder(path) else path
    if is_file(path):
        return path
    cached = _cached_config(name)
    if cached is None:
        raise ModelError(
            f"no configuration {name!r}: give a config.json of transformers, a folder that holds "
            "one, or ORG/NAME of a model that the Hugging Face cache of this machine holds; gdp "
            "downloads nothing"
        )
    return cached


def _cached_config(name: str) -> Path | None:
    """The config.json of model ORG/NAME as it was downloaded before (its main revision)."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


@dataclass(frozen=True, eq=False)
class HuggingFaceModel(Phase):
    """A model of transformers, whose traces are kept."""

    key: str = ""
    scheme: Mapping[str, Any] | None = None  # quantization_config that its weights are stored by
    served: Served | None = None  # where an engine computes it instead of torch

    def graph_of(self, listed: Listed) -> Traced:
        """The graph of a program, with weights as they are stored, as the engine computes it."""
        traced = super().graph_of(listed)
        if self.served is None:
            return traced
        return replace(traced, graph=served(traced.graph, self.served))

    def trace(self) -> Traced:
        """The graph as it was traced before, or traced now."""
        traced = find_trace(self.key)
        if traced is None:
            stage(f"tracing {self.label}, {len(list(self.module.modules()))} modules")
            with closed():
                listed = self.program()
                traced = self.complete(self.graph_of(listed), listed)
            cache_trace(self.key, traced)
        return traced

    def record(self, *args: Any, **kwargs: Any) -> RecordedTorch:
        """The graph and its exported program, traced now; `ModelError` where an engine computes
        other ops."""
        if self.served is not None:
            raise ModelError(
                f"{self.label}: with {AT_ONCE} the model is as vLLM computes it, which is placed, "
                f"not executed here; leave {AT_ONCE} out"
            )
        stage(f"tracing {self.label} for execution")
        with closed():
            recorded = super().record(*args, **kwargs)
        paths = weights_by_path(recorded.listing, recorded.program, self.prefix)
        ops = [recorded.listing.ops[i] for i in recorded.op_of]
        read = storages_read(self.model, ops, paths)
        whole = with_unread(
            Traced(recorded.graph, (), ()), self.model, read, self.options.get("stored", {})
        )
        names = recorded.graph.op_names
        op_of = {i: whole.graph.op_index[names[op]] for i, op in recorded.op_of.items()}
        return replace(recorded, graph=whole.graph, op_of=op_of)

    def require_room(self, room_bytes: int) -> None:
        """Raise `InfeasibleError` where the weights of the model are larger than all memory there
        is for them. Nothing is traced."""
        weights = {storage_of(w): w for w in (*self.model.parameters(), *self.model.buffers())}
        sizes = {s: w.untyped_storage().nbytes() for s, w in weights.items()}
        saved = saved_bytes(self.model, self.options.get("stored", {}))
        if sum(sizes.values()) - saved <= room_bytes:
            return
        # As in `complete`: of the unread, modules with parameters are held, not lone buffers.
        read = self._storages_read()
        total = sum(size for storage, size in sizes.items() if storage in read) - saved
        total += sum(unread_weights(self.model, read, {}).values()) if read else 0
        if total > room_bytes:
            stored = self.options.get("stored", {})
            sizes_by_path = {
                path: stored[path].nbytes if path in stored else weight.nbytes
                for path, weight in self.model.named_parameters()
            }
            held = ((path.rpartition(".")[0], size) for path, size in sizes_by_path.items())
            left = experts_left(held, self.scheme)
            raise InfeasibleError(
                f"no placement of {self.label} fits: its weights alone miss "
                f"{format_bytes(total - room_bytes)} on all devices together (need "
                f"{format_bytes(total)} of {format_bytes(room_bytes)})" + (left and f"; {left}")
            )

    def complete(self, traced: Traced, *programs: Listed) -> Traced:
        """The graph of some programs with the weights that none of them reads."""
        read: set[int] = set()
        for listed in programs:
            ops = live_ops(listed, Results(state=listed.state))
            read |= storages_read(self.model, ops, listed.paths)
        return with_unread(traced, self.model, read, self.options.get("stored", {}))

    def _storages_read(self) -> set[int]:
        """The storages that a forward pass on the meta device reads; none where it fails, which
        tracing then says better."""
        import torch
        from torch.utils._pytree import tree_map

        read: set[int] = set()
        try:
            made = self.made()
            inputs = tree_map(_on_meta, dict(made.kwargs))
            mode = on_meta(lambda leaf: read.add(storage_of(leaf)))
            with closed(), torch.no_grad(), torch.device("meta"), mode:
                made.module(*made.args, **inputs)
        except Exception:
            return set()
        return read


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if hasattr(leaf, "untyped_storage") else leaf


def huggingface_model(text: str, device: str = "meta", *, whole: bool = True) -> HuggingFaceModel:
    """The model of a spec with its inputs: on the meta device, elsewhere with random weights.

    Nothing is downloaded, no code beside the configuration is run, and attention is torch's own,
    whatever the configuration asks for. Without `whole` the model can be traced but not executed:
    the inputs of a step of decoding are made when it is traced, of a cut model if that can be.
    """
    spec, path = parse_config_spec(text), config_file(text)
    given = check_config(path)
    document = _without_code(given)
    scheme = quantization_of(document, spec.quantize, str(path))
    stage("importing torch and transformers")
    torch = import_torch()
    with closed():
        transformers = import_transformers()
        config = _config(transformers, path, given, document)
        task = spec.task or task_of(config)
        require_task(config, task, text)
        if spec.decode or spec.new:
            require_generating(config, task, text)
        asked = _Asked(torch, transformers, config, task, text)
        stage(f"building the {config.model_type} model without weights")
        with torch.device(device):
            model = _built(transformers, config, task, text, _attention(given, path))
            if spec.decode or spec.new:
                fix_ropes(model)
            quantised = {} if scheme is None else quantised_options(model, scheme, text)
            with _countable(text):
                inputs = _inputs(torch, asked, model, spec)
    key = _key(spec, document)
    name = f"{type(model).__name__} {spec.batch}x{spec.prompt or spec.sequence}"
    name += f" {spec.quantize}" if spec.quantize else ""
    if spec.new:
        with _countable(text), closed():
            request = _generating(asked, model, spec, f"{name}+{spec.new}", key, whole)
            return _stored_as(_with_programs(request, spec, document, task), quantised, scheme)
    if not spec.decode:
        phase = HuggingFaceModel(text, model, (), inputs, {"name": name}, key=key)
        return _stored_as(_with_programs(phase, spec, document, task), quantised, scheme)

    def decoding() -> HuggingFaceModel:
        with _countable(text), closed():
            return _decoding(asked, model, spec.batch, spec.sequence, spec.sequence)

    phase = decoding() if whole else HuggingFaceModel(text, model)
    phase = replace(phase, options={**phase.options, "name": f"{name} decode"}, key=key)
    phase = _with_programs(replace(phase, again=decoding), spec, document, task)
    return _stored_as(phase, quantised, scheme)


def quantisation_note(text: str, graph: OpGraph) -> str:
    """Experts of the graph of a spec that its quantisation leaves at 16 bits, in a sentence; "" for
    other models, and where there are none."""
    if not text.startswith(PREFIX):
        return ""
    spec, path = parse_config_spec(text), config_file(text)
    scheme = quantization_of(_without_code(check_config(path)), spec.quantize, str(path))
    first = np.unique(graph.weight_id, return_index=True)[1].tolist()
    own = graph.weight_bytes - graph.cache_bytes
    return experts_left(((graph.scope[op], int(own[op])) for op in first), scheme)


def find_huggingface_trace(text: str) -> Traced | None:
    """The trace of a spec where one is kept; takes neither torch nor transformers."""
    spec, path = parse_config_spec(text), config_file(text)
    found = find_trace(_key(spec, _without_code(check_config(path))))
    return found and _reserved(found, spec.request)


def _reserved(traced: Traced, request: Request) -> Traced:
    """A trace with the caches of so many requests, of so many tokens each."""
    graph = with_requests(traced.graph, request.requests)
    return replace(traced, graph=with_context(graph, request.context))


def _with_programs(
    phase: HuggingFaceModel, spec: ConfigSpec, document: Mapping[str, Any], task: str
) -> HuggingFaceModel:
    """The phase, and the step of a request, with the digests of their programs: how weights are
    stored and whether an engine fuses ops is not among what these depend on, nor is it for a prompt
    how many tokens follow."""
    dense = _dense(document)

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
    return Served(tokens, spec.batch, at_once, bits)


def _dense(document: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those within it, without its quantisation."""
    return {
        key: _dense(value) if isinstance(value, Mapping) else value
        for key, value in document.items()
        if key != "quantization_config"
    }


def _key(spec: ConfigSpec, document: Mapping[str, Any]) -> str:
    return key_of(document, astuple(spec)[1:-2])


def _without_code(value: Any) -> Any:
    """A configuration, and those within it, without what is `_REMOVED`."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k not in _REMOVED}
        asked = next((value[k] for k in _ATTENTION_KEYS if k in value), None)
        if asked in ATTENTION:
            kept["attn_implementation"] = asked
        return {k: _without_code(v) for k, v in kept.items()}
    return [_without_code(part) for part in value] if isinstance(value, list) else value


def _attention(given: Mapping[str, Any], path: Path) -> str | None:
    """The implementation that a configuration asks for, None where it leaves that to transformers
    or asks for one that is not ours."""
    asked = next((given[k] for k in _ATTENTION_KEYS if given.get(k) is not None), None)
    if asked is not None and asked not in ATTENTION:
        LOG.warning(
            "%s: attention %r is no part of torch; %s is placed instead", path, asked,
            " or ".join(ATTENTION),
        )  # fmt: skip
        return None
    return asked


def _config(
    transformers: Any, path: Path, given: Mapping[str, Any], document: Mapping[str, Any]
) -> Any:
    kind = document.get("model_type")
    built_in = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if given.get("auto_map") and not built_in:
        raise ModelError(
            f"{path}: model type {kind!r} is none of transformers {transformers.__version__}, and "
            "gdp never runs the code that auto_map names; place the module: "
            "python:package.module:function"
        )
    if not isinstance(kind, str):
        raise ModelError(f"{path} is no configuration of transformers: it names no model_type")
    if given.get("auto_map"):
        LOG.warning(
            "%s: gdp never runs the code that auto_map names; the %s of transformers is placed",
            path, kind,
        )  # fmt: skip
    try:
        # A folder of its own, since transformers looks for more beside a configuration.
        with tempfile.TemporaryDirectory(prefix="gdp-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(document), encoding="utf-8")
            return transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        _refuse_missing(error, str(path), given)
        raise ModelError(
            f"{path} is no configuration of transformers: {error_line(error)}"
        ) from error


def _built(transformers: Any, config: Any, task: str, text: str, attention: str | None) -> Any:
    asked = {} if attention is None else {"attn_implementation": attention}
    try:
        model = getattr(transformers, TASKS[task]).from_config(
            config, trust_remote_code=False, **asked
        )
    except Exception as error:
        _refuse_missing(error, repr(text), config.to_dict())
        raise ModelError(
            f"{text!r}: transformers makes no {task} model of it: {error_line(error)}"
        ) from error
    for module in model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if used not in (None, *ATTENTION):
            raise ModelError(f"{text!r}: attention {used!r} is none of {', '.join(ATTENTION)}")
    return model.eval()


def _refuse_missing(error: BaseException, where: str, document: Mapping[str, Any]) -> None:
    """Raise `ModelError` where transformers would have fetched something."""
    missing = not_at_hand(error)
    if not missing:
        return
    backbone = document.get("backbone")
    if isinstance(backbone, str) and backbone:
        raise ModelError(
            f"{where}: its backbone {backbone!r} is only named, and gdp downloads nothing; write "
            "the backbone's own configuration as backbone_config"
        ) from error
    raise ModelError(f"{where}: needs {missing}, and gdp downloads nothing") from error


def _inputs(torch: Any, asked: "_Asked", model: Any, spec: ConfigSpec) -> dict[str, Any]:
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


class _Asked(NamedTuple):
    """Model and task that phases are made of."""

    torch: Any
    transformers: Any
    config: Any
    task: str
    text: str


def _decoding(asked: _Asked, model: Any, batch: int, tokens: int, written: int) -> HuggingFaceModel:
    """One step: a token in, logits out, the cache of all tokens before held where it is read."""
    torch = asked.torch
    read = _read(asked, model, batch, tokens, written)
    takes = inspect.signature(model.forward).parameters
    encoded = read.encoded
    given_as = next((name for name in ARGUMENTS if name in takes), read.name)

    class DecodingStep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, cache: Any, encoder_outputs: Any = None) -> Any:
            named = {given_as: refilled(kept, cache), "use_cache": True}
            if encoder_outputs is not None:
                named |= {"decoder_input_ids": input_ids}
                named |= {"encoder_outputs": as_encoded(encoder_outputs)}
            else:
                named |= {"input_ids": input_ids}
                if "position_ids" in takes:
                    position = torch.full((1, 1), tokens, device=input_ids.device)
                    named["position_ids"] = position
            return self.model(**named).logits

    kept = read.cache
    with torch.device("meta"):
        token = torch.zeros(batch, 1, dtype=torch.long)
        kwargs = {"input_ids": token, "cache": list(states(kept).values())}
        if encoded is not None:
            # The cache holds what is read of it; its shape is still asked for.
            kwargs["encoder_outputs"] = torch.empty(encoded.shape, dtype=encoded.dtype)
    step = DecodingStep().eval()
    return HuggingFaceModel(
        asked.text, step, (), kwargs, {"held": ("cache",)}, prefix="model",
        cache_bytes={path: int(state.nbytes) for path, state in states(kept).items()},
    )  # fmt: skip


def _read(asked: _Asked, model: Any, batch: int, tokens: int, written: int) -> ReadPrompt:
    """The cache, and the encoder's result, after so many tokens; on the meta device."""
    with asked.torch.device("meta"):
        twin = model if next(model.parameters()).is_meta else _built(
            asked.transformers, asked.config, asked.task, asked.text,
            getattr(asked.config, "_attn_implementation", None),
        )  # fmt: skip
        inputs = prompt_inputs(twin, asked.config, (batch, tokens), written, asked.text)
    try:
        return read_prompt(twin, inputs, asked.text)
    except ModelError as error:
        raise ModelError(f"{error}{other_classes(asked.config, type(twin).__name__)}") from error


@dataclass(frozen=True, eq=False)
class GeneratingModel(HuggingFaceModel):
    """A model that reads a prompt and writes tokens: the prompt, and a step of decoding."""

    step: HuggingFaceModel | None = None
    request: Request | None = None
    longest: int = 0  # tokens of context that the model was made for; 0 where nothing says it

    def trace(self) -> Traced:
        """The joint graph of both phases (`gdp.graph.generation`), as it was traced before, or
        traced now."""
        found = find_trace(self.key)
        if self.step is None or self.request is None:
            return found or super().trace()
        if found is not None:
            return _reserved(found, self.request)
        count = len(list(self.module.modules()))
        with closed():
            # First, as not every model that reads a prompt keeps a cache.
            stage(f"tracing {self.label}: a step of decoding, {count} modules")
            listed = self.step.program()
            step = self.step.graph_of(listed)
            stage(f"tracing {self.label}: reading the prompt, {count} modules")
            read = self.program()
            prompt = self.graph_of(read)
        request = self.request._replace(requests=0, context=0)  # as any number shares the trace
        growth = CacheGrowth(listed.contexts, self.longest)
        graph = generation_graph(self.label, prompt.graph, step.graph, request, growth)
        both = [
            *zip(
                (prompt.estimated, prompt.assumptions),
                (step.estimated, step.assumptions),
                strict=True,
            )
        ]
        estimated, assumptions = (tuple(dict.fromkeys(a + b)) for a, b in both)
        traced = Traced(graph, estimated, assumptions, prompt.parameters)
        traced = self.complete(traced, read, listed)
        cache_trace(self.key, traced)
        return _reserved(traced, self.request)

    def record(self, *args: Any, **kwargs: Any) -> RecordedTorch:
        """Refused: a program of both phases does not exist."""
        raise ModelError(
            f"{self.label}: a generation is placed, not executed here; export it with --to "
            "accelerate, or run one phase of it (--sequence, --decode)"
        )


def _generating(
    asked: _Asked, model: Any, spec: ConfigSpec, name: str, key: str, whole: bool
) -> GeneratingModel:
    """The prompt and a step at the mean context, and the cache as it is in the end."""
    torch, new = asked.torch, spec.new
    sizes = [
        (spec.prompt, n) if encodes(model) else (spec.prompt + n, n)
        for n in (max(1, new // 2), new, new + 1)
    ]
    longest = _longest(asked.config) + (spec.prompt if encodes(model) else 0)

    def step() -> HuggingFaceModel:
        with _countable(asked.text), closed():
            full = _read(asked, model, spec.batch, *sizes[1]).cache
            made = _decoding(asked, model, spec.batch, *sizes[0])
            other, at = made.cache_bytes, spec.prompt + max(1, new // 2)
            if new == 1:  # the mean context is the full one
                more = states(_read(asked, model, spec.batch, *sizes[2]).cache)
                other, at = {p: int(state.nbytes) for p, state in more.items()}, at + 1
            grown = growth_of(full, spec.prompt + new, other, at)
            most = max(longest, 2 * (spec.prompt + new))
            bends = {g.bend for g in grown.values() if spec.prompt + new < g.bend < most}
            contexts = (spec.prompt + new, *sorted(bends), most)
            full_bytes = {n: {p: g.at(n) for p, g in grown.items()} for n in contexts}
            return replace(made, full_bytes=full_bytes)

    takes = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    class Prompt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs, use_cache=True, **last).logits

    with torch.device("meta"):
        shape = (spec.batch, spec.prompt)
        inputs = prompt_inputs(model, asked.config, shape, 1, asked.text)
    return GeneratingModel(
        asked.text, Prompt().eval(), (), inputs, {"name": name}, prefix="model", key=key,
        step=replace(step() if whole else HuggingFaceModel(asked.text, model), again=step),
        request=spec.request, longest=longest,
    )  # fmt: skip


_LONGEST = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")
"""Fields of configurations that say the longest context, the first of which counts."""


def _longest(config: Any) -> int:
    """Tokens of the longest context that a configuration was made for; 0 where it says none."""
    text = config.get_text_config(decoder=True)
    for name in _LONGEST:
        size = getattr(text, name, None)
        if isinstance(size, int) and _is_whole(size) and 0 < size <= _LARGEST:
            return size
    return 0


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


@contextmanager
def _countable(text: str) -> Iterator[None]:
    """Raise `ModelError` where inputs have more bytes than 64 bits count."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ModelError(
            f"{text!r}: its inputs are too large to be counted; ask for fewer samples, tokens or "
            f"pixels ({error_line(error)})"
        ) from error


def check_config(path: Path) -> dict[str, Any]:
    """A configuration as it stands in its file; raises `ModelError` where it is no JSON object, or
    names what cannot be built."""
    data = read_bytes(path, _KIND, MOST_BYTES)
    try:
        # As transformers reads it: NaN and infinity stand in some of its configurations.
        document = json.loads(data)
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply for a {_KIND.name}") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more than 4300 digits
        raise ModelError(f"{path} is no {_KIND.name}: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is no {_KIND.name}: it holds no object with a model_type")
    names = document.get("architectures")
    if not (names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))):
        raise ModelError(
            f"{path}: architectures must be a list of class names, got {_short(names)}"
        )
    for key, value in _fields(document, path, 0):
        _check_field(key, value, path)
    return document


def _fields(document: Mapping[str, Any], path: Path, depth: int) -> Iterator[tuple[str, Any]]:
    """Every field, those of configurations within it, too."""
    if depth > MOST_DEPTH:
        raise ModelError(f"{path} is nested too deeply for a {_KIND.name}")
    for key, value in document.items():
        yield key, value
        if isinstance(value, dict):
            yield from _fields(value, path, depth + 1)


def _check_field(key: str, value: Any, path: Path) -> None:
    numbers = value if isinstance(value, list) else [value]
    if key in _SIZES and value is not None:
        several = {2: "two of them"}.get(_SIZES[key], "a list of them, one of each stage")
        fits = not isinstance(value, list) or 2 <= len(value) <= _SIZES[key]
        if not fits or not all(_is_whole(n) and 1 <= n <= _LARGEST for n in numbers):
            raise ModelError(
                f"{path}: {key} must be a positive whole number or {several}, got {_short(value)}"
            )
    if _LAYER.search(key):
        if any(_is_whole(n) and abs(n) > MOST_LAYERS for n in numbers):
            raise ModelError(
                f"{path}: {key} must be from {-MOST_LAYERS} to {MOST_LAYERS}, got {_short(value)}"
            )
        return
    for names, most in _COUNTS:
        if names.search(key) and any(_is_whole(n) and not 0 <= n <= most for n in numbers):
            raise ModelError(f"{path}: {key} must be from 0 to {most}, got {_short(value)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4300 digits, a list in lists
        text = "a huge value"
    return text if len(text) < 60 else f"{text[:60]}..."
