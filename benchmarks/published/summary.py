"""All problems of a comparison in one table: values, and the time of each method over `auto`'s."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.published.baselines.rows import lines_of
from benchmarks.published.cases import BOUND, Case, Row, cases_of, kept, tables_of
from benchmarks.tables import geomean, head, line
from gdp.base.tasks import Engine

HIDDEN = ("single device", "CPU only", "ETF", "gdp auto, shortest search")
"""Rows that the table of values leaves out."""
Tables = Sequence[Sequence[Row]]


def comparison(
    about: str | None, what: str, names: Mapping[str, Any], small: str, clusters: str,
    title: Callable[[Row], str],
    rows_of: Callable[[str, str], Mapping[str, tuple[Any, bool]]], run: Callable[[Case], Row],
) -> click.Command:  # fmt: skip
    """A command that runs all rows of problems (model, cluster), and prints a table of each and the
    summary."""

    @click.command(help=about)
    @click.option("--evaluations", default=1000, show_default=True)
    @click.option("--seeds", default=5, show_default=True)
    @click.option(f"--{what}s", "chosen", default=small, show_default=True)
    @click.option("--clusters", default=clusters, show_default=True)
    @click.option("--without", multiple=True, help="A row to leave out.")
    @click.option("--as-is", is_flag=True, help="Run nothing: print what --rows has.")
    @click.option("--rows", type=click.Path(path_type=Path), help="Rows done, to go on from.")
    @click.option("--ray", help="A Ray cluster, HOST:PORT, to run rows on.")
    @click.option("--processes", type=click.IntRange(1), default=1, show_default=True,
                  help="Rows that run at once on this machine.")  # fmt: skip
    def main(
        evaluations: int, seeds: int, chosen: str, clusters: str, without: tuple[str, ...],
        as_is: bool, rows: Path | None, ray: str | None, processes: int,
    ) -> None:  # fmt: skip
        wanted = list(names) if chosen == "all" else chosen.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise click.BadParameter(f"no {what} {unknown[0]!r}; there are {', '.join(names)}")
        engine = Engine(processes, ray)
        cases = cases_of(product(wanted, clusters.split(",")), rows_of, evaluations, seeds, without)
        tables = tables_of(kept(cases, run, rows, None if as_is else engine))
        for table in tables:
            click.echo("\n".join([title(table[0]), "", *lines_of(table), ""]))
        click.echo(summary_text(tables))

    return main


def summary_text(tables: Tables) -> str:
    """Milliseconds of all methods on all problems, and the time of each method over `auto`'s."""
    return "\n\n".join([values_text(tables), ratios_text(tables)])


COLUMNS = 7
"""Problems side by side in one table at most, which a page of 1,280 pixels holds."""


def values_text(tables: Tables) -> str:
    """Milliseconds, means over the seeds: a row for each method, a column for each problem."""
    width = -(-len(tables) // -(-len(tables) // COLUMNS))
    blocks = [tables[at : at + width] for at in range(0, len(tables), width)]
    return "\n\n".join(_values_of(block, _methods(tables)) for block in blocks)


def _values_of(tables: Tables, methods: Sequence[str]) -> str:
    firsts = [table[0] for table in tables]
    by = [{row["method"]: row for row in table} for table in tables]
    lines = [
        head(" | ".join(["", *(f"{first['model']} on {_devices(first)}" for first in firsts)])),
        *(line(key, *(first[key] for first in firsts)) for key in ("ops", "fused")),
    ]
    for name in methods:
        values = [row.get(name, {}).get("value_s") for row in by]
        if name not in HIDDEN and any(values):
            lines.append(line(name, *(f"{x * 1e3:#.4g}".rstrip(".") if x else "-" for x in values)))
    return "\n".join(lines)


def ratios_text(tables: Tables) -> str:
    """Time over that of `auto`: geometric mean, least and most over the problems that have it."""
    titles = "method | problems | seeds | time / auto's - 1 | least | most | evaluations | CPU s"
    lines = [head(titles)]
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
        seeds = sorted({row["seeds"] for row, _ in found})
        cells = [name, len(found), " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))]
        cells += [f"{x - 1:+.1%}" for x in (geomean(ratio), ratio.min(), ratio.max())]
        for key, form in (("evaluations_spent", "{:.0f}"), ("cpu_s", "{:.1f}")):
            have = [row[key] for row, _ in found if key in row]
            cells.append(form.format(np.mean(have)) if have else "")
        lines.append(line(*cells))
    return "\n".join(lines)


def _devices(row: Row) -> str:
    return row.get("devices", row["cluster"])


def _methods(tables: Tables) -> list[str]:
    """Every method of some table, in order; the bound last."""
    names = dict.fromkeys(row["method"] for table in tables for row in table)
    return [*(name for name in names if name != BOUND), BOUND]
