"""The call `fit_traffic`: which machines and schemes serve some traffic, and how fast."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gdp.api.answer import loading_note
from gdp.api.traffic.drafting import Draft
from gdp.api.traffic.serve import served_plan
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.cluster.file import Machine, load_cluster
from gdp.costs.base import CostModel
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question.models import Generation, with_options
from gdp.sim.traffic import Spread, Traffic
from gdp.sim.traffic_text import parse_traffic


@dataclass(frozen=True)
class TrafficRow:
    """Traffic on one machine; times are seconds, None where not even one request fits."""

    cluster: str
    quantize: str = ""  # scheme that was tried; "" for that of the configuration
    fits: bool = False
    tokens_per_s: float | None = None  # written for all requests
    first_token: Spread | None = None
    token: Spread | None = None
    running: float | None = None  # requests at once, in the mean
    room: int | None = None  # requests that memory has room for; None: no limit
    layout: str = ""  # such as "tensor 2 x data 2"
    limit: str = ""  # what limits decode, or what does not fit
    note: str = ""  # what a scheme leaves of the weights as they are
    costs: str = ""  # where the seconds come from, and how far off they may be
    model: str = ""
    links: str = ""  # of the machine's accelerators, by kind

    @property
    def label(self) -> str:
        """Model, machine and scheme in words."""
        machine = f"{self.model} on {self.cluster}" if self.model else self.cluster
        return f"{machine}, {self.quantize}" if self.quantize else machine

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


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
    models = [models] if isinstance(models, str | os.PathLike) else list(models)
    machines, rows = [load_cluster(cluster) for cluster in clusters], list[TrafficRow]()
    asked = list(itertools.product(models, machines, quantize))
    for i, (model, machine, scheme) in enumerate(asked):
        named = os.fspath(model) if len(models) > 1 else ""
        row = TrafficRow(machine.name, scheme, model=named)
        if progress is not None:
            progress(row.label, i / len(asked))
        spec = os.fspath(with_options(model, quantize=scheme or None))
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
            note=loading_note(request, result.question.graph),
        )  # fmt: skip
        rows.append(row)
    return rows
