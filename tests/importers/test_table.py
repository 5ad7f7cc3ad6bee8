"""A spec belongs to the first importer that matches it, and an importer is a row of the table."""

from pathlib import Path

import pytest
from gguf_models import write_gguf

import gdp
from gdp.base.errors import ArgumentError
from gdp.graph.op_graph import make_graph
from gdp.importers import table
from gdp.importers.table import Importer, importer_of
from gdp.question.models import inspect_model, load, source_files, with_options


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("python:package.module:function?path=model.onnx", "python"),
        ("hf:folder.onnx?decode", "hf"),
        ("onnx:light_squeezenet", "onnx"),
        ("a/model.onnx", "onnx"),
        ("a/model.gguf?sequence=4", "gguf"),
        ("a/graph.json.gz", "graph"),
        ("a/graph.gdpgraph", "graph"),
        ("a/model", "file"),
    ],
)
def test_a_spec_has_one_importer(spec: str, name: str) -> None:
    assert importer_of(spec).name == name


def test_options_are_of_the_importers_that_have_them() -> None:
    assert str(with_options("m.gguf", sequence=4, decode=True)) == "m.gguf?sequence=4&decode"
    with pytest.raises(ArgumentError, match=r"--sequence is for hf:CONFIG and \.gguf models, not"):
        with_options("m.onnx", sequence=4)
    with pytest.raises(ArgumentError, match=r"--quantize is for hf:CONFIG models, not for 'm.gguf"):
        with_options("m.gguf", quantize="nf4")


def test_an_importer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load`, `inspect_model` and `source_files` know no importer by name."""
    row = Importer(
        "toy", "toy:N", lambda spec: spec.startswith("toy:"),
        lambda spec, options: make_graph(spec, [*spec[4:]], ["Relu"] * len(spec[4:]), [], []),
        lambda spec: [Path(spec[4:])],
    )  # fmt: skip
    monkeypatch.setattr(table, "IMPORTERS", (row, *table.IMPORTERS))
    assert load("toy:abc").op_names == ("a", "b", "c")
    assert inspect_model("toy:abc")["num_ops"] == 3
    assert source_files("toy:abc") == [Path("abc")]


def test_every_importer_says_what_it_read(tmp_path: Path) -> None:
    """Whatever the ops are called: tanh is no primitive of JAX alone."""
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    assert gdp.trace(lambda x: jnp.tanh(x), jnp.zeros(3)).source == "jax"
    assert gdp.trace_torch(torch.nn.Tanh(), (torch.zeros(3),)).source == "torch"
    assert load("onnx:light_squeezenet").source == "onnx"
    path = write_gguf(tmp_path / "m.gguf", layers=1)
    assert load(f"{path}?sequence=4").source == "gguf"
    assert load(f"{path}?prompt=4&new=2").source == "gguf"
