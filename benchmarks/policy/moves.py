"""Moves chosen by a score, in equal CPU seconds: `python -m benchmarks.policy.moves`.

Local search from the best heuristic, on fresh problems of families that served for no fitting,
three seeds. Rows: moves as they are drawn, a score by hand, the shipped, learned score. Every row
has the CPU seconds that the first one takes for so many evaluations (measured, on each problem),
and fewer evaluations for them. Figures are mean logarithms of seconds over the first row's, in
percent, with the standard error over problems: below zero is better. `--split validation` is for
choices, `test` for the report.
"""

import time
from dataclasses import dataclass, replace

import click
import numpy as np

from benchmarks.policy.instances import show
from gdp.clock import Clock
from gdp.learn.instances import load_problems
from gdp.methods.annealing.move_score import (
    MoveScoring,
    score_by_hand,
    shipped_scoring,
    using,
    without_scores,
)
from gdp.methods.base import Search
from gdp.methods.scoring import Evaluated
from gdp.methods.search.local_search import improve
from gdp.problem.problem import Problem
from pretrain.moves import Counts, cases, start_of

PROBE_S = 0.15
"""CPU seconds of the run by which a row's pace is measured, at least."""
BUDGETS = {"large": (300, 1000)}
SMALL_BUDGETS = (1000, 3000)
LEAST = 1e-4
"""Relative difference from which a problem counts as won or lost."""


@dataclass(frozen=True)
class Run:
    """Result and cost of a search."""

    value_s: float
    cpu_s: float
    evaluations: int


def searched(
    problem: Problem, start: Evaluated, way: MoveScoring, seed: int, evaluations: int
) -> Run:
    """Local search from the start with one way to choose moves."""
    search = Search(seed=seed, seconds=None, evaluations=evaluations)
    begin_s = time.process_time()
    with using(way):
        found = improve(problem, [start], search, Clock(None))
    return Run(found.value_s, time.process_time() - begin_s, found.evaluations)


def pace_s(problem: Problem, start: Evaluated, way: MoveScoring) -> float:
    """CPU seconds of an evaluation, beyond what the search takes to begin."""
    first = searched(problem, start, way, 99, 2)
    count = 100
    while True:
        run = searched(problem, start, way, 99, count)
        if run.cpu_s - first.cpu_s >= PROBE_S or run.evaluations < count:
            return max(run.cpu_s - first.cpu_s, 1e-5) / max(run.evaluations - 2, 1)
        count *= 4


def compared(
    problem: Problem,
    start: Evaluated,
    ways: dict[str, MoveScoring],
    budgets: tuple[int, ...],
    seeds: int,
) -> dict[str, np.ndarray]:
    """Of each way: [seeds, budgets, (seconds, CPU seconds, evaluations)], in equal CPU seconds."""
    rows = {}
    plain_s = pace_s(problem, start, next(iter(ways.values())))
    for name, way in ways.items():
        share = 1.0 if not rows else min(1.0, plain_s / pace_s(problem, start, way))
        rows[name] = np.array([
            [
                (run.value_s, run.cpu_s, run.evaluations)
                for count in budgets
                for run in (searched(problem, start, way, seed, max(2, int(count * share))),)
            ]
            for seed in range(seeds)
        ])  # fmt: skip
    return rows


def table(rows: list[dict[str, np.ndarray]], budgets: tuple[int, ...]) -> dict[str, str]:
    """A line of text for each way."""
    names, lines = list(rows[0]), {}
    for name in names:
        cells = []
        for k, count in enumerate(budgets):
            logs = np.array([
                np.log(row[name][:, k, 0] / row[names[0]][:, k, 0]).mean() for row in rows
            ])  # fmt: skip
            cpu = np.exp(np.mean([
                np.log(row[name][:, k, 1].sum() / row[names[0]][:, k, 1].sum()) for row in rows
            ]))  # fmt: skip
            spent = np.mean([row[name][:, k, 2].mean() for row in rows])
            error = logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else np.nan
            cells.append(
                f"{count}: {100 * logs.mean():+.2f}% ±{100 * error:.2f}, "
                f"{(logs < -LEAST).sum()} won {(logs > LEAST).sum()} lost, "
                f"CPU x{cpu:.2f}, {spent:.0f} evaluations"
            )
        lines[name] = "; ".join(cells)
    return lines


@click.command(help=__doc__)
@click.option("--split", type=click.Choice(["validation", "test"]), default="test")
@click.option("--ample", default=10, show_default=True)
@click.option("--tight", default=10, show_default=True)
@click.option("--tiled", default=6, show_default=True)
@click.option("--large", default=6, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--draw", default=41, show_default=True, help="Seed by which problems are drawn.")
@click.option("--draws", type=int, help="Moves drawn for each that is simulated, learned rows.")
@click.option("--row", "chosen", multiple=True, help="Only these rows, beside the first.")
def main(
    split: str, ample: int, tight: int, tiled: int, large: int, seeds: int, draw: int,
    draws: int | None, chosen: tuple[str, ...],
) -> None:  # fmt: skip
    """Print a table for each regime, and one for all."""
    learned = shipped_scoring()
    if draws is not None:
        learned = replace(learned, draws=draws)
    ways = {
        "moves as drawn": without_scores(),
        "score by hand": score_by_hand(),
        "learned": learned,
    }
    if chosen:
        ways = {
            name: way for name, way in ways.items() if name == "moves as drawn" or name in chosen
        }
    graphs = load_problems("data/corpus", random_graphs=0, min_ops=60, max_ops=9000)
    names = graphs.test if split == "test" else graphs.validation
    rows: dict[str, list[dict[str, np.ndarray]]] = {}
    for case in cases(names, graphs, Counts(ample, tight, tiled, large), draw):
        problem = case.problem(graphs)
        with using(without_scores()):
            start = start_of(problem)
        if start is None:
            continue
        start = replace(start, evaluations=0)
        if not rows:
            for way in ways.values():  # compiled before anything is measured
                searched(problem, start, way, 0, 20)
        budgets = BUDGETS.get(case.regime, SMALL_BUDGETS)
        made = compared(problem, start, ways, budgets, seeds)
        rows.setdefault(case.regime, []).append(made)
        first = made["moves as drawn"]
        text = ", ".join(
            f"{name} {100 * np.log(row[:, -1, 0] / first[:, -1, 0]).mean():+.2f}%"
            for name, row in made.items()
        )
        click.echo(f"{case.regime} {case.graph}, {problem.num_ops} ops: {text}", err=True)
    for regime, found in rows.items():
        title = f"{regime}, {len(found)} problems of {split} families, {seeds} seeds"
        show(title, dict(table(found, BUDGETS.get(regime, SMALL_BUDGETS))))
    every = [row for found in rows.values() for row in found]
    show(f"all {len(every)}, the smaller (0) and the larger budget (1)", dict(table(every, (0, 1))))


if __name__ == "__main__":
    main()
