"""Do learned seconds make better plans? Boxes of two kinds of cards, one of them never seen.

    python -m benchmarks.measured_plans --rows CACHE.npz [--bench FOLDER] [--left-out h100,l40s]
        [--evaluations 1000] [--seeds 2] [--json FILE]

The machine is simulated: its truth is the kernel network that ships, which was fitted to measured
kernels of every card in the box. Plans are made by costs that know less of the card left out:

    datasheet   the roofline of all cards
    unseen      a network trained without the card, told by its descriptor
    30 kernels  the same with a vector fitted to thirty of its kernels
    1, 3 runs   the unseen network after so many measured runs (`gdp.costs.adapt`), each of the plan
                so far; a run tells the seconds of each device, not of its ops
    truth       the network that ships

Each plan is judged by the truth; printed are its seconds over those of the plan made by the truth,
geometric means with 95% intervals over graphs, and the worst. `CACHE.npz` is that of
`pretrain.costs.train --rows`; tables: `pretrain.costs.tables`.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import gdp
from benchmarks.tables import head
from gdp.base.files.reading import data_path
from gdp.costs.adapt import AdaptedCosts, Piece, Run, adapt, op_keys, piece_shares
from gdp.costs.base import CostModel, roofline
from gdp.costs.measured.costs import MeasuredCosts
from gdp.costs.measured.network import KernelNetwork, shipped_network
from gdp.costs.measured.own import fit_vector
from gdp.graph.fuse import fuse
from pretrain.costs.tables import Rows, silicon
from pretrain.costs.train import FEW, load_rows, train

BOXES = {
    "h100": ("cpu-server-ddr5+h100+a100", "cpu-server-ddr5+2xh100+2xl40s"),
    "l40s": ("cpu-server-ddr5+l40s+a100", "cpu-server-ddr5+2xl40s+2xrtx-pro-6000"),
}
GRAPHS = (
    "densenet/densenet-counts6x12x24x16-training", "encoder/encoder-layers12-batch1-training",
    "gpt/gpt-layers12-features768-heads12-training", "dit/dit-layers12-features768-heads12-forward",
    "llama/llama-layers8-features1024-heads16-training", "resnet/resnet-depth50-batch32-training",
    "moe/moe-layers8-experts8-features1024-heads16-training", "swin/swin-counts2x2x6x2-forward",
)  # fmt: skip
OBJECTIVES = ("latency", "throughput")
STEPS = 4000
RUNS = (1, 3)


class Judged(NamedTuple):
    """A plan, by the truth."""

    left_out: str
    box: str
    graph: str
    objective: str
    seed: int
    by: str  # the costs that it was made by
    value_s: float


def networks(rows: Rows, name: str, seed: int) -> tuple[KernelNetwork, KernelNetwork]:
    """Networks that never saw a device: as it is, and with a few of its kernels."""
    made, d = silicon(rows), rows.devices.index(name)
    unseen, _ = train(rows, made, rows.device != d, STEPS, seed)
    own = rows.take(rows.device == d)
    few = np.random.default_rng(seed).permutation(len(own.seconds))[:FEW]
    vector = fit_vector(unseen, own.kernels.take(few), made[d], own.seconds[few])
    return unseen, replace(unseen, vectors={**unseen.vectors, name: vector})


def measured_run(
    graph: gdp.OpGraph, cluster: gdp.Cluster, placed: gdp.Placement, base: CostModel,
    truth: CostModel,
) -> Run:  # fmt: skip
    """Seconds of each device in a run of the simulated machine, beside those of the costs."""
    fused = fuse(graph)
    lead = np.unique(fused.group_of, return_index=True)[1]
    device, ops = placed.device[lead], fused.graph
    told, true = base(ops, cluster), truth(ops, cluster)
    works, rows = ~ops.is_io, np.arange(ops.num_ops)
    shares = piece_shares(op_keys(ops), told[rows, device], np.where(works, device, -1))
    pieces = [
        Piece(entry.name, entry.kind, shares[d], float(true[works & (device == d), d].sum()), False)
        for d, entry in enumerate(cluster.devices)
        if d in shares
    ]
    return Run(graph.name, tuple(pieces))


def judged(
    graph: gdp.OpGraph, box: str, name: str, models: dict[str, CostModel], objective: str,
    seed: int, evaluations: int,
) -> Iterator[Judged]:  # fmt: skip
    """Plans by all costs, and by the unseen network after runs."""
    cluster, truth = gdp.Cluster.load(box), models["truth"]

    def plan(costs: CostModel) -> gdp.Placement:
        search = gdp.Search(seed=seed, evaluations=evaluations)
        return gdp.place(graph, cluster, objective=objective, costs=costs, search=search).placement

    def row(by: str, placed: gdp.Placement) -> Judged:
        score = gdp.simulate(graph, placed, cluster, objective=objective, costs=truth)
        return Judged(name, box, graph.name, objective, seed, by, score.value_s)

    for by, costs in models.items():
        placed = plan(costs)
        yield row(by, placed)
        if by != "unseen":
            continue
        runs: list[Run] = []
        for count in range(1, max(RUNS) + 1):
            runs.append(measured_run(graph, cluster, placed, costs, truth))
            placed = plan(AdaptedCosts(costs, adapt(runs)))
            if count in RUNS:
                yield row(f"{count} run{'s' * (count > 1)}", placed)


def told(rows: list[Judged]) -> Iterator[str]:
    """Geometric means over graphs of seconds over those of the plan by the truth."""
    best = {row[:5]: row.value_s for row in rows if row.by == "truth"}
    yield head("left out | objective | plan by | mean | 95% interval | worst", left=3)
    groups = defaultdict[tuple[str, str, str], list[float]](list)
    for row in rows:
        for name in (row.left_out, "all"):
            key = (name, row.objective, row.by)
            groups[key].append(float(np.log(row.value_s / best[row[:5]])))
    for (name, objective, by), logs in sorted(groups.items()):
        if by != "truth":
            mean = float(np.mean(logs))
            half = 1.96 * float(np.std(logs, ddof=1)) / len(logs) ** 0.5 if logs[1:] else 0.0
            low, high = np.exp([mean - half, mean + half])
            yield (
                f"| {name} | {objective} | {by} | {np.exp(mean):.3f} | {low:.3f} to {high:.3f} | "
                f"{np.exp(max(logs)):.2f} |"
            )


@click.command(help=__doc__)
@click.option("--rows", "cache", type=click.Path(path_type=Path), help="Cache of the tables.")
@click.option("--bench", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--left-out", default=",".join(BOXES), show_default=True)
@click.option("--evaluations", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File of all plans.")
def main(
    cache: Path | None, bench: Path | None, left_out: str, evaluations: int, seeds: int,
    path: Path | None,
) -> None:  # fmt: skip
    shipped = shipped_network()
    assert shipped is not None
    rows, found = load_rows(cache, bench, 12000), []
    for name in left_out.split(","):
        unseen, few = networks(rows, name, 0)
        models: dict[str, CostModel] = {"datasheet": roofline}
        for by, network in (("unseen", unseen), ("30 kernels", few), ("truth", shipped[0])):
            models[by] = MeasuredCosts(network)
        for stem in GRAPHS:
            graph = gdp.load(str(data_path("corpus") / f"{stem}.json.gz"))
            for box in BOXES[name]:
                for objective in OBJECTIVES:
                    for seed in range(seeds):
                        found += judged(graph, box, name, models, objective, seed, evaluations)
            click.echo(f"{name}: {stem}", err=True)
    if path is not None:
        path.write_text(json.dumps([row._asdict() for row in found], indent=1) + "\n")
    click.echo("\n".join(told(found)))


if __name__ == "__main__":
    main()
