"""How many placements a policy answer simulates, and how many it reports.

    python -m benchmarks.policy_effort [--count 28]

Counted at the simulator's door: placements judged one by one or in batches. What a repair evaluates
inside compiled code is not among them.
"""

import statistics
from collections.abc import Callable
from typing import Any

import click

from benchmarks import policy_instances as tests
from benchmarks.policy_instances import hard, spread
from gdp.methods.base import Search
from gdp.policy.method import place_with_policy
from gdp.sim import score


class Door:
    """Counts what passes to the simulator while it stands open."""

    def __init__(self) -> None:
        self.simulated = 0
        score.latencies = self._counted(score.latencies, len)
        score.periods = self._counted(score.periods, len)
        score.simulate = self._counted(score.simulate, lambda device: 1)

    def _counted(self, function: Callable, size: Callable[[Any], int]) -> Callable:
        def counted(problem: Any, devices: Any, *rest: Any, **named: Any) -> Any:
            self.simulated += size(devices)
            return function(problem, devices, *rest, **named)

        return counted


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
