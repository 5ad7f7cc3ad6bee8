"""A specification of a model: its path may hold question marks, its options are given once."""

from pathlib import Path

import pytest
from gguf_models import write_gguf

import gdp
from gdp.base.errors import ModelError
from gdp.graph.file import save_graph
from gdp.graph.op_graph import make_graph
from gdp.importers.spec import ModelSpec
from gdp.question.models import source_files


@pytest.mark.parametrize("spec", ["hf:x?batch=1&batch=2", "m.gguf?decode&sequence=4&decode"])
def test_an_option_that_is_given_twice_is_refused(spec: str) -> None:
    """In one sentence, wherever the model is read."""
    name = "batch" if "batch" in spec else "decode"
    for read in (ModelSpec.of, gdp.load, lambda text: gdp.place(text, "2xt4-pcie4")):
        with pytest.raises(ModelError, match=rf"^'.*' gives the option '{name}' 2 times, not once"):
            read(spec)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ModelError, match=r"must look like hf:PATH.*, got 'bacth', 'x y'$"):
        gdp.load("hf:x?x%20y=1&bacth=2")


def test_names_of_options_are_written_as_they_are_read() -> None:
    spec = ModelSpec("m.gguf", {"a&b": "c d&", "e": ""})
    assert ModelSpec.of(str(spec)) == spec


def test_a_file_may_have_question_marks_in_its_name(tmp_path: Path) -> None:
    """Of a name that several files begin, the longest one is meant."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    path = write_gguf(tmp_path / "why?me?.gguf")
    (tmp_path / "why").touch()
    spec = ModelSpec.of(f"{path}?batch=2&decode")
    assert spec == ModelSpec(str(path), {"batch": "2", "decode": ""})
    assert ModelSpec.of(str(spec)) == spec
    graph = gdp.load(path, sequence=4)
    assert graph.digest == gdp.load(f"{path}?sequence=4").digest
    assert source_files(f"{path}?sequence=4") == [path]
    graph = make_graph("small", ["a"], ["Relu"], [(0, 4)], [])
    save_graph(graph, tmp_path / "a?b=1&b=2.json")
    assert gdp.load(tmp_path / "a?b=1&b=2.json").op_names == ("a",)
