"""HSDAG's three models under one judge: its method, what it was compared with, and gdp.

    python -m benchmarks.published.hsdag_table [--evaluations 1000] [--seeds 5]
        [--without ROW ...] [--rows FILE] [--processes 2 | --ray ADDRESS] [--json]

Every row is simulated seconds of one inference on datasheet numbers, of the best placement met
within so many evaluations, under the best of gdp's rules of priority. Methods that draw have as
many seeds, and a 95% interval (Student). With `--rows`, runs are appended to a file as they are
done, and those in it are not run again. CPU seconds are of a run's process, compilation included.
"""

from itertools import product
from pathlib import Path

import click

from benchmarks.published.baselines.rows import lines_of
from benchmarks.published.cases import Row, cases_of, chosen, engine_options
from benchmarks.published.hsdag_cases import CLUSTERS, UPDATES, rows_of, run
from benchmarks.published.hsdag_graphs import MODELS, PUBLISHED
from benchmarks.published.summary import compare
from gdp.tasks import Engine


def table_text(rows: list[Row]) -> str:
    """The table of one model on one cluster, in Markdown."""
    first = rows[0]
    nodes, edges = PUBLISHED[first["model"]]
    title = (
        f"{first['model']} on {first['cluster']}: {first['ops']} ops and {first['edges']} edges "
        f"({nodes} and {edges} in the paper), {first['fused']} after fusion, {first['nodes']} "
        "colocated nodes."
    )
    lines = [title, "", *lines_of(rows)]
    if found := [row for row in rows if "auto_until" in row]:
        until = found[0]["auto_until"] or "so many as its search takes"
        lines += ["", f"auto has a placement as fast as HSDAG's best after {until} simulations."]
    if any(row["method"] == "HSDAG, pre-trained" for row in rows):
        lines += ["", f"Pre-training took {20 * UPDATES} placements of the other two models more."]
    return "\n".join(lines)


@click.command()
@click.option("--evaluations", default=1000, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--models", default="all", show_default=True)
@click.option("--clusters", default=",".join(CLUSTERS), show_default=True)
@click.option("--without", multiple=True, help="A row to leave out.")
@click.option("--json", "as_json", is_flag=True)
@engine_options
def main(
    evaluations: int, seeds: int, models: str, clusters: str, without: tuple[str, ...],
    as_json: bool, rows: Path | None, engine: Engine | None,
) -> None:  # fmt: skip
    """Print the tables."""
    problems = list(product(chosen(models, list(MODELS), "model"), clusters.split(",")))
    cases = cases_of(problems, rows_of, evaluations, seeds, without)
    compare(cases, run, rows, engine, "HSDAG", table_text, as_json)


if __name__ == "__main__":
    main()
