"""GDP's workloads as JAX training steps under one judge: its comparison, and gdp.

    python -m benchmarks.published.gdp_table [--evaluations 1000] [--seeds 5] [--workloads A,B]
        [--clusters equal] [--without ROW ...] [--rows FILE] [--processes 2 | --ray ADDRESS]

The families of GDP's table 1 (arXiv 1910.01578) with the depths and the numbers of devices that it
names: equal P100s over PCIe, memory as on the card. Sizes beyond that (hidden units, steps, batch)
are not at hand; they are `WORKLOADS`. `--workloads all` takes them all, `--clusters A,B` presets
instead of equal P100s. Rows are the same however many processes run them, but for CPU seconds and
for bounds, which have a few seconds each.
"""

import functools
import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.published.baselines.expert import Family, expert
from benchmarks.published.baselines.gdp_one import gdp_batch, gdp_one
from benchmarks.published.baselines.rows import (
    Run,
    Runner,
    by_finetuning,
    by_method,
    by_rule,
    by_training,
    run_case,
    run_of,
)
from benchmarks.published.cases import Case, Row
from benchmarks.published.summary import comparison
from gdp.cluster.types import Cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.policy.method import load
from gdp.policy.propose import propose
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from pretrain.corpus.build import traced
from pretrain.corpus.cnn import inception, nas_cells
from pretrain.corpus.families import CorpusGraph
from pretrain.corpus.rnn import gnmt, rnnlm, wavenet
from pretrain.corpus.transformer import transformer_xl


class Workload(NamedTuple):
    """A training step, how many devices GDP gave it, and which rule a person follows."""

    variant: CorpusGraph
    devices: int
    family: Family


def _amoebanet(**arguments: Any) -> Any:
    return nas_cells(amoeba=True, **arguments)


def _made(
    name: str, builder: Any, devices: int, family: Family, **arguments: Any
) -> tuple[str, Workload]:
    variant = CorpusGraph(name, builder, "training", arguments)
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
EQUAL = "equal"
"""As many P100s over PCIe as GDP gave the workload."""
BATCH = ("rnnlm-2", "transformer-xl-2", "inception", "wavenet-2x18")
"""The workloads that GDP-batch learns from at once: the smallest workload of four families."""
ZERO_SHOT = 0.064  # of the evaluations: one decode, its advisers and a few proposals
TUNED = 0.5  # of the evaluations for fine-tuning; `auto`, from which it starts, has as many
SHORTEST = 0.001  # of the evaluations for auto's search; its candidates are simulated before


def rows_of(name: str, cluster: str) -> dict[str, tuple[Runner, bool]]:
    """Every row of a workload: how it is run, and whether it draws."""
    table, family = solve.methods(), WORKLOADS[name].family
    learned = {"GDP-one": (by_training(gdp_one), True)}
    if name in BATCH:
        learned["GDP-batch"] = by_batch(name, cluster), True
    return {
        "human expert": (by_rule(partial(expert, family=family)), False),
        "single device": (by_method(table["single"]), False),
        "METIS": (by_method(table["metis"]), False),
        "HEFT": (by_method(table["heft"]), False),
        "ETF": (by_method(table["etf"]), False),
        **learned,
        "HSDAG": (by_method(table["hsdag"]), True),
        "gdp greedy decode": (decoded_once, False),
        "gdp policy, untuned": (by_method(table["policy"], ZERO_SHOT), True),
        "gdp fine-tuned": (by_finetuning(TUNED), True),
        "gdp auto, shortest search": (by_method(table["auto"], SHORTEST), True),
        "gdp auto": (by_method(table["auto"]), True),
    }


def decoded_once(problem: Problem, evaluations: int, seed: int) -> Run:
    """The shipped policy's greedy placement as it was decoded, and no other beside it."""
    del evaluations
    began_s = time.process_time()
    proposals = propose(load(None), problem, 1, seed)
    value_s = float(proposals.value_s[0])
    spent_s = time.process_time() - began_s
    return Run(value_s if np.isfinite(value_s) else None, proposals.evaluations, spent_s)


def by_batch(name: str, cluster: str) -> Runner:
    """GDP-batch's best placement of one workload, whose problem it poses itself."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        del problem
        return _batched(cluster, evaluations, seed)[BATCH.index(name)]

    return run


@functools.lru_cache(maxsize=16)
def _batched(cluster: str, evaluations: int, seed: int) -> Sequence[Run]:
    problems = [replace(problem_of(name, cluster)) for name in BATCH]  # nothing known of them
    return [run_of(found) for found in gdp_batch(problems, evaluations, seed)]


@functools.lru_cache(maxsize=16)
def graph_of(name: str) -> OpGraph:
    """The traced training step."""
    return traced(WORKLOADS[name].variant)


@functools.lru_cache(maxsize=64)
def problem_of(name: str, cluster: str) -> Problem:
    """The workload on a cluster, prepared once."""
    machine = Cluster.load(cluster_of(name, cluster))
    return prepare_problem(Question(graph_of(name), machine, costs=roofline))


def cluster_of(name: str, cluster: str) -> str:
    """The preset that is meant."""
    return f"{WORKLOADS[name].devices}xp100-pcie3" if cluster == EQUAL else cluster


def run(case: Case) -> Row:
    """The row of a case."""
    problem = problem_of(case.model, case.cluster)
    about = {
        "devices": cluster_of(case.model, case.cluster), "ops": graph_of(case.model).num_ops,
        "fused": problem.num_ops,
    }  # fmt: skip
    return about | run_case(case, problem, rows_of(case.model, case.cluster))


def _title(row: Row) -> str:
    return f"{row['model']} on {row['devices']}: {row['ops']} ops, {row['fused']} after fusion"


main = comparison(
    __doc__, "workload", WORKLOADS, "rnnlm-2,transformer-xl-2,wavenet-2x18", EQUAL, _title,
    rows_of, run,
)  # fmt: skip


if __name__ == "__main__":
    importlib.import_module("benchmarks.published.gdp_table").main()  # tasks travel by that name
