"""`gdp place`, `compare`, `simulate` and `report`."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.program import STARTED_S
from gdp.cli.show import placing, show, stages
from gdp.clock import COMPILE, Phases, waiting_for
from gdp.errors import InfeasibleError
from gdp.terminal import printable

if TYPE_CHECKING:
    from gdp.result import Result


@click.command()
@options.model
@options.cluster
@options.place_objective
@options.method
@options.trained
@options.constraints
@options.destination
@options.outputs(
    placement=options.written("-o", "--output", metavar="P", help="Write the placement (JSON)."),
    report=options.report,
    trace=options.trace,
)
@options.as_json
def place(
    model: options.ModelOptions, cluster: options.ClusterOptions, objective: str,
    search: options.MethodOptions, trained: options.TrainedFiles,
    constraints: options.ConstraintOptions, destination: options.Destination,
    outputs: options.Outputs,
) -> None:  # fmt: skip
    """Place a model on a cluster."""
    from gdp import api
    from gdp.cli import first_run
    from gdp.cli.text import result_text
    from gdp.commands import reporting
    from gdp.commands.generation import generation_answer
    from gdp.commands.placing import memory_for, place_for
    from gdp.placement import save_placement

    phases = Phases(STARTED_S)
    phases.ended("import")
    machine, rules = cluster.load(), constraints.read()
    room = memory_for(destination.runtime, machine, destination.offload, rules)
    graph = model.load(room)
    outputs.require(
        model.spec, cluster.cluster, trained.checkpoint, trained.costs, constraints.constraints
    )
    search.search()  # refuses bad values before anything is compiled
    if destination.runtime is None:
        api.require_answerable(
            graph, machine, method=search.method, costs=trained.costs,
            checkpoint=trained.checkpoint, constraints=rules,
        )  # fmt: skip
    with waiting_for(COMPILE):
        first_run.prepare(search.method, objective)
    phases.ended("read")
    with stages(lines=False) as say:
        placed = place_for(
            destination.runtime, graph, machine, model=model.spec, dims=model.bound(),
            granularity=destination.granularity, offload=destination.offload,
            objective=objective, method=search.method, costs=trained.costs,
            search=search.search(placing(say)), checkpoint=trained.checkpoint, constraints=rules,
        )  # fmt: skip
    result, machine, costs = _all_waited(phases, placed.result), placed.cluster, placed.costs
    if path := outputs.paths.get("placement"):
        save_placement(result.placement, path)
    if path := outputs.paths.get("trace"):
        reporting.trace(graph, result.placement, machine, path, costs=costs)
    if path := outputs.paths.get("report"):
        reporting.report(graph, result, machine, path, costs=costs)
    answer = generation_answer(
        graph, result.placement, machine, result.score, costs=costs, objective=objective
    )  # fmt: skip
    plain = result.to_json() | ({} if answer is None else {"generation": answer.to_json()})
    show(plain, lambda: result_text(graph, machine, result, answer))


def _all_waited(phases: Phases, result: "Result") -> "Result":
    """The result with the seconds that the program waited before it searched."""
    seconds = {
        name: phases.seconds.get(name, 0.0) + result.phases.get(name, 0.0)
        for name in (*phases.seconds, *result.phases)
    }
    return replace(result, phases=seconds, seconds=sum(seconds.values()))


@click.command()
@options.model
@options.cluster
@options.place_objective
@options.search
@options.trained
@options.constraints
@click.option("--methods", metavar="A,B", help="Only these methods.")
@options.as_json
def compare(
    model: options.ModelOptions, cluster: options.ClusterOptions, objective: str,
    search: options.SearchOptions, trained: options.TrainedFiles,
    constraints: options.ConstraintOptions, methods: str | None,
) -> None:  # fmt: skip
    """Run every method and print one table."""
    from gdp import api
    from gdp.cli import first_run
    from gdp.cli.text import compare_text
    from gdp.prepare import room_bytes

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"gdp: {name} ...", err=True)

    machine, rules, budget = cluster.load(), constraints.read(), search.search()
    graph = model.load(room_bytes(machine, rules))
    names = methods.split(",") if methods else None
    for name in names or ["auto"]:
        api.require_answerable(
            graph, machine, method=name, costs=trained.costs, checkpoint=trained.checkpoint,
            constraints=rules,
        )  # fmt: skip
    first_run.prepare("auto", objective)
    rows = api.compare(
        graph, machine, objective=objective, names=names, costs=trained.costs, search=budget,
        checkpoint=trained.checkpoint, constraints=rules, progress=say,
    )  # fmt: skip
    plain = [
        {"method": name, "feasible": False, "reason": row}
        if isinstance(row, str)
        else row.to_json()
        for name, row in rows.items()
    ]
    show({"rows": plain}, lambda: compare_text(graph, machine, rows))
    if all(isinstance(row, str) for row in rows.values()):
        raise InfeasibleError("no method found a placement")


@click.command()
@options.model
@click.argument("placement", required=False)
@options.cluster
@options.own_objective
@options.costs
@options.outputs(trace=options.trace)
@options.as_json
def simulate(
    model: options.ModelOptions, placement: str | None, cluster: options.ClusterOptions,
    objective: str | None, costs: str | None, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Predict time and memory of a placement, or of a device map (JSON), accelerate's too.

    A placement that remembers its model is enough: gdp simulate PLACEMENT.
    """
    from gdp import api
    from gdp.cli.text import generation_lines
    from gdp.commands import reporting
    from gdp.commands.generation import generation_answer
    from gdp.prepare import placed_on

    spec, placement = model.beside(placement)
    read = options.read_placement(placement)
    outputs.require(spec, placement, cluster.cluster, costs)
    objective = options.objective_of(objective, read)
    asked = cluster.of(read)
    graph, placed, machine, _ = placed_on(
        None if spec is None else model.load(), read, asked, costs
    )
    score = api.simulate(graph, placed, asked, objective=objective, costs=costs)
    if path := outputs.paths.get("trace"):
        reporting.trace(graph, placed, machine, path, costs=costs)
    prediction = {
        "objective": objective,
        "latency_s": score.latency_s,
        "period_s": score.period_s,
        "feasible": score.feasible,
        "overflow_bytes": score.overflow_bytes,
        "peak_bytes": dict(zip(placed.device_names, score.peak_bytes.tolist(), strict=True)),
    }
    answer = generation_answer(graph, placed, machine, score, costs=costs, objective=objective)
    if answer is not None:
        prediction["generation"] = answer.to_json()
    lines = [str(score), *([] if answer is None else generation_lines(answer))]
    show(prediction, lambda: printable("\n".join(lines)))
    if not score.feasible:
        sys.exit(1)


@click.command()
@click.argument("placement")
@options.named_model
@options.cluster
@options.own_objective
@options.costs
@options.outputs(report=options.required(metavar="R.html"))
@options.as_json
def report(
    placement: str, model: options.ModelOptions, cluster: options.ClusterOptions,
    objective: str | None, costs: str | None, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Write an HTML report of a placement."""
    from gdp.commands import reporting

    outputs.require(model.given, placement, cluster.cluster, costs)
    read = options.read_placement(placement)
    path = outputs.paths["report"]
    reporting.report(
        model.graph(), read, cluster.of(read), path,
        objective=options.objective_of(objective, read), costs=costs,
    )  # fmt: skip
    show({"report": path}, lambda: path)
