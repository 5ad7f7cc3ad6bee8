"""What is proven about the policy's test problems: `python -m benchmarks.policy.regime_bounds`.

The bound of so many seconds of effort over the best known value, for each instance of a regime (see
`benchmarks.policy.regimes`); geometric means by objective, and medians of CPU seconds. What is
missing to 1 is the sum of what the bound and the best known miss.
"""

import time

import click
import numpy as np

from benchmarks.policy.instances import geomean
from benchmarks.policy.regimes import REGIME, REGIMES, load, pose, source
from gdp.bounds.best import best_bound
from gdp.cli.program import run


@click.command(help=__doc__)
@REGIME
@click.option("--seconds", default=10.0, show_default=True, help="Of effort, for each bound.")
def main(regimes: tuple[str, ...], seconds: float) -> None:
    """A line for each instance, then one for each regime and objective."""
    graphs = source()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in load():
        if entry.regime not in (regimes or REGIMES) or entry.best_s is None:
            continue
        problem, begin_s = pose(entry, graphs), time.process_time()
        bound = best_bound(problem, seconds, found_s=entry.best_s)
        took_s = time.process_time() - begin_s
        row = found.setdefault((entry.regime, entry.objective), [])
        row.append((bound.value_s / entry.best_s, took_s))
        click.echo(
            f"{entry.graph}, {problem.num_ops} ops, {problem.num_devices} devices: "
            f"{row[-1][0]:.3f} in {took_s:.1f} CPU s; {bound.argument}",
            err=True,
        )
    for (regime, objective), rows in found.items():
        ratio, took = (list(column) for column in zip(*rows, strict=True))
        click.echo(
            f"{regime}, {objective}, {len(rows)} instances: bound / best {geomean(ratio):.3f}, "
            f"least {min(ratio):.3f}, median {np.median(took):.1f} CPU s"
        )


if __name__ == "__main__":
    run(main)
