"""GDP's workloads as JAX training steps under one judge: its comparison, and gdp.

    python -m benchmarks.published.gdp_table [--evaluations 1000] [--seeds 5] [--workloads A,B]
        [--clusters equal] [--without ROW ...] [--rows FILE] [--processes 2 | --ray ADDRESS]

The families of GDP's table 1 (arXiv 1910.01578) with the depths and the numbers of devices that it
names: equal P100s over PCIe, memory as on the card. Sizes beyond that (hidden units, steps, batch)
are not at hand; they are `WORKLOADS` of `gdp_cases`. `--workloads all` takes them all, `--clusters
unequal` three clusters of unlike devices instead. Rows are the same however many processes run
them, but for CPU seconds and for bounds, which have a few seconds each.
"""

from itertools import product
from pathlib import Path

import click

from benchmarks.published.baselines.rows import lines_of
from benchmarks.published.cases import Row, cases_of, chosen, engine_options
from benchmarks.published.gdp_cases import EQUAL, UNEQUAL, WORKLOADS, graph_of, rows_of, run
from benchmarks.published.summary import compare
from gdp.tasks import Engine

SMALL = "rnnlm-2,transformer-xl-2,wavenet-2x18"


def table_text(rows: list[Row]) -> str:
    """The table of one workload, in Markdown."""
    first = rows[0]
    return "\n".join([
        f"{first['model']} on {first['devices']}: {first['ops']} ops, {first['fused']} after "
        "fusion", "", *lines_of(rows),
    ])  # fmt: skip


@click.command()
@click.option("--evaluations", default=1000, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--workloads", default=SMALL, show_default=True)
@click.option("--clusters", default=EQUAL, show_default=True, help="Presets, or 'unequal'.")
@click.option("--counts", is_flag=True, help="Only how many ops each workload has.")
@click.option("--without", multiple=True, help="A row to leave out.")
@click.option("--json", "as_json", is_flag=True)
@engine_options
def main(
    evaluations: int, seeds: int, workloads: str, clusters: str, counts: bool,
    without: tuple[str, ...], as_json: bool, rows: Path | None, engine: Engine | None,
) -> None:  # fmt: skip
    """Print the tables."""
    names = chosen(workloads, list(WORKLOADS), "workload")
    if counts:
        for name in names:
            graph = graph_of(name)
            click.echo(f"{name}: {graph.num_ops} ops, {graph.num_uses} edges")
        return
    machines = list(UNEQUAL) if clusters == "unequal" else clusters.split(",")
    problems = list(product(names, machines))
    cases = cases_of(problems, rows_of, evaluations, seeds, without)
    compare(cases, run, rows, engine, "HDP", table_text, as_json)


if __name__ == "__main__":
    main()
