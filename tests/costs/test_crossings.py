"""Plans of PyTorch pay for tensors from other devices what its copies take."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.costs.default import FROM_HOST_S, PIECE_S, TO_HOST_S, CrossingCosts, resolve_costs
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.importers.pytorch.model import TorchModel
from gdp.methods.base import Assignment, Search
from gdp.methods.simplify import count_pieces, count_transfers, simpler
from gdp.methods.table import METHODS
from gdp.placement.placement import make_placement
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.question.prepare import prepare_placement, prepare_problem
from gdp.question.question import Question
from gdp.sim.prediction import Prediction
from gdp.sim.score import score_of

CPU, T4, OTHER = range(3)
GIVEN_S = 11.5e-6
"""A latency that gdp would not assume."""


def box(latency_s: float | None = None) -> Cluster:
    """A processor with two cards on PCIe; latencies of its links where they are given."""
    cluster = cluster_preset("cpu+2xt4-pcie4")
    if latency_s is None:
        return cluster
    return replace(cluster, link_latency_s=latency_s * (1 - np.eye(3)))


def row(ops: int = 3) -> OpGraph:
    """Products in a row, of tensors of 4 bytes."""
    return make_graph(
        "row", [f"mm{i}" for i in range(ops)], ["mm"] * ops,
        [(i, 4) for i in range(ops - 1)], [(i, i + 1) for i in range(ops - 1)],
        flop=np.full(ops, 1e8), memory_traffic_bytes=np.full(ops, 100_000), source="torch",
    )  # fmt: skip


def predicted(graph: OpGraph, device: list[int], cluster: Cluster, objective: str) -> Prediction:
    placement = make_placement(graph, cluster, np.array(device))
    return prepare_placement(Question(graph, cluster, objective=objective), placement)


@pytest.mark.parametrize(
    ("there", "crossing_s"),
    [((CPU, T4), FROM_HOST_S), ((T4, CPU), TO_HOST_S), ((T4, OTHER), TO_HOST_S)],
)
def test_a_copy_takes_what_was_measured(there: tuple[int, int], crossing_s: float) -> None:
    """Beyond seconds of ops, those of a first piece and four bytes over the link."""
    a, b = there
    apart = predicted(row(2), [a, b], box(), "latency")
    work_s = arrays_of(apart.problem).compute_s[[0, 1], [a, b]].sum()
    sent_s = apart.score().latency_s - work_s - PIECE_S
    bytes_s = 4 / apart.problem.cluster.link_bytes_per_s[a, b]
    assert sent_s == pytest.approx(crossing_s + bytes_s)


@pytest.mark.parametrize("source", ["torch", "onnx", "jax"])
def test_links_that_somebody_measured_stay(source: Any) -> None:
    for graph in (row(), replace(row(), source=source)):
        own = predicted(graph, [CPU, T4, OTHER], box(GIVEN_S), "latency").problem.cluster
        assert (own.link_latency_s == box(GIVEN_S).link_latency_s).all()
        assert [d.dispatch_per for d in own.devices] == ["op"] * 3
    assumed = predicted(graph, [CPU, T4, OTHER], box(), "latency").problem.cluster
    assert (assumed.devices[T4].dispatch_s == PIECE_S) == (source == "torch")


@pytest.mark.parametrize("kind", ["cpu+2xt4-pcie4", "cpu+2xrx7900xtx", "cpu-core+a100"])
def test_ops_take_as_long_as_without_pieces(kind: str) -> None:
    """The dispatch of ops moves into their seconds, whatever costs lie below."""
    cluster, graph = cluster_preset(kind), row()
    model, _ = resolve_costs(None, cluster, graph)
    assert isinstance(model, CrossingCosts)
    for d in range(1, cluster.num_devices):
        placement = make_placement(graph, cluster, np.full(3, d))
        one, other = (
            prepare_placement(Question(graph, cluster, costs=costs), placement)
            for costs in (model, model.base)
        )
        assert one.score().latency_s == pytest.approx(other.score().latency_s + PIECE_S)


def test_the_device_that_reads_is_busy_for_its_part() -> None:
    graph, cluster = row(4), box()
    for device in ([T4, T4, OTHER, OTHER], [T4, OTHER, T4, OTHER]):
        placed = predicted(graph, device, cluster, "throughput")
        work_s = arrays_of(placed.problem).compute_s[range(4), device]
        for d in (T4, OTHER):
            mine = np.array(device) == d
            pieces = int((mine & (np.diff(device, prepend=-1) != 0)).sum())
            load_s = work_s[mine].sum() + pieces * PIECE_S
            assert placed.score().period_s >= load_s - 1e-12


torch: Any = pytest.importorskip("torch", reason="torch is not installed")


class Skips(torch.nn.Module):
    """A dict in and a nested one out, skips across the middle, a head tied to its embedding."""

    def __init__(self, vocabulary: int = 1000, width: int = 384, depth: int = 8) -> None:
        super().__init__()
        nn = torch.nn
        self.embed = nn.Embedding(vocabulary, width)
        self.down = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.up = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(depth)])
        self.register_buffer("scale", torch.ones(width))

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = self.embed(batch["tokens"]) * batch["mask"].unsqueeze(-1)
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        x = x * self.scale
        return {"logits": x @ self.embed.weight.T, "aux": {"mean": x.mean(1)}}


def simplified(problem: Problem) -> Assignment:
    search = Search(seconds=None, evaluations=5000)
    answer = simpler(problem, METHODS["local_search"](problem, search), 0.02, search.evaluations)
    assert answer.assignment is not None
    return answer.assignment


@pytest.mark.slow
def test_a_plan_of_many_pieces_is_none_where_pieces_cost_something() -> None:
    """By links of 10 us a sample is quicker in many pieces; by what copies take, the plan that is
    told is quicker than that one, in fewer pieces."""
    with torch.device("meta"):
        batch = {"tokens": torch.zeros(8, 128, dtype=torch.long), "mask": torch.ones(8, 128)}
        graph = TorchModel("skips", Skips().eval(), (batch,)).record().graph
    told, blind = (
        prepare_problem(Question(graph, box(latency_s), objective="throughput"))
        for latency_s in (None, 10.5e-6)
    )
    one, many = simplified(told), simplified(blind)
    assert count_pieces(told, many.device) > 2 * count_pieces(told, one.device)
    assert count_transfers(told, many.device) > count_transfers(told, one.device)
    assert score_of(told, many).value_s > 1.02 * score_of(told, one).value_s
