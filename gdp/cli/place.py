"""`gdp place`, `fit`, `compare`, `simulate` and `report`."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

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
from gdp.clock import COMPILE, Phases, waiting_for
from gdp.errors import InfeasibleError
from gdp.targets.table import PLANNERS
from gdp.terminal import printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdp.models import Model
    from gdp.question import Question
    from gdp.result import Result


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
    from gdp.api.generation import generation_answer
    from gdp.api.place import answer
    from gdp.cli import first_run
    from gdp.cli.text import result_text
    from gdp.models import spec_of
    from gdp.solve import require_answerable

    phases = Phases(STARTED_S)
    phases.ended("import")

    def asked(model: "Model | None" = None) -> "Question":
        phases.ended("planning")  # of the questions before this one
        question = asking.question(
            model, target=destination.runtime, granularity=destination.granularity,
            offload=destination.offload, method=search.method, search=search.search(),
        )  # fmt: skip
        phases.ended("read")
        return question

    def answered(question: "Question") -> "Result":
        with stages(lines=False) as say:
            return answer(replace(question, search=search.search(placing(say))))

    if serving.traffic is not None:
        _place_for_traffic(
            asking, destination.runtime, serving, asked, answered, outputs, phases
        )  # fmt: skip
        return
    serving.require_none()
    question = asked(drafted(asking.model.spec, serving.draft))
    outputs.require(spec_of(question.model or ""), *asking.files)
    if destination.runtime is None:
        require_answerable(question)
    if destination.runtime is None or PLANNERS[destination.runtime].searches:
        with waiting_for(COMPILE):
            first_run.prepare(search.method, question.objective)
    phases.ended("read")
    result = _all_waited(phases, answered(question))
    _write(result, outputs)
    question = result.question
    generation = generation_answer(question, result.placement, result.score)
    plain = result.to_json()
    plain |= {} if generation is None else {"generation": generation.to_json()}
    show(plain, lambda: result_text(question.graph, question.cluster, result, generation))


def _place_for_traffic(
    asking: options.Asking, runtime: str | None, serving: TrafficOptions,
    asked: "Callable[..., Question]", answered: "Callable[[Question], Result]",
    outputs: options.Outputs, phases: Phases,
) -> None:  # fmt: skip
    """Place a language model for an engine that serves traffic."""
    from gdp.api.traffic.serve import served_plan
    from gdp.cli.text import result_text
    from gdp.files.writing import check_file_writable, is_stream
    from gdp.models import HF_PREFIX
    from gdp.placement import save_placement

    spec = asking.model.spec
    if runtime != "vllm" or not spec.startswith(HF_PREFIX):
        raise click.UsageError("--traffic is for hf: models --for vllm")
    asking.model.require_no_sizes("--traffic")
    traffic, limits, draft = serving.parsed()
    overwrite = outputs.require(spec, *asking.files)
    plan = served_plan(
        asked, spec, traffic, answered, within=limits, disaggregated=not serving.joint, draft=draft
    )
    phases.ended("planning")
    seconds = phases.seconds
    waited = replace(plan.result, phases=seconds, seconds=sum(seconds.values()))
    plan = replace(plan, result=waited)
    path = outputs.paths.get("placement")
    if plan.prompts is not None and path and not is_stream(path):
        of_prompts = beside(path)
        check_file_writable(of_prompts, "placement", overwrite)
        save_placement(plan.prompts.result.placement, of_prompts)
    _write(plan.result, outputs, plan.traffic_json())
    question, result = plan.result.question, plan.result
    lines = result_text(question.graph, question.cluster, result, plan.generation, plan.lines())
    show(plan.to_json(), lambda: lines)


def beside(path: str) -> str:
    """The file of the GPUs that read prompts, where those that write tokens have another.

    >>> beside("plans/p.json")
    'plans/p.prompts.json'
    """
    stem, dot, ending = path.rpartition(".")
    return f"{stem}.prompts.{ending}" if dot and "/" not in ending else f"{path}.prompts"


def _write(
    result: "Result", outputs: options.Outputs, traffic: "Mapping[str, Any] | None" = None
) -> None:
    """Write the files that were asked for."""
    from gdp.api import report as reporting
    from gdp.placement import save_placement

    if path := outputs.paths.get("placement"):
        save_placement(result.placement, path)
    if path := outputs.paths.get("trace"):
        reporting.trace(result.question, result.placement, path)
    if path := outputs.paths.get("report"):
        reporting.write_page(result.question, result, path, traffic=traffic)


def _all_waited(phases: Phases, result: "Result") -> "Result":
    """The result with the seconds that the program waited before it searched."""
    seconds = {
        name: phases.seconds.get(name, 0.0) + result.phases.get(name, 0.0)
        for name in (*phases.seconds, *result.phases)
    }
    return replace(result, phases=seconds, seconds=sum(seconds.values()))


@click.command()
@options.asking(options.place_objective)
@options.search
@click.option("--methods", metavar="A,B", help="Only these methods.")
@options.as_json
def compare(asking: options.Asking, search: options.SearchOptions, methods: str | None) -> None:
    """Run every method and print one table."""
    from gdp.api.compare import compared
    from gdp.cli import first_run
    from gdp.cli.text import compare_text
    from gdp.solve import require_answerable

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"gdp: {name} ...", err=True)

    question = asking.question(search=search.search())
    names = methods.split(",") if methods else None
    for name in names or ["auto"]:
        require_answerable(replace(question, method=name))
    first_run.prepare("auto", question.objective)
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
    from gdp import solve
    from gdp.api import report as reporting
    from gdp.api.generation import generation_answer
    from gdp.cli.text import generation_lines

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
    from gdp.solve import evaluate

    path, requests = outputs.paths["report"], traffic and parsed_traffic(traffic)
    outputs.require(about.model.given, placement, about.cluster.cluster, about.costs)
    question, placed = about.question(placement, about.model.given)
    question = on_vllm(question, placed) if requests else question
    result = evaluate(question, placed)
    served = served_on(result, requests).traffic_json() if requests else None
    reporting.write_page(question, result, path, traffic=served)
    show({"report": path}, lambda: path)
