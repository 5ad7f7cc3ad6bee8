"""Cases of the published comparisons: one run of one row each, run anywhere, kept in a file."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables import interval
from gdp.base.tasks import HERE, Engine, each

Row = dict[str, Any]
BOUND = "bound"


class Case(NamedTuple):
    """One run."""

    model: str
    cluster: str
    method: str
    evaluations: int
    seed: int


def kept(
    cases: Sequence[Case],
    work: Callable[[Case], Row],
    path: Path | None = None,
    engine: Engine | None = HERE,
) -> list[Row]:
    """The rows of all cases; those of the file are not run again, and new ones are added to it.
    Without an engine, only what the file has.

    `work` is a function of a module that depends on nothing but its case, so that it makes the same
    wherever it is run, CPU seconds apart.
    """
    known = done(path)
    if engine is None:
        return [known[case] for case in cases if case in known]
    missing = [case for case in cases if case not in known]
    for number, row in each(work, missing, engine):
        known[missing[number]] = missing[number]._asdict() | row
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(known[missing[number]]) + "\n")
    return [known[case] for case in cases]


def done(path: Path | None) -> dict[Case, Row]:
    """The rows of a file by case; a last line that was cut off is taken away."""
    if path is None or not path.exists():
        return {}
    whole, _, cut = path.read_text().rpartition("\n")
    if cut:
        path.write_text(whole + "\n" * bool(whole))
    rows = [json.loads(line) for line in whole.splitlines()]
    return {Case(*(row[name] for name in Case._fields)): row for row in rows}


def cases_of(
    problems: Iterable[tuple[str, str]],
    rows_of: Callable[[str, str], Mapping[str, tuple[Any, bool]]],
    evaluations: int,
    seeds: int,
    without: Sequence[str] = (),
) -> list[Case]:
    """Cases of all rows of all problems (model, cluster), and of their bounds: the first seed of
    all before the second of any; of rows that do not draw only the first."""
    wanted = list(problems)
    return [
        Case(model, cluster, method, evaluations, seed)
        for seed in range(seeds)
        for model, cluster in wanted
        for method, draws in [*((m, d) for m, (_, d) in rows_of(model, cluster).items()),
                              (BOUND, False)]
        if method not in without and (draws or seed == 0)
    ]  # fmt: skip


def tables_of(found: Sequence[Row]) -> list[list[Row]]:
    """One row per method, of all its seeds, in one table per model and cluster."""
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for one in found:
        table = tables.setdefault((one["model"], one["cluster"]), {})
        table.setdefault(one["method"], []).append(one)
    return [[_summary(runs) for runs in table.values()] for table in tables.values()]


def _summary(runs: list[Row]) -> Row:
    """The means of the runs with one interval; without a value where one has none."""
    values = np.array([np.nan if run["value_s"] is None else run["value_s"] for run in runs])
    row = dict(runs[0])
    missing = bool(np.isnan(values).any())
    row |= {
        "seeds": len(runs),
        "value_s": None if missing else float(values.mean()),
        "interval_s": None if missing else interval(values),
        "values_s": [run["value_s"] for run in runs],
        "best_s": None if missing else float(values.min()),
    }
    if "evaluations_spent" in row:
        for name in ("evaluations_spent", "cpu_s"):
            row[name] = float(np.mean([run[name] for run in runs]))
    return row
