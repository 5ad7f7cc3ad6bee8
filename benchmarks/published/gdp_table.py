"""GDP's workloads as JAX training steps under one judge: its comparison, and gdp.

    python -m benchmarks.published.gdp_table [--evaluations 1000] [--seeds 5]
        [--workloads A,B] [--without ROW ...] [--rows FILE]

The families of GDP's table 1 (arXiv 1910.01578) with the depths and the numbers of devices that it
names: equal P100s over PCIe, memory as on the card. Sizes beyond that (hidden units, steps, batch)
are not at hand; they are `WORKLOADS` below. `--workloads all` takes them all.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.published.baselines.expert import Family, expert
from benchmarks.published.baselines.rows import (
    Runner,
    by_finetuning,
    by_method,
    by_rule,
    by_training,
    kept,
    lines_of,
    reached,
)
from benchmarks.published.baselines.table import LEARNED
from gdp import api
from gdp.cluster.types import Cluster
from gdp.corpus.build import traced
from gdp.corpus.cnn import inception, nas_cells
from gdp.corpus.families import Variant
from gdp.corpus.rnn import gnmt, rnnlm, wavenet
from gdp.corpus.transformer import transformer_xl
from gdp.posed import pose


class Workload(NamedTuple):
    """A training step, how many devices GDP gave it, and which rule a person follows."""

    variant: Variant
    devices: int
    family: Family


def _amoebanet(**arguments: Any) -> Any:
    return nas_cells(amoeba=True, **arguments)


def _made(
    name: str, builder: Any, devices: int, family: Family, **arguments: Any
) -> tuple[str, Workload]:
    variant = Variant(name, builder, "training", arguments)
    return name, Workload(variant, devices, family)


WORKLOADS: dict[str, Workload] = dict([
    *(_made(f"rnnlm-{n}", rnnlm, n, "recurrent", layers=n, steps=32, hidden=2048, batch=64)
      for n in (2, 4, 8)),
    *(_made(f"gnmt-{n}", gnmt, n, "recurrent", layers=n, steps=steps, hidden=1024, batch=128)
      for n, steps in ((2, 40), (4, 40), (8, 52))),
    *(_made(f"transformer-xl-{n}", transformer_xl, n, "transformer", layers=n, features=1024,
            heads=16, batch=32, steps=128, segments=4) for n in (2, 4, 8)),
    _made("inception", inception, 2, "convolutional", blocks=12, batch=64, image=299),
    _made("amoebanet", _amoebanet, 4, "convolutional", cells=18, width=32, batch=8, image=224),
    _made("wavenet-2x18", wavenet, 2, "transformer", stacks=2, layers=18, channels=128, batch=8),
    _made("wavenet-4x36", wavenet, 4, "transformer", stacks=4, layers=36, channels=128, batch=8),
])  # fmt: skip
SMALL = "rnnlm-2,transformer-xl-2,wavenet-2x18"
ZERO_SHOT = 0.064  # of the evaluations: one decode, its advisers and a few proposals
SHORTEST = 0.001  # of the evaluations for auto's search; its candidates are simulated before


def rows_of(workload: Workload) -> dict[str, tuple[Runner, bool]]:
    """Every row: how it is run, and whether it draws."""
    table = api.methods()
    return {
        "human expert": (by_rule(partial(expert, family=workload.family)), False),
        "single device": (by_method(table["single"]), False),
        "METIS": (by_method(table["metis"]), False),
        "HEFT": (by_method(table["heft"]), False),
        "ETF": (by_method(table["etf"]), False),
        **{name: (by_training(train), True) for name, train in LEARNED.items() if name != "RNN"},
        "HSDAG": (by_method(table["hsdag"]), True),
        "gdp zero-shot": (by_method(table["policy"], ZERO_SHOT), True),
        "gdp fine-tuned": (by_finetuning(), True),
        "gdp auto, shortest search": (by_method(table["auto"], SHORTEST), True),
        "gdp auto": (by_method(table["auto"]), True),
    }


def measured(
    names: list[str], evaluations: int, seeds: int, path: Path | None, without: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Every row of every workload."""
    for name in names:
        workload = WORKLOADS[name]
        graph, cluster = traced(workload.variant), f"{workload.devices}xp100-pcie3"
        problem = pose(graph, Cluster.load(cluster)).problem
        about = {
            "model": name, "cluster": cluster, "ops": graph.num_ops, "fused": problem.num_ops,
            "evaluations": evaluations, "seeds": seeds,
        }  # fmt: skip
        rows = {name: row for name, row in rows_of(workload).items() if name not in without}
        for row in kept(path, about, rows, problem):
            if row["method"] == "HDP" and row["best_s"] is not None:
                row["auto_until"] = reached(problem, row["best_s"])
            yield row


def table_text(rows: list[dict[str, Any]]) -> str:
    """The table of one workload, in Markdown."""
    first = rows[0]
    title = (
        f"{first['model']} on {first['cluster']}: {first['ops']} ops, {first['fused']} after fusion"
    )
    found = next(row for row in rows if row["method"] == "HDP")
    ends = found.get("auto_until") or "in its search"
    return "\n".join([
        title, "", *lines_of(rows), "",
        f"HDP's best was met after {found['best_at']} draws at most; auto has one at least as fast "
        f"as the best of its seeds after {ends} simulations.",
    ])  # fmt: skip


SUMMED = ("human expert", "METIS", "HEFT", "HDP", "Placeto", "gdp zero-shot", "gdp auto", "bound")


def summary_text(tables: list[list[dict[str, Any]]]) -> str:
    """One row per workload: milliseconds, and what auto gains; geometric means in the last."""
    head = ["workload", "devices", "ops", "fused", *SUMMED, "expert / auto - 1", "HDP / auto - 1",
            "HDP's draws", "auto's simulations"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    gains: list[tuple[float, float]] = []
    for table in tables:
        by = {row["method"]: row for row in table}
        seconds = {name: by[name]["value_s"] for name in SUMMED if name in by}
        ours, found = seconds["gdp auto"], by["HDP"]
        gains.append((seconds["human expert"] / ours, seconds["HDP"] / ours))
        cells = [table[0]["model"], table[0]["cluster"].split("x")[0], table[0]["ops"],
                 table[0]["fused"]]  # fmt: skip
        cells += [f"{x * 1e3:.1f}" if (x := seconds.get(name)) else "-" for name in SUMMED]
        cells += [f"{gain - 1:+.1%}" for gain in gains[-1]]
        cells += [found["best_at"], found.get("auto_until") or "in its search"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    mean = np.exp(np.log(np.array(gains)).mean(axis=0)) - 1
    lines.append("\nGeometric means: " + ", ".join(f"{x:+.1%}" for x in mean) + ".")
    return "\n".join(lines)


@click.command()
@click.option("--evaluations", default=1000, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--workloads", default=SMALL, show_default=True)
@click.option("--rows", type=click.Path(path_type=Path), help="Rows done, to go on from.")
@click.option("--counts", is_flag=True, help="Only how many ops each workload has.")
@click.option("--without", multiple=True, help="A row to leave out.")
@click.option("--json", "as_json", is_flag=True)
def main(
    evaluations: int, seeds: int, workloads: str, rows: Path | None, counts: bool,
    without: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Print the tables."""
    names = list(WORKLOADS) if workloads == "all" else workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise click.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if counts:
        for name in names:
            graph = traced(WORKLOADS[name].variant)
            click.echo(f"{name}: {graph.num_ops} ops, {graph.num_uses} edges")
        return
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in measured(names, evaluations, seeds, rows, without):
        tables.setdefault(row["model"], []).append(row)
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables.values() for row in table]}))
        return
    for table in tables.values():
        click.echo(table_text(table) + "\n")
    click.echo(summary_text(list(tables.values())))


if __name__ == "__main__":
    main()
