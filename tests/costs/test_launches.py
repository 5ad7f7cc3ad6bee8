"""One thread of the host launches PyTorch's ops, whatever devices they are on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdp.bounds.best import all_bounds
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster, Link, make_cluster
from gdp.costs.default import FROM_HOST_S, PIECE_S, TO_HOST_S
from gdp.costs.measured.costs import LIBRARY_S
from gdp.graph.op_graph import OpGraph
from gdp.importers.pytorch.model import TorchModel
from gdp.placement.placement import make_placement
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.question.prepare import prepare_placement, prepare_problem
from gdp.question.question import Question

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
LENGTH = 10
CARDS = (1, 2)
LAUNCHES_S = 2 * LENGTH * LIBRARY_S + 2 * PIECE_S
"""Of all products, and of two pieces that begin."""


class Chains(torch.nn.Module):
    """Two rows of small products that do not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        rows = ([torch.nn.Linear(64, 64) for _ in range(LENGTH)] for _ in CARDS)
        self.rows = torch.nn.ModuleList(torch.nn.Sequential(*row) for row in rows)

    def forward(self, x: Any) -> Any:
        return [row(x) for row in self.rows]


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return TorchModel("chains", Chains().eval(), (torch.zeros(1, 64),)).record().graph


def box() -> Cluster:
    return cluster_preset("cpu+2xh100-nvlink")


def prepared(graph: OpGraph, cluster: Cluster | None = None, target: str | None = None) -> Problem:
    return prepare_problem(Question(graph, cluster or box(), target=target))


def value_s(graph: OpGraph, cards: tuple[int, int], objective: str, target: str | None) -> float:
    """Seconds with each row on a card."""
    second = np.array(["rows.1" in name for name in graph.op_names])
    device = np.where(graph.is_io, 0, np.where(second, cards[1], cards[0]))
    question = Question(graph, box(), objective=objective, target=target)
    return prepare_placement(question, make_placement(graph, box(), device)).score().value_s


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_two_cards_are_launched_one_after_the_other(graph: OpGraph, objective: str) -> None:
    """Twenty products of 50 us on one card or on two, and two pieces; beside them, at most, copies
    of the input and the results. With a process for each card half of it."""
    copies_s = 0.0 if objective == "throughput" else FROM_HOST_S + 2 * TO_HOST_S
    for cards in ((1, 1), CARDS):
        own = value_s(graph, cards, objective, None)
        assert LAUNCHES_S * (1 - 1e-9) <= own <= (LAUNCHES_S + copies_s) * (1 + 1e-9)
    assert value_s(graph, CARDS, objective, "pipelining") < 0.51 * LAUNCHES_S + copies_s
    assert value_s(graph, (1, 1), objective, "pipelining") < 1.01 * LAUNCHES_S + copies_s


def test_the_launches_of_all_ops_bound_any_plan(graph: OpGraph) -> None:
    (bound,) = [b for b in all_bounds(prepared(graph)) if "thread of the host" in b.argument]
    assert bound.value_s == pytest.approx(LAUNCHES_S, rel=1e-6)


def test_who_launches_alone(graph: OpGraph) -> None:
    """Other libraries; training, whose backward ops have threads of their own; runtimes of several
    processes; a device without others."""
    training = replace(graph, is_backward=~graph.is_io)
    assert prepared(graph).launches is not None
    assert prepared(replace(graph, source="onnx")).launches is None
    assert prepared(training).launches is None
    assert prepared(graph, target="tensor-parallel").launches is None
    assert prepared(graph, cluster_preset("h100")).launches is None


def test_dispatch_counts_once_where_links_are_known(graph: OpGraph) -> None:
    """Devices then pay their dispatch by op, beside the seconds of launches."""
    cluster = box()
    known = replace(cluster, link_latency_s=11.5e-6 * (1 - np.eye(3)))
    flat = arrays_of(prepared(graph, known))
    assert (flat.serial == 0).all()
    on_cards = flat.serial_s[~flat.is_io][:, CARDS]
    np.testing.assert_allclose(on_cards[on_cards > 0], LIBRARY_S)
    assert (on_cards <= flat.compute_s[~flat.is_io][:, CARDS] + 1e-15).all()


def test_each_machine_has_a_thread(graph: OpGraph) -> None:
    """Two machines of a processor and two cards each; and two of a device each, which launches its
    own."""
    cpu, card = box().devices[:2]
    names = [f"{kind}{m}" for m in "ab" for kind in ("cpu", "x", "y")]
    devices = [replace(cpu if name[0] == "c" else card, name=name) for name in names]
    ways = [Link(f"cpu{m}", f"{kind}{m}", 2.5e10, 1e-5) for m in "ab" for kind in "xy"]
    two = make_cluster("two", devices, ways, default_bytes_per_s=1e9, default_latency_s=1e-4)
    problem = prepared(graph, two)
    assert arrays_of(problem).serial.tolist() == [0, 0, 0, 1, 1, 1]
    (bound,) = [b for b in all_bounds(problem) if "threads launch all ops" in b.argument]
    assert bound.value_s == pytest.approx(LAUNCHES_S / 2, rel=1e-6)
    alone = arrays_of(prepared(graph, cluster_preset("2xdgx-spark-pcie4")))
    assert (alone.serial < 0).all()
