"""Where search starts on large graphs: `python -m benchmarks.policy.large_starts [CHECKPOINT ...]`.

Graphs of 5,000 ops and more of the validation families on random clusters, latency. Rows: the best
of the heuristics that place op by op, of these and `multilevel`, the policy of every checkpoint
and, with `random`, weights that were never trained, in the same procedure. Of each what it answers
without a search after it, and after a search of 1,000 evaluations from there: over the best of all
rows, geometric mean and median, with CPU seconds of both. Labels are not needed, so this is what
weights are chosen by where graphs are large.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np

from gdp.cli.program import run
from gdp.clock import Clock
from gdp.learn.instances import Instance, make
from gdp.learn.problems import Problems, load_problems
from gdp.methods.base import Answer, Search
from gdp.methods.portfolio import HEURISTICS, auto
from gdp.methods.scoring import best_of
from gdp.methods.search.local_search import improve
from gdp.policy.method import load, place_with_policy
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem
from gdp.resources import shipped

LEAST, MOST = 5000, 30_000
RANDOM = "random"


@dataclass
class Row:
    """Seconds and CPU seconds of one way to start, problem by problem."""

    start_s: list[float] = field(default_factory=list)
    found_s: list[float] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)


Way = Callable[[Problem], Answer]


def decoded(policy: Policy) -> Way:
    """The policy's answer without a search after it."""

    def way(problem: Problem) -> Answer:
        return place_with_policy(problem, policy, Search(seconds=None), polish=False)

    return way


def heuristics(problem: Problem) -> Answer:
    """What `auto` without the policy starts its search from."""
    return auto(problem, Search(seconds=None, evaluations=1))


def op_by_op(problem: Problem) -> Answer:
    """The best heuristic, without coarser graphs."""
    methods = [method for name, method in HEURISTICS if name != "multilevel"]
    answers = [method(problem, Search(seconds=None)) for method in methods]
    found = [answer.assignment for answer in answers if answer.assignment is not None]
    spent = sum(answer.evaluations for answer in answers)
    return Answer(best_of(problem, found).assignment if found else None, evaluations=spent)


def ways_of(checkpoints: tuple[str, ...]) -> dict[str, Way]:
    """The rows by name."""
    ways: dict[str, Way] = {"heuristics op by op": op_by_op, "heuristics": heuristics}
    for name in checkpoints:
        config = load(None).config
        policy = Policy(config, init(config, 0)) if name == RANDOM else load(name)
        ways[name] = decoded(policy)
    return ways


def measure(row: Row, way: Way, problem: Problem, evaluations: int) -> None:
    """One more problem in a row; inf where nothing fits."""
    begin_s = time.process_time()
    answer = way(problem)
    middle_s = time.process_time()
    if answer.assignment is None:
        row.start_s.append(np.inf)
        row.found_s.append(np.inf)
    else:
        start = best_of(problem, [answer.assignment])
        search = Search(seconds=None, evaluations=evaluations)
        found = improve(problem, [replace(start, evaluations=0)], search, Clock(None))
        row.start_s.append(start.value_s)
        row.found_s.append(found.value_s)
    row.cpu_s.append((middle_s - begin_s, time.process_time() - middle_s))


def graphs() -> Problems:
    """The corpus, large graphs included."""
    return load_problems(
        shipped("data/corpus"), random_graphs=0, seed=0, min_ops=LEAST, max_ops=MOST
    )


def text(rows: dict[str, Row]) -> list[str]:
    """A line for each row."""
    best_s = np.min([row.found_s for row in rows.values()], axis=0)
    lines = []
    for name, row in rows.items():
        start, found = np.log(row.start_s / best_s), np.log(row.found_s / best_s)
        parts = [
            f"{np.exp(x.mean()):.4f} / {np.exp(np.median(x)):.4f} ({cpu_s:.1f} CPU s)"
            for x, cpu_s in zip((start, found), np.mean(row.cpu_s, axis=0), strict=True)
        ]
        lines.append(f"{name}: as it starts {parts[0]}, searched {parts[1]}")
    return lines


@click.command(help=__doc__)
@click.argument("checkpoints", nargs=-1)
@click.option("--clusters", default=3, show_default=True, help="Random clusters for each graph.")
@click.option("--evaluations", default=1000, show_default=True)
def main(checkpoints: tuple[str, ...], clusters: int, evaluations: int) -> None:
    """Print the table."""
    known = graphs()
    ways = ways_of(checkpoints or (str(Path("checkpoints/default")), RANDOM))
    rows = {name: Row() for name in ways}
    for graph in known.validation:
        for seed in range(1, clusters + 1):
            for name, way in ways.items():
                problem = make(Instance(graph, seed, "latency"), known.graph)
                measure(rows[name], way, problem, evaluations)
            last = {name: f"{row.found_s[-1] * 1e3:.3f} ms" for name, row in rows.items()}
            click.echo(f"{graph}, cluster {seed}: {last}", err=True)
    click.echo(f"{len(next(iter(rows.values())).start_s)} problems, over the best of all rows")
    for line in text(rows):
        click.echo(line)


if __name__ == "__main__":
    run(main)
