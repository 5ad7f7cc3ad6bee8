"""GDP's workloads as JAX training steps under one judge: its comparison, and gdp.

    python -m benchmarks.published.gdp_table [--evaluations 1000] [--seeds 5] [--workloads A,B]
        [--clusters equal] [--without ROW ...] [--rows FILE] [--processes 2 | --ray ADDRESS]

The families of GDP's table 1 (arXiv 1910.01578) with the depths and the numbers of devices that it
names: equal P100s over PCIe, memory as on the card. Sizes beyond that (hidden units, steps, batch)
are not at hand; they are `WORKLOADS` of `gdp_cases`. `--workloads all` takes them all, `--clusters
unequal` three clusters of unlike devices instead. Rows are the same however many processes run
them, but for CPU seconds and for bounds, which have a few seconds each.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import click
import numpy as np

from benchmarks.published.baselines.rows import lines_of, with_until
from benchmarks.published.cases import (
    BOUND,
    Row,
    cases_of,
    chosen,
    engine_options,
    kept,
    tables_of,
)
from benchmarks.published.gdp_cases import EQUAL, UNEQUAL, WORKLOADS, graph_of, rows_of, run
from gdp.tasks import Engine

SMALL = "rnnlm-2,transformer-xl-2,wavenet-2x18"
HIDDEN = ("single device", "ETF", "gdp auto, shortest search")
"""Rows that the summary's first table leaves out."""


def measured(
    problems: Sequence[tuple[str, str]], evaluations: int, seeds: int, path: Path | None,
    engine: Engine, without: Sequence[str] = (),
) -> list[list[Row]]:  # fmt: skip
    """The table of every workload on every cluster; HDP's row says when `auto` has its best."""
    cases = cases_of(problems, rows_of, evaluations, seeds, without)
    tables = tables_of(kept(cases, run, path, engine))
    with_until(tables, "HDP", lambda asked: kept(asked, run, path, engine))
    return tables


def table_text(rows: list[Row]) -> str:
    """The table of one workload, in Markdown."""
    first = rows[0]
    return "\n".join([
        f"{first['model']} on {first['devices']}: {first['ops']} ops, {first['fused']} after "
        "fusion", "", *lines_of(rows),
    ])  # fmt: skip


def summary_text(tables: list[list[Row]]) -> str:
    """Milliseconds of all methods on all workloads; what each method takes over `auto`; and after
    how many simulations `auto` has passed HDP."""
    return "\n\n".join([_values(tables), _ratios(tables), _until(tables)])


def _values(tables: list[list[Row]]) -> str:
    names = [name for name in _methods(tables) if name not in HIDDEN]
    lines = [_row(["workload", "devices", "ops", "fused", *names])]
    lines.append("| --- | --- |" + " ---: |" * (len(names) + 2))
    for table in tables:
        by, first = {row["method"]: row for row in table}, table[0]
        cells = [first[name] for name in ("model", "devices", "ops", "fused")]
        values = [by.get(name, {}).get("value_s") for name in names]
        lines.append(_row([*cells, *(f"{x * 1e3:.1f}" if x else "-" for x in values)]))
    return "\n".join(lines)


def _ratios(tables: list[list[Row]]) -> str:
    """Time over that of `auto`: geometric mean, least and most over the workloads that have it."""
    head = ["method", "workloads", "time / auto's - 1", "least", "most", "evaluations", "CPU s"]
    lines = [_row(head), "| --- |" + " ---: |" * (len(head) - 1)]
    for name in _methods(tables):
        found = [
            (row, ours["value_s"])
            for table in tables
            for ours in table
            for row in table
            if ours["method"] == "gdp auto" and row["method"] == name and row["value_s"]
            and ours["value_s"]
        ]  # fmt: skip
        if not found:
            continue
        ratio = np.array([row["value_s"] / ours_s for row, ours_s in found])
        cells = [name, len(found), f"{np.exp(np.log(ratio).mean()) - 1:+.1%}"]
        cells += [f"{ratio.min() - 1:+.1%}", f"{ratio.max() - 1:+.1%}"]
        for key, form in (("evaluations_spent", "{:.0f}"), ("cpu_s", "{:.1f}")):
            have = [row[key] for row, _ in found if key in row]
            cells.append(form.format(np.mean(have)) if have else "")
        lines.append(_row(cells))
    return "\n".join(lines)


def _until(tables: list[list[Row]]) -> str:
    lines = [
        "| workload | devices | HDP's draws until its best | auto's simulations until as fast |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in (row for table in tables for row in table if "auto_until" in row):
        ends = row["auto_until"] or "in its search"
        lines.append(_row([row["model"], row["devices"], row["best_at"], ends]))
    return "\n".join(lines)


def _methods(tables: list[list[Row]]) -> list[str]:
    """Every method of some table, in order; the bound last."""
    names = dict.fromkeys(row["method"] for table in tables for row in table)
    return [*(name for name in names if name != BOUND), BOUND]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


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
    without: tuple[str, ...], as_json: bool, rows: Path | None, processes: int, ray: str | None,
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
    tables = measured(problems, evaluations, seeds, rows, Engine(processes, ray), without)
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables for row in table]}))
        return
    for table in tables:
        click.echo(table_text(table) + "\n")
    click.echo(summary_text(tables))


if __name__ == "__main__":
    main()
