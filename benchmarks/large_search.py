"""Search of large graphs for latency: each way from the same start, with the same CPU seconds.

    python benchmarks/large_search.py [--seconds 10] [--cluster 4xa100-nvlink] [--graph NAME ...]
        [--way NAME ...] [--seed 0] [--json]

Graphs of the corpus, HEFT's placement as the start. `plain`: every step simulates the whole graph.
`coarse`: a contraction of 1,000 ops is searched first, then all. `windows`: stretches of the
schedule, in turns with steps that simulate everything. `both`: first coarse, then in windows.
`levels`: the same over several levels, each a quarter of the one before; what `auto` does. Seconds
are of this process's CPU, so that other load does not decide.
"""

import json
import time
from pathlib import Path

import click
import numpy as np

from gdp.clock import Clock
from gdp.cluster.load import load_cluster
from gdp.methods.base import Search
from gdp.methods.heuristics.list_schedule import heft
from gdp.methods.scoring import Scored, score_all
from gdp.methods.search.budget import SearchConfig
from gdp.methods.search.local_search import improve
from gdp.models import load
from gdp.posed import pose
from gdp.problem.problem import Problem

CORPUS = Path("data/corpus")
NEVER = 1 << 60  # ops
WAYS = {
    "plain": SearchConfig(coarse_above=NEVER, windows_above=NEVER),
    "coarse": SearchConfig(windows_above=NEVER, coarse_ratio=NEVER),
    "windows": SearchConfig(coarse_above=NEVER),
    "both": SearchConfig(coarse_ratio=NEVER),
    "levels": SearchConfig(),
}
GRAPHS = (
    "multi_modal-layers12-features768-heads12-batch32-microbatched16",
    "densenet-counts6x12x32x32-batch32-microbatched8",
    "swin-counts2x2x18x2-features128-batch32-microbatched16",
    "wavenet-stacks8-layers10-channels128-batch32-microbatched16",
    "amoebanet-cells18-batch32-microbatched16",
    "gpt-layers48-features1600-heads25-batch32-microbatched16",
    "random_layered-seed32-layers160-width120-reach3",
    "series_parallel-seed33-num_ops80000",
)


class CpuClock(Clock):
    """A budget of this process's CPU seconds."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self.started_s = time.process_time()

    def elapsed_s(self) -> float:
        """CPU seconds since it was made."""
        return time.process_time() - self.started_s


def problem_of(name: str, cluster: str) -> Problem:
    """The latency problem of a graph of the corpus, fused."""
    rows = json.loads((CORPUS / "manifest.json").read_text())["graphs"]
    files = [row["file"] for row in rows if row["name"] == name]
    if not files:
        raise click.ClickException(f"no graph {name!r} in {CORPUS / 'manifest.json'}")
    return pose(load(str(CORPUS / files[0])), load_cluster(cluster)).problem


def start_of(problem: Problem) -> Scored | None:
    """What HEFT answers; None where that does not fit."""
    answer = heft(problem, Search(seconds=None))
    return None if answer.assignment is None else score_all(problem, [answer.assignment])[0]


def warm_up() -> None:
    """Compile and load all kernels, on a small graph that every way takes for a large one."""
    problem = problem_of("gpt-layers12-features768-heads12-batch32-microbatched16", "2xa100-nvlink")
    start = start_of(problem)
    assert start is not None
    for config in WAYS.values():
        improve(problem, [start], Search(seconds=None, evaluations=60), Clock(None), config)


@click.command()
@click.option("--seconds", type=float, default=10.0, show_default=True)
@click.option("--cluster", default="4xa100-nvlink", show_default=True)
@click.option("--graph", "graphs", multiple=True, default=GRAPHS)
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), default=list(WAYS))
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    seconds: float,
    cluster: str,
    graphs: tuple[str, ...],
    ways: tuple[str, ...],
    seed: int,
    as_json: bool,
) -> None:
    """Print latencies over that of the start, and in the end the geometric mean over the best."""
    warm_up()
    rows = []
    if not as_json:
        click.echo(f"| graph | ops | start ms | {' | '.join(ways)} |")
        click.echo("| --- | ---: | ---: |" + " ---: |" * len(ways))
    for name in graphs:
        problem = problem_of(name, cluster)
        if (start := start_of(problem)) is None:
            click.echo(f"{name}: HEFT's placement does not fit on {cluster}", err=True)
            continue
        found_s = {}
        for way in ways:
            search = Search(seed=seed, seconds=None)
            best = improve(problem, [start], search, CpuClock(seconds), WAYS[way])
            found_s[way] = best.value_s
        rows.append({"graph": name, "ops": problem.num_ops, "start_s": start.value_s, **found_s})
        if not as_json:
            shares = " | ".join(f"{found_s[way] / start.value_s:.4f}" for way in ways)
            click.echo(f"| {name} | {problem.num_ops} | {start.value_s * 1e3:.2f} | {shares} |")
    if as_json:
        click.echo(json.dumps({"seconds": seconds, "cluster": cluster, "rows": rows}))
    elif rows:
        table = np.array([[row[way] for way in ways] for row in rows])
        means = np.exp(np.log(table / table.min(axis=1, keepdims=True)).mean(axis=0))
        click.echo(f"| over the best of these | | | {' | '.join(f'{x:.4f}' for x in means)} |")


if __name__ == "__main__":
    main()
