"""A spec belongs to the first importer that matches it, and an importer is a row of the table."""

from pathlib import Path

import pytest

from gdp.errors import ArgumentError
from gdp.graph.op_graph import make_graph
from gdp.importers import table
from gdp.importers.table import Importer, importer_of
from gdp.models import inspect_model, load, source_files, with_options


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
    assert with_options("m.gguf", sequence=4, decode=True) == "m.gguf?sequence=4&decode"
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
