"""`gdp corpus build`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.program import Verbs
from gdp.cli.show import show

if TYPE_CHECKING:
    from gdp.tasks import Engine


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
    from gdp.commands.corpus import RECIPE, CorpusConfig, build_corpus

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
