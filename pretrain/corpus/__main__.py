"""Traces the models of the corpus: `python -m pretrain.corpus --help`."""

from pathlib import Path

import click

from gdp.base.tasks import engine_of
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
@options.stack(*options.ENGINE)
def main(
    output: Path, families: tuple[str, ...], limit: int | None, rebuild: bool,
    processes: int | None, ray: str | None,
) -> None:  # fmt: skip
    """Trace the models of the corpus and write their graphs and a manifest.

    Started again on the same folder, it builds what is missing.
    """

    def say(done: int, count: int, entry: CorpusEntry) -> None:
        click.echo(f"{done}/{count} {entry.name}: {entry.num_ops} ops", err=True)

    manifest = build_missing(output, families, limit, rebuild, say, engine_of(processes, ray))
    click.echo(f"{len(manifest.graphs)} graphs in {output}")


if __name__ == "__main__":
    run(main)
