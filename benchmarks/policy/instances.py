"""Test problems, values and tables that the benchmarks of the policy share.

Graphs of test families serve for no choice.
"""

import functools
import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.learn.instances import Problems, load_problems
from gdp.methods.base import Answer
from gdp.policy.policy import Policy, default_checkpoint, load_policy
from gdp.problem.problem import Problem
from gdp.sim.score import values

CHECKPOINT = click.option("--checkpoint", type=Path, default=None, help="Default: the shipped.")


@functools.cache
def problems(min_ops: int, max_ops: int) -> Problems:
    """The corpus, test graphs of benchmark size included."""
    return load_problems("data/corpus", random_graphs=0, min_ops=min_ops, max_ops=max_ops)


def loaded(checkpoint: Path | None) -> Policy:
    """The policy under test."""
    return load_policy(default_checkpoint() if checkpoint is None else checkpoint)


def reached_s(problem: Problem, answer: Answer) -> float:
    """Seconds of an answer under its own priorities; inf without one, or where it overflows."""
    found = answer.assignment
    if found is None:
        return float("inf")
    seconds, overflow = values(problem, found.device[None], found.rank)
    return float(seconds[0]) if overflow[0] == 0 else float("inf")


def show(title: str, table: dict[str, Any]) -> None:
    """Print one table, and the same as a JSON line for programs."""
    click.echo(title)
    for name, cell in table.items():
        click.echo(f"  {name:34s} {cell}")
    click.echo(json.dumps({title: table}))


def unseen_cluster(kind: int, graph: OpGraph) -> Cluster:
    """10 alike with links of 1 TB/s, 12 up to 30 times apart, 16 behind links of 1 GB/s and 0.2 ms.

    Speeds are scaled so that moving all tensors over a link takes a third of all arithmetic.
    """
    size = (10, 12, 16)[kind]
    slower = [float(np.linspace(1, 30, size)[i]) if kind == 1 else 1.0 for i in range(size)]
    link, latency_s = ((1e12, 0.5e-6), (60e9, 5e-6), (1e9, 2e-4))[kind]
    moved_s = float(graph.tensor_bytes.sum()) / link
    flop_per_s = float(graph.flop.sum()) / (3.0 * moved_s)
    devices = [
        Device(f"d{i}", "x", {"default": flop_per_s / x}, flop_per_s / x / 10.0)
        for i, x in enumerate(slower)
    ]
    return make_cluster("unseen", devices, default_bytes_per_s=link, default_latency_s=latency_s)
