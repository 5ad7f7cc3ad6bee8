"""What ops, channels and modules are called."""

from dataclasses import replace

import numpy as np
import pytest
from reports.shared import shown_view
from tiny import cpu, plain_graph, unit_cluster

from gdp.cluster.types import Link, make_cluster
from gdp.costs.base import roofline
from gdp.placement.placement import make_placement
from gdp.problem.problem import make_problem
from gdp.question.question import Question
from gdp.question.solve import view_of
from gdp.reports import html
from gdp.reports.trace import trace_events
from gdp.reports.view import PlacementView, channel_names, layers, module_tree, op_label
from gdp.sim.latency import simulate


def modules(scopes: list[str]) -> PlacementView:
    """A chain with an op in each of these modules, on the first of two devices."""
    n = len(scopes)
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)], scope=scopes)
    problem = make_problem(graph, unit_cluster(), np.ones((n, 2)))
    device = np.zeros(n, dtype=np.int64)
    return PlacementView(graph, problem, simulate(problem, device), device)


@pytest.mark.parametrize(
    ("name", "scope", "label"),
    [
        ("n7", "model.layers.0", "model.layers.0 / n7"),
        ("n7", "", "n7"),
        ("/encoder/layer.0/MatMul", "encoder.layer.0", "/encoder/layer.0/MatMul"),
        ("encoders.x", "encoder", "encoder / encoders.x"),
    ],
)
def test_ops_are_named_by_their_module(name: str, scope: str, label: str) -> None:
    graph = replace(plain_graph(1, []), op_names=(name,), scope=(scope,))
    assert op_label(graph, 0) == label


def test_channels_are_named_by_their_links() -> None:
    """A bus that all six links of three devices share, and a channel for each of two."""
    bus = [Link(a, b, 1.0, channel="bus") for a, b in ("ab", "ac", "bc")]
    names = channel_names(make_cluster("bus", [cpu("a"), cpu("b"), cpu("c")], bus))
    assert names == ["a → b and 5 more links"]
    assert channel_names(unit_cluster()) == ["d0 → d1", "d1 → d0"]


def test_ops_are_counted_as_the_model_has_them_and_as_kernels() -> None:
    view = shown_view()
    ops, kernels = view.counts()
    assert (ops.tolist(), kernels.tolist()) == ([3, 1], [2, 1])


def test_layers_are_the_deepest_level_that_is_short_enough() -> None:
    view = modules([f"m.{layer}.{part}" for layer in range(12) for part in ("a", "b", "c")])
    labels, group = layers(module_tree(view), view)
    assert {labels[g] for g in group} == {f"m.{layer}" for layer in range(12)}


def test_a_deep_stack_is_shown_by_the_parts_of_its_layers() -> None:
    view = modules(["m.embed", *(f"m.layers.{i}.{p}" for i in range(30) for p in ("a", "b.0x"))])
    labels, group = layers(module_tree(view), view)
    assert {labels[g] for g in group} == {"m.embed", "m.layers.*.a", "m.layers.*.b.0x"}


def test_op_types_stand_in_where_a_model_names_no_modules() -> None:
    view = modules(["", ""])
    tree = module_tree(view)
    assert (tree.names, tree.by_type) == (("plain", "Op"), True)
    assert tree.module_of.tolist() == [1, 1]


def test_samples_that_take_other_ways_are_shown_one_after_the_other() -> None:
    """A chain of 1, 2 and 3 s on d0, which d1 takes in turn: 6 s each, the second from 6 s on."""
    graph = plain_graph(3, [(0, 1), (1, 2)], 0, flop=[1.0, 2.0, 3.0], weight_bytes=[2, 0, 0])
    cluster = unit_cluster(2)
    placement = make_placement(graph, cluster, np.zeros(3, np.int64), teams=((0, 1),))
    view = view_of(Question(graph, cluster, costs=roofline), placement)
    assert [way.since_s for way in view.ways] == [0.0, 6.0]
    assert view.end_s == 12.0
    ops, kernels = view.counts()
    assert ops.tolist() == kernels.tolist() == [3, 3], "each member runs all of them"
    drawn = html.payload(view, module_tree(view))
    assert drawn["ops"]["device"] == [0, 0, 0, 1, 1, 1]
    assert drawn["ops"]["start"] == [round(s * 1e9) for s in (0, 1, 3, 6, 7, 9)]
    assert drawn["ops"]["label"][3] == "sample 2: o0"
    assert [device["busy"] for device in drawn["devices"]] == [6 * 10**9] * 2
    assert all(min(curve["bytes"]) >= 2 for curve in drawn["memory"]), "weights stay"
    first, second = html.device_rows(view, {"d0": 5, "d1": 5})
    assert (first["beside"], second["beside"]) == (["d1"], ["d0"])
    assert first["busy_share"] == 0.5
    assert html.device_rows(view, {}, 3.0)[0]["busy_share"] == 1.0, "a sample every 3 s"
    (row,) = html.breakdowns(view, module_tree(view))["op type"]
    assert row["by_device_s"] == [3.0, 3.0], "a sample's share of each"
    assert {row["device"] for row in html.costliest_rows(view)} == {"d0, d1"}
    spans = [e for e in trace_events(view) if e["ph"] == "X"]
    assert [(e["tid"], e["ts"]) for e in spans] == [
        (d, s * 1e6) for d, s in ((0, 0), (0, 1), (0, 3), (1, 6), (1, 7), (1, 9))
    ]
