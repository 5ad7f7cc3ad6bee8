"""`gdp run`, `gdp tune` and `gdp export`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.base.clock import MEASURE_SECONDS
from gdp.base.files.writing import write_atomic
from gdp.base.terminal import listening, printable_lines
from gdp.cli import options
from gdp.cli.asking import Asking, require_writable
from gdp.cli.measured import TRIALS, tune_by_files
from gdp.cli.show import Say, placing, show, stages
from gdp.targets.table import EXPORTERS, RUNTIMES

if TYPE_CHECKING:
    from gdp.api.tune import Round, Tuned
    from gdp.question.question import Question
    from gdp.question.result import Result

FILE_RUNTIMES = tuple(key for key, row in RUNTIMES.items() if row.executes in ("onnx", "gguf"))


MEASURING = [
    click.option(
        "--measure-seconds", type=float, default=MEASURE_SECONDS, show_default=True,
        help="Seconds of measuring in all, at most; it ends when intervals are under 3%.",
    ),
    click.option(
        "--runtime", type=click.Choice(FILE_RUNTIMES),
        help="Default: onnxruntime of ONNX models, llamacpp of .gguf files.",
    ),
]  # fmt: skip


@click.command()
@options.stack(
    *options.asking(options.OWN_OBJECTIVE), click.argument("placement", required=False),
    *options.METHOD, *MEASURING, options.REPORT, options.FORCE, options.AS_JSON,
)  # fmt: skip
def run(
    placement: str | None, measure_seconds: float, runtime: str | None, report: str | None,
    force: bool, **values: Any,
) -> None:  # fmt: skip
    """Execute a placement for real: predicted beside measured, outputs checked.

    Without PLACEMENT the model is placed first; a placement that remembers its model is enough.
    """
    from gdp.api import report as reporting
    from gdp.api.run import execute
    from gdp.cli.text import run_text
    from gdp.measure.measuring import Measuring
    from gdp.placement.placement import read_placed
    from gdp.question.models import spec_of
    from gdp.question.question import model_asked
    from gdp.question.solve import evaluate

    asking, model = Asking(**values), None
    spec = asking.model
    if placement is not None or asking.is_placement:
        model, placement = asking.beside(placement)
        spec = spec_of(model_asked(read_placed(placement), model)[0])
    require_writable(force, spec, placement, *asking.files, report=report)
    result = None
    with stages() as say, listening(say):
        measuring = Measuring(measure_seconds, asking.seed, progress=say)
        say(f"loading {spec}", 0.0)  # no line: one that cannot be loaded is refused in one
        search = asking.search(placing(say))
        if placement is None:
            question = asking.question(search=search)
            result = _placed(question, runtime, asking, say)
            placed = result.placement
        else:
            question, placed = asking.about(placement, model, asking.demands())
        measured = execute(question, placed, measuring, runtime)
    if report:
        result = result or evaluate(question, placed)
        reporting.write_page(question, result, report, reporting.measured_view(measured))
    show(measured, lambda: run_text(measured))
    if measured["outputs_equal"] is False or not measured.get("inner_equal", True):
        sys.exit(1)


def _placed(question: "Question", runtime: str | None, asking: Asking, say: Say) -> "Result":
    """An answer that the runtime executes, with its stages reported."""
    from gdp.api.answer import answer
    from gdp.api.run import runnable, runtime_of

    question = runnable(question, runtime_of(question.model or question.graph, runtime))
    limit = f"{asking.seconds:g} s"
    if asking.evaluations is not None:
        limit = f"{asking.evaluations} evaluations"
    say(f"placing on {question.cluster.name}, at most {limit} of search")
    return answer(question)


@click.command()
@options.stack(
    click.argument("placement"), *options.NAMED_MODEL, *options.CLUSTER,
    click.option("--to", "target", required=True, type=click.Choice(tuple(EXPORTERS))),
    options.output("DIR"), options.FORCE, options.AS_JSON,
)  # fmt: skip
def export(placement: str, target: str, output: str, force: bool, **values: Any) -> None:
    """Write what a runtime needs to execute a placement."""
    from gdp.api.run import export as export_placement
    from gdp.placement.placement import read_placed

    read, asking = read_placed(placement), Asking(**values)
    overrides = asking.cluster is not None or asking.max_memory or asking.reserve
    machine = asking.machine(read) if overrides else None
    files = export_placement(
        read, asking.model, target, Path(output), machine, asking.dims,
        sources=[Path(path) for path in (placement, asking.cluster) if path], force=force,
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


def _forget(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from gdp.costs.machine import data_folder, forget

    count = forget()
    click.echo(f"forgot {count} tuned model{'s' if count != 1 else ''} in {data_folder()}")
    context.exit()


@click.command()
@options.stack(
    *options.asking(options.OBJECTIVE),
    click.option(
        "--runs", type=click.IntRange(min=1), default=10, show_default=True,
        help="Placements to execute at most; fewer where two in a row gain nothing.",
    ),
    click.option(
        "--place-seconds", type=float, default=2.0, show_default=True,
        help="Search budget of each round.",
    ),
    click.option("--method", default="auto", show_default=True, help="As of gdp place."),
    options.SEED,
    click.option(
        "--no-keep", "keep", is_flag=True, flag_value=False, default=True,
        help="Do not remember this machine for place and run.",
    ),
    *MEASURING,
    click.option(
        "--forget", is_flag=True, is_eager=True, expose_value=False, callback=_forget,
        help="Remove all that is remembered of this machine, and exit.",
    ),
    options.output("P.json", "Write the placement; with --for, the folder of the trials."),
    *TRIALS,
    click.option("--write-costs", metavar="C.json", help="Write what was learned, for --costs."),
    options.REPORT, options.FORCE, options.AS_JSON,
)  # fmt: skip
def tune(
    runs: int, place_seconds: float, keep: bool, measure_seconds: float, runtime: str | None,
    output: str | None, write_costs: str | None, report: str | None, force: bool,
    engine: str | None, traffic: Any, within: Any, result: str | None, **values: Any,
) -> None:  # fmt: skip
    """Place, run, learn this machine's real costs, and place again.

    The best plan, the first one and the baselines are measured in turn at the end. What was
    learned is remembered where it predicts these better than the costs so far: from then on
    place and run predict with it on this machine. Ctrl-C ends with the best plan and code 130.

    With --for, gdp runs nothing: it writes a trial, prints the lines that start the engine and
    measure it, reads the result at the next call with the same arguments, and goes on until no
    other setting is expected to gain anything.
    """
    from gdp.api import report as reporting
    from gdp.api.tune import tuned_answer
    from gdp.costs.machine import encode
    from gdp.measure.measuring import Measuring
    from gdp.methods.base import Search
    from gdp.placement.placement import save_placement

    if engine is not None:
        tune_by_files(engine, traffic, within, result, output, force, values)
        return
    for flag, value in (("--traffic", traffic), ("--within", within), ("--result", result)):
        if value is not None:
            raise click.UsageError(f"{flag} is for an engine (--for vllm, sglang or llamacpp)")
    asking = Asking(**values)
    require_writable(
        force, asking.model, *asking.files, placement=output, costs=write_costs, report=report
    )
    question = asking.question(search=Search(asking.seed, place_seconds))
    with stages() as say:
        tuned = tuned_answer(
            question, runs=runs, runtime=runtime, keep=keep,
            measuring=Measuring(measure_seconds, asking.seed, progress=say),
            progress=lambda found: say(round_text(found)),
        )  # fmt: skip
    if output:
        save_placement(tuned.placement, output)
    if write_costs and tuned.verdict.is_better:
        write_atomic(Path(write_costs), encode(tuned.record))
    if report:
        reporting.report_tuned(question, tuned, report)
    show(tuned.to_json(), lambda: tuned_text(tuned, write_costs or ""))
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
