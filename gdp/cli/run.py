"""`gdp run`, `gdp tune` and `gdp export`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.base.clock import MEASURE_SECONDS
from gdp.base.files.writing import write_atomic
from gdp.base.terminal import listening, printable_lines
from gdp.cli import options
from gdp.cli.show import Say, placing, show, stages
from gdp.targets.table import EXPORTERS, RUNTIMES

if TYPE_CHECKING:
    from gdp.api.tune import Round, Tuned
    from gdp.question.question import Question
    from gdp.question.result import Result

FILE_RUNTIMES = tuple(key for key, row in RUNTIMES.items() if row.executes in ("onnx", "gguf"))


@dataclass(frozen=True)
class MeasuringOptions:
    """Duration of measuring, and the runtime."""

    measure_seconds: float = options.option(
        "--measure-seconds", type=float, default=MEASURE_SECONDS,
        help="Seconds of measuring in all, at most; it ends when intervals are under 3%.",
    )  # fmt: skip
    runtime: str | None = options.option(
        "--runtime", type=click.Choice(FILE_RUNTIMES),
        help="Default: onnxruntime of ONNX models, llamacpp of .gguf files.",
    )  # fmt: skip


@click.command()
@options.asking(options.own_objective)
@click.argument("placement", required=False)
@options.method
@options.pass_dataclass("timing", MeasuringOptions)
@options.outputs(report=options.report)
@options.as_json
def run(
    asking: options.Asking, placement: str | None, search: options.MethodOptions,
    timing: MeasuringOptions, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Execute a placement for real: predicted beside measured, outputs checked.

    Without PLACEMENT the model is placed first; a placement that remembers its model is enough.
    """
    from gdp.api import report as reporting
    from gdp.api.run import execute
    from gdp.cli.text import run_text
    from gdp.measure.measuring import Measuring
    from gdp.question.models import spec_of
    from gdp.question.question import model_asked
    from gdp.question.solve import evaluate

    model, given = asking.model, None
    spec = model.spec
    if placement is not None or model.is_placement:
        given, placement = model.beside(placement)
        spec = spec_of(model_asked(options.read_placement(placement), given)[0])
    outputs.require(spec, placement, *asking.files)
    page, result = outputs.paths.get("report"), None
    with stages() as say, listening(say):
        measuring = Measuring(timing.measure_seconds, search.seed, progress=say)
        say(f"loading {spec}", 0.0)  # no line: one that cannot be loaded is refused in one
        if placement is None:
            question = asking.question(method=search.method, search=search.search(placing(say)))
            result = _placed(question, timing.runtime, search, say)
            placed = result.placement
        else:
            search.search()  # refuses bad values, though nothing is searched
            costs = asking.trained.costs
            about = options.About(model, asking.cluster, asking.objective, costs)
            question, placed = about.question(placement, given, asking.constraints.read())
        report = execute(question, placed, measuring, timing.runtime)
    if page:
        result = result or evaluate(question, placed)
        reporting.write_page(question, result, page, reporting.measured_view(report))
    show(report, lambda: run_text(report))
    if report["outputs_equal"] is False or not report.get("inner_equal", True):
        sys.exit(1)


def _placed(
    question: "Question", runtime: str | None, search: options.MethodOptions, say: Say
) -> "Result":
    """An answer that the runtime executes, with its stages reported."""
    from gdp.api.answer import answer
    from gdp.api.run import runnable, runtime_of

    question = runnable(question, runtime_of(question.model or question.graph, runtime))
    limit = f"{search.seconds:g} s"
    if search.evaluations is not None:
        limit = f"{search.evaluations} evaluations"
    say(f"placing on {question.cluster.name}, at most {limit} of search")
    return answer(question)


@click.command()
@click.argument("placement")
@options.named_model
@options.cluster
@click.option("--to", "target", required=True, type=click.Choice(tuple(EXPORTERS)))
@options.outputs(export=options.required(metavar="DIR"))
@options.as_json
def export(
    placement: str,
    model: options.ModelOptions,
    cluster: options.ClusterOptions,
    target: str,
    outputs: options.Outputs,
) -> None:
    """Write what a runtime needs to execute a placement."""
    from gdp.api.run import export as export_placement

    read = options.read_placement(placement)
    overrides = cluster.cluster is not None or cluster.max_memory or cluster.reserve
    machine = cluster.of(read) if overrides else None
    files = export_placement(
        read, model.given, target, Path(outputs.paths["export"]), machine,
        model.dims, sources=[Path(path) for path in (placement, cluster.cluster) if path],
        force=outputs.force,
    )  # fmt: skip
    names = [str(path) for path in files]
    summary: dict[str, Any] = {"target": target, "files": names}
    lines = {path.stem: path.read_text().strip() for path in files if path.suffix == ".txt"}
    plans = [json.loads(path.read_text()) for path in files if path.name == f"{target}.json"]
    why = plans[0].get("why", {}) if plans else {}
    summary |= lines | ({"why": why} if why else {})
    reasons = [f"{flag}: {reason}" for flag, reason in why.items()]
    typed = [line for text in lines.values() for line in text.splitlines()]
    show(summary, lambda: printable_lines([*names, *typed, *reasons]))


@dataclass(frozen=True)
class TuneOptions:
    """Budget of a tuning, and whether its lessons are remembered."""

    runs: int = options.option(
        "--runs", type=click.IntRange(min=1), default=10,
        help="Placements to execute at most; fewer where two in a row gain nothing.",
    )  # fmt: skip
    place_seconds: float = options.option(
        "--place-seconds", type=float, default=2.0, help="Search budget of each round."
    )
    method: str = options.option("--method", default="auto", help="As of gdp place.")
    seed: int = options.option("--seed", type=int, default=0)
    no_keep: bool = options.option(
        "--no-keep", is_flag=True, help="Do not remember this machine for place and run."
    )


def _forget(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from gdp.costs.machine import data_folder, forget

    count = forget()
    click.echo(f"forgot {count} tuned model{'s' if count != 1 else ''} in {data_folder()}")
    context.exit()


@click.command()
@options.asking(options.objective)
@options.pass_dataclass("tuning", TuneOptions)
@options.pass_dataclass("timing", MeasuringOptions)
@click.option(
    "--forget", is_flag=True, is_eager=True, expose_value=False, callback=_forget,
    help="Remove all that is remembered of this machine, and exit.",
)  # fmt: skip
@options.outputs(
    placement=options.written("-o", "--output", metavar="P.json", help="Write the placement."),
    costs=options.written(
        "--write-costs", metavar="C.json", help="Write what was learned, for --costs."
    ),
    report=options.report,
)
@options.as_json
def tune(
    asking: options.Asking, tuning: TuneOptions, timing: MeasuringOptions,
    outputs: options.Outputs,
) -> None:  # fmt: skip
    """Place, run, learn this machine's real costs, and place again.

    The best plan, the first one and the baselines are measured in turn at the end. What was
    learned is remembered where it predicts these better than the costs so far: from then on
    place and run predict with it on this machine. Ctrl-C ends with the best plan and code 130.
    """
    from gdp.api import report as reporting
    from gdp.api.tune import tuned_answer
    from gdp.costs.machine import encode
    from gdp.measure.measuring import Measuring
    from gdp.methods.base import Search
    from gdp.placement.placement import save_placement

    outputs.require(asking.model.spec, *asking.files)
    question = asking.question(
        method=tuning.method, search=Search(tuning.seed, tuning.place_seconds)
    )
    with stages() as say:
        tuned = tuned_answer(
            question, runs=tuning.runs, runtime=timing.runtime, keep=not tuning.no_keep,
            measuring=Measuring(timing.measure_seconds, tuning.seed, progress=say),
            progress=lambda found: say(round_text(found)),
        )  # fmt: skip
    paths = outputs.paths
    if "placement" in paths:
        save_placement(tuned.placement, paths["placement"])
    if "costs" in paths and tuned.verdict.is_better:
        write_atomic(Path(paths["costs"]), encode(tuned.record))
    if "report" in paths:
        reporting.report_tuned(question, tuned, paths["report"])
    show(tuned.to_json(), lambda: tuned_text(tuned, paths.get("costs", "")))
    if tuned.interrupted:
        click.get_current_context().exit(130)


def round_text(found: "Round") -> str:
    """A line about a round."""
    learned = "; ".join(found.learned) or "nothing that is off by a tenth"
    return (
        f"predicted {found.predicted_s * 1e3:.3f} ms, measured {found.measured_s * 1e3:.3f} ms "
        f"({found.off:.0%} off), {found.pieces} pieces, best {found.best_s * 1e3:.3f} ms; "
        f"learned: {learned}"
    )


def tuned_text(tuned: "Tuned", costs_file: str = "") -> str:
    """Text of `gdp tune`: the rounds, the finalists, what is kept, and one sentence."""
    from gdp.cli.text import run_text, shown, table

    rows = [
        [str(i), f"{r.predicted_s * 1e3:.3f}", f"{r.measured_s * 1e3:.3f}", f"{r.off:.0%}",
         str(r.pieces), f"{r.best_s * 1e3:.3f}"]
        for i, r in enumerate(tuned.rounds, 1)
    ]  # fmt: skip
    header = ["round", "predicted ms", "measured ms", "off", "pieces", "best ms"]
    lines = [table(header, rows)]
    lines += [f"learned  {text}" for text in tuned.rounds[-1].learned]
    if tuned.report is not None:
        report = tuned.report.to_json()
        rows = report["rivals"] | report["baselines"]
        lines.append(run_text(report | {"cluster": tuned.cluster, "baselines": rows}))
    lines += [f"not measured: {stage}: {reason}" for stage, reason in tuned.unmeasured]
    lines += [f"note: {note}" for note in tuned.notes]
    lines.append(_kept_text(tuned, costs_file))
    lines.append(
        f"answer: the {tuned.answer}, {tuned.value_s * 1e3:.3f} ms; predictions were "
        f"{tuned.record.off_before:.0%} off, now {tuned.record.off:.0%}"
    )
    return shown(lines)


def _kept_text(tuned: "Tuned", costs_file: str) -> str:
    """A line on whether the learned costs are stored or written, and why."""
    places = [f"remembered for this machine in {tuned.record_file}"] if tuned.record_file else []
    if costs_file and tuned.verdict.is_better:
        places.append(f"written to {costs_file}")
    if places:
        return f"costs: {' and '.join(places)}; {tuned.verdict.reason}"
    neither = f"not remembered, {costs_file} not written" if costs_file else "not remembered"
    return f"costs: {neither}; {tuned.verdict.reason}"
