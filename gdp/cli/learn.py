"""`gdp corpus build`, `gdp pretrain` and `gdp finetune`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.cli import options
from gdp.cli.asking import Asking, require_writable
from gdp.cli.program import Verbs
from gdp.cli.show import show

if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig


@click.group(cls=Verbs)
def corpus() -> None:
    """Graphs of your own models, to pre-train on."""


@corpus.command()
@options.stack(
    click.option(
        "--from", "first", multiple=True, required=True, metavar="MODEL...",
        help="Models, or folders of model files; FAMILY=MODEL names the family.",
    ),
    click.argument("more", nargs=-1, metavar="[MODEL]..."),
    options.output("FOLDER"), options.FORCE,
    click.option(
        "--hold-out", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
        help="Share of the families that serve validation.",
    ),
    click.option(
        "--label-seconds", type=click.FloatRange(0), default=60.0, show_default=True,
        help="For searching good placements, all together; more are better.",
    ),
    click.option(
        "--problems", type=click.IntRange(1), default=2, show_default=True,
        help="Random machines for each graph.",
    ),
    click.option(
        "--max-ops", type=click.IntRange(1), default=2000, show_default=True,
        help="Of the fused graph; larger ones are left out.",
    ),
    options.DIMS, options.SEED, *options.ENGINE, options.AS_JSON,
)  # fmt: skip
def build(
    first: tuple[str, ...], more: tuple[str, ...], output: str, force: bool, processes: int | None,
    ray: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Import models, split them by family, and search the placements that a policy learns from.

    A file's family is the folder that holds it; where all are in one folder, each is its own. Whole
    families are held out. Run again on the same folder, it adds models and improves labels. It ends
    with the gdp pretrain command that trains on it.
    """
    from gdp.api.corpus import RECIPE, CorpusConfig, build_corpus
    from gdp.base.tasks import engine_of

    require_writable(force, folder="corpus", corpus=output)
    folder = Path(output)

    def say(done: int, count: int, what: str) -> None:
        click.echo(f"{done}/{count} {what}", err=True)

    built = build_corpus(
        [*first, *more], folder, CorpusConfig(**settings), engine=engine_of(processes, ray),
        force=force, progress=say,
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


@click.command()
@options.stack(
    click.argument("recipe", type=click.Path(path_type=Path)),
    options.output("FOLDER"), options.FORCE,
    click.option(
        "--stop-after", type=float, metavar="S",
        help="Seconds to train for, reading and compilation included; the update under way is "
        "finished (the first compiles for about a minute), and the last weights are validated.",
    ),
    click.option("--threads", type=int, default=1, show_default=True, help="For rollouts."),
    click.option(
        "--coordinator", default="", metavar="HOST:PORT", help="Of the first process."
    ),
    click.option("--processes", type=int, default=1, show_default=True),
    click.option("--process-id", type=int, default=0, show_default=True),
    options.AS_JSON,
)  # fmt: skip
def pretrain(
    recipe: Path, output: str, force: bool, stop_after: float | None, threads: int,
    coordinator: str, processes: int, process_id: int,
) -> None:  # fmt: skip
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
    if coordinator:
        joined = join(coordinator, processes, process_id)
    settings, text = load_recipe(recipe)
    try:
        trained = train(
            settings, Path(output), recipe_text=text, team=joined, threads=threads,
            stop_after_s=stop_after, force=force,
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


def _finetune_config(
    recipe: str | None, updates: int | None, samples: int | None, seconds: float | None
) -> "FinetuneConfig":
    """Settings of the recipe, or the defaults, overridden by the command line."""
    from gdp.learn.finetune import FinetuneConfig, load_finetune

    config = FinetuneConfig() if recipe is None else load_finetune(recipe)
    if seconds is not None:
        config = replace(config, seconds=seconds)
    if updates is None and samples is None:
        return config
    updates = config.updates if updates is None else updates
    samples = config.samples if samples is None else samples
    return replace(config, updates=updates, samples=samples, evaluations=updates * samples)


@click.command()
@options.stack(
    *options.asking(options.OBJECTIVE),
    click.option("--recipe", metavar="TOML", help="Settings; see finetune/recipes."),
    click.option(
        "--updates", type=int, help="At most; x samples: the placements judged. [default: 50]"
    ),
    click.option("--samples", type=int, help="Placements an update. [default: 16]"),
    click.option(
        "--seconds", type=float, help="After which no update begins. [default: no limit]"
    ),
    options.SEED, options.output("CHECKPOINT"), options.FORCE, options.AS_JSON,
)  # fmt: skip
def finetune(
    recipe: str | None, updates: int | None, samples: int | None, seconds: float | None,
    output: str, force: bool, **values: Any,
) -> None:  # fmt: skip
    """Adapt the policy to one model and cluster; writes a checkpoint for `gdp place`.

    It starts from the answer of `--method auto` with as many evaluations; those come on top. Half
    of the placements then try other gates of the superposition network, a tenth teach the weights
    by PPO, and the rest is a local search. `gdp tune` learns from runs of the model on this
    machine.
    """
    from gdp.api.finetune import finetuned
    from gdp.learn.metrics import progress_bar

    asking = Asking(**values)
    require_writable(force, asking.model, *asking.files, recipe, folder="policy", policy=output)
    config, question = _finetune_config(recipe, updates, samples, seconds), asking.question()
    with progress_bar(config.evaluations, 0, "fine-tuning") as draw:
        tuned = finetuned(
            question, out=output, config=config, seed=asking.seed, force=force,
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
