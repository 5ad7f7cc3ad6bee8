"""Phases of models of transformers: one pass, a step of decoding, and a request of both."""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gdp.base.errors import InfeasibleError, ModelError
from gdp.base.terminal import stage
from gdp.base.units import format_bytes
from gdp.graph.generation import generation_graph, with_context
from gdp.graph.request import CacheGrowth, Request
from gdp.graph.serving import Served, served
from gdp.importers.huggingface.build import build_model, countable
from gdp.importers.huggingface.check import LARGEST, is_whole
from gdp.importers.huggingface.spec import ConfigSpec
from gdp.importers.huggingface.tasks import (
    encodes,
    other_classes,
    prompt_inputs,
)
from gdp.importers.program import Results, Traced, live_ops
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
from gdp.importers.pytorch.closed import closed
from gdp.importers.pytorch.model import RecordedTorch, weights_by_path
from gdp.importers.pytorch.phases import Phase, leaf_on_meta
from gdp.importers.pytorch.quantised import (
    experts_left,
    saved_bytes,
)
from gdp.importers.pytorch.repeated import Listed
from gdp.importers.pytorch.trace_cache import ModelFacts, cache_facts, cache_trace, find_trace
from gdp.importers.pytorch.unread import (
    Unread,
    storage_of,
    storages_read,
    unread_of,
    unread_weights,
    with_unread,
)
from gdp.ops.vllm import AT_ONCE


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
        unread = unread_of(self.model, read, self.options.get("stored", {}))
        whole = with_unread(Traced(recorded.graph, (), ()), unread)
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
        return with_unread(traced, self.unread_by(programs))

    def unread_by(self, programs: Iterable[Listed]) -> Unread:
        """The weights of the model that none of some programs reads."""
        read: set[int] = set()
        for listed in programs:
            ops = live_ops(listed, Results(state=listed.state))
            read |= storages_read(self.model, ops, listed.paths)
        return unread_of(self.model, read, self.options.get("stored", {}))

    def _storages_read(self) -> set[int]:
        """Storages read by a forward pass on the meta device; none if it fails, where tracing gives
        the better error."""
        import torch
        from torch.utils._pytree import tree_map

        read: set[int] = set()
        try:
            made = self.made()
            inputs = tree_map(leaf_on_meta, dict(made.kwargs))
            mode = on_meta(lambda leaf: read.add(storage_of(leaf)))
            with closed(), torch.no_grad(), torch.device("meta"), mode:
                made.module(*made.args, **inputs)
        except Exception:
            return set()
        return read


class ConfigTask(NamedTuple):
    """Model and task that phases are made of."""

    torch: Any
    transformers: Any
    config: Any
    task: str
    text: str


def decoding_step(
    asked: ConfigTask, model: Any, batch: int, tokens: int, written: int
) -> HuggingFaceModel:
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


def _read(asked: ConfigTask, model: Any, batch: int, tokens: int, written: int) -> ReadPrompt:
    """The cache, and the encoder's result, after so many tokens; on the meta device."""
    with asked.torch.device("meta"):
        twin = model if next(model.parameters()).is_meta else build_model(
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
    task: str = ""
    facts_key: str = ""  # digest of all that `ModelFacts` depends on

    def trace(self) -> Traced:
        """The joint graph of both phases (`gdp.graph.generation`), as it was traced before, or
        traced now."""
        found = find_trace(self.key)
        if self.step is None or self.request is None:
            return found or super().trace()
        if found is not None:
            return reserved(found, self.request)
        count = len(list(self.module.modules()))
        with closed():
            # First, as not every model that reads a prompt keeps a cache.
            stage(f"tracing {self.label}: a step of decoding, {count} modules")
            listed = self.step.program()
            stage(f"tracing {self.label}: reading the prompt, {count} modules")
            read = self.program()
        facts = self.facts(self.unread_by((listed, read)))
        cache_facts(self.facts_key, facts)
        traced = self.joint(read, listed, facts)
        cache_trace(self.key, traced)
        return reserved(traced, self.request)

    def facts(self, unread: Unread) -> ModelFacts:
        """All of the model but its programs."""
        options = {name: value for name, value in self.options.items() if name != "name"}
        return ModelFacts(type(self.model).__name__, self.task, self.longest, options, unread)

    def joint(self, read: Listed, listed: Listed, facts: ModelFacts) -> Traced:
        """The joint graph, of the programs of the prompt and of a step."""
        assert self.step is not None
        assert self.request is not None
        step, prompt = self.step.graph_of(listed), self.graph_of(read)
        request = self.request._replace(requests=0, context=0)  # as any number shares the trace
        growth = CacheGrowth(listed.contexts, facts.longest)
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
        return with_unread(traced, facts.unread)

    def record(self, *args: Any, **kwargs: Any) -> RecordedTorch:
        """Refused: a program of both phases does not exist."""
        raise ModelError(
            f"{self.label}: a generation is placed, not executed here; export it with --to "
            "accelerate, or run one phase of it (--sequence, --decode)"
        )


def generating_model(
    asked: ConfigTask, model: Any, spec: ConfigSpec, name: str, key: str, *, whole: bool
) -> GeneratingModel:
    """The prompt and a step at the mean context, and the cache as it is in the end."""
    torch, new = asked.torch, spec.new
    sizes = [
        (spec.prompt, n) if encodes(model) else (spec.prompt + n, n)
        for n in (max(1, new // 2), new, new + 1)
    ]
    longest = longest_of(asked.config.get_text_config(decoder=True))
    longest += spec.prompt if longest and encodes(model) else 0

    def step() -> HuggingFaceModel:
        with countable(asked.text), closed():
            full = _read(asked, model, spec.batch, *sizes[1]).cache
            made = decoding_step(asked, model, spec.batch, *sizes[0])
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
        request=spec.request, longest=longest, task=asked.task,
    )  # fmt: skip


_LONGEST = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")
"""Fields of configurations that say the longest context, the first of which counts."""


def longest_of(text: Any) -> int:
    """Maximum context of a text model's configuration, including RoPE scaling; 0 if unknown."""
    for name in _LONGEST:
        size = getattr(text, name, None)
        if isinstance(size, int) and is_whole(size) and 0 < size <= LARGEST:
            return min(LARGEST, max(size, _stretched(text, size)))
    return 0


def _stretched(text: Any, size: int) -> int:
    """Tokens after the scaling of rotations, as vLLM counts them
    (`_get_and_verify_max_model_len`): a factor of `size`, for yarn of the context before it."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    base = rope.get("original_max_position_embeddings") if kind == "yarn" else size
    if kind not in ("linear", "dynamic", "yarn") or not base or not factor:
        return 0
    return int(base * factor) if math.isfinite(base * factor) else 0


def reserved(traced: Traced, request: Request) -> Traced:
    """A trace with the caches of so many requests, of so many tokens each."""
    if traced.graph.request is None:
        return traced
    graph = replace(traced.graph, request=request._replace(context=0))
    return replace(traced, graph=with_context(graph, request.context))
