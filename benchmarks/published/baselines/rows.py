"""Rows of the tables: methods of gdp, rules and learned baselines run alike, and kept in a file."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdp.bounds.best import best_bound
from gdp.methods.base import Answer, Method, Search
from gdp.methods.heuristics.modules import module_assignments
from gdp.methods.heuristics.simple import single_assignments
from gdp.methods.portfolio import HEURISTICS
from gdp.problem.problem import Problem
from gdp.sim.score import score

BOUND_S = 4.0
"""Seconds for a proven bound."""


class Run(NamedTuple):
    """One method's answer with one seed."""

    value_s: float | None  # None where nothing fits
    evaluations: int
    cpu_s: float
    best_at: int | None = None  # placements that a baseline had drawn when it met its best


Runner = Callable[[Problem, int, int], Run]  # (problem, evaluations, seed)


def by_method(method: Method, share: float = 1.0) -> Runner:
    """A method of gdp with a share of the evaluations, and no limit of seconds."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        began_s = time.process_time()
        budget = max(1, int(share * evaluations))
        answer = method(problem, Search(seed=seed, seconds=None, evaluations=budget))
        spent = time.process_time() - began_s
        if answer.assignment is None:
            return Run(None, answer.evaluations, spent)
        value_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
        return Run(value_s, answer.evaluations, spent)

    return run


def by_rule(rule: Callable[[Problem], Any]) -> Runner:
    """A baseline that does not search."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        del evaluations, seed
        found = rule(problem)
        return Run(found.value_s, found.evaluations, found.cpu_s)

    return run


def by_training(train: Callable[[Problem, int, int], Any]) -> Runner:
    """A learned baseline."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        found = train(problem, evaluations, seed)
        value_s = None if found.assignment is None else found.value_s
        return Run(value_s, found.evaluations, found.cpu_s, found.best_at)

    return run


def by_finetuning() -> Runner:
    """The shipped policy adapted to the problem within the evaluations."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        from gdp.learn.finetune import FinetuneConfig, finetune

        began_s = time.process_time()
        found = finetune(problem, config=FinetuneConfig(evaluations=evaluations), seed=seed)
        return Run(found.value_s, found.evaluations, time.process_time() - began_s)

    return run


def reached(problem: Problem, below_s: float) -> int | None:
    """How many placements `auto` has simulated when one is at least as fast; None: in its search.

    Its candidates in its order: plans of `single` and `modules` one by one, others as a whole.
    """
    spent = 0
    known: dict[str, Answer] = {}
    for name, method in HEURISTICS:
        if name in ("single", "modules"):
            plans = single_assignments if name == "single" else module_assignments
            for tried, plan in enumerate(plans(problem), spent + 1):
                judged = score(problem, plan.device, plan.rank)
                if judged.feasible and judged.value_s <= below_s:
                    return tried
        known[name] = answer = method(problem, Search(seconds=None, known=known))
        spent += answer.evaluations + 1
        if answer.assignment is None:
            continue
        judged = score(problem, answer.assignment.device, answer.assignment.rank)
        if judged.feasible and judged.value_s <= below_s:
            return spent
    return None


def interval(values: np.ndarray) -> float:
    """Half the width of the 95% interval of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def done(path: Path | None) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of a file, by what they are of."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {key(row): row for row in rows}


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is of."""
    return tuple(str(row[name]) for name in ("model", "cluster", "method", "evaluations", "seeds"))


def summary(runs: list[Run]) -> dict[str, Any]:
    """The means of the runs with one interval; without a value where one has none."""
    values = np.array([np.nan if run.value_s is None else run.value_s for run in runs])
    missing = bool(np.isnan(values).any())
    return {
        "value_s": None if missing else float(values.mean()),
        "interval_s": None if missing else interval(values),
        "best_s": None if missing else float(values.min()),
        "spent": float(np.mean([run.evaluations for run in runs])),
        "cpu_s": float(np.mean([run.cpu_s for run in runs])),
        "best_at": max((run.best_at for run in runs if run.best_at is not None), default=None),
    }


def _append(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of one problem in Markdown; speed-up of auto over each is value / auto - 1."""
    ours = next(row["value_s"] for row in rows if row["method"] == "gdp auto")
    lines = [
        "| method | ms | 95% | value / auto - 1 | evaluations | CPU s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        value_s = row["value_s"]
        if value_s is None:
            lines.append(f"| {row['method']} | does not fit | | | {row['spent']:.0f} | |")
            continue
        gain = "" if ours is None else f"{value_s / ours - 1:+.1%}"
        cells = [row["method"], f"{value_s * 1e3:.4f}", "", gain, "", ""]
        if "spent" in row:
            cells[2] = f"{row['interval_s'] * 1e3:.4f}" if row["interval_s"] else ""
            cells[4:] = [f"{row['spent']:.0f}", f"{row['cpu_s']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def kept(
    path: Path | None,
    about: dict[str, Any],
    rows: Mapping[str, tuple[Runner, bool]],
    problem: Problem,
) -> Iterator[dict[str, Any]]:
    """Every row of one problem and its bound; those of the file first asked for there.

    `about` says what the rows are of, "evaluations" and "seeds" among it.
    """
    known = done(path)
    for method, (run, draws) in rows.items():
        row = about | {"method": method}
        if key(row) not in known:
            seeds = range(about["seeds"] if draws else 1)
            known[key(row)] = row | summary([run(problem, about["evaluations"], s) for s in seeds])
            _append(path, known[key(row)])
        yield known[key(row)]
    row = about | {"method": "bound"}
    if key(row) not in known:
        bound = best_bound(problem, BOUND_S)
        known[key(row)] = row | {"value_s": bound.value_s, "argument": bound.argument}
        _append(path, known[key(row)])
    yield known[key(row)]
