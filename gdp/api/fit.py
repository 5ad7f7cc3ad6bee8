"""The calls `fit` and `fit_traffic`: requests to language models, or traffic, on machines."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp.api.answer import answer, loading_note, planned
from gdp.api.ask import ask
from gdp.api.traffic.drafting import Draft
from gdp.api.traffic.serve import served_plan
from gdp.base.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.base.units import format_bytes
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.links import links_line
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, fullness
from gdp.costs.base import CostModel
from gdp.importers.spec import ModelSpec
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Placement
from gdp.question.models import Generation, is_gguf, with_options
from gdp.question.question import Kept, Question
from gdp.question.result import Result
from gdp.sim.traffic import Spread, Traffic
from gdp.sim.traffic_text import parse_traffic
from gdp.targets.contexts import longest_found, longest_of_plan
from gdp.targets.llamacpp.plan import PROPOSAL


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Columns of every row."""

    quantize: str = ""  # scheme that was tried; "" for that of the configuration
    tokens_per_s: float | None = None  # written for all requests
    limit: str = ""  # what limits decode, or what does not fit
    note: str = ""  # what a scheme leaves of the weights as they are, or smaller caches bring
    costs: str = ""  # where the seconds come from, and how far off they may be
    model: str = ""
    links: str = ""  # of the machine's accelerators, by kind
    layout: str = ""  # of a plan that divides ops, such as "tensor 4" or "tensor 2 x data 2"
    # 90%, of (mean) first_token_s, token_s (TPOT) and tokens_per_s; empty where nothing is known.
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    joules_per_token: float | None = None  # None where watts are unknown
    joules_per_request: float | None = None
    watts: float | None = None  # mean, of the devices that compute

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class FitRow(_Row):
    """One request on one machine; times are None where it does not fit."""

    cluster: str
    prompt: int
    new: int
    batch: int
    fits: bool
    first_token_s: float | None = None
    request_s: float | None = None
    fullest: float | None = None  # share of its memory that the fullest device holds
    # Share of the request's seconds that no placement is proven to need; None without a bound.
    gap: float | None = None
    context: int | None = None  # tokens of a sequence that caches are reserved for
    # The longest for which a plan of the machine is found, whatever the row's prompt.
    longest_context: int | None = None
    # Of decode once all tokens of the context are used, where more were asked for than are timed.
    full_tokens_per_s: float | None = None

    @property
    def label(self) -> str:
        """Machine, request and scheme in words."""
        scheme = f", {self.quantize}" if self.quantize else ""
        machine = f"{self.model} on {self.cluster}" if self.model else self.cluster
        return f"{machine}, {self.prompt}+{self.new} tokens, batch {self.batch}{scheme}"

    @property
    def apart_from_prompt(self) -> tuple[str, str, str, int]:
        """Its request without the prompt: rows that share it have one longest context."""
        return self.model, self.cluster, self.quantize, self.batch


@dataclass(frozen=True)
class TrafficRow(_Row):
    """Traffic on one machine; times are seconds, None where not even one request fits."""

    cluster: str
    fits: bool = False
    first_token: Spread | None = None
    token: Spread | None = None
    running: float | None = None  # requests at once, in the mean
    room: int | None = None  # requests that memory has room for; None: no limit

    @property
    def label(self) -> str:
        """Model, machine and scheme in words."""
        machine = f"{self.model} on {self.cluster}" if self.model else self.cluster
        return f"{machine}, {self.quantize}" if self.quantize else machine


def fit(
    models: str | Path | Sequence[str | Path],
    clusters: Sequence[Machine],
    *,
    prompts: Sequence[int] = (2048,),
    batches: Sequence[int] = (1,),
    quantize: Sequence[str] = ("",),
    new: int = 256,
    context: int | str | None = None,
    target: str | None = None,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[FitRow]:
    """Rows of fit and speed, one for every model, machine, scheme, prompt and batch.

    Every row is what `gdp.place` answers to its request, for latency and with this search. A
    request that does not fit says what misses; the larger ones of its machine are asked all the
    same, as windows bound caches.

    Args:
        models: A configuration of transformers, with or without "hf:", a .gguf file, or several.
        clusters: Presets, files or clusters.
        prompts: Tokens that are read.
        batches: Sequences side by side.
        quantize: Schemes that weights are stored in, such as "nf4"; "none" for none, "" for that of
            the configuration. Only "" for .gguf models.
        new: Tokens that are written.
        context: Tokens of each sequence that caches are reserved for, "max" for the longest that
            fits. Default: those of prompt and new.
        target: Runtime that shall be able to follow, as `gdp.place` takes it. Default: "llamacpp"
            for .gguf models where it runs, as nothing else runs them, none for others.
        costs: As `gdp.place` takes them.
        search: Budget of each placement. Default: one second.
        progress: Called with the row that begins and the share of the rows that are done.

    Raises:
        ModelError, ClusterError: A file cannot be read, or a scheme is unknown.
        ArgumentError: A scheme is given for a model of another kind.
    """
    parts = {"costs": costs, "search": search or Search(seconds=1.0), "kept": Kept()}
    asked = [*itertools.product(_every(models, clusters, quantize), prompts, batches)]
    rows, longest = list[FitRow](), dict[tuple[str, str, str, int], int]()
    for i, ((named, spec, machine, scheme), prompt, batch) in enumerate(asked):
        row = FitRow(machine.name, prompt, new, batch, fits=False, quantize=scheme, model=named)
        if progress is not None:
            progress(row.label, i / len(asked))
        request = Generation(spec, prompt=prompt, new=new, batch=batch, context=context)
        try:
            question, result = _answered(request, machine, target, parts)
        except InfeasibleError as error:
            rows.append(replace(row, limit=str(error)))
            continue
        rows.append(_with_answer(row, question, result))
        most = longest.get(row.apart_from_prompt) or _longest(question, result)
        longest[row.apart_from_prompt] = max(most, rows[-1].longest_context or 0)
    return [
        replace(row, longest_context=longest[row.apart_from_prompt] or None) if row.fits else row
        for row in rows
    ]


def _every(
    models: str | Path | Sequence[str | Path], clusters: Sequence[Machine], quantize: Sequence[str]
) -> list[tuple[str, str, Cluster, str]]:
    """(name in rows, specification, machine, scheme) of every model, machine and scheme."""
    models = [models] if isinstance(models, str | os.PathLike) else list(models)
    machines = [load_cluster(cluster) for cluster in clusters]
    return [
        (
            os.fspath(model) if len(models) > 1 else "",
            os.fspath(with_options(model, quantize=scheme or None)), machine, scheme,
        )
        for model, machine, scheme in itertools.product(models, machines, quantize)
    ]  # fmt: skip


def fit_traffic(
    models: str | Path | Sequence[str | Path],
    clusters: Sequence[Machine],
    traffic: Traffic | str,
    *,
    quantize: Sequence[str] = ("",),
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    constraints: Constraints | None = None,
    draft: Draft | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[TrafficRow]:
    """Rows of a plan for vLLM of every model, machine and scheme, under the same traffic; no GPUs
    are kept for prefill alone.

    Args:
        models: A configuration of transformers, with or without "hf:", or several.
        clusters: Presets, files or clusters.
        traffic: As `gdp.serve` takes it.
        quantize: Schemes that weights are stored in, such as "fp8"; "none" for none, "" for that of
            the configuration.
        costs: As `gdp.place` takes them.
        search: As `gdp.place` takes it.
        constraints: As `gdp.place` takes them.
        draft: As `gdp.serve` takes it.
        progress: Called with the row that begins and the share of the rows that are done.

    Raises:
        ModelError, ClusterError: A file cannot be read, or a scheme is unknown.
        ArgumentError: The traffic has another form.
    """
    traffic = parse_traffic(traffic) if isinstance(traffic, str) else traffic
    asked, rows = _every(models, clusters, quantize), list[TrafficRow]()
    for i, (named, spec, machine, scheme) in enumerate(asked):
        row = TrafficRow(machine.name, quantize=scheme, model=named)
        if progress is not None:
            progress(row.label, i / len(asked))
        parts = {
            "cluster": machine, "target": "vllm", "costs": costs, "search": search,
            "constraints": constraints,
        }  # fmt: skip
        try:
            plan = served_plan(parts, spec, traffic, disaggregated=False, draft=draft)
        except (ArgumentError, InfeasibleError) as error:  # not even one request has room
            rows.append(replace(row, limit=str(error)))
            continue
        served, result = plan.served, plan.result
        request = Generation(spec, traffic.prompt, traffic.new)
        row = replace(
            row, fits=True, tokens_per_s=served.tokens_per_s, first_token=served.first_token,
            token=served.token, running=served.running, room=plan.room, layout=plan.layout,
            limit=plan.generation.limits[1], costs=result.costs, links=result.links,
            note=loading_note(request, result.question.graph), intervals=plan.intervals,
            watts=plan.watts,
            joules_per_token=plan.joules_per_token, joules_per_request=plan.joules_per_request,
        )  # fmt: skip
        rows.append(row)
    return rows


def _answered(
    request: Generation, machine: Cluster, target: str | None, parts: Mapping[str, Any]
) -> tuple[Question, Result]:
    """A question with its answer; a free one where the runtime that was not named cannot run, such
    as llama.cpp without a processor.

    Raises:
        InfeasibleError: It does not fit; what it needs is said.
    """
    runtime = target or ("llamacpp" if is_gguf(request) else None)
    question = ask(request, machine, target=runtime, **parts)
    try:
        try:
            return question, answer(question)
        except PlacementError:
            if target is not None or runtime is None:
                raise
            return question, answer(replace(question, target=None))
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}; {_needed(question)}") from None


def _needed(question: Question) -> str:
    """Bytes that a request needs and that its machine has, and the option that needs fewer."""
    graph, machine = question.graph, question.cluster
    first = graph.weight_holders()
    cache = int(graph.cache_bytes[first].sum())
    text = (
        f"weights and caches take {format_bytes(int(graph.weight_bytes[first].sum()))}, "
        f"{format_bytes(cache)} of it caches"
    )
    if max(machine.memory_bytes) < UNLIMITED_BYTES:
        room = machine.room_bytes(np.ones(machine.num_devices, dtype=bool))
        text += f", and all devices together have {format_bytes(room)}"
    spec = ModelSpec.of(question.model)
    if is_gguf(spec):
        return text + (
            "" if "cache" in spec.options else "; with ?cache=q8_0 caches take about half"
        )
    said = "quantize" in spec.options
    return text + ("" if said else "; with --quantize fp8 or nf4 weights take less")


def _longest(question: Question, result: Result) -> int:
    """Maximum context length for which a question's machine has a plan, by plans made without a
    search; 0 if the growth of caches is unknown."""
    graph = result.question.graph
    request, most = graph.request, graph.growth.longest
    if request is None or not graph.growth.is_known:
        return 0
    own = longest_of_plan(result.question, result.placement, result.score) or request.held
    if question.longest or own >= most > 0:
        return own
    return max(longest_found(question, planned)[0], own)


def _with_answer(row: FitRow, question: Question, result: Result) -> FitRow:
    """The row of a request with the figures of its result."""
    found = result.generation
    if found is None:
        return row
    notes = [loading_note(question.model, result.question.graph)]
    notes += [note for note in result.notes if note.startswith(PROPOSAL)]
    full = fullness(result.question.cluster, result.score.peak_bytes.tolist())
    return replace(
        row, fits=True, tokens_per_s=found.tokens_per_s, first_token_s=found.first_token_s,
        request_s=found.request_s, fullest=max(full), limit=found.limits[1], context=found.context,
        longest_context=found.longest_context,
        full_tokens_per_s=found.full_tokens_per_s, gap=result.gap if result.bound_by else None,
        note="; ".join(filter(None, notes)), costs=result.costs, links=links_line(question.cluster),
        layout=_layout(result.placement, found.stages), intervals=found.intervals,
        watts=found.watts,
        joules_per_token=found.joules_per_token, joules_per_request=found.joules_per_request,
    )  # fmt: skip


def _layout(placement: Placement, stages: int) -> str:
    """Sizes of a plan whose ops devices compute together; "" for others."""
    if not placement.splits:
        return ""
    experts = ", whole experts" if placement.splits[0].experts else ""
    pipeline = f" x pipeline {stages}" if stages > 1 else ""
    first = placement.splits[0]
    unlike = "" if first.is_even else f" ({':'.join(map(str, first.parts))})"
    return f"tensor {len(first.devices)}{unlike}{pipeline}{experts}"


def fit_picture(rows: Sequence[FitRow | TrafficRow]) -> str:
    """An SVG of tokens per second: a bar for every row, a cross where it does not fit."""
    from html import escape

    most = max((row.tokens_per_s or 0.0 for row in rows), default=0.0) or 1.0
    labels = [row.label for row in rows]
    height, bars = 26, 310
    left = 16 + 7 * max(map(len, labels), default=0)  # of letters 12 pixels high
    width = left + bars + 110

    def lines() -> Iterator[str]:
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            y = 20 + i * height
            yield f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
            if row.tokens_per_s is None:
                yield f'<text x="{left}" y="{y + 13}" class="no">does not fit</text>'
                continue
            bar = max(1.0, bars * row.tokens_per_s / most)
            yield f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="18" rx="2"/>'
            speed = f"{row.tokens_per_s:.1f} tokens/s"
            yield f'<text x="{left + bar + 6:.1f}" y="{y + 13}">{speed}</text>'

    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}rect{fill:#4c6ef5}.no{fill:#c92a2a}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    whole = height * len(rows) + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" role="img" '
        f'aria-label="tokens per second"><style>{style}</style>{"".join(lines())}</svg>\n'
    )
