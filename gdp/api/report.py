"""Pages and traces of placements: `gdp report`, `--report` and `--trace`."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gdp.api.generation import generation_answer, with_energy
from gdp.api.traffic.plan import on_vllm, served_on
from gdp.api.tune import Tuned
from gdp.cluster.file import Machine
from gdp.costs.adapt import adapt, learned_rows
from gdp.costs.base import CostModel
from gdp.measure.cycle import steady_state
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Assignment, Placed, Placement
from gdp.question import solve
from gdp.question.models import Model
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question, question_about
from gdp.question.result import Result
from gdp.sim.objectives import find_objective
from gdp.sim.prediction import Prediction
from gdp.sim.traffic import Traffic


def report(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None,
    path: str | Path,
    *,
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
    measured: Mapping[str, Any] | None = None,
    traffic: Traffic | str | None = None,
) -> None:
    """Write the HTML page of a placement, which opens without a network.

    Args:
        model: Model that the placement is of.
        placement: `Result`, whose objective, bound and candidates are shown, or a placement, for
            which the simulator and the heuristics find them now.
        cluster: Cluster of the placement.
        path: HTML file to write.
        objective: Objective of a placement that is no `Result`; None for its own, else latency.
        costs: Cost model or file; None for the shipped one.
        measured: Result of `gdp.run` for the placement.
        traffic: Requests that share the engine of a placement for vLLM, as `gdp.serve` takes them.

    Raises:
        ArgumentError: Traffic has another form, or the placement is not for vLLM.
    """
    question, placed = question_about(placement, model, cluster, objective=objective, costs=costs)
    question = question if traffic is None else on_vllm(question, placed)
    result = placement if isinstance(placement, Result) else solve.evaluate(question, placed)
    if traffic is not None:
        result = replace(result, traffic=served_on(result, traffic))
    write_page(question, result, path, None if measured is None else measured_view(measured))


def write_page(
    question: Question, result: Result, path: str | Path, measured: Mapping[str, Any] | None = None
) -> None:
    """Write the page of a result, whose costs and cluster are those of a question; `measured` are
    the fields of `measured_view`."""
    from gdp.reports.html import write_report

    question = replace(question, objective=result.objective, constraints=Constraints())
    if all(candidate.method != "single" for candidate in result.candidates):
        from gdp.methods.portfolio import heuristic_candidates

        yardsticks = heuristic_candidates(prepare_problem(question), result.seed)
        result = replace(result, candidates=(*result.candidates, *yardsticks))
    view = solve.view_of(question, result.placement)
    steady = None
    if find_objective(result.objective).pipelined:
        drawn = steady_state(Prediction(view.problem, Assignment(view.device, None, view.teams)))
        steady = None if drawn is None else asdict(drawn)
    answer = result.generation or generation_answer(question, result.placement, result.score)
    result = result if answer else with_energy(result)
    generation = None if answer is None else answer.to_json()
    traffic = None if result.traffic is None else result.traffic.traffic_json()
    write_report(view, result.to_json(), path, measured, steady, generation, traffic)


def report_tuned(question: Question, tuned: Tuned, path: str | Path) -> None:
    """Write the page of a tuned placement, with the machine's lessons, by the costs learned.

    Args:
        question: That was tuned.
        tuned: Result of `gdp.tune` for it.
        path: HTML file to write.
    """
    measured = None if tuned.report is None else measured_view(tuned.report.to_json())
    runs = tuned.record.runs
    taught = {
        "rounds": [
            {"predicted_s": r.predicted_s, "measured_s": r.measured_s, "off": r.off,
             "learned": "; ".join(r.learned)}
            for r in tuned.rounds
        ],
        "rows": [row._asdict() for row in learned_rows(adapt(runs), runs)[:MOST_TAUGHT]],
    }  # fmt: skip
    question = replace(question, costs=tuned.costs)
    write_page(
        question, solve.evaluate(question, tuned.placement), path,
        {"rows": [], "segments": [], "lines": list(tuned.notes)} | (measured or {})
        | {"taught": taught},
    )  # fmt: skip


MOST_TAUGHT = 40
"""Rows of the page about what a machine taught."""


def trace(question: Question, placement: Placement, path: str | Path) -> None:
    """Write the simulated schedule of a placement as a Chrome/Perfetto trace."""
    from gdp.reports.trace import write_trace

    write_trace(solve.view_of(question, placement), path)


def measured_view(report: Mapping[str, Any]) -> dict[str, Any]:
    """The rows and lines of a page about an execution, from the fields of a `RunReport`."""
    from gdp.measure.report import advice

    placed = {
        "name": "placed", "predicted_latency_s": report["predicted_latency_s"],
        "latency_s": report["measured_latency_s"],
        "latency_interval_s": report["latency_interval_s"],
        "predicted_rate": report["predicted_throughput_per_s"],
        "rate": report["measured_throughput_per_s"],
        "rate_interval": report["throughput_interval_per_s"],
    }  # fmt: skip
    baselines = [
        {
            "name": name.replace("_", " "), "latency_s": row["latency_s"],
            "latency_interval_s": row["latency_interval_s"], "rate": row["throughput_per_s"],
            "rate_interval": row["throughput_interval_per_s"],
            "predicted_latency_s": row.get("predicted_latency_s"),
            "predicted_rate": row.get("predicted_throughput_per_s"),
        }
        for name, row in report["baselines"].items()
    ]  # fmt: skip
    verdict = {
        None: "Outputs cannot be compared: they are other ones at each run.",
        True: "Outputs equal the uncut model's.",
        False: "Outputs DIFFER from the uncut model's.",
    }
    notes = [note for note in (report.get("note"), *report["warnings"]) if note]
    return {
        "rows": [placed, *baselines],
        "segments": report["segments"],
        "lines": [
            f"{verdict[report['outputs_equal']]} Medians of {report['rounds']} rounds.",
            *notes, advice(report),
        ],
    }  # fmt: skip
