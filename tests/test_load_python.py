"""Models named `python:package.module:function` become graphs as their author says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdp.base.errors import ModelError
from gdp.graph.op_graph import INPUT
from gdp.question.models import inspect_model, load, source_files


def inputs(graph) -> list[str]:  # type: ignore[no-untyped-def]
    return [n for n, kind in zip(graph.op_names, graph.op_types, strict=True) if kind == INPUT]


def test_arguments_named_as_weights_are_held_by_ops() -> None:
    graph = load("python:jax_models:attention_model")
    assert inputs(graph) == ["input1"]
    floats = 50 * 32 + 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64 + 2 * 32)
    first = {int(i): int(b) for i, b in zip(graph.weight_id, graph.weight_bytes, strict=True)}
    assert sum(first.values()) == 4 * floats


def test_trees_of_arrays_are_weights_and_other_arguments_inputs_on_the_host() -> None:
    """Three kernels in a list; the head and the images are arrays by themselves."""
    graph = load("python:jax_models:cnn")
    assert len(inputs(graph)) == 2
    assert graph.weight_bytes.sum() == 4 * 3 * 3 * (3 * 8 + 8 * 8 + 8 * 8)


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


_NOISY = """
import jax.numpy as jnp
print("on import")

def noisy():
    print("on call")
    def function(x):
        print("on trace")
        return x * 2
    return function, (jnp.ones(2),)

def leaves():
    def function(x):
        raise SystemExit(0)
    return function, (jnp.ones(2),)
"""


@pytest.mark.slow
def test_what_a_module_prints_stays_out_of_json_and_its_exit_is_said(tmp_path: Path) -> None:
    (tmp_path / "noisy_module.py").write_text(_NOISY)

    def gdp(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gdp", "inspect", f"python:noisy_module:{name}", "--json"]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    done = gdp("noisy")
    assert json.loads(done.stdout)["num_ops"] == 1
    assert [f"on {when}" in done.stderr for when in ("import", "call", "trace")] == [True] * 3
    done = gdp("leaves")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be traced by JAX: SystemExit: 0" in done.stderr


def test_a_function_before_inputs_of_torch_is_traced_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    made = "import torch\n\ndef mine():\n    return (lambda x: x @ x), (torch.ones(4, 4),)\n"
    (tmp_path / "torch_function_module.py").write_text(made)
    monkeypatch.syspath_prepend(tmp_path)
    graph = load("python:torch_function_module:mine")
    assert graph.op_types == ("Input", "matmul", "Output")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("M(), (x,), 3", "options must be a mapping, got int"),
        ("M(), (x,), {'kwargs': 3}", "option 'kwargs' must be a mapping, got int"),
        ("Same(), (x,), {'name': 'mine'}", "model 'mine' has no ops"),
    ],
)
def test_what_is_wrong_with_a_module_names_the_spec(
    returned: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    name = f"module_of_{len(returned)}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n\n\nclass M(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x + 1\n"
        "\n\nclass Same(torch.nn.Module):\n    def forward(self, x):\n        return None\n"
        f"\n\nx = torch.ones(2)\n\n\ndef made():\n    return {returned}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=message) as found:
        load(f"python:{name}:made")
    assert f"python:{name}:made" in str(found.value)


def test_arguments_of_the_function_stand_behind_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_module.py").write_text(
        "import jax.numpy as jnp\n\n\ndef made(layers=1, scale=1.0, twice=False, kind='add'):\n"
        "    def run(x):\n        for _ in range(layers * (2 if twice else 1)):\n"
        "            x = x + scale if kind == 'add' else x @ x\n        return x\n"
        "    return run, (jnp.ones((4, 4)),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = "python:asked_module:made"
    types = {
        asked: load(f"{spec}{asked}").op_types[1:-1]
        for asked in ("", "?layers=3", "?layers=2&twice=true&kind=dot&scale=0.5")
    }
    assert list(types.values()) == [("add",), ("add",) * 3, ("dot_general",) * 4]
    assert [path.name for path in source_files(f"{spec}?kind=a:b")] == ["asked_module.py"]


def test_named_inputs_may_stand_in_place_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "named_module.py").write_text(
        "import torch\n\n\nclass M(torch.nn.Module):\n"
        "    def forward(self, x, other=None):\n"
        "        return x if other is None else x @ other\n"
        "\n\nx = torch.ones(4, 4)\n\n\ndef made(third):\n"
        "    return M(), (x,), {'kwargs': {'other': x}} if third == 'kwargs' else {third: x}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for third in ("kwargs", "other"):
        assert "matmul" in load(f"python:named_module:made?third={third}").op_types
    with pytest.raises(ModelError, match="no option 'strange'"):
        load("python:named_module:made?third=strange")
