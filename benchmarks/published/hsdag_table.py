"""HSDAG's three models under one judge: its method, what it was compared with, and gdp.

    python -m benchmarks.published.hsdag_table [--evaluations 1000] [--seeds 3]
        [--without ROW ...] [--rows FILE] [--json]

Every row is simulated seconds of one inference on datasheet numbers, of the best placement met
within so many evaluations, under the best of gdp's rules of priority. Methods that draw have as
many seeds, and a 95% interval (Student). With `--rows`, rows are appended to a file as they are
done, and those in it are not run again. CPU seconds are of this process, compilation included.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.published.baselines.expert import Family, expert, only_on
from benchmarks.published.baselines.rows import (
    Runner,
    by_method,
    by_rule,
    by_training,
    kept,
    lines_of,
    reached,
)
from benchmarks.published.baselines.table import LEARNED
from benchmarks.published.hsdag_graphs import MODELS, PUBLISHED, graph_of
from gdp import api
from gdp.cluster.types import Cluster
from gdp.learn.hsdag.config import HsdagConfig, published
from gdp.learn.hsdag.method import hsdag
from gdp.learn.hsdag.nodes import make_nodes
from gdp.posed import pose

CLUSTERS = ("cpu+flex-170", "cpu+2xflex-170")
FAMILY: dict[str, Family] = {"bert-base": "transformer"}
ABLATED = {
    "output shape": HsdagConfig(output_shape=False),
    "node id": HsdagConfig(node_id=False),
    "graph structure": HsdagConfig(structure=False),
}
SHARE = 0.01  # of the evaluations, for the search; its candidates are simulated before


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
        "gdp auto, shortest search": (by_method(table["auto"], SHARE), True),
        "gdp auto": (by_method(table["auto"]), True),
    }  # fmt: skip


def measured(
    models: list[str],
    clusters: list[str],
    evaluations: int,
    seeds: int,
    path: Path | None,
    without: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Every row of every model on every cluster."""
    for model in models:
        graph = graph_of(model, MODELS[model]())
        for cluster in clusters:
            problem = pose(graph, Cluster.load(cluster)).problem
            about = {
                "model": model, "cluster": cluster, "ops": graph.num_ops, "edges": graph.num_uses,
                "fused": problem.num_ops, "nodes": make_nodes(problem, HsdagConfig()).count,
                "evaluations": evaluations, "seeds": seeds,
            }  # fmt: skip
            rows = {name: row for name, row in rows_of(model).items() if name not in without}
            for row in kept(path, about, rows, problem):
                if row["method"] == "HSDAG":
                    row["auto_until"] = reached(problem, row["best_s"])
                yield row


def table_text(rows: list[dict[str, Any]]) -> str:
    """The table of one model on one cluster, in Markdown."""
    first = rows[0]
    nodes, edges = PUBLISHED[first["model"]]
    title = (
        f"{first['model']} on {first['cluster']}: {first['ops']} ops and {first['edges']} edges "
        f"({nodes} and {edges} in the paper), {first['fused']} after fusion, {first['nodes']} "
        "colocated nodes."
    )
    lines = [title, "", *lines_of(rows)]
    if found := [row for row in rows if row["method"] == "HSDAG"]:
        until = found[0]["auto_until"] or "so many as its search takes"
        lines += ["", f"auto has a placement as fast as HSDAG's best after {until} simulations."]
    return "\n".join(lines)


@click.command()
@click.option("--evaluations", default=1000, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--clusters", default=",".join(CLUSTERS), show_default=True)
@click.option("--rows", type=click.Path(path_type=Path), help="Rows done, to go on from.")
@click.option("--without", multiple=True, help="A row to leave out.")
@click.option("--json", "as_json", is_flag=True)
def main(
    evaluations: int,
    seeds: int,
    models: str,
    clusters: str,
    rows: Path | None,
    without: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the tables."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    chosen = models.split(","), clusters.split(",")
    for row in measured(*chosen, evaluations, seeds, rows, without):
        tables.setdefault((row["model"], row["cluster"]), []).append(row)
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables.values() for row in table]}))
        return
    for table in tables.values():
        click.echo(table_text(table) + "\n")


if __name__ == "__main__":
    main()
