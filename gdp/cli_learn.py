"""The verbs that train: `gdp pretrain` and `gdp finetune`; and `gdp report`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdp.cli_targets import force_option, permit_of, require_files

if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig


def register(cli: click.Group) -> None:
    """Add the verbs to the command line."""
    cli.add_command(pretrain)
    cli.add_command(finetune)
    cli.add_command(report)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, metavar="FOLDER", type=click.Path(path_type=Path))
@force_option
@click.option("--stop-after", type=float, default=None, metavar="S", help="Seconds to train for.")
@click.option("--threads", type=int, default=1, show_default=True, help="For rollouts.")
@click.option("--coordinator", default="", metavar="HOST:PORT", help="Of the first process.")
@click.option("--processes", type=int, default=1, show_default=True)
@click.option("--process-id", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def pretrain(
    recipe: Path, output: Path, stop_after: float | None, threads: int, coordinator: str,
    processes: int, process_id: int, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Pre-train a policy over a corpus; started again on the same folder, it goes on."""
    from gdp.learn.distributed import DistributedError, join, quit_at_once
    from gdp.learn.pretrain import pretrain as train
    from gdp.learn.recipe import load_recipe

    team = join(coordinator, processes, process_id) if coordinator else None
    settings, text = load_recipe(recipe)
    try:
        trained = train(
            settings, output, recipe_text=text, team=team, threads=threads,
            stop_after_s=stop_after, force=force,
        )  # fmt: skip
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
@click.option("--recipe", metavar="TOML", help="Settings; see finetune/recipes.")
@click.option("--updates", type=int, default=None,
              help="At most; x samples: the placements judged. [default: 50]")  # fmt: skip
@click.option("--samples", type=int, default=None, help="Placements an update. [default: 16]")
@click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "--output", required=True, metavar="CHECKPOINT")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def finetune(
    model: str, dims: tuple[str, ...], cluster: str | None, objective: str, checkpoint: str | None,
    reward: str, recipe: str | None, updates: int | None, samples: int | None, costs: str | None,
    seed: int, output: str, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Adapt the policy to one model and cluster; writes a checkpoint for `gdp place`.

    With a simulated reward half of the placements try other gates of the superposition network, a
    tenth teach the weights by PPO, and the rest is a search that the tuned policy guides.
    """
    from gdp.api import pose, with_dims
    from gdp.cluster import Cluster
    from gdp.learn.finetune import finetune as tune
    from gdp.learn.metrics import progress_bar
    from gdp.measured import MeasuredReward
    from gdp.models import is_onnx, load
    from gdp.targets import require_folder

    if reward == "measured" and not is_onnx(model):
        raise ValueError(f"--reward measured executes ONNX models, got {model!r}")
    graph = load(model, with_dims(dims))
    require_folder(
        output, "policy", permit_of(model, cluster, checkpoint, recipe, costs, force=force)
    )
    machine = Cluster.local() if cluster is None else Cluster.load(cluster)
    kind = "throughput" if objective == "throughput" else "latency"
    posed = pose(graph, machine, kind, costs=costs)
    judge = None
    if reward == "measured":
        judge = MeasuredReward(model, graph, posed, machine, dims=dims, seed=seed)

    config = _settings(recipe, updates, samples)
    with progress_bar(config.evaluations, 0, "fine-tuning") as draw:
        tuned = tune(
            posed.problem, checkpoint, out=output, force=force, reward=judge, seed=seed,
            config=config,
            progress=lambda at, numbers: draw(
                numbers["evaluations"], f"best {numbers['best_s'] * 1e3:.3f} ms"
            ),
        )  # fmt: skip
    found = {
        "checkpoint": output, "objective": objective, "reward": reward,
        "best_s": tuned.value_s, "evaluations": tuned.evaluations,
    }  # fmt: skip
    text = f"best {tuned.value_s * 1e3:.3f} ms ({reward}) after {tuned.evaluations} evaluations"
    click.echo(json.dumps(found) if as_json else f"{text}; checkpoint {output}")


def _settings(recipe: str | None, updates: int | None, samples: int | None) -> "FinetuneConfig":
    """The recipe's settings, or those by default, under what the command line says."""
    from gdp.learn.finetune import FinetuneConfig
    from gdp.learn.recipe import load_finetune

    config = FinetuneConfig() if recipe is None else load_finetune(recipe)
    if updates is None and samples is None:
        return config
    updates = config.updates if updates is None else updates
    samples = config.samples if samples is None else samples
    return replace(config, updates=updates, samples=samples, evaluations=updates * samples)


@click.command()
@click.argument("placement")
@click.option("--model", required=True, metavar="MODEL")
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
@click.option("--cluster", metavar="CLUSTER", help="TOML file or preset; default: this machine.")
@click.option("--objective", type=click.Choice(("latency", "throughput")), default="latency",
              show_default=True)  # fmt: skip
@click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
@click.option("-o", "--output", required=True, metavar="R.html")
@force_option
def report(
    placement: str, model: str, dims: tuple[str, ...], cluster: str | None, objective: str,
    costs: str | None, output: str, force: bool,
) -> None:  # fmt: skip
    """Write an HTML report of a placement."""
    from gdp.api import judged, schedule_of, with_dims
    from gdp.cluster import Cluster
    from gdp.models import load
    from gdp.placement import load_placement
    from gdp.report.html import write_report

    graph = load(model, with_dims(dims))
    permit = permit_of(model, placement, cluster, costs, force=force)
    require_files({"report": output}, permit)
    machine = Cluster.local() if cluster is None else Cluster.load(cluster)
    placed = load_placement(placement)
    kind = "throughput" if objective == "throughput" else "latency"
    problem, schedule, device = schedule_of(graph, placed, machine, costs=costs)
    result = judged(graph, placed, machine, objective=kind, costs=costs)
    write_report(problem, schedule, device, result.to_json(), output)
    click.echo(output)
