"""python -m pretrain.corpus: build what is missing of the corpus."""

import time
from pathlib import Path

import click

from gdp.errors import GdpError


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("data/corpus"),
              show_default=True)  # fmt: skip
@click.option("--family", "families", multiple=True, help="Only these families.")
@click.option("--limit", type=int, default=None, help="Stop after this many new graphs.")
@click.option("--rebuild", is_flag=True, help="Build what is there, too.")
def main(output: Path, families: tuple[str, ...], limit: int | None, rebuild: bool) -> None:
    """Trace the models of the corpus and write their graphs and a manifest."""
    from pretrain.corpus.build import build, items, read_manifest, write_manifest

    manifest = read_manifest(output)
    todo = list(items())
    known = {item.name for item in todo}
    entries = {entry.name: entry for entry in manifest.graphs if entry.name in known}
    todo = [i for i in todo if (rebuild or i.name not in entries)]
    todo = [i for i in todo if not families or i.family in families][:limit]
    for index, item in enumerate(todo):
        started_s = time.perf_counter()
        try:
            entry = build(item, output)
        except (GdpError, ValueError, TypeError) as error:
            raise click.ClickException(f"{item.name}: {error}") from error
        entries[item.name] = entry
        manifest.graphs = list(entries.values())
        write_manifest(manifest, output)
        click.echo(
            f"{index + 1}/{len(todo)} {item.name}: {entry.num_ops} ops, "
            f"{time.perf_counter() - started_s:.1f} s",
            err=True,
        )


if __name__ == "__main__":
    main()
