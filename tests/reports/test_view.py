"""What ops, channels and modules are called."""

from dataclasses import replace

import numpy as np
import pytest
from reports.shared import shown_view
from tiny import cpu, plain_graph, unit_cluster

from gdp.cluster.types import Link, make_cluster
from gdp.problem.problem import make_problem
from gdp.reports.modules import layers, module_tree
from gdp.reports.view import View, channel_names, op_label
from gdp.sim.latency import simulate


def modules(scopes: list[str]) -> View:
    """A chain with an op in each of these modules, on the first of two devices."""
    n = len(scopes)
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)], scope=scopes)
    problem = make_problem(graph, unit_cluster(), np.ones((n, 2)))
    device = np.zeros(n, dtype=np.int64)
    return View(graph, problem, simulate(problem, device), device, np.arange(n))


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
