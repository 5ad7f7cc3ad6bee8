"""HSDAG's three models under one judge: its method, what it was compared with, and gdp.

    python -m benchmarks.hsdag_table [--evaluations 1000] [--seeds 3] [--rows FILE] [--json]

Every row is simulated seconds of one inference on datasheet numbers, of the best placement met
within so many evaluations, under the best of gdp's rules of priority. Methods that draw have as
many seeds, and a 95% interval (Student). With `--rows`, rows are appended to a file as they are
done, and those in it are not run again. CPU seconds are of this process, compilation included.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.baselines.expert import Family, expert, only_on
from benchmarks.baselines.table import LEARNED
from benchmarks.hsdag_graphs import MODELS, PUBLISHED, graph_of
from gdp import api
from gdp.bounds.best import best_bound
from gdp.cluster.types import Cluster
from gdp.learn.hsdag.config import HsdagConfig, published
from gdp.learn.hsdag.method import hsdag
from gdp.learn.hsdag.nodes import make_nodes
from gdp.methods.base import Method, Search
from gdp.problem.problem import Problem
from gdp.sim.score import score

CLUSTERS = ("cpu+flex-170", "cpu+2xflex-170")
FAMILY: dict[str, Family] = {"bert-base": "transformer"}
ABLATED = {
    "output shape": HsdagConfig(output_shape=False),
    "node id": HsdagConfig(node_id=False),
    "graph structure": HsdagConfig(structure=False),
}
SHARE = 0.01  # of the evaluations, for the row that answers in so few


class Run(NamedTuple):
    """One method's answer with one seed."""

    value_s: float | None  # None where nothing fits
    evaluations: int
    cpu_s: float


Runner = Callable[[Problem, int, int], Run]  # (problem, evaluations, seed)


def by_method(method: Method, share: float = 1.0) -> Runner:
    """A method of gdp with a share of the evaluations, and no limit of seconds."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        began_s = time.process_time()
        budget = max(1, int(share * evaluations))
        answer = method(problem, Search(seed=seed, seconds=None, evaluations=budget))
        spent = time.process_time() - began_s
        if answer.assignment is None:
            return Run(None, answer.evaluations, spent)
        value_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
        return Run(value_s, answer.evaluations, spent)

    return run


def by_rule(rule: Callable[[Problem], Any]) -> Runner:
    """A baseline that does not search."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        del evaluations, seed
        found = rule(problem)
        return Run(found.value_s, found.evaluations, found.cpu_s)

    return run


def by_training(train: Callable[[Problem, int, int], Any]) -> Runner:
    """A learned baseline."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        found = train(problem, evaluations, seed)
        value_s = None if found.assignment is None else found.value_s
        return Run(value_s, found.evaluations, found.cpu_s)

    return run


def rows_of(model: str) -> dict[str, tuple[Runner, bool]]:
    """Every row: how it is run, and whether it draws."""
    table = api.methods()
    human = partial(expert, family=FAMILY.get(model, "convolutional"))
    return {
        "CPU only": (by_rule(lambda problem: only_on(problem, 0)), False),
        "GPU only": (by_rule(lambda problem: only_on(problem, 1)), False),
        "human expert": (by_rule(human), False),
        "METIS": (by_method(table["metis"]), False),
        "HEFT": (by_method(table["heft"]), False),
        "ETF": (by_method(table["etf"]), False),
        **{name: (by_training(train), True) for name, train in LEARNED.items()},
        "HSDAG": (by_method(hsdag), True),
        **{
            f"HSDAG without {name}": (by_method(partial(hsdag, config=config)), True)
            for name, config in ABLATED.items()
        },
        "HSDAG, published settings": (by_method(partial(hsdag, config=published())), True),
        "gdp policy": (by_method(table["policy"]), True),
        "gdp auto, 1% of the evaluations": (by_method(table["auto"], SHARE), True),
        "gdp auto": (by_method(table["auto"]), True),
    }  # fmt: skip


def interval(values: np.ndarray) -> float:
    """Half the width of the 95% interval of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def done(path: Path | None) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of a file, by what they are of."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {key(row): row for row in rows}


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is of."""
    return tuple(str(row[name]) for name in ("model", "cluster", "method", "evaluations", "seeds"))


def measured(
    models: list[str], clusters: list[str], evaluations: int, seeds: int, path: Path | None
) -> Iterator[dict[str, Any]]:
    """Every row, those of the file first asked for there."""
    known = done(path)
    for model in models:
        graph = graph_of(model, MODELS[model]())
        for cluster in clusters:
            problem = api.pose(graph, Cluster.load(cluster)).problem
            about = {
                "model": model, "cluster": cluster, "ops": graph.num_ops, "edges": graph.num_uses,
                "fused": problem.num_ops, "nodes": make_nodes(problem, HsdagConfig()).count,
                "evaluations": evaluations, "seeds": seeds,
            }  # fmt: skip
            for method, (run, draws) in rows_of(model).items():
                row = about | {"method": method}
                if key(row) not in known:
                    runs = [run(problem, evaluations, s) for s in range(seeds if draws else 1)]
                    known[key(row)] = row | summary(runs)
                    _append(path, known[key(row)])
                yield known[key(row)]
            row = about | {"method": "bound"}
            if key(row) not in known:
                bound = best_bound(problem, 10.0)
                known[key(row)] = row | {"value_s": bound.value_s, "argument": bound.argument}
                _append(path, known[key(row)])
            yield known[key(row)]


def summary(runs: list[Run]) -> dict[str, Any]:
    """The means of the runs with one interval; without a value where one has none."""
    values = np.array([np.nan if run.value_s is None else run.value_s for run in runs])
    missing = bool(np.isnan(values).any())
    return {
        "value_s": None if missing else float(values.mean()),
        "interval_s": None if missing else interval(values),
        "best_s": None if missing else float(values.min()),
        "spent": float(np.mean([run.evaluations for run in runs])),
        "cpu_s": float(np.mean([run.cpu_s for run in runs])),
    }


def _append(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def table_text(rows: list[dict[str, Any]]) -> str:
    """The table of one model on one cluster, in Markdown."""
    first = rows[0]
    nodes, edges = PUBLISHED[first["model"]]
    ours = next(row["value_s"] for row in rows if row["method"] == "gdp auto")
    lines = [
        f"{first['model']} on {first['cluster']}: {first['ops']} ops and {first['edges']} edges "
        f"({nodes} and {edges} in the paper), {first['fused']} after fusion, {first['nodes']} "
        "colocated nodes.",
        "",
        "| method | ms | 95% | method / auto - 1 | evaluations | CPU s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        value_s = row["value_s"]
        if value_s is None:
            lines.append(f"| {row['method']} | fits not | | | {row['spent']:.0f} | |")
            continue
        cells = [row["method"], f"{value_s * 1e3:.4f}", "", f"{value_s / ours - 1:+.1%}", "", ""]
        if "spent" in row:
            cells[2] = f"{row['interval_s'] * 1e3:.4f}" if row["interval_s"] else ""
            cells[4:] = [f"{row['spent']:.0f}", f"{row['cpu_s']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command()
@click.option("--evaluations", default=1000, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--clusters", default=",".join(CLUSTERS), show_default=True)
@click.option("--rows", type=click.Path(path_type=Path), help="Rows done, to go on from.")
@click.option("--json", "as_json", is_flag=True)
def main(
    evaluations: int, seeds: int, models: str, clusters: str, rows: Path | None, as_json: bool
) -> None:
    """Print the tables."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in measured(models.split(","), clusters.split(","), evaluations, seeds, rows):
        tables.setdefault((row["model"], row["cluster"]), []).append(row)
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables.values() for row in table]}))
        return
    for table in tables.values():
        click.echo(table_text(table) + "\n")


if __name__ == "__main__":
    main()
