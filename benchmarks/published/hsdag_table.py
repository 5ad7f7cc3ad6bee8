"""HSDAG's three models under one judge: its method, what it was compared with, and gdp.

    python -m benchmarks.published.hsdag_table [--evaluations 1000] [--seeds 5]
        [--without ROW ...] [--rows FILE] [--processes 2 | --ray ADDRESS]

Every row is simulated seconds of one inference on datasheet numbers, of the best placement met
within so many evaluations, under the best of gdp's rules of priority. Methods that draw have as
many seeds, and a 95% interval (Student). With `--rows`, runs are appended to a file as they are
done, and those in it are not run again. Before HSDAG, pre-trained come 2,000 placements of the
other two models. CPU seconds are of a run's process, compilation included.
"""

import functools
import importlib
from collections.abc import Callable
from functools import partial

from benchmarks.published.baselines.common import nodes_of
from benchmarks.published.baselines.expert import Family, expert, only_on
from benchmarks.published.baselines.gdp_one import gdp_one
from benchmarks.published.baselines.rows import (
    Runner,
    by_method,
    by_rule,
    by_training,
    run_case,
)
from benchmarks.published.cases import Case, Row
from benchmarks.published.hsdag_graphs import MODELS, PUBLISHED, graph_of
from benchmarks.published.summary import comparison
from gdp.cluster.types import Cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.learn.hsdag.network import HsdagConfig, published
from gdp.learn.hsdag.train import hsdag
from gdp.methods.base import Answer, Search
from gdp.policy.model.config import Params
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question

CLUSTERS = "cpu-server+flex-170,cpu-server+2xflex-170"
FAMILY: dict[str, Family] = {"bert-base": "transformer"}
ABLATED = {
    "output shape": HsdagConfig(output_shape=False),
    "node id": HsdagConfig(node_id=False),
    "graph structure": HsdagConfig(structure=False),
}
"""Features that HSDAG's table 3 leaves out."""
SHARE = 0.01  # of the evaluations, for the search; its candidates are simulated before
UPDATES = 100
"""Of the pre-training over the two other models, 20 placements each: as many as the paper has."""


def rows_of(model: str, cluster: str) -> dict[str, tuple[Runner, bool]]:
    """Every row: how it is run, and whether it draws."""
    table = solve.methods()
    human = partial(expert, family=FAMILY.get(model, "convolutional"))
    return {
        "CPU only": (by_rule(lambda problem: only_on(problem, 0)), False),
        "GPU only": (by_rule(lambda problem: only_on(problem, 1)), False),
        "human expert": (by_rule(human), False),
        "METIS": (by_method(table["metis"]), False),
        "HEFT": (by_method(table["heft"]), False),
        "ETF": (by_method(table["etf"]), False),
        "GDP-one": (by_training(gdp_one), True),
        "HSDAG": (by_method(hsdag), True),
        **{f"HSDAG without {name}": (by_method(partial(hsdag, config=config)), True)
           for name, config in ABLATED.items()},
        "HSDAG, pre-trained": (by_method(_pretrained(model, cluster)), True),
        "HSDAG, published settings": (by_method(partial(hsdag, config=published())), True),
        "gdp policy": (by_method(table["policy"]), True),
        "gdp auto, shortest search": (by_method(table["auto"], SHARE), True),
        "gdp auto": (by_method(table["auto"]), True),
    }  # fmt: skip


def _pretrained(model: str, cluster: str) -> Callable[[Problem, Search], Answer]:
    """HSDAG from weights trained on the other two models; their `UPDATES` come on top."""

    def placed(problem: Problem, search: Search) -> Answer:
        return hsdag(problem, search, params=_weights(model, cluster, search.seed))

    return placed


@functools.lru_cache(maxsize=64)
def _weights(model: str, cluster: str, seed: int) -> Params:
    from gdp.learn.hsdag.train import pretrain

    others = [prepared(other, cluster) for other in MODELS if other != model]
    return pretrain(others, seed=seed, updates=UPDATES)


@functools.cache
def graph(model: str) -> OpGraph:
    """The traced forward pass."""
    return graph_of(model, MODELS[model]())


@functools.cache
def prepared(model: str, cluster: str) -> Problem:
    """The model on a cluster, prepared once."""
    # Datasheet numbers: what ships for JAX on processors was measured on one machine.
    return prepare_problem(Question(graph(model), Cluster.load(cluster), costs=roofline))


def run(case: Case) -> Row:
    """The row of a case."""
    problem = prepared(case.model, case.cluster)
    about = {
        "ops": graph(case.model).num_ops, "edges": graph(case.model).num_uses,
        "fused": problem.num_ops, "nodes": nodes_of(problem).count,
    }  # fmt: skip
    return about | run_case(case, problem, rows_of(case.model, case.cluster))


def _title(row: Row) -> str:
    nodes, edges = PUBLISHED[row["model"]]
    return (
        f"{row['model']} on {row['cluster']}: {row['ops']} ops and {row['edges']} edges "
        f"({nodes} and {edges} in the paper), {row['fused']} after fusion, {row['nodes']} "
        "colocated nodes."
    )


main = comparison(__doc__, "model", MODELS, "all", CLUSTERS, _title, rows_of, run)


if __name__ == "__main__":
    importlib.import_module("benchmarks.published.hsdag_table").main()  # tasks travel by that name
