"""All problems of a comparison in one table each: values, what methods take over `auto`, and when
`auto` has passed a rival."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.published.baselines.rows import with_until
from benchmarks.published.cases import BOUND, Case, Row, kept, tables_of
from gdp.tasks import HERE, Engine

HIDDEN = ("single device", "CPU only", "ETF", "gdp auto, shortest search")
"""Rows that the table of values leaves out."""
Tables = Sequence[Sequence[Row]]


def compare(
    cases: Sequence[Case], run: Callable[[Case], Row], path: Path | None, engine: Engine | None,
    rival: str, table_text: Callable[[list[Row]], str], as_json: bool,
) -> None:  # fmt: skip
    """Run the cases and print a table of each problem and the summary; the rival's row says when
    `auto` has its best."""
    tables = tables_of(kept(cases, run, path, engine))
    with_until(tables, rival, lambda asked: kept(asked, run, path, engine or HERE))
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables for row in table]}))
        return
    for table in tables:
        click.echo(table_text(table) + "\n")
    click.echo(summary_text(tables, rival))


def summary_text(tables: Tables, rival: str) -> str:
    """Milliseconds of all methods on all problems; what each method takes over `auto`; and after
    how many simulations `auto` has passed the rival."""
    return "\n\n".join([values_text(tables), ratios_text(tables), until_text(tables, rival)])


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
        _line(["", *(f"{first['model']} on {_devices(first)}" for first in firsts)]),
        "| --- |" + " ---: |" * len(firsts),
        *(_line([key, *(first[key] for first in firsts)]) for key in ("ops", "fused")),
    ]
    for name in methods:
        values = [row.get(name, {}).get("value_s") for row in by]
        if name not in HIDDEN and any(values):
            lines.append(
                _line([name, *(f"{x * 1e3:#.4g}".rstrip(".") if x else "-" for x in values)])
            )
    return "\n".join(lines)


def ratios_text(tables: Tables) -> str:
    """Time over that of `auto`: geometric mean, least and most over the problems that have it."""
    head = ["method", "problems", "seeds", "time / auto's - 1", "least", "most", "evaluations",
            "CPU s"]  # fmt: skip
    lines = [_line(head), "| --- |" + " ---: |" * (len(head) - 1)]
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
        cells += [f"{np.exp(np.log(ratio).mean()) - 1:+.1%}"]
        cells += [f"{ratio.min() - 1:+.1%}", f"{ratio.max() - 1:+.1%}"]
        for key, form in (("evaluations_spent", "{:.0f}"), ("cpu_s", "{:.1f}")):
            have = [row[key] for row, _ in found if key in row]
            cells.append(form.format(np.mean(have)) if have else "")
        lines.append(_line(cells))
    return "\n".join(lines)


def until_text(tables: Tables, rival: str) -> str:
    """What the rival had spent when it had its best, and `auto` when it was as fast."""
    lines = [
        f"| model | devices | {rival}'s draws until its best | auto's simulations until as fast |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in (row for table in tables for row in table if "auto_until" in row):
        ends, drawn = row["auto_until"] or "in its search", row["best_at"] or "not counted"
        lines.append(_line([row["model"], _devices(row), drawn, ends]))
    return "\n".join(lines)


def _devices(row: Row) -> str:
    return row.get("devices", row["cluster"])


def _methods(tables: Tables) -> list[str]:
    """Every method of some table, in order; the bound last."""
    names = dict.fromkeys(row["method"] for table in tables for row in table)
    return [*(name for name in names if name != BOUND), BOUND]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
