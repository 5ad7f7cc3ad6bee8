"""What a few seconds buy on large graphs: `python -m benchmarks.policy.by_clock [--seconds 5]`.

`auto` without the policy and with it, within so many seconds of the clock on all cores, on the
large graphs of the test families: over the best known of `benchmarks.policy.regimes`, median and
geometric mean, and how many do not fit. Compilation takes nothing of the seconds; run it with
nothing else on the machine.
"""

import click
import numpy as np

from benchmarks.policy.instances import geomean
from benchmarks.policy.regimes import load, pose, reached_s, source
from gdp.cli.program import run
from gdp.methods.base import Search
from gdp.methods.portfolio import auto
from gdp.policy.method import policy_candidate


@click.command(help=__doc__)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--seeds", default=2, show_default=True)
def main(seconds: float, seeds: int) -> None:
    """Print a line for each way."""
    graphs, policy = source(), [("policy", policy_candidate())]
    known = [x for x in load() if x.regime == "large" and x.best_s is not None]
    for name, extra in (("auto", []), ("auto with the policy", policy)):
        auto(pose(known[0], graphs), Search(seconds=None, evaluations=50), extra)  # compiles
        ratios = []
        for entry in known:
            for seed in range(seeds):
                problem = pose(entry, graphs)
                answer = auto(problem, Search(seed=seed, seconds=seconds), extra)
                ratios.append(reached_s(problem, answer) / (entry.best_s or np.nan))
                click.echo(f"{entry.graph}, seed {seed}, {name}: {ratios[-1]:.3f}", err=True)
        fits = [ratio for ratio in ratios if np.isfinite(ratio)]
        click.echo(
            f"{name}, {seconds:g} s: median {np.median(fits):.3f}, mean {geomean(fits):.3f}, "
            f"misfits {len(ratios) - len(fits)} of {len(ratios)}"
        )


if __name__ == "__main__":
    run(main)
