"""Requests to a language model on several machines: if they fit, and how fast they run."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gdp import api
from gdp.cluster.file import Machine, load_cluster
from gdp.commands.generation import generation_answer
from gdp.costs.base import CostModel
from gdp.errors import InfeasibleError
from gdp.methods.base import Search
from gdp.models import Generation, load, with_options
from gdp.prepare import room_bytes


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
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[FitRow]:
    """Rows of what fits and how fast, one for every machine, scheme, prompt and batch.

    Every row is a placement of its own, for latency. A request that does not fit says what misses;
    the larger ones of its machine are asked all the same, as windows bound caches.

    Args:
        model: A configuration of transformers, with or without "hf:".
        clusters: Presets, files or clusters.
        prompts: Tokens that are read.
        batches: Sequences side by side.
        quantize: Schemes that weights are stored in, such as "nf4"; "none" for none, "" for that of
            the configuration. Only "" for .gguf models.
        new: Tokens that are written.
        costs: As `gdp.place` takes them.
        search: Budget of each placement. Default: one second.
        progress: Called with what begins and the share of the rows that are done.

    Raises:
        ModelError, ClusterError: A file cannot be read, or a scheme is unknown.
        ArgumentError: A scheme is given for a model of another kind.
    """
    search = search or Search(seconds=1.0)
    machines = [load_cluster(cluster) for cluster in clusters]
    asked = list(itertools.product(quantize, prompts, batches))
    rows: dict[tuple[int, str, int, int], FitRow] = {}
    for i, (scheme, prompt, batch) in enumerate(asked):
        spec = with_options(os.fspath(model), quantize=scheme) if scheme else model
        request = Generation(spec, prompt=prompt, new=new, batch=batch)
        for j, machine in enumerate(machines):
            if progress is not None:
                share = (i * len(machines) + j) / (len(asked) * len(machines))
                progress(f"{machine.name}: {prompt} tokens, batch {batch}", share)
            row = _row(request, machine, costs, search)
            rows[j, scheme, prompt, batch] = replace(row, quantize=scheme)
    return [rows[j, *key] for j in range(len(machines)) for key in asked]


def _row(
    request: Generation, machine: Any, costs: CostModel | str | Path | None, search: Search
) -> FitRow:
    row = FitRow(machine.name, request.prompt, request.new, request.batch, fits=False)
    try:
        graph = load(request, room_bytes=room_bytes(machine))
        result = api.place(graph, machine, costs=costs, search=search)
    except InfeasibleError as error:
        return replace(row, limit=str(error))
    answer = generation_answer(graph, result.placement, machine, result.score, costs=costs)
    if answer is None:
        return row
    full = [
        int(peak) / device.memory_bytes
        for peak, device in zip(result.score.peak_bytes, machine.devices, strict=True)
    ]
    return FitRow(
        machine.name, request.prompt, request.new, request.batch, fits=True,
        tokens_per_s=answer.tokens_per_s, first_token_s=answer.first_token_s,
        request_s=answer.request_s, fullest=max(full), limit=answer.limits[1],
    )  # fmt: skip


def picture(rows: Sequence[FitRow]) -> str:
    """An SVG of tokens per second: a bar for every row, a cross where it does not fit."""
    from html import escape

    most = max((row.tokens_per_s or 0.0 for row in rows), default=0.0) or 1.0
    labels = [
        f"{row.cluster}, {row.prompt}+{row.new} tokens, batch {row.batch}"
        + (f", {row.quantize}" if row.quantize else "")
        for row in rows
    ]
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
