"""`gdp place`, `fit`, `compare`, `simulate` and `report`."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gdp.base.clock import Phases
from gdp.base.errors import InfeasibleError
from gdp.base.terminal import listening, printable_lines
from gdp.cli import options
from gdp.cli.program import STARTED_S
from gdp.cli.show import placing, show, stages
from gdp.cli.traffic import (
    TrafficOptions,
    drafted,
    parsed_traffic,
    traffic_option,
    traffic_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdp.question.result import Result
    from gdp.targets.target import StartCommand


@click.command()
@options.asking(options.place_objective)
@options.method
@options.destination
@traffic_options
@options.outputs(
    placement=options.written("-o", "--output", metavar="P", help="Write the placement (JSON)."),
    report=options.report,
    trace=options.trace,
)
@options.as_json
def place(
    asking: options.Asking, search: options.MethodOptions, destination: options.Destination,
    serving: TrafficOptions, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Place a model on a cluster."""
    from gdp.api.answer import answer
    from gdp.api.run import start_commands
    from gdp.cli.text import result_text
    from gdp.question.models import spec_of

    phases = Phases(STARTED_S)
    phases.ended("import")
    parts = {
        "target": destination.runtime, "granularity": destination.granularity,
        "offload": destination.offload, "method": search.method, "phases": phases,
    }  # fmt: skip
    if serving.traffic is not None:
        _place_for_traffic(asking, parts, search, serving, outputs)
        return
    serving.require_none()
    model = drafted(asking.model.spec, serving.draft)
    question = asking.question(model, search=search.search(), **parts)
    outputs.require(spec_of(question.model or ""), *asking.files)
    with stages() as say, listening(say):
        watched = search.search(placing(say))
        result = answer(replace(question, search=watched), phases)
    _write(result, outputs)
    starts, path = start_commands(result), outputs.paths.get("placement")
    show(_with_starts(result.to_json(), starts), lambda: result_text(result, None, path, starts))


def _place_for_traffic(
    asking: options.Asking, parts: dict[str, Any], search: options.MethodOptions,
    serving: TrafficOptions, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Place a language model for an engine that serves traffic."""
    from gdp.api.run import start_commands
    from gdp.api.traffic.serve import served_plan
    from gdp.base.files.writing import check_file_writable, is_stream
    from gdp.cli.text import result_text
    from gdp.placement.placement import save_placement
    from gdp.question.models import HF_PREFIX

    spec = asking.model.spec
    if parts["target"] != "vllm" or not spec.startswith(HF_PREFIX):
        raise click.UsageError("--traffic is for hf: models --for vllm")
    asking.model.require_no_sizes("--traffic")
    asking.cluster.require_backend(None)
    traffic, limits, draft = serving.parsed()
    overwrite = outputs.require(spec, *asking.files)
    with stages() as say, listening(say):
        parts |= asking.parts() | {"search": search.search(placing(say))}
        plan = served_plan(
            parts, spec, traffic, within=limits, disaggregated=not serving.joint, draft=draft
        )
    path = outputs.paths.get("placement")
    if plan.prefill is not None and path and not is_stream(path):
        of_prefill = beside(path)
        check_file_writable(of_prefill, "placement", overwrite)
        save_placement(plan.prefill.result.placement, of_prefill)
    _write(plan.result, outputs, plan.traffic_json())
    parts_of = [] if plan.prefill is None else [plan.prefill.result]
    starts = [start for part in (*parts_of, plan.result) for start in start_commands(part)]
    show(_with_starts(plan.to_json(), starts), lambda: result_text(plan.result, plan, path, starts))


def _with_starts(plain: dict[str, Any], starts: "list[StartCommand]") -> dict[str, Any]:
    """An answer as JSON with the commands that start its runtime, if there are any."""
    return plain | ({"start": [start._asdict() for start in starts]} if starts else {})


def beside(path: str) -> str:
    """The file of the prefill GPUs, where the decode GPUs have another.

    >>> beside("plans/p.json")
    'plans/p.prefill.json'
    """
    stem, dot, ending = path.rpartition(".")
    return f"{stem}.prefill.{ending}" if dot and "/" not in ending else f"{path}.prefill"


def _write(
    result: "Result", outputs: options.Outputs, traffic: "Mapping[str, Any] | None" = None
) -> None:
    """Write the requested files."""
    from gdp.api import report as reporting
    from gdp.placement.placement import save_placement

    if path := outputs.paths.get("placement"):
        save_placement(result.placement, path)
    if path := outputs.paths.get("trace"):
        reporting.trace(result.question, result.placement, path)
    if path := outputs.paths.get("report"):
        reporting.write_page(result.question, result, path, traffic=traffic)


@click.command()
@options.asking(options.place_objective)
@options.search
@click.option("--methods", metavar="A,B", help="Only these methods.")
@options.as_json
def compare(asking: options.Asking, search: options.SearchOptions, methods: str | None) -> None:
    """Run every method and print one table."""
    from gdp.api.compare import compared
    from gdp.cli.text import compare_text

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"gdp: {name} ...", err=True)

    question = asking.question(search=search.search())
    names = methods.split(",") if methods else None
    with stages() as told, listening(told):
        rows = compared(question, names, say)
    plain = [
        {"method": name, "feasible": False, "reason": row}
        if isinstance(row, str)
        else row.to_json()
        for name, row in rows.items()
    ]
    show({"rows": plain}, lambda: compare_text(question.graph, question.cluster, rows))
    if all(isinstance(row, str) for row in rows.values()):
        raise InfeasibleError("no method found a placement")


@click.command()
@options.about(options.model)
@click.argument("placement", required=False)
@options.outputs(trace=options.trace)
@options.as_json
def simulate(about: options.About, placement: str | None, outputs: options.Outputs) -> None:
    """Predict time and memory of a placement, or of a device map (JSON), accelerate's too.

    A placement that remembers its model is enough: gdp simulate PLACEMENT.
    """
    from gdp.api import report as reporting
    from gdp.api.generation import generation_answer
    from gdp.cli.text import generation_lines
    from gdp.question import solve

    spec, placement = about.model.beside(placement)
    outputs.require(spec, placement, about.cluster.cluster, about.costs)
    question, placed = about.question(placement, spec)
    score = solve.simulate(question, placed)
    if path := outputs.paths.get("trace"):
        reporting.trace(question, placed, path)
    prediction = {
        "objective": question.objective,
        "latency_s": score.latency_s,
        "period_s": score.period_s,
        "feasible": score.feasible,
        "overflow_bytes": score.overflow_bytes,
        "peak_bytes": dict(zip(placed.device_names, score.peak_bytes.tolist(), strict=True)),
    }
    answer = generation_answer(question, placed, score)
    if answer is not None:
        prediction["generation"] = answer.to_json()
    lines = [str(score), *([] if answer is None else generation_lines(answer))]
    show(prediction, lambda: printable_lines(lines))
    if not score.feasible:
        sys.exit(1)


@click.command()
@click.argument("placement")
@options.about(options.named_model)
@traffic_option
@options.outputs(report=options.required(metavar="R.html"))
@options.as_json
def report(
    placement: str, about: options.About, traffic: str | None, outputs: options.Outputs
) -> None:
    """Write an HTML report of a placement."""
    from gdp.api import report as reporting
    from gdp.api.traffic.plan import on_vllm, served_on
    from gdp.question.solve import evaluate

    path, requests = outputs.paths["report"], traffic and parsed_traffic(traffic)
    outputs.require(about.model.given, placement, about.cluster.cluster, about.costs)
    question, placed = about.question(placement, about.model.given)
    question = on_vllm(question, placed) if requests else question
    result = evaluate(question, placed)
    served = served_on(result, requests).traffic_json() if requests else None
    reporting.write_page(question, result, path, traffic=served)
    show({"report": path}, lambda: path)
