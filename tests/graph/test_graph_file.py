"""Graph files come back as they went, and a bad one is refused in one line."""

import gzip
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.graph.file import load_graph, save_graph
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph
from gdp.graph.source import Source


def sample() -> OpGraph:
    detail = OpDetail(
        "bfloat16", ((2, 3), ()), ((2, 3),), {"axis": 1, "scale": 1.0, "pads": (0, 1), "mode": "x"}
    )
    return make_graph(
        "sample", ["in", "a", "b", "out"], ["Input", "MatMul", "Relu", "Output"],
        [(0, 10), (1, 20), (1, 0), (2, 2**40)], [(0, 1), (1, 2), (0, 2), (3, 3)],
        flop=[0.0, 1.5e18, 3.0, 0.0], memory_traffic_bytes=[0.0, 1 / 3, 2.0, 0.0],
        weight_bytes=[0, 7, 7, 0],
        weight_id=[0, 5, 5, 3], colocate=[0, -9, -9, 3], is_backward=[False, False, True, False],
        scope=["", "net/a", "net/b", ""], detail=[OpDetail(), detail, detail, OpDetail()],
        tensor_names=["x", "y", "z", "ü"],
    )  # fmt: skip


def assert_same(one: OpGraph, two: OpGraph) -> None:
    for key, value in vars(one).items():
        if key.startswith("_") or key in ("digest", "edges", "op_index", "is_io"):
            continue
        other = getattr(two, key)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, key
            assert np.array_equal(value, other), key
        else:
            assert value == other, key
    assert one.digest == two.digest


@pytest.mark.parametrize("name", ["g.json", "g.json.gz", "g.gdpgraph"])
def test_a_graph_comes_back_as_it_went(tmp_path: Path, name: str) -> None:
    save_graph(sample(), tmp_path / name)
    assert_same(sample(), load_graph(tmp_path / name))
    assert (tmp_path / name).read_bytes()[:2] == (b'{"' if name == "g.json" else b"\x1f\x8b")


VALUES = (1, 1.0, "1", (1, 2), (1.0, 2.0), 2**63 - 1, (-(2**63), 0))


def test_attributes_keep_their_types(tmp_path: Path) -> None:
    """1 and 1.0 are equal as keys of a table, but not the same attribute."""
    details = [OpDetail(attributes={"k": value}) for value in VALUES]
    names = list("abcdefg")
    save_graph(make_graph("g", names, names, [], [], detail=details), tmp_path / "g.json")
    loaded = [entry.attributes["k"] for entry in load_graph(tmp_path / "g.json").detail]
    given = [entry.attributes["k"] for entry in details]
    assert [(type(v), v) for v in loaded] == [(type(v), v) for v in given]
    assert [type(v) for v in loaded[4]] == [float, float]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2**63, (1, -(2**63) - 1)])
def test_what_no_file_can_hold_is_refused_when_it_is_saved(tmp_path: Path, value: Any) -> None:
    graph = make_graph("g", ["a"], ["a"], [], [], detail=[OpDetail(attributes={"k": value})])
    with pytest.raises(ModelError, match="op 'a': attribute 'k' is"):
        save_graph(graph, tmp_path / "g.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", get_args(Source))
def test_a_source_is_kept_whatever_the_ops_are_called(tmp_path: Path, source: Source) -> None:
    for types in (["MatMul", "Relu"], ["mm", "relu"], ["dot_general", "max"]):
        graph = make_graph("g", ["a", "b"], types, [(0, 4)], [(0, 1)], source=source)
        save_graph(graph, tmp_path / "g.json")
        assert load_graph(tmp_path / "g.json").source == source
        assert fuse(graph).graph.source == source
        assert graph.digest == make_graph("g", ["a", "b"], types, [(0, 4)], [(0, 1)]).digest


def test_equal_graphs_make_equal_files(tmp_path: Path) -> None:
    for name in ("one.gdpgraph", "two.gdpgraph"):
        save_graph(sample(), tmp_path / name)
    assert (tmp_path / "one.gdpgraph").read_bytes() == (tmp_path / "two.gdpgraph").read_bytes()


def test_ops_in_any_order_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(
        '{"gdp_graph":1,"name":"g","ops":["late","early"],"types":["X"],"type":[0,0],'
        '"tensor_bytes":[4],"producer":[1],"use_tensor":[0],"use_op":[0]}'
    )
    assert load_graph(path).op_names == ("early", "late")


def edited(tmp_path: Path, **changes: object) -> Path:
    save_graph(sample(), tmp_path / "g.json")
    document = json.loads((tmp_path / "g.json").read_text())
    document.update(changes)
    (tmp_path / "g.json").write_text(json.dumps(document))
    return tmp_path / "g.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"gdp_graph": 2}, "has graph schema 2, this gdp reads 1"),
        ({"producer": [0, 1, 1]}, "'producer' has 3 entries, 4 wanted"),
        ({"producer": [0, 1, 1, 9]}, "'producer' holds index 9, the largest that exists is 3"),
        ({"use_op": [1, 2, 2, -1]}, r"`int` >= 0"),
        ({"flop": [0, -1, 3, 0]}, r">= 0.0 - at `\$.flop\[1\]`"),
        ({"backward": [4]}, "'backward' holds index 4"),
        ({"detail": [0, 1, 1, 2]}, "'detail' holds index 2"),
        ({"producer": [0, 1, 1, 1], "use_op": [1, 2, 2, 1]}, "has a cycle .* op 'a'"),
        ({"ops": ["in", "a", "a", "out"]}, "op name 'a' appears twice"),
        ({"ops": "in"}, "Expected `array`"),
        ({"tensor_bytes": [10, 20, 0, 2**70]}, "int"),
        ({"source": "tf"}, r"Invalid enum value 'tf' - at `\$.source`"),
        ({"colocate": [0, 2**65, 1, 2]}, r"<= 4611686018427387904 - at `\$.colocate\[1\]`"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_graph(edited(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a graph file"),
        (b"\x08\x07not json", "is not a graph file"),
        (b'{"gdp_graph":1}', "missing required field"),
        (b"\xff\xfe", "is not a graph file"),
        (gzip.compress(b"{}" * 500, mtime=0)[:-12], "is a damaged gzip file"),
        (b"\x1f\x8b\x00\x00", "is a damaged gzip file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "g.json").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        load_graph(tmp_path / "g.json")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no graph file"):
        load_graph(tmp_path / "none.json")
    with pytest.raises(ModelError, match="cannot be read"):
        load_graph(tmp_path)


def test_a_graph_without_ops_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(
        '{"gdp_graph":1,"name":"g","ops":[],"types":[],"type":[],'
        '"tensor_bytes":[],"producer":[],"use_tensor":[],"use_op":[]}'
    )
    with pytest.raises(ModelError, match="no ops"):
        load_graph(path)
