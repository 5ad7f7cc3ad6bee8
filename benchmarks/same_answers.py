"""Whether two versions of gdp give the same answers: a digest of each, written and compared.

    python benchmarks/same_answers.py -o before.json          # at one commit
    python benchmarks/same_answers.py --against before.json   # at another

Every answer has a seed and a budget in evaluations, no clock. It uses the public interface alone,
so that it runs across changes of everything below. Exit code 1 says that an answer differs.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import gdp

CLUSTERS = ("2xcpu-core", "cpu+2xt4-pcie4", "4xa100-nvlink")
# Small, so that exact programs end, and of different kinds: a CNN, a training step, a random DAG.
GRAPHS = (
    "data/corpus/mlp/*.json.gz",
    "data/corpus/two_tower/*.json.gz",
    "data/corpus/gru_encoder/*.json.gz",
    "data/corpus/random_layered/*.json.gz",
)
EVENT = ("latency", "throughput")
QUICK = (
    "single",
    "round_robin",
    "blocks",
    "metis",
    "heft",
    "etf",
    "local_search",
    "auto",
    "policy",
)
EVALUATIONS = 200


def asked() -> Iterator[tuple[str, str, str, str]]:
    """(graph file, cluster, objective, method): more than sixty."""
    top = Path(__file__).resolve().parent.parent
    files = [
        sorted(top.glob(pattern), key=lambda f: (f.stat().st_size, f.name))[0] for pattern in GRAPHS
    ]
    for i, file in enumerate(files):
        for j, objective in enumerate(EVENT):
            for method in QUICK:
                yield str(file), CLUSTERS[(i + j) % len(CLUSTERS)], objective, method
    for objective in EVENT:
        yield str(files[0]), CLUSTERS[1], objective, "guided"
        yield str(files[0]), CLUSTERS[0], objective, "pipeline_dp"
    for objective in ("max_load", "block_latency"):
        yield str(files[0]), CLUSTERS[1], objective, "pipeline_dp"
        yield str(files[0]), CLUSTERS[1], objective, "mip"


def answer(file: str, cluster: str, objective: str, method: str) -> dict[str, Any]:
    """The digest of one answer: devices, ranks, value, bound and effort."""
    search = gdp.Search(seed=3, seconds=None, evaluations=EVALUATIONS)
    if hasattr(search, "simplicity"):  # earlier versions gave nothing for it
        search = replace(search, simplicity=0.0)
    graph, box = gdp.load(file), gdp.Cluster.load(cluster)
    try:
        result = gdp.place(graph, box, objective=objective, method=method, search=search)  # pyright: ignore[reportArgumentType]
    except gdp.GdpError as error:
        return {"error": str(error)}
    placed = result.placement
    digest = hashlib.sha256()
    for array in (placed.device, placed.rank):
        digest.update(array.astype("<i8").tobytes())
    return {
        "placement": digest.hexdigest()[:16],
        "value_s": result.value_s,
        "bound_s": result.bound_s,
        "evaluations": result.evaluations,
        "candidates": [[c.method, c.latency_s, c.period_s] for c in result.candidates],
    }


@click.command()
@click.option("-o", "output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--against", type=click.Path(exists=True, path_type=Path))
def main(output: Path | None, against: Path | None) -> None:
    """Print, write or compare the answers."""
    warnings.simplefilter("ignore")
    rows = {}
    for file, cluster, objective, method in asked():
        name = f"{Path(file).name} {cluster} {objective} {method}"
        rows[name] = answer(file, cluster, objective, method)
        click.echo(f"{name}: {rows[name].get('placement') or rows[name]}", err=True)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))
    if against is None:
        return
    before = json.loads(against.read_text())
    differing = [name for name in {**before, **rows} if before.get(name) != rows.get(name)]
    for name in differing:
        click.echo(f"{name}\n  before {before.get(name)}\n  now    {rows.get(name)}")
    click.echo(f"{len(rows) - len(differing)} of {len(rows)} answers are the same")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
