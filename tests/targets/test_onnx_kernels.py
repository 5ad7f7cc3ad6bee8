"""Plans for ONNX Runtime keep ops on the processor that its CUDA provider has no kernel of."""

from typing import Any

import pytest

import gdp
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph

CUDA, CPU = "t4", "cpu"


def row(kind: str, **attributes: Any) -> OpGraph:
    """An op between two products that only a GPU computes in time; its name is a glob."""
    return make_graph(
        "row", ["a", "op[0]*", "b"], ["MatMul", kind, "MatMul"], [(0, 4), (1, 4)],
        [(0, 1), (1, 2)], flop=[1e11, 1e9, 1e11], memory_traffic_bytes=[1e6] * 3, source="onnx",
        detail=[OpDetail(), OpDetail(attributes=attributes), OpDetail()],
    )  # fmt: skip


def placed(graph: OpGraph, cluster: str, target: str | None = "onnxruntime") -> gdp.Result:
    search = gdp.Search(seconds=None, evaluations=50, simplicity=0.0)
    return gdp.place(graph, cluster, target=target, costs="datasheet", search=search)


@pytest.mark.parametrize(
    ("kind", "attributes", "on"),
    [
        ("ArgMax", {"select_last_index": 1}, CPU),
        ("ArgMin", {"select_last_index": 0}, CUDA),
        ("ArgMax", {"axis": 1}, CUDA),
        ("NonMaxSuppression", {}, CPU),
        ("Relu", {}, CUDA),
        ("ConvTranspose", {"pads": (0, 1, 1, 1)}, CPU),
        ("ConvTranspose", {"pads": (0, 1, 0, 1), "auto_pad": "NOTSET"}, CUDA),
        ("ConvTranspose", {"auto_pad": "SAME_LOWER"}, CPU),
        ("LSTM", {"hidden_size": 8}, CUDA),
        ("LSTM", {"input_forget": 1}, CPU),
        ("GRU", {"linear_before_reset": 1}, CUDA),
        ("GRU", {"linear_before_reset": 0}, CPU),
        ("RNN", {"clip": 3.0}, CPU),
    ],
)
def test_an_op_without_a_kernel_is_the_processors(
    kind: str, attributes: dict[str, Any], on: str
) -> None:
    result = placed(row(kind, **attributes), "cpu+t4")
    of = result.placement.device_map()
    assert (of["a"], of["op[0]*"], of["b"]) == (CUDA, on, CUDA)
    assert any("no kernel of op[0]*" in note for note in result.notes) == (on == CPU)
    assert sum(note.startswith("not checked: element types") for note in result.notes) == 1


def test_what_is_not_checked_is_said() -> None:
    graph = row("ArgMax", select_last_index=1)
    assert placed(graph, "cpu+t4", None).placement.device_map()["op[0]*"] == CUDA
    alone = placed(graph, "2xt4")
    assert any("the processor computes what has none" in note for note in alone.notes)
    other = placed(graph, "cpu+rx7900xtx")
    assert any(n.startswith("not checked: kernels") and "rx7900xtx" in n for n in other.notes)
    assert not [n for n in placed(graph, "2xcpu-core").notes if "kernel" in n]
