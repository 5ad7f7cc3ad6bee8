"""The verbs that train: `gdp pretrain` and `gdp finetune`; and `gdp report`."""

import json
import sys
from pathlib import Path

import click


def register(cli: click.Group) -> None:
    """Add the verbs to the command line."""
    cli.add_command(pretrain)
    cli.add_command(finetune)
    cli.add_command(report)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--stop-after", type=float, default=None, metavar="S", help="Seconds to train for.")
@click.option("--threads", type=int, default=1, show_default=True, help="For rollouts.")
@click.option("--coordinator", default="", metavar="HOST:PORT", help="Of the first process.")
@click.option("--processes", type=int, default=1, show_default=True)
@click.option("--process-id", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def pretrain(
    recipe: Path, output: Path, stop_after: float | None, threads: int, coordinator: str,
    processes: int, process_id: int, as_json: bool,
) -> None:  # fmt: skip
    """Pre-train a policy over a corpus; started again on the same folder, it goes on."""
    from gdp.learn.distributed import DistributedError, join, quit_at_once
    from gdp.learn.pretrain import pretrain as train
    from gdp.learn.recipe import load_recipe

    team = join(coordinator, processes, process_id) if coordinator else None
    settings, text = load_recipe(recipe)
    try:
        trained = train(
            settings, output, recipe_text=text, team=team, threads=threads, stop_after_s=stop_after
        )
    except DistributedError as error:
        quit_at_once(error)
    found = {"updates": trained.updates, "best": str(trained.best), "folder": str(trained.folder)}
    click.echo(
        json.dumps(found)
        if as_json
        else f"{trained.updates} updates, best on validation families: {trained.best}"
    )


@click.command()
@click.argument("model")
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
@click.option("--cluster", metavar="CLUSTER", help="TOML file or preset; default: this machine.")
@click.option("--objective", type=click.Choice(("latency", "throughput")), default="latency",
              show_default=True)  # fmt: skip
@click.option("--checkpoint", metavar="CK", help="Start from; default: the shipped policy.")
@click.option("--reward", type=click.Choice(("simulated", "measured")), default="simulated",
              show_default=True)  # fmt: skip
@click.option("--updates", type=int, default=50, show_default=True,
              help="At most; updates x samples bounds the placements judged. A simulated reward "
              "leaves most of them to a search that the tuned policy guides.")  # fmt: skip
@click.option("--samples", type=int, default=16, show_default=True, help="Placements an update.")
@click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "--output", required=True, metavar="CHECKPOINT")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def finetune(
    model: str, dims: tuple[str, ...], cluster: str | None, objective: str, checkpoint: str | None,
    reward: str, updates: int, samples: int, costs: str | None, seed: int, output: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Adapt the policy to one model and cluster; writes a checkpoint for `gdp place`."""
    from gdp.api import pose, with_dims
    from gdp.cluster import Cluster
    from gdp.learn.finetune import FinetuneConfig
    from gdp.learn.finetune import finetune as tune
    from gdp.measured import MeasuredReward
    from gdp.models import is_onnx, load

    if reward == "measured" and not is_onnx(model):
        raise ValueError(f"--reward measured executes ONNX models, got {model!r}")
    graph = load(model, with_dims(dims))
    machine = Cluster.local() if cluster is None else Cluster.load(cluster)
    kind = "throughput" if objective == "throughput" else "latency"
    posed = pose(graph, machine, kind, costs=costs)
    judge = None
    if reward == "measured":
        judge = MeasuredReward(model, graph, posed, machine, dims=dims, seed=seed)

    def say(at: int, numbers: dict[str, float]) -> None:
        if sys.stderr.isatty():
            click.echo(f"\rgdp: update {at + 1}/{updates} {numbers}", nl=False, err=True)

    tuned = tune(
        posed.problem, checkpoint, out=output, reward=judge, seed=seed, progress=say,
        config=FinetuneConfig(updates=updates, samples=samples, evaluations=updates * samples),
    )  # fmt: skip
    found = {
        "checkpoint": output, "objective": objective, "reward": reward,
        "best_s": tuned.value_s, "evaluations": tuned.evaluations,
    }  # fmt: skip
    text = f"best {tuned.value_s * 1e3:.3f} ms ({reward}) after {tuned.evaluations} evaluations"
    click.echo(json.dumps(found) if as_json else f"{text}; checkpoint {output}")


@click.command()
@click.argument("placement")
@click.option("--model", required=True, metavar="MODEL")
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
@click.option("--cluster", metavar="CLUSTER", help="TOML file or preset; default: this machine.")
@click.option("--objective", type=click.Choice(("latency", "throughput")), default="latency",
              show_default=True)  # fmt: skip
@click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
@click.option("-o", "--output", required=True, metavar="R.html")
def report(
    placement: str, model: str, dims: tuple[str, ...], cluster: str | None, objective: str,
    costs: str | None, output: str,
) -> None:  # fmt: skip
    """Write an HTML report of a placement."""
    from gdp.api import judged, schedule_of, with_dims
    from gdp.cluster import Cluster
    from gdp.models import load
    from gdp.placement import load_placement
    from gdp.report.html import write_report

    graph = load(model, with_dims(dims))
    machine = Cluster.local() if cluster is None else Cluster.load(cluster)
    placed = load_placement(placement)
    kind = "throughput" if objective == "throughput" else "latency"
    problem, schedule, device = schedule_of(graph, placed, machine, costs=costs)
    result = judged(graph, placed, machine, objective=kind, costs=costs)
    write_report(problem, schedule, device, result.to_json(), output)
    click.echo(output)
