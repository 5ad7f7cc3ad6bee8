"""Traces the models of the corpus: `python -m pretrain.corpus --help`."""

from pathlib import Path

import click

from gdp.base.tasks import Engine
from gdp.cli import options
from gdp.cli.program import run
from pretrain.corpus.build import CorpusEntry, build_missing


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("data/corpus"),
    show_default=True, metavar="FOLDER", help="Where recipes look for it.",
)  # fmt: skip
@click.option("--family", "families", multiple=True, help="Only these families of models.")
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many new graphs.")
@click.option("--rebuild", is_flag=True, help="Build what is there, too.")
@options.engine
def main(
    output: Path, families: tuple[str, ...], limit: int | None, rebuild: bool, engine: Engine
) -> None:
    """Trace the models of the corpus and write their graphs and a manifest.

    Started again on the same folder, it builds what is missing.
    """

    def say(done: int, count: int, entry: CorpusEntry) -> None:
        click.echo(f"{done}/{count} {entry.name}: {entry.num_ops} ops", err=True)

    manifest = build_missing(output, families, limit, rebuild, say, engine)
    click.echo(f"{len(manifest.graphs)} graphs in {output}")


if __name__ == "__main__":
    run(main)
