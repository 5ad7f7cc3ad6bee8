"""`gdp tune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.run import MeasuringOptions
from gdp.cli.show import show, stages
from gdp.files.writing import write_atomic

if TYPE_CHECKING:
    from gdp.commands.tuning import Round, Tuned


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
@options.model
@options.cluster
@options.objective
@options.trained
@options.constraints
@options.handing_a("tuning", TuneOptions)
@options.handing_a("timing", MeasuringOptions)
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
    model: options.ModelOptions, cluster: options.ClusterOptions, objective: str,
    trained: options.TrainedFiles, constraints: options.ConstraintOptions, tuning: TuneOptions,
    timing: MeasuringOptions, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Place, run, learn what this machine really costs, and place again.

    The best plan, the first one and the baselines are measured in turn at the end. What was
    learned is remembered: from then on place and run predict with it on this machine.
    """
    from gdp.commands import reporting
    from gdp.commands.tuning import tune as tune_model
    from gdp.costs.machine import encode
    from gdp.methods.base import Search
    from gdp.placement import save_placement
    from gdp.runtime.measure import Measuring

    machine = cluster.load()
    outputs.require(
        model.spec, cluster.cluster, trained.checkpoint, trained.costs, constraints.constraints
    )
    with stages() as say:
        tuned = tune_model(
            model.spec, machine, objective=objective, runs=tuning.runs, dims=model.dims,
            costs=trained.costs, method=tuning.method, checkpoint=trained.checkpoint,
            search=Search(tuning.seed, tuning.place_seconds), constraints=constraints.read(),
            runtime=timing.runtime, keep=not tuning.no_keep,
            measuring=Measuring(timing.measure_seconds, tuning.seed, progress=say),
            progress=lambda found: say(round_text(found)),
        )  # fmt: skip
    paths = outputs.paths
    if "placement" in paths:
        save_placement(tuned.placement, paths["placement"])
    if "costs" in paths:
        write_atomic(Path(paths["costs"]), encode(tuned.record))
    if "report" in paths:
        reporting.report_tuned(model.load(), tuned, machine, paths["report"])
    show(tuned.to_json(), lambda: tuned_text(tuned))


def round_text(found: "Round") -> str:
    """A line about a round."""
    learned = "; ".join(found.learned) or "nothing that is off by a tenth"
    return (
        f"predicted {found.predicted_s * 1e3:.3f} ms, measured {found.measured_s * 1e3:.3f} ms "
        f"({found.off:.0%} off), {found.pieces} pieces, best {found.best_s * 1e3:.3f} ms; "
        f"learned: {learned}"
    )


def tuned_text(tuned: "Tuned") -> str:
    """Text of `gdp tune`: the rounds, the finalists, and one sentence."""
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
    lines += [f"note: {note}" for note in tuned.notes]
    if tuned.record_file:
        lines.append(f"costs: remembered for this machine in {tuned.record_file}")
    lines.append(
        f"answer: the {tuned.answer}, {tuned.value_s * 1e3:.3f} ms; predictions were "
        f"{tuned.record.off_before:.0%} off, now {tuned.record.off:.0%}"
    )
    return shown(lines)
