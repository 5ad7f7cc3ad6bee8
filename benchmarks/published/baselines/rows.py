"""Rows of the tables: methods of gdp, rules and learned baselines run alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.published.baselines.common import Found
from benchmarks.published.cases import BOUND, Case, Row
from benchmarks.tables import head, line
from gdp.bounds.best import best_bound
from gdp.methods.base import Method, Search
from gdp.problem.problem import Problem
from gdp.sim.score import score

BOUND_S = 4.0
"""Seconds for a proven bound."""


class Run(NamedTuple):
    """One method's answer with one seed."""

    value_s: float | None  # None where nothing fits
    evaluations_spent: int
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


def by_training(train: Callable[[Problem, int, int], Found]) -> Runner:
    """A learned baseline."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        return run_of(train(problem, evaluations, seed))

    return run


def by_rule(rule: Callable[[Problem], Found]) -> Runner:
    """A baseline that does not search."""
    return by_training(lambda problem, evaluations, seed: rule(problem))


def run_of(found: Found) -> Run:
    """The run of a baseline."""
    value_s = None if found.assignment is None else found.value_s
    return Run(value_s, found.evaluations, found.cpu_s, found.best_at)


def by_finetuning(share: float = 1.0) -> Runner:
    """The shipped policy adapted to the problem with a share of the evaluations; `auto`, from which
    it starts, has as many on top."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        from gdp.learn.finetune import FinetuneConfig, finetune

        began_s = time.process_time()
        config = FinetuneConfig(evaluations=max(1, int(share * evaluations)))
        found = finetune(problem, config=config, seed=seed)
        return Run(found.value_s, found.evaluations, time.process_time() - began_s)

    return run


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The rows of one problem in Markdown; speed-up of auto over each is value / auto - 1."""
    ours = next((row["value_s"] for row in rows if row["method"] == "gdp auto"), None)
    lines = [head("method | seeds | ms | 95% | value / auto - 1 | evaluations | CPU s")]
    for row in rows:
        value_s, ran = row["value_s"], "evaluations_spent" in row
        cells = ["", row.get("reason", "does not fit"), "", "", "", ""]
        if value_s is not None:
            gain = "" if ours is None else f"{value_s / ours - 1:+.1%}"
            cells = ["", f"{value_s * 1e3:.4f}", "", gain, "", ""]
            if ran:
                width = f"{row['interval_s'] * 1e3:.4f}" if row["interval_s"] else ""
                cells[0], cells[2], cells[5] = str(row["seeds"]), width, f"{row['cpu_s']:.1f}"
        cells[4] = f"{row['evaluations_spent']:.0f}" if ran else ""
        lines.append(line(row["method"], *cells))
    return lines


def run_case(case: Case, problem: Problem, rows: Mapping[str, tuple[Runner, bool]]) -> Row:
    """The result of a case: a run of its method, or the bound.

    Every run has the problem as if it were the first to ask, so that evaluations and seconds are
    those of a fresh start, whichever were run before.
    """
    if case.method == BOUND:
        bound = best_bound(problem, BOUND_S)
        return {"value_s": bound.value_s, "argument": bound.argument}
    found = rows[case.method][0](replace(problem), case.evaluations, case.seed)
    return found._asdict()
