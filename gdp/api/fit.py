"""The call `fit`: which requests to a language model fit which machines, and how fast they are."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gdp import solve
from gdp.api.generation import generation_answer
from gdp.api.place import ask, loading_note, planned
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.links import links_line
from gdp.cluster.types import Cluster, fullness
from gdp.costs.base import CostModel
from gdp.errors import InfeasibleError
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import Generation, with_options
from gdp.placement import Placement, check, make_placement
from gdp.question import Question
from gdp.result import Result
from gdp.targets.contexts import plan_longest
from gdp.targets.free import plan_freely


@dataclass(frozen=True)
class FitRow:
    """One request on one machine; times are None where it does not fit."""

    cluster: str
    prompt: int
    new: int
    batch: int
    fits: bool
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    request_s: float | None = None
    fullest: float | None = None  # share of its memory that the fullest device holds
    limit: str = ""  # what limits decode, or what does not fit
    quantize: str = ""  # scheme that was tried; "" for that of the configuration
    # Share of the request's seconds that no placement is proven to need; None without a bound.
    gap: float | None = None
    context: int | None = None  # tokens of a sequence that caches are reserved for
    longest_context: int | None = None  # that the plan has room for
    note: str = ""  # what a scheme leaves of the weights as they are
    costs: str = ""  # where the seconds come from, and how far off they may be
    links: str = ""  # of the machine's accelerators, by kind
    layout: str = ""  # of a plan that divides ops, such as "tensor 4"

    @property
    def label(self) -> str:
        """Machine, request and scheme in words."""
        scheme = f", {self.quantize}" if self.quantize else ""
        return f"{self.cluster}, {self.prompt}+{self.new} tokens, batch {self.batch}{scheme}"

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


def fit(
    model: str | Path,
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
    """Rows of fit and speed, one for every machine, scheme, prompt and batch.

    Every row is a placement of its own, for latency; where the plan of another row is better for
    it, as that of a longer prompt or of a machine with fewer devices may be, it is taken. A request
    that does not fit says what misses; the larger ones of its machine are asked all the same, as
    windows bound caches.

    Args:
        model: A configuration of transformers, with or without "hf:".
        clusters: Presets, files or clusters.
        prompts: Tokens that are read.
        batches: Sequences side by side.
        quantize: Schemes that weights are stored in, such as "nf4"; "none" for none, "" for that of
            the configuration. Only "" for .gguf models.
        new: Tokens that are written.
        context: Tokens of each sequence that caches are reserved for, "max" for the longest that
            fits. Default: those of prompt and new.
        target: Runtime that shall be able to follow, as `gdp.place` takes it. Default: none.
        costs: As `gdp.place` takes them.
        search: Budget of each placement. Default: one second.
        progress: Called with the row that begins and the share of the rows that are done.

    Raises:
        ModelError, ClusterError: A file cannot be read, or a scheme is unknown.
        ArgumentError: A scheme is given for a model of another kind.
    """
    search, plan = search or Search(seconds=1.0), plan_freely if target is None else planned
    machines = [load_cluster(cluster) for cluster in clusters]
    asked = list(itertools.product(quantize, prompts, batches))
    rows: dict[tuple[int, str, int, int], tuple[FitRow, Result | None]] = {}
    for i, (scheme, prompt, batch) in enumerate(asked):
        spec = with_options(os.fspath(model), quantize=scheme) if scheme else model
        request = Generation(spec, prompt=prompt, new=new, batch=batch, context=context)
        for j, machine in enumerate(machines):
            if progress is not None:
                share = (i * len(machines) + j) / (len(asked) * len(machines))
                progress(f"{machine.name}: {prompt} tokens, batch {batch}", share)
            row = FitRow(machine.name, prompt, new, batch, fits=False, quantize=scheme)
            rows[j, scheme, prompt, batch] = _planned(
                row, plan, request, machine, target=target, costs=costs, search=search
            )
    plans = [result.placement for _, result in rows.values() if result is not None]
    return [
        row if result is None else _told(row, _best_of(result, plans))
        for row, result in (rows[j, *key] for j in range(len(machines)) for key in asked)
    ]


def _planned(
    row: FitRow, plan: Callable[[Question], Result], request: Generation, machine: Cluster,
    **parts: Any,
) -> tuple[FitRow, Result | None]:  # fmt: skip
    """The row and the plan of its request, asked with these parts of a question; None where the
    request does not fit."""
    try:
        question = ask(request, machine, **parts)
        result = plan_longest(question, plan) if question.longest else plan(question)
    except InfeasibleError as error:
        return replace(row, limit=str(error)), None
    note = loading_note(request, result.question.graph)
    return replace(row, note=note, costs=result.costs, links=links_line(machine)), result


def _best_of(result: Result, plans: Iterable[Placement]) -> Result:
    """The result of a request with the fastest of its own and other requests' plans."""
    best, question = result, result.question
    for plan in plans:
        placement = _carried(plan, question.graph, question.cluster)
        if placement is None or (placement.device == best.placement.device).all():
            continue
        score = solve.simulate(question, placement)
        if score.feasible and score.latency_s < best.score.latency_s:
            best = replace(best, placement=placement, score=score)
    return best


def _told(row: FitRow, result: Result) -> FitRow:
    """The row of a request with its result."""
    answer = generation_answer(result.question, result.placement, result.score)
    if answer is None:
        return row
    full = fullness(result.question.cluster, result.score.peak_bytes.tolist())
    value_s = result.score.latency_s
    return replace(
        row, fits=True, tokens_per_s=answer.tokens_per_s, first_token_s=answer.first_token_s,
        request_s=answer.request_s, fullest=max(full), limit=answer.limits[1],
        context=answer.context, longest_context=answer.longest_context,
        gap=_gap(result, value_s),
        layout=_layout(result.placement, answer.stages),
    )  # fmt: skip


def _gap(result: Result, value_s: float) -> float | None:
    """Share of the seconds above the bound; None where no bound is known."""
    if not result.bound_by:
        return None
    return max(0.0, 1.0 - result.bound_s / value_s) if value_s else 0.0


def _layout(placement: Placement, stages: int) -> str:
    """Sizes of a plan whose ops devices compute together; "" for others."""
    if not placement.splits:
        return ""
    experts = ", whole experts" if placement.splits[0].experts else ""
    pipeline = f" x pipeline {stages}" if stages > 1 else ""
    first = placement.splits[0]
    unlike = "" if first.is_even else f" ({':'.join(map(str, first.parts))})"
    return f"tensor {len(first.devices)}{unlike}{pipeline}{experts}"


def _carried(plan: Placement, graph: OpGraph, machine: Cluster) -> Placement | None:
    """The devices of another request's plan, by name; None where ops or devices are others."""
    known = {name: d for d, name in enumerate(machine.device_names)}
    if plan.op_names != graph.op_names or plan.teams or plan.splits:
        return None
    if not {plan.device_names[d] for d in np.unique(plan.device).tolist()} <= known.keys():
        return None
    # Of devices without ops nothing is asked.
    index = np.array([known.get(name, 0) for name in plan.device_names])
    device = np.where(graph.is_io, machine.host, index[plan.device])
    placement = make_placement(graph, machine, device, plan.rank, made_by=plan.made_by)
    return None if check(placement, graph, machine) else placement


@runtime_checkable
class HasBar(Protocol):
    """A row that has a bar in the picture."""

    @property
    def label(self) -> str:
        """Machine and request in words."""
        ...

    @property
    def tokens_per_s(self) -> float | None:
        """Length of the bar; None where the request does not fit."""
        ...


def fit_picture(rows: Sequence[HasBar]) -> str:
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
