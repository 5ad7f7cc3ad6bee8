"""A small file cannot ask for more memory or time than it is worth."""

import math
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from onnx_tiny import BOOL, FLOAT, INT64, ints, model, node, save, value, zeros

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx import normalise, shapes
from gdp.importers.onnx.model import load_onnx, load_onnx_model

SIDE = 2000  # two axes of it are 16 MB of float32
SHORT = 300  # three axes of it are 108 MB
MOST_BYTES = 8 << 20


def constant_node(op_type: str, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A node over constants, and a Relu so that there is something to place."""
    nodes = [node(op_type, list(inputs), ["big"], name="big"), node("Relu", ["x"], ["r"])]
    return model(nodes, {"x": [2]}, ["r", "big"], inputs)


def axis(rank: int, at: int, length: int = SIDE, dtype: type = np.float32) -> np.ndarray:
    """Ones along one axis of a tensor of this rank."""
    return np.ones([length if i == at else 1 for i in range(rank)], dtype)


@pytest.mark.parametrize(
    ("op_type", "inputs", "elements"),
    [
        ("Where", [axis(3, i, SHORT, (bool, int, int)[i]) for i in range(3)], SHORT**3),
        *((op, [axis(3, i, SHORT) for i in range(3)], SHORT**3) for op in ("Sum", "Min", "Max")),
        *((op, [axis(2, 0), axis(2, 1)], SIDE**2) for op in ("Add", "Mul", "Div", "Less", "Pow")),
        ("Expand", [axis(2, 0), ints(SIDE, SIDE)], SIDE**2),
        ("Expand", [axis(2, 0), ints(1, SIDE)], SIDE**2),  # the shape alone is small
        ("Tile", [axis(1, 0), ints(SIDE)], SIDE**2),
        ("ConstantOfShape", [ints(SIDE, SIDE)], SIDE**2),
        ("Gather", [axis(2, 1), np.zeros((SIDE,), np.int64)], SIDE**2),
        ("Range", [ints(0).reshape(()), ints(SIDE**2).reshape(()), ints(1).reshape(())], SIDE**2),
        # Nothing comes out, but the first two inputs alone are large.
        ("Sum", [axis(3, 0), axis(3, 1), zeros(1, 1, 0)], 0),
        ("Tile", [axis(2, 0), ints(SIDE, 0)], 0),
    ],
)
def test_constants_are_measured_before_they_are_computed(
    tmp_path: Path, op_type: str, inputs: list[np.ndarray], elements: int
) -> None:
    path = save(tmp_path, constant_node(op_type, {f"c{i}": c for i, c in enumerate(inputs)}))
    load_onnx(path)  # caches of libraries fill
    tracemalloc.start()
    try:
        graph = load_onnx(path)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < MOST_BYTES
    shape = shape_of(graph, "big")
    assert math.prod(shape) == elements


def shape_of(graph: OpGraph, tensor: str) -> tuple[int, ...]:
    op = int(graph.producer[graph.tensor_names.index(tensor)])
    return graph.detail[op].output_shapes[0]


@pytest.mark.parametrize("length", [2048, 2049, 100_000])
def test_a_range_of_any_length_is_shaped(tmp_path: Path, length: int) -> None:
    """Positions 0, 1, ... of a sequence whose length is read from the input's shape."""
    nodes = [
        node("Shape", ["ids"], ["shape"], start=1, end=2),
        node("Squeeze", ["shape"], ["length"]),
        node("Range", ["zero", "length", "one"], ["positions"]),
        node("Cast", ["positions"], ["p"], to=FLOAT),
        node("Add", ["ids", "p"], ["y"], name="add"),
    ]
    weights = {"zero": np.array(0), "one": np.array(1)}
    path = save(tmp_path, model(nodes, {"ids": ["batch", "seq"]}, ["y"], weights))
    graph = load_onnx(path, {"batch": 1, "seq": length})
    assert shape_of(graph, "y") == (1, length)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_sequence_of_a_million_rows_is_one_run(tmp_path: Path, keepdims: int) -> None:
    count = 1 << 20
    nodes = [
        node("SplitToSequence", ["x"], ["rows"], keepdims=keepdims),
        node("SequenceAt", ["rows", "last"], ["row"], name="at"),
        node("ConcatFromSequence", ["rows"], ["y"], axis=0, name="join"),
    ]
    path = save(tmp_path, model(nodes, {"x": [count, 3]}, ["row", "y"], {"last": np.array(-1)}))
    load_onnx(path)
    tracemalloc.start()
    try:
        imported = load_onnx_model(path)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < MOST_BYTES
    assert shape_of(imported.graph, "rows") == (count,)
    assert shape_of(imported.graph, "row") == ((1, 3) if keepdims else (3,))
    assert shape_of(imported.graph, "y") == ((count, 3) if keepdims else (3 * count,))


def test_a_sequence_keeps_its_order_when_runs_are_split(tmp_path: Path) -> None:
    """Rows of 2, 2, 1; a row of 5 put at 1; the first taken out: 5, 2, 1."""
    places = {"two": np.array(2), "one": np.array(1), "zero": np.array(0), "end": np.array(-1)}
    nodes = [
        node("SplitToSequence", ["x", "two"], ["s"]),
        node("SequenceInsert", ["s", "five", "one"], ["t"]),
        node("SequenceErase", ["t", "zero"], ["u"]),
        *(node("SequenceAt", ["u", at], [f"at_{at}"]) for at in ("zero", "one", "end")),
        node("ConcatFromSequence", ["u"], ["y"], axis=0),
    ]
    outputs = ["at_zero", "at_one", "at_end", "y"]
    path = save(tmp_path, model(nodes, {"x": [5, 3], "five": [5, 3]}, outputs, places))
    graph = load_onnx(path)
    assert [shape_of(graph, name)[0] for name in outputs] == [5, 2, 1, 8]


def test_a_map_over_a_long_sequence_visits_its_body_once_for_each_kind(tmp_path: Path) -> None:
    body = helper.make_graph(
        [node("Relu", ["row"], ["out"])], "body", [value("row", None)], [value("out", None)]
    )
    nodes = [
        node("SplitToSequence", ["x", "two"], ["rows"]),
        node("SequenceMap", ["rows"], ["mapped"], body=body, name="map"),
        node("ConcatFromSequence", ["mapped"], ["y"], axis=0),
    ]
    rows = 100_001
    path = save(tmp_path, model(nodes, {"x": [rows, 3]}, ["y"], {"two": np.array(2)}))
    graph = load_onnx(path)
    assert shape_of(graph, "y") == (rows, 3)
    assert graph.flop[graph.op_index["map"]] == rows * 3


def growing_loop(depth: int, state: str) -> onnx.NodeProto:
    """`depth` loops within each other; the innermost makes its state longer by one at each trip."""
    inside, go, made = f"s{depth}", f"go{depth}", f"m{depth}"
    step = (
        growing_loop(depth - 1, inside)
        if depth > 1
        else node("Concat", [inside, "one_more"], ["m0"], axis=0)
    )
    body = helper.make_graph(
        [step, node("Identity", [go], [f"{go}_on"])],
        f"body{depth}",
        [value(f"i{depth}", [], INT64), value(go, [], BOOL), value(inside, None)],
        [value(f"{go}_on", [], BOOL), value(step.output[0], None)],
    )
    return node("Loop", ["trips", "", state], [made], body=body, name=f"loop{depth}")


def test_loops_within_loops_are_traced_for_a_bounded_number_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body is visited again while its state grows; four loops of 64 trips are 64**4 visits."""
    monkeypatch.setattr(shapes, "TRACED_NODES", 500)
    visits: list[str] = []
    visit = shapes.Facts._visit

    def counted(facts: shapes.Facts, visited: ir.Node) -> None:
        visits.append(visited.op_type)
        visit(facts, visited)

    monkeypatch.setattr(shapes.Facts, "_visit", counted)
    weights = {"trips": np.array(64), "one_more": zeros(1)}
    load_onnx(save(tmp_path, model([growing_loop(4, "x")], {"x": [1]}, ["m4"], weights)))
    assert 500 < len(visits) < 600


def test_functions_that_double_at_every_call_are_refused(tmp_path: Path) -> None:
    depth = 60
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    inner = [node("Relu", ["a"], ["b"])]
    functions = []
    for level in range(depth):
        functions.append(helper.make_function("own", f"f{level}", ["a"], ["b"], inner, opsets))
        inner = [
            node(f"f{level}", ["a"], ["m"], domain="own"),
            node(f"f{level}", ["m"], ["b"], domain="own"),
        ]
    called = [node(f"f{depth - 1}", ["x"], ["y"], domain="own")]
    made = model(called, {"x": [1]}, ["y"], functions=functions, domains={"own": 1})
    with pytest.raises(ModelError, match=r"would become 5.8e\+17 nodes"):
        load_onnx(save(tmp_path, made))


def test_functions_are_counted_with_their_subgraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call, in each branch of an If, of a function of three nodes: seven with the If."""
    opsets = [helper.make_opsetid("", 17)]
    three = [node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["c"]), node("Relu", ["c"], ["d"])]
    function = helper.make_function("own", "three", ["a"], ["d"], three, opsets)
    branch = [
        helper.make_graph([node("three", ["x"], [o], domain="own")], o, [], [value(o, [1])])
        for o in ("left", "right")
    ]
    nodes = [node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1])]
    inputs = {"x": [1], "c": (BOOL, [])}
    path = save(tmp_path, model(nodes, inputs, ["y"], functions=[function], domains={"own": 1}))
    monkeypatch.setattr(normalise, "MAX_NODES", 7)
    assert load_onnx(path).num_ops == 4
    monkeypatch.setattr(normalise, "MAX_NODES", 6)
    with pytest.raises(ModelError, match="functions cannot be inlined: they would become"):
        load_onnx(path)


def test_subgraphs_as_deep_as_protobuf_reads_are_read(tmp_path: Path) -> None:
    step = node("Relu", ["x"], ["y0"])
    for level in range(1, 26):
        branches = [
            helper.make_graph([inner], "branch", [], [value(inner.output[0], [1])])
            for inner in (step, node("Abs", ["x"], [f"a{level}"]))
        ]
        made = onnx.NodeProto(op_type="If", input=["c"], output=[f"y{level}"])
        for name, branch in zip(("then_branch", "else_branch"), branches, strict=True):
            made.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g.CopyFrom(branch)
        step = made
    path = save(tmp_path, model([step], {"x": [1], "c": (BOOL, [])}, ["y25"]))
    assert load_onnx(path).num_ops == 4


def deep_bytes(depth: int, innermost: bytes) -> bytes:
    """A graph, in an attribute of a node of a graph, and so on: more than protobuf would write."""
    message = innermost
    for field in [7, *([1, 5, 6] * depth)][::-1]:
        size, length = len(message), b""
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        message = bytes([field << 3 | 2]) + length + bytes([size]) + message
    return b"\x08\x08" + message


@pytest.mark.parametrize("padded", [False, True])  # longer messages are looked into
@pytest.mark.parametrize("depth", [50, 5000])
def test_deeper_subgraphs_are_one_clear_line(tmp_path: Path, depth: int, padded: bool) -> None:
    path = tmp_path / "deep.onnx"
    doc_string = b"\x52\xa0\x8d\x06" + b"d" * 100_000
    path.write_bytes(deep_bytes(depth, doc_string if padded else b""))
    for weights in (False, True):
        with pytest.raises(ModelError, match=r"deep.onnx: is nested too deeply: protobuf decodes"):
            load_onnx_model(path, weights=weights)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "-" * 100_000 + "1", "a." * 100_000 + "b", "{[]: 1}", "{{1}}", "{1: 2}", "[1]"],
)
def test_scopes_that_nest_or_are_no_list_are_no_scopes(tmp_path: Path, text: str) -> None:
    made = model([node("Relu", ["x"], ["y"], name="relu")], {"x": [1]}, ["y"])
    made.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=text)
    assert load_onnx(save(tmp_path, made)).scope[1] == ""


@pytest.mark.parametrize("text", ["9**9**9**9", "9**(9**9)", "2**99999999", "((9**9)**9)**9"])
def test_a_dimension_is_not_computed_when_it_is_a_tower(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, model([node("Relu", ["x"], ["y"])], {"x": [text, "batch"]}, ["y"]))
    graph = load_onnx(path, {text: 3, "batch": 2})
    assert shape_of(graph, "y") == (3, 2)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({}, "lacks its attribute 'num_scan_inputs'"),
        ({"num_scan_inputs": 1, "scan_input_axes": [5]}, r"scan_input_axes \[5\] are not one axis"),
        ({"num_scan_inputs": 1, "scan_input_axes": [0, 0]}, "are not one axis of each"),
        ({"num_scan_inputs": 1, "scan_output_axes": [0, 0]}, "does not fit its inputs"),
        ({"num_scan_inputs": 7}, "does not fit its inputs|is given 2 tensors"),
    ],
)
def test_a_malformed_scan_is_one_line(tmp_path: Path, attributes: dict, said: str) -> None:
    body = helper.make_graph(
        [node("Add", ["s", "e"], ["t"]), node("Mul", ["e", "e"], ["o"])],
        "body",
        [value("s", [4]), value("e", [4])],
        [value("t", [4]), value("o", [4])],
    )
    nodes = [node("Scan", ["i", "x"], ["f", "y"], body=body, name="scan", **attributes)]
    path = save(tmp_path, model(nodes, {"x": [2, 4]}, ["y"], {"i": zeros(4)}))
    with pytest.raises(ModelError, match=rf"node 'scan' \(Scan\).*({said})") as caught:
        load_onnx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            [node("SplitToSequence", ["x", "c"], ["s"], name="op"),
             node("ConcatFromSequence", ["s"], ["y"], axis=0)],
            r"node 'op' \(SplitToSequence\) does not fit its inputs: cannot convert float infinity",
        ),
        (
            [node("SequenceConstruct", ["x"], ["s"]),
             node("SequenceAt", ["s", "c"], ["y"], name="op")],
            r"node 'op' \(SequenceAt\) does not fit its inputs: cannot convert float infinity",
        ),
    ],
)  # fmt: skip
def test_a_constant_that_is_no_number_is_one_line(
    tmp_path: Path, nodes: list[onnx.NodeProto], said: str
) -> None:
    constant = np.array([np.inf], np.float32)
    path = save(tmp_path, model(nodes, {"x": [4]}, ["y"], {"c": constant}))
    with pytest.raises(ModelError, match=said):
        load_onnx(path)
