"""`gdp place`, `fit`, `compare`, `simulate` and `report`."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.program import STARTED_S
from gdp.cli.show import placing, show, stages
from gdp.clock import COMPILE, Phases, waiting_for
from gdp.errors import InfeasibleError
from gdp.terminal import printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdp.api.fit import FitRow
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
    from gdp import solve
    from gdp.api import report as reporting
    from gdp.api.fit import generation_answer
    from gdp.api.place import memory_for, model_for, place_for
    from gdp.cli import first_run
    from gdp.cli.text import result_text
    from gdp.models import asks_longest, at_context, spec_of
    from gdp.placement import save_placement

    phases = Phases(STARTED_S)
    phases.ended("import")
    machine, rules = cluster.load(), constraints.read()
    room = memory_for(destination.runtime, machine, destination.offload, rules)
    longest = asks_longest(model.spec)
    asked = model_for(destination.runtime, model.spec, machine)
    spec = spec_of(at_context(asked, None) if longest else asked)
    graph = options.told_load(spec, model.bound(), room)
    outputs.require(
        spec, cluster.cluster, trained.checkpoint, trained.costs, constraints.constraints
    )
    search.search()  # refuses bad values before anything is compiled
    if destination.runtime is None:
        solve.require_answerable(
            graph, machine, method=search.method, costs=trained.costs,
            checkpoint=trained.checkpoint, constraints=rules,
        )  # fmt: skip
    with waiting_for(COMPILE):
        first_run.prepare(search.method, objective)
    phases.ended("read")
    with stages(lines=False) as say:
        placed = place_for(
            destination.runtime, graph, machine, model=spec, dims=model.bound(),
            granularity=destination.granularity, offload=destination.offload, longest=longest,
            objective=objective, method=search.method, costs=trained.costs,
            search=search.search(placing(say)), checkpoint=trained.checkpoint, constraints=rules,
        )  # fmt: skip
    result, machine, costs = _all_waited(phases, placed.result), placed.cluster, placed.costs
    graph = placed.graph or graph
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
    from gdp import solve
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
        solve.require_answerable(
            graph, machine, method=name, costs=trained.costs, checkpoint=trained.checkpoint,
            constraints=rules,
        )  # fmt: skip
    first_run.prepare("auto", objective)
    rows = solve.compare(
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
    from gdp import solve
    from gdp.api import report as reporting
    from gdp.api.fit import generation_answer
    from gdp.cli.text import generation_lines
    from gdp.prepare import placed_on

    spec, placement = model.beside(placement)
    read = options.read_placement(placement)
    outputs.require(spec, placement, cluster.cluster, costs)
    objective = options.objective_of(objective, read)
    asked = cluster.of(read)
    graph, placed, machine, _ = placed_on(
        None if spec is None else model.graph(read), read, asked, costs
    )
    score = solve.simulate(graph, placed, asked, objective=objective, costs=costs)
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
    show(prediction, lambda: printable_lines(lines))
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
    from gdp.api import report as reporting

    outputs.require(model.given, placement, cluster.cluster, costs)
    read = options.read_placement(placement)
    path = outputs.paths["report"]
    reporting.report(
        model.graph(read), read, cluster.of(read), path,
        objective=options.objective_of(objective, read), costs=costs,
    )  # fmt: skip
    show({"report": path}, lambda: path)


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    from gdp.units import whole_number

    sizes = [whole_number(part.strip()) for part in value.split(",")]
    if None in sizes:
        raise click.BadParameter(f"{value!r} must be whole numbers such as 2048,8192")
    return tuple(dict.fromkeys(size for size in sizes if size is not None))


def _schemes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--cluster", "--clusters", "clusters", multiple=True, required=True, metavar="A,B",
    help="Presets or TOML files to compare; may be repeated.",
)  # fmt: skip
@click.option(
    "--prompt", "prompts", default="2048,8192", show_default=True, callback=_sizes,
    help="Tokens that are read.",
)  # fmt: skip
@click.option(
    "--batch", "batches", default="1", show_default=True, callback=_sizes,
    help="Sequences side by side.",
)  # fmt: skip
@click.option(
    "--quantize", default="", callback=_schemes, metavar="A,B",
    help="Schemes that weights are stored in, such as none,int8,nf4.",
)  # fmt: skip
@click.option(
    "--new", type=click.IntRange(1, 2**31 - 1), default=256, show_default=True,
    help="Tokens that are written.",
)  # fmt: skip
@options.context
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Search of each row.")
@options.seed
@options.costs
@options.outputs(picture=options.written("--picture", metavar="P.svg", help="Write bars (SVG)."))
@options.as_json
def fit(
    model: str, clusters: tuple[str, ...], prompts: tuple[int, ...], batches: tuple[int, ...],
    quantize: tuple[str, ...], new: int, context: str | None, seconds: float, seed: int,
    costs: str | None, outputs: options.Outputs,
) -> None:  # fmt: skip
    """Compare contexts, batches, schemes and machines: if they fit, and how fast they are.

    MODEL is a configuration of transformers (hf:CONFIG) or a .gguf file. Every row is a placement
    of one request: the prompt is read, then tokens are written.
    """
    from gdp.api.fit import fit as fit_rows
    from gdp.api.fit import fit_picture
    from gdp.files.writing import write_atomic
    from gdp.methods.base import Search
    from gdp.models import HF_PREFIX, LONGEST, is_gguf
    from gdp.terminal import listening

    if not (model.startswith(HF_PREFIX) or is_gguf(model)):
        raise click.UsageError(f"gdp fit takes hf:CONFIG and .gguf models, not {model!r}")
    names = [name for given in clusters for name in given.split(",")]
    outputs.require(model, costs, *(name for name in names if name.endswith(".toml")))
    with stages() as say, listening(say):
        rows = fit_rows(
            model, names, prompts=prompts, batches=batches, quantize=quantize, new=new,
            context=context if context in (None, LONGEST) else int(context), costs=costs,
            search=Search(seed, seconds), progress=say,
        )  # fmt: skip
    if path := outputs.paths.get("picture"):
        write_atomic(path, fit_picture(rows).encode())
    show({"model": model, "rows": [row.to_json() for row in rows]}, lambda: fit_text(rows))


def fit_text(rows: "Sequence[FitRow]") -> str:
    """Text of `gdp fit`."""
    from gdp.cli.text import shown, table
    from gdp.units import format_seconds

    body, tried = [], any(row.quantize for row in rows)
    for row in rows:
        start = [row.cluster, f"{row.prompt}+{row.new}", str(row.batch)]
        start += [row.quantize or "-"] if tried else []
        if not row.fits or row.first_token_s is None or row.request_s is None:
            body.append([*start, "no", *["-"] * 6])
            continue
        body.append(
            [
                *start, "yes", f"{row.tokens_per_s:.1f}", format_seconds(row.first_token_s),
                format_seconds(row.request_s), f"{row.gap or 0:.0%}", f"{row.fullest or 0:.0%}",
                "-" if row.longest_context is None else str(row.longest_context),
            ]
        )  # fmt: skip
    header = ["machine", "tokens", "batch", *["quantised"] * tried, "fits", "tokens/s"]
    header += ["first token", "request", "gap", "fullest", "longest context"]
    reasons = dict.fromkeys(
        f"{row.cluster}, {row.prompt}+{row.new} tokens, batch {row.batch}"
        f"{row.quantize and f', {row.quantize}'}: {row.limit}"
        for row in rows
        if row.limit
    )
    notes = dict.fromkeys(f"note: {row.quantize}: {row.note}" for row in rows if row.note)
    return shown([table(header, body), "", *reasons, *notes])
