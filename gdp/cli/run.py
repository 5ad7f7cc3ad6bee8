"""The verbs of models and machines as they are: `gdp run`, `export`, `inspect` and `devices`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from gdp.cli import options
from gdp.cli.show import placing, show, stages
from gdp.clock import MEASURE_SECONDS
from gdp.commands.registry import EXPORTERS, RUNTIMES
from gdp.terminal import printable_lines

ONNX_RUNTIMES = tuple(row.name for row in RUNTIMES.values() if row.executes == "onnx")


@dataclass(frozen=True)
class Timing:
    """How long `gdp run` measures, and with what."""

    measure_seconds: float = options.option(
        "--measure-seconds", type=float, default=MEASURE_SECONDS,
        help="Seconds of measuring in all, at most; it ends when intervals are under 3%.",
    )  # fmt: skip
    runtime: str | None = options.option(
        "--runtime", type=click.Choice(ONNX_RUNTIMES), help="Of an ONNX model; default onnxruntime."
    )


@click.command()
@options.model
@click.argument("placement", required=False)
@options.cluster
@options.objective
@options.method
@options.trained
@options.constraints
@options.handing_a("timing", Timing)
@options.outputs(report=options.report)
@options.as_json
def run(
    model: options.ModelOptions, placement: str | None, cluster: options.ClusterOptions,
    objective: str, search: options.MethodOptions, trained: options.Trained,
    constraints: options.ConstraintOptions, timing: Timing, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Execute a placement for real: predicted beside measured, outputs checked.

    Without PLACEMENT the model is placed first.
    """
    from gdp import api
    from gdp.cli import first_run
    from gdp.cli.text import run_text
    from gdp.commands import reporting
    from gdp.commands.execute import Placing, runnable
    from gdp.commands.execute import run as run_model
    from gdp.placement import load_placement
    from gdp.prepare import room_bytes
    from gdp.runtime.measure import Measuring

    machine = cluster.load()
    outputs.require(model.spec, placement, cluster.cluster, trained.checkpoint, trained.costs)
    placed = None if placement is None else load_placement(placement)
    page, made = outputs.paths.get("report"), placed
    with stages() as say:
        how: Placing = {
            "method": search.method, "checkpoint": trained.checkpoint,
            "search": search.search(placing(say)), "constraints": constraints.read(),
        }  # fmt: skip
        measuring = Measuring(timing.measure_seconds, search.seed, progress=say)
        say(f"loading {model.spec}", 0.0)  # no line: one that cannot be loaded is refused in one
        graph = model.load(room_bytes(machine, how["constraints"]) if placed is None else None)
        if placed is None:
            how = runnable(model.spec, how, timing.runtime)
            api.require_answerable(
                graph, machine, method=search.method, costs=trained.costs,
                checkpoint=trained.checkpoint, constraints=how.get("constraints"),
            )  # fmt: skip
            first_run.prepare(search.method, objective, say)
            say(f"placing on {machine.name}, at most {search.seconds:g} s of search")
            made = api.place(graph, machine, objective=objective, costs=trained.costs, **how)
            placed = made.placement
        else:
            first_run.prepare(None, objective, say)
        report = run_model(
            model.spec, machine, placed, dims=model.dims, objective=objective,
            costs=trained.costs, runtime=timing.runtime, measuring=measuring, graph=graph,
        )  # fmt: skip
    if page and made is not None:
        reporting.report(
            graph, made, machine, page,
            objective=objective, costs=trained.costs, measured=report,
        )  # fmt: skip
    show(report, lambda: run_text(report))
    if report["outputs_equal"] is False or not report.get("inner_equal", True):
        sys.exit(1)


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
    from gdp.commands.execute import export as export_placement
    from gdp.placement import load_placement

    machine = None if cluster.cluster is None else cluster.load()
    files = export_placement(
        load_placement(placement), model.spec, target, Path(outputs.paths["export"]), machine,
        model.dims, sources=[Path(path) for path in (placement, cluster.cluster) if path],
        force=outputs.force,
    )  # fmt: skip
    names = [str(path) for path in files]
    said = [path.read_text().strip() for path in files if path.name == "arguments.txt"]
    found = {"target": target, "files": names} | ({"arguments": said[0]} if said else {})
    show(found, lambda: printable_lines([*names, *said]))


@click.command()
@options.model
@click.option("--ops", is_flag=True, help="List every op.")
@options.as_json
def inspect(model: options.ModelOptions, ops: bool) -> None:
    """Show ops, FLOPs, bytes, and the ops that are only estimated."""
    from gdp.cli.text import inspection_text
    from gdp.commands.inspection import inspect_model

    found = inspect_model(model.spec, model.dims, ops=ops)
    show(found, lambda: inspection_text(found))


@click.command()
@options.outputs(
    cluster=options.written(
        "-o", "--output", metavar="cluster.toml", help="Write a cluster file to edit."
    )
)
@options.cluster
@options.as_json
def devices(cluster: options.ClusterOptions, outputs: options.Outputs) -> None:
    """Show what this machine (or a cluster) has."""
    from gdp.cli.text import cluster_json, cluster_text
    from gdp.cluster.file import write_cluster

    machine = cluster.load()
    outputs.require(cluster.cluster)
    if path := outputs.paths.get("cluster"):
        write_cluster(machine, path)
    show(cluster_json(machine), lambda: cluster_text(machine))
