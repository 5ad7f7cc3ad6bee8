"""What a policy answer costs, and what plain search finds for the same.

    python -m benchmarks.policy.effort [--count 56]

Medians of the placements that an answer simulates and of those it reports; then geometric means
over the best known of test instances, a misfit five-fold: the policy beside annealing from the best
heuristic with as many placements as the policy simulated. One seed. Counted at the simulator's
door: what a repair evaluates inside compiled code is not among them.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from benchmarks.policy import instances as tests
from benchmarks.policy.hard import advised_s, start_of
from benchmarks.policy.instances import geomean, hard, spread
from gdp.learn.validate import MISFIT
from gdp.methods.base import Answer, Search
from gdp.methods.search.local_search import local_search
from gdp.policy.method import place_with_policy
from gdp.problem.problem import Problem
from gdp.sim import latency, score

ROWS = (
    "best of the heuristics",
    "quick methods under the rules of priority",
    "policy",
    "policy and heuristics",
    "annealing with as many placements",
)


class Door:
    """Counts what passes to the simulator from now on."""

    def __init__(self) -> None:
        self.simulated = 0
        self._count(score.values, lambda problem, devices, *rest: len(devices))
        self._count(score.score, lambda *arguments: 1)
        self._count(latency.simulate, lambda *arguments: 1, inside="gdp.sim")

    def _count(self, function: Callable, size: Callable[..., int], inside: str = "-") -> None:
        """Put a counter before a function, wherever it was imported but in one package."""

        def counted(*arguments: Any) -> Any:
            self.simulated += size(*arguments)
            return function(*arguments)

        for name, module in list(sys.modules.items()):
            if name.startswith("gdp.") and (
                name == function.__module__ or not name.startswith(inside)
            ):
                for key in [k for k, v in vars(module).items() if v is function]:
                    setattr(module, key, counted)


@click.command(help=__doc__)
@click.option("--count", default=56, show_default=True, help="Test instances at most.")
def main(count: int) -> None:
    """Print medians by objective."""
    door, source = Door(), tests.problems()
    spent: dict[str, list[tuple[int, int]]] = {}
    ratios: list[tuple[float, ...]] = []
    for entry in spread(hard(tests.load()), count):
        problem, before = source.get(entry.instance), door.simulated
        answer = place_with_policy(problem, None, Search(seed=0, seconds=None))
        simulated = door.simulated - before
        spent.setdefault(entry.instance.objective, []).append((simulated, answer.evaluations))
        search = Search(seed=0, seconds=None, evaluations=simulated, start=start_of(problem))
        found = [
            entry.heuristic_s,
            advised_s(problem),
            reached_s(problem, answer),
            min(entry.heuristic_s, reached_s(problem, answer)),
            reached_s(problem, local_search(problem, search)),
        ]
        ratios.append(tuple(min(value_s / entry.best_s, MISFIT) for value_s in found))
    for objective, made in spent.items():
        simulated, reported = (statistics.median(column) for column in zip(*made, strict=True))
        click.echo(
            f"{objective}: {len(made)} answers, medians: {simulated:g} simulated, "
            f"{reported:g} reported"
        )
    for name, column in zip(ROWS, zip(*ratios, strict=True), strict=True):
        click.echo(f"  {name:48s} {geomean(list(column)):.3f}")


def reached_s(problem: Problem, answer: Answer) -> float:
    """Seconds of an answer, inf without one."""
    return np.inf if answer.assignment is None else tests.value(problem, answer.assignment)


if __name__ == "__main__":
    main()
