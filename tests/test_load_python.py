"""Models named `python:package.module:function` become graphs as their author says."""

import pytest

from gdp.errors import ModelError
from gdp.graph.op_graph import INPUT
from gdp.models import load
from gdp.verbs.inspection import inspect_model


def inputs(graph) -> list[str]:  # type: ignore[no-untyped-def]
    return [n for n, kind in zip(graph.op_names, graph.op_types, strict=True) if kind == INPUT]


def test_arguments_named_as_weights_are_held_by_ops() -> None:
    graph = load("python:jax_models:attention_model")
    assert inputs(graph) == ["input1"]
    floats = 50 * 32 + 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64 + 2 * 32)
    first = {int(i): int(b) for i, b in zip(graph.weight_id, graph.weight_bytes, strict=True)}
    assert sum(first.values()) == 4 * floats


def test_other_arguments_are_inputs_on_the_host() -> None:
    graph = load("python:jax_models:cnn")
    assert len(inputs(graph)) == 5
    assert graph.weight_bytes.sum() == 0


def test_a_loss_with_an_optimizer_is_a_training_step() -> None:
    graph = load("python:jax_models:training_step")
    assert graph.is_backward.any()
    assert len(inputs(graph)) == 2 * 2  # two leaves of the batch, two microbatches
    # Parameters and their momentum.
    assert graph.weight_bytes.sum() == 2 * 4 * (12 * 24 + 24 + 24 * 24 + 24 + 24 * 6 + 6)


def test_a_graph_is_taken_as_it_is() -> None:
    assert load("python:jax_models:graph_only").op_names == ("a", "b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"must return \(function, arguments\) .* got str"),
        ("wrong_option", r"no option 'weights'; there are name, weight_argnums"),
        ("wrong_position", r"weight_argnums \[3\] do not fit 1 arguments"),
        ("nothing", r"has no function 'nothing'"),
    ],
)
def test_what_is_wrong_is_said(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(f"python:jax_models:{name}")


def test_inspect_tells_what_was_estimated_and_assumed() -> None:
    found = inspect_model("python:jax_models:while_loop")
    assert found["num_ops"] == 2
    assert found["assumptions"] == ["a while loop is assumed to run once; give trip_count"]
    assert found["estimated"] == []
