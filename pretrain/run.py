"""Runs a recipe: `python -m pretrain.run RECIPE -o FOLDER`; started again, it resumes."""

import logging
from pathlib import Path

import click

from gdp.errors import GdpError
from gdp.learn.distributed import DistributedError, join, quit_at_once
from gdp.learn.pretrain import pretrain
from gdp.learn.recipe import load_recipe
from gdp.terminal import printable


@click.command()
@click.argument("recipe", type=Path)
@click.option("-o", "--out", type=Path, required=True, help="Folder of the run.")
@click.option("--stop-after", type=float, default=None, help="Seconds after which it stops.")
@click.option("--coordinator", default="", help="HOST:PORT of process 0.")
@click.option("--processes", default=1)
@click.option("--process-id", default=0)
def main(
    recipe: Path,
    out: Path,
    stop_after: float | None,
    coordinator: str,
    processes: int,
    process_id: int,
) -> None:
    """Pre-train, resume, or join other processes that do."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        team = None
        if coordinator:
            team = join(coordinator, processes, process_id)
        settings, text = load_recipe(recipe)
        trained = pretrain(settings, out, recipe_text=text, team=team, stop_after_s=stop_after)
    except DistributedError as error:
        quit_at_once(error)
    except GdpError as error:
        raise SystemExit(printable(str(error))) from None
    click.echo(f"{trained.updates} updates, best on validation {trained.best}")


if __name__ == "__main__":
    main()
