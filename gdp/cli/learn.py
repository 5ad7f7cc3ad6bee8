"""`gdp corpus build`, `gdp pretrain` and `gdp finetune`."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.program import Verbs
from gdp.cli.show import show

if TYPE_CHECKING:
    from gdp.base.tasks import Engine
    from gdp.learn.finetune import FinetuneConfig


@click.group(cls=Verbs)
def corpus() -> None:
    """Graphs of your own models, to pre-train on."""


@corpus.command()
@click.option("--from", "first", multiple=True, required=True, metavar="MODEL...",
              help="Models, or folders of model files; FAMILY=MODEL names the family.")  # fmt: skip
@click.argument("more", nargs=-1, metavar="[MODEL]...")
@options.outputs(corpus=options.required(metavar="FOLDER"))
@click.option("--hold-out", type=click.FloatRange(0, 1, max_open=True), default=0.2,
              show_default=True, help="Share of the families that serve validation.")  # fmt: skip
@click.option("--label-seconds", type=click.FloatRange(0), default=60.0, show_default=True,
              help="For searching good placements, all together; more are better.")  # fmt: skip
@click.option("--problems", type=click.IntRange(1), default=2, show_default=True,
              help="Random machines for each graph.")  # fmt: skip
@click.option("--max-ops", type=click.IntRange(1), default=2000, show_default=True,
              help="Of the fused graph; larger ones are left out.")  # fmt: skip
@options.dims
@options.seed
@options.engine
@options.as_json
def build(
    first: tuple[str, ...], more: tuple[str, ...], outputs: options.Outputs, hold_out: float,
    label_seconds: float, problems: int, max_ops: int, dims: tuple[str, ...], seed: int,
    engine: "Engine",
) -> None:  # fmt: skip
    """Import models, split them by family, and search the placements that a policy learns from.

    A file's family is the folder that holds it; where all are in one folder, each is its own. Whole
    families are held out. Run again on the same folder, it adds models and improves labels. It ends
    with the gdp pretrain command that trains on it.
    """
    from gdp.api.corpus import RECIPE, CorpusConfig, build_corpus

    outputs.require(folder="corpus")
    folder = Path(outputs.paths["corpus"])

    def say(done: int, count: int, what: str) -> None:
        click.echo(f"{done}/{count} {what}", err=True)

    built = build_corpus(
        [*first, *more], folder,
        CorpusConfig(hold_out, label_seconds, problems, max_ops, dims, seed),
        engine=engine, force=outputs.force, progress=say,
    )  # fmt: skip
    graphs = built.manifest.graphs
    held = sorted({e.family for e in graphs if e.split != "train"})
    count = len({e.family for e in graphs})
    lines = [f"left out {spec}: {reason}" for spec, reason in built.left_out.items()]
    lines += [
        f"{len(graphs)} graphs of {count} families in {folder}, {built.labels} problems labelled",
        f"held out for validation: {', '.join(held) or 'nothing, as there is one family'}",
        f"next: gdp pretrain {folder / RECIPE} -o RUN",
    ]
    show(
        {
            "corpus": str(folder), "graphs": len(graphs), "families": count, "held_out": held,
            "labels": built.labels, "left_out": built.left_out, "recipe": str(folder / RECIPE),
        },
        lambda: "\n".join(lines),
    )  # fmt: skip


@dataclass(frozen=True)
class ProcessOptions:
    """This process among several that train together."""

    coordinator: str = options.option(
        "--coordinator", default="", metavar="HOST:PORT", help="Of the first process."
    )
    processes: int = options.option("--processes", type=int, default=1)
    process_id: int = options.option("--process-id", type=int, default=0)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@options.outputs(run=options.required(metavar="FOLDER"))
@click.option(
    "--stop-after", type=float, default=None, metavar="S",
    help="Seconds to train for, reading and compilation included; the update under way is "
    "finished (the first compiles for about a minute), and the last weights are validated.",
)  # fmt: skip
@click.option("--threads", type=int, default=1, show_default=True, help="For rollouts.")
@options.pass_dataclass("team", ProcessOptions)
@options.as_json
def pretrain(
    recipe: Path,
    outputs: options.Outputs,
    stop_after: float | None,
    threads: int,
    team: ProcessOptions,
) -> None:
    """Pre-train a policy over a corpus; started again on the same folder, it goes on.

    RECIPE is TOML, such as pretrain/recipes/base.toml, which travels with gdp, or the recipe.toml
    of a corpus of your own (gdp corpus build). It ends with the curve on problems that are held
    out, and the policy that was best on them.
    """
    from gdp.learn.metrics import curve_text, read_metrics, validation_points
    from gdp.learn.pretrain import pretrain as train
    from gdp.learn.processes import DistributedError, join, quit_at_once
    from gdp.learn.recipe import load_recipe

    joined = None
    if team.coordinator:
        joined = join(team.coordinator, team.processes, team.process_id)
    settings, text = load_recipe(recipe)
    try:
        trained = train(
            settings, Path(outputs.paths["run"]), recipe_text=text, team=joined, threads=threads,
            stop_after_s=stop_after, force=outputs.force,
        )  # fmt: skip
    except DistributedError as error:
        quit_at_once(error)
    points = validation_points(read_metrics(trained.folder / "metrics.jsonl"))
    best, folder = trained.best, trained.folder
    error = "" if math.isnan(best.best_error) else f" (standard error {best.best_error:.1%})"
    text = (
        f"{trained.updates} updates; cost over the best known of {trained.validated_on}: "
        f"{best.greedy:.3f} greedy, {best.best:.3f} best of 17{error}; policy {folder / 'best'}"
    )
    show(
        {
            "updates": trained.updates, "best": best._asdict(), "folder": str(folder),
            "validated_on": trained.validated_on, "policy": str(folder / "best"),
            "curve": [point._asdict() for point in points],
        },
        lambda: "\n".join(part for part in (curve_text(points), text) if part),
    )  # fmt: skip


@dataclass(frozen=True)
class FinetuneFlags:
    """Settings of fine-tuning, and number of placements."""

    recipe: str | None = options.option(
        "--recipe", metavar="TOML", help="Settings; see finetune/recipes."
    )
    updates: int | None = options.option(
        "--updates", type=int, help="At most; x samples: the placements judged. [default: 50]"
    )
    samples: int | None = options.option(
        "--samples", type=int, help="Placements an update. [default: 16]"
    )
    seconds: float | None = options.option(
        "--seconds", type=float, help="After which no update begins. [default: no limit]"
    )
    seed: int = options.option("--seed", type=int, default=0)

    def config(self) -> "FinetuneConfig":
        """Settings of the recipe, or the defaults, overridden by the command line."""
        from gdp.learn.finetune import FinetuneConfig, load_finetune

        config = FinetuneConfig() if self.recipe is None else load_finetune(self.recipe)
        if self.seconds is not None:
            config = replace(config, seconds=self.seconds)
        if self.updates is None and self.samples is None:
            return config
        updates = config.updates if self.updates is None else self.updates
        samples = config.samples if self.samples is None else self.samples
        return replace(config, updates=updates, samples=samples, evaluations=updates * samples)


@click.command()
@options.asking(options.objective)
@options.pass_dataclass("tuning", FinetuneFlags)
@options.outputs(policy=options.required(metavar="CHECKPOINT"))
@options.as_json
def finetune(asking: options.Asking, tuning: FinetuneFlags, outputs: options.Outputs) -> None:
    """Adapt the policy to one model and cluster; writes a checkpoint for `gdp place`.

    It starts from the answer of `--method auto` with as many evaluations; those come on top. Half
    of the placements then try other gates of the superposition network, a tenth teach the weights
    by PPO, and the rest is a local search. `gdp tune` learns from runs of the model on this
    machine.
    """
    from gdp.api.finetune import finetuned
    from gdp.learn.metrics import progress_bar

    output = outputs.paths["policy"]
    outputs.require(asking.model.spec, *asking.files, tuning.recipe, folder="policy")
    config, question = tuning.config(), asking.question()
    with progress_bar(config.evaluations, 0, "fine-tuning") as draw:
        tuned = finetuned(
            question, out=output, config=config, seed=tuning.seed, force=outputs.force,
            progress=lambda at, numbers: draw(
                numbers["evaluations"], f"best {numbers['best_s'] * 1e3:.3f} ms"
            ),
        )  # fmt: skip
    spent = tuned.start_evaluations
    start = f"auto, {spent} evaluations" if spent else "advisers"
    show(
        {
            "checkpoint": output, "objective": question.objective, "start_s": tuned.start_s,
            "start_evaluations": tuned.start_evaluations, "best_s": tuned.value_s,
            "evaluations": tuned.evaluations,
        },
        lambda: f"started at {tuned.start_s * 1e3:.3f} ms "
        f"({start}), best {tuned.value_s * 1e3:.3f} ms "
        f"after {tuned.evaluations} evaluations; checkpoint {output}",
    )  # fmt: skip
