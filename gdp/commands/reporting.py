"""Pages and traces of placements: what `gdp report`, `--report` and `--trace` write."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gdp import api
from gdp.cluster.load import Machine
from gdp.costs.base import CostModel
from gdp.models import Model
from gdp.placement import Placed
from gdp.prepare import placed_on, prepare_problem
from gdp.result import Result


def report(
    model: Model,
    placement: Placed,
    cluster: Machine,
    path: str | Path,
    *,
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write the HTML page of a placement, which opens without a network.

    Of a `Result` its own objective, bound and candidates are shown, of a placement those that the
    simulator and the heuristics find now. `measured` is what `gdp.run` returned for it.
    """
    from gdp.reports.html import write_report

    graph, placed, cluster, costs = placed_on(model, placement, cluster, costs)
    if isinstance(placement, Result):
        result = placement
    else:
        result = api.evaluated(graph, placed, cluster, objective=objective, costs=costs)
    if all(candidate.method != "single" for candidate in result.candidates):
        from gdp.methods.portfolio import heuristic_candidates

        free = prepare_problem(graph, cluster, result.objective, costs=costs).problem
        yardsticks = heuristic_candidates(free, result.seed)
        result = replace(result, candidates=(*result.candidates, *yardsticks))
    view = api.view_of(graph, result.placement, cluster, costs=costs)
    write_report(
        view, result.to_json(), path, None if measured is None else measured_view(measured)
    )


def trace(
    model: Model,
    placement: Placed,
    cluster: Machine,
    path: str | Path,
    *,
    costs: CostModel | str | Path | None = None,
) -> None:
    """Write the simulated schedule of a placement as a Chrome/Perfetto trace."""
    from gdp.reports.trace import write_trace

    write_trace(api.view_of(model, placement, cluster, costs=costs), path)


def measured_view(found: Mapping[str, Any]) -> dict[str, Any]:
    """The rows and lines of a page about an execution, from the fields of a `RunReport`."""
    from gdp.runtime.report import advice

    placed = {
        "name": "placed", "predicted_latency_s": found["predicted_latency_s"],
        "latency_s": found["measured_latency_s"],
        "latency_interval_s": found["latency_interval_s"],
        "predicted_rate": found["predicted_throughput_per_s"],
        "rate": found["measured_throughput_per_s"],
        "rate_interval": found["throughput_interval_per_s"],
    }  # fmt: skip
    baselines = [
        {
            "name": name.replace("_", " "), "latency_s": row["latency_s"],
            "latency_interval_s": row["latency_interval_s"], "rate": row["throughput_per_s"],
            "rate_interval": row["throughput_interval_per_s"],
            "predicted_latency_s": row.get("predicted_latency_s"),
            "predicted_rate": row.get("predicted_throughput_per_s"),
        }
        for name, row in found["baselines"].items()
    ]  # fmt: skip
    verdict = {
        None: "Outputs cannot be compared: they are other ones at each run.",
        True: "Outputs equal the uncut model's.",
        False: "Outputs DIFFER from the uncut model's.",
    }
    notes = [note for note in (found.get("note"), *found["warnings"]) if note]
    return {
        "rows": [placed, *baselines],
        "segments": found["segments"],
        "lines": [
            f"{verdict[found['outputs_equal']]} Medians of {found['rounds']} rounds.",
            *notes, advice(found),
        ],
    }  # fmt: skip
