"""python -m pretrain.corpus: build what is missing of the corpus."""

from pathlib import Path

import click

from gdp.files.writing import write_atomic
from pretrain.corpus.build import built, items, read_manifest, write_manifest
from pretrain.tasks import Engine, each, engine_options


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("data/corpus"),
              show_default=True)  # fmt: skip
@click.option("--family", "families", multiple=True, help="Only these families.")
@click.option("--limit", type=int, default=None, help="Stop after this many new graphs.")
@click.option("--rebuild", is_flag=True, help="Build what is there, too.")
@engine_options
def main(
    output: Path, families: tuple[str, ...], limit: int | None, rebuild: bool, engine: Engine
) -> None:
    """Trace the models of the corpus and write their graphs and a manifest."""
    manifest = read_manifest(output)
    todo = list(items())
    known = {item.name for item in todo}
    entries = {entry.name: entry for entry in manifest.graphs if entry.name in known}
    todo = [i for i in todo if (rebuild or i.name not in entries)]
    names = [i.name for i in todo if not families or i.family in families][:limit]
    for _, (entry, content) in each(built, names, engine):
        write_atomic(output / entry.file, content)
        entries[entry.name] = entry
        manifest.graphs = list(entries.values())
        write_manifest(manifest, output)
        click.echo(f"{entry.name}: {entry.num_ops} ops, {len(names)} asked for", err=True)


if __name__ == "__main__":
    main()
