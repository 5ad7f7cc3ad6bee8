"""How many placements a policy answer simulates, and how many it reports.

    python -m benchmarks.policy_effort [--count 28]

Counted at the simulator's door: placements judged one by one or in batches. What a repair evaluates
inside compiled code is not among them.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import click

from benchmarks import policy_instances as tests
from benchmarks.policy_instances import hard, spread
from gdp.methods.base import Search
from gdp.policy.method import place_with_policy
from gdp.sim import latency, score


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
@click.option("--count", default=28, show_default=True, help="Test instances at most.")
def main(count: int) -> None:
    """Print medians by objective."""
    door, source = Door(), tests.problems()
    rows: dict[str, list[tuple[int, int]]] = {}
    for entry in spread(hard(tests.load()), count):
        problem, before = source.get(entry.instance), door.simulated
        answer = place_with_policy(problem, None, Search(seed=0, seconds=None))
        made = (door.simulated - before, answer.evaluations)
        rows.setdefault(entry.instance.objective, []).append(made)
    for objective, made in rows.items():
        simulated, reported = (statistics.median(column) for column in zip(*made, strict=True))
        click.echo(
            f"{objective}: {len(made)} answers, medians: {simulated:g} simulated, "
            f"{reported:g} reported"
        )


if __name__ == "__main__":
    main()
