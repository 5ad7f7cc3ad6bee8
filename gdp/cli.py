"""The command line: each verb calls one library function and prints what it returns."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import click

from gdp import cli_costs, cli_learn
from gdp.cli_program import Verbs, verbose_option
from gdp.cli_program import run as run_program
from gdp.cli_targets import force_option, permit_of, require_files
from gdp.errors import InfeasibleError
from gdp.terminal import log_to_stderr, printable, printable_lines

EventObjective = Literal["latency", "throughput"]
OBJECTIVES: tuple[EventObjective, ...] = get_args(EventObjective)
PlaceObjective = Literal["latency", "throughput", "max_load"]
TARGETS = ("onnxruntime", "onnx", "openvino", "accelerate", "jax")


def main() -> NoReturn:
    """The `gdp` program.

    Exits with 0: done, 1: infeasible or failed check, 2: wrong input, 3: a bug of gdp, 130:
    interrupted, 141: nobody reads standard output any more. An error is one line on stderr;
    standard output holds a whole result or nothing, with --json as without.
    """
    cli_costs.register(cli)
    cli_learn.register(cli)
    run_program(cli)


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="gdp")
def cli() -> None:
    """Decide on which device each operator of a neural network runs.

    MODEL is an .onnx path, onnx:NAME (a light model of the installed onnx package), a graph file,
    or python:package.module:function.
    """
    log_to_stderr()


cli.params.append(verbose_option())


def _options(*options: Callable) -> Callable:
    def decorate(function: Callable) -> Callable:
        return functools.reduce(lambda f, option: option(f), reversed(options), function)

    return decorate


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
_dim = click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
_costs = click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
_model = _options(click.argument("model"), _dim)
_cluster = _options(
    click.option(
        "--cluster", metavar="CLUSTER", help="TOML file or preset; default: this machine."
    ),
    click.option("--max-memory", metavar="0=20GiB,cpu=30GiB", help="Memory limits by device."),
)
_objective = click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="latency", show_default=True
)
_place_objective = click.option(
    "--objective", type=click.Choice(get_args(PlaceObjective)), default="latency",
    show_default=True,
    help="max_load: seconds per sample where devices meet in host memory and compute and "
    "transfers do not overlap.",
)  # fmt: skip
_search = _options(
    click.option("--seconds", type=float, default=5.0, show_default=True, help="Search budget."),
    click.option("--evaluations", type=int, default=None, help="Budget in simulated placements."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--checkpoint", metavar="CK", help="Policy checkpoint; default: the shipped one."),
)
_constraints = _options(
    click.option("--pin", "pins", multiple=True, metavar="GLOB=DEVICE", help="Fix ops to devices."),
    click.option("--forbid", multiple=True, metavar="GLOB=DEVICE", help="Keep ops off devices."),
    click.option("--together", multiple=True, metavar="GLOB", help="Keep ops on one device."),
    click.option("--constraints", metavar="FILE", help="The same in a TOML file."),
)


def _load(model: str, dims: tuple[str, ...]) -> Any:
    from gdp.api import with_dims
    from gdp.models import load

    return load(model, with_dims(dims))


def _read_cluster(cluster: str | None, max_memory: str | None) -> Any:
    from gdp.cluster import Cluster
    from gdp.cluster_file import parse_max_memory, with_max_memory

    found = Cluster.local() if cluster is None else Cluster.load(cluster)
    return found if max_memory is None else with_max_memory(found, parse_max_memory(max_memory))


def _read_constraints(
    pins: tuple[str, ...], forbid: tuple[str, ...], together: tuple[str, ...], path: str | None
) -> Any:
    from gdp.constraints import Constraints, merge, parse_pin, read_constraints

    flags = Constraints(tuple(map(parse_pin, pins)), tuple(map(parse_pin, forbid)), tuple(together))
    return merge([flags] if path is None else [read_constraints(path), flags])


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[float, float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0)

        def update(fraction: float, value_s: float) -> None:
            bar.update(task, completed=fraction, description=f"{label} {value_s * 1e3:.3f} ms")

        yield update


def _emit(data: dict[str, Any]) -> None:
    # NaN and infinity are not JSON; a reader gets null.
    click.echo(json.dumps(_plain(data), allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


@cli.command()
@_options(_model, _cluster, _place_objective)
@click.option("--method", default="auto", show_default=True, help="See `gdp compare`.")
@_options(_search, _costs, _constraints)
@click.option("-o", "--output", metavar="P", help="Write the placement (JSON).")
@click.option("--report", metavar="R.html", help="Write an HTML report.")
@click.option("--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule.")
@_options(force_option, _json)
def place(
    model: str, dims: tuple[str, ...], cluster: str | None, max_memory: str | None,
    objective: PlaceObjective,
    method: str, seconds: float, evaluations: int | None, seed: int, checkpoint: str | None,
    costs: str | None, pins: tuple[str, ...], forbid: tuple[str, ...], together: tuple[str, ...],
    constraints: str | None, output: str | None, report: str | None, trace: str | None,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Place a model on a cluster."""
    from gdp import api
    from gdp.methods.base import Search
    from gdp.placement import save_placement
    from gdp.text import result_text

    graph, machine = _load(model, dims), _read_cluster(cluster, max_memory)
    permit = permit_of(model, cluster, checkpoint, costs, constraints, force=force)
    require_files({"placement": output, "report": report, "trace": trace}, permit)
    with _progress("placing") as progress:
        result = api.place(
            graph, machine, objective=objective, method=method, costs=costs,
            search=Search(seed, seconds, evaluations, progress=progress), checkpoint=checkpoint,
            constraints=_read_constraints(pins, forbid, together, constraints),
        )  # fmt: skip
    if output:
        save_placement(result.placement, output)
    if report or trace:
        _write_views(graph, machine, result, report, trace, costs)
    if as_json:
        _emit(result.to_json())
    else:
        click.echo(result_text(graph, machine, result))


def _write_views(
    graph: Any, machine: Any, result: Any, report: str | None, trace: str | None, costs: str | None
) -> None:
    from gdp.api import schedule_of

    problem, schedule, device = schedule_of(graph, result.placement, machine, costs=costs)
    if trace:
        from gdp.report.trace import write_trace

        write_trace(problem, schedule, device, trace)
    if report:
        from gdp.report.html import write_report

        write_report(problem, schedule, device, result.to_json(), report)


@cli.command()
@_options(_model, _cluster, _place_objective, _search, _costs, _constraints)
@click.option("--methods", metavar="A,B", help="Only these methods.")
@_json
def compare(
    model: str, dims: tuple[str, ...], cluster: str | None, max_memory: str | None,
    objective: PlaceObjective,
    seconds: float, evaluations: int | None, seed: int, checkpoint: str | None, costs: str | None,
    pins: tuple[str, ...], forbid: tuple[str, ...], together: tuple[str, ...],
    constraints: str | None, methods: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run every method and print one table."""
    from gdp import api
    from gdp.methods.base import Search
    from gdp.text import compare_text

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"gdp: {name} ...", err=True)

    graph, machine = _load(model, dims), _read_cluster(cluster, max_memory)
    rows = api.compare(
        graph, machine, objective=objective, names=methods.split(",") if methods else None,
        costs=costs, search=Search(seed, seconds, evaluations), checkpoint=checkpoint,
        constraints=_read_constraints(pins, forbid, together, constraints), progress=say,
    )  # fmt: skip
    if as_json:
        plain = [
            {"method": name, "feasible": False, "reason": row}
            if isinstance(row, str)
            else row.to_json()
            for name, row in rows.items()
        ]
        _emit({"rows": plain})
    else:
        click.echo(compare_text(graph, machine, rows))
    if all(isinstance(row, str) for row in rows.values()):
        raise InfeasibleError("no method found a placement")


@cli.command()
@_options(_model)
@click.argument("placement")
@_options(_cluster, _objective, _costs)
@click.option("--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule.")
@_options(force_option, _json)
def simulate(
    model: str, dims: tuple[str, ...], placement: str, cluster: str | None, max_memory: str | None,
    objective: EventObjective, costs: str | None, trace: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Predict time and memory of a placement."""
    from gdp import api
    from gdp.placement import load_placement

    graph, machine = _load(model, dims), _read_cluster(cluster, max_memory)
    placed = load_placement(placement)
    require_files({"trace": trace}, permit_of(model, placement, cluster, costs, force=force))
    score = api.simulate(graph, placed, machine, objective=objective, costs=costs)
    if trace:
        from gdp.report.trace import write_trace

        problem, schedule, device = api.schedule_of(graph, placed, machine, costs=costs)
        write_trace(problem, schedule, device, trace)
    if as_json:
        _emit(
            {
                "objective": objective,
                "latency_s": score.latency_s,
                "period_s": score.period_s,
                "feasible": score.feasible,
                "overflow_bytes": score.overflow_bytes,
                "peak_bytes": dict(
                    zip(machine.device_names, score.peak_bytes.tolist(), strict=True)
                ),
            }
        )
    else:
        click.echo(printable(str(score)))
    if not score.feasible:
        sys.exit(1)


@cli.command()
@_model
@click.option("--ops", is_flag=True, help="List every op.")
@_json
def inspect(model: str, dims: tuple[str, ...], ops: bool, as_json: bool) -> None:
    """Show ops, FLOPs, bytes, and the ops that are only estimated."""
    from gdp.inspection import inspect_model
    from gdp.text import inspection_text

    found = inspect_model(model, dims, ops=ops)
    if as_json:
        _emit(found)
    else:
        click.echo(inspection_text(found))


@cli.command()
@click.option("-o", "--output", metavar="cluster.toml", help="Write a cluster file to edit.")
@_options(_cluster, force_option, _json)
def devices(
    output: str | None, cluster: str | None, max_memory: str | None, force: bool, as_json: bool
) -> None:
    """Show what this machine (or a cluster) has."""
    from gdp.cluster_file import write_cluster
    from gdp.text import cluster_json, cluster_text

    machine = _read_cluster(cluster, max_memory)
    require_files({"cluster": output}, permit_of(cluster, force=force))
    if output:
        write_cluster(machine, output)
    if as_json:
        _emit(cluster_json(machine))
    else:
        click.echo(cluster_text(machine))


@cli.command()
@_model
@click.argument("placement", required=False)
@_options(_cluster, _objective, _search, _costs, _constraints)
@click.option("--method", default="auto", show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True, help="Measuring rounds.")
@click.option("--measure-seconds", type=float, default=60.0, show_default=True,
              help="Measuring takes at most about so long.")  # fmt: skip
@_json
def run(
    model: str, dims: tuple[str, ...], placement: str | None, cluster: str | None,
    max_memory: str | None, objective: EventObjective, seconds: float, evaluations: int | None,
    seed: int, checkpoint: str | None, costs: str | None, pins: tuple[str, ...],
    forbid: tuple[str, ...], together: tuple[str, ...], constraints: str | None, method: str,
    rounds: int, measure_seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Execute a placement for real: predicted beside measured, outputs checked.

    Without PLACEMENT the model is placed first.
    """
    from gdp.execute import run as run_model
    from gdp.methods.base import Search
    from gdp.placement import load_placement
    from gdp.text import run_text

    machine = _read_cluster(cluster, max_memory)
    with _progress("running") as progress:
        report = run_model(
            model, machine, None if placement is None else load_placement(placement),
            dims=dims, objective=objective, method=method, costs=costs, checkpoint=checkpoint,
            search=Search(seed, seconds, evaluations, progress=progress), rounds=rounds,
            measure_seconds=measure_seconds,
            constraints=_read_constraints(pins, forbid, together, constraints),
        )  # fmt: skip
    if as_json:
        _emit(report)
    else:
        click.echo(run_text(report))
    if report["outputs_equal"] is False or not report.get("inner_equal", True):
        sys.exit(1)


@cli.command()
@click.argument("placement")
@click.option("--model", required=True, metavar="MODEL")
@_dim
@_cluster
@click.option("--to", "target", required=True, type=click.Choice(TARGETS))
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@_options(force_option, _json)
def export(
    placement: str, model: str, dims: tuple[str, ...], cluster: str | None, max_memory: str | None,
    target: str, output: Path, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write what a runtime needs to execute a placement."""
    from gdp.execute import export as export_placement
    from gdp.placement import load_placement

    machine = None if cluster is None else _read_cluster(cluster, max_memory)
    written = export_placement(
        load_placement(placement), model, target, output, machine, dims,
        sources=[Path(path) for path in (placement, cluster) if path], force=force,
    )  # fmt: skip
    if as_json:
        _emit({"target": target, "files": [str(path) for path in written]})
    else:
        click.echo(printable_lines(map(str, written)))
