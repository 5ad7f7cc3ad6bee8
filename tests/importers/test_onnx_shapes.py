"""Shapes of tiny models: open dimensions, shape arithmetic, control flow, external data."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_tiny import BOOL, FLOAT, INT64, external, ints, model, node, save, value, zeros

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx, load_onnx_model


def output_shapes(graph: OpGraph) -> list[tuple[int, ...]]:
    return [
        detail.input_shapes[0]
        for kind, detail in zip(graph.op_types, graph.detail, strict=True)
        if kind == "Output"
    ]


def relu(folder: Path, shape: list[int | str | None], **options: object) -> OpGraph:
    made = model([node("Relu", ["x"], ["y"], name="relu")], {"x": shape}, ["y"])
    return load_onnx(save(folder, made), **options)


def test_a_symbol_is_bound_wherever_it_stands(tmp_path: Path) -> None:
    made = model(
        [node("Add", ["a", "b"], ["y"], name="add")],
        {"a": ["batch", 3], "b": ["batch", 1]}, ["y"],
    )  # fmt: skip
    graph = load_onnx(save(tmp_path, made), {"batch": 8})
    assert output_shapes(graph) == [(8, 3)]
    assert graph.tensor_bytes.tolist() == [4 * 24, 4 * 8, 4 * 24]


def test_an_expression_of_bound_symbols_is_computed(tmp_path: Path) -> None:
    assert output_shapes(relu(tmp_path, ["2*n + 1", "m"], dims={"n": 3, "m": 0})) == [(7, 0)]


def test_an_expression_can_be_bound_as_it_stands(tmp_path: Path) -> None:
    shape = relu(tmp_path, ["past + new"], dims={"past + new": 5})
    assert output_shapes(shape) == [(5,)]


@pytest.mark.parametrize("unnamed", [None, -1])
def test_a_dimension_without_a_name_is_bound_by_tensor_and_axis(
    tmp_path: Path, unnamed: int | None
) -> None:
    assert output_shapes(relu(tmp_path, [unnamed, 2], dims={"x:0": 7})) == [(7, 2)]


def test_an_open_dimension_is_named_with_the_flags_that_bind_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'x'.*\[batch, \?, 4\].*--dim batch=VALUE --dim x:1=V"):
        relu(tmp_path, ["batch", None, 4])


def test_an_unknown_dimension_name_lists_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no open dimension 'btach'.*are: batch, seq"):
        relu(tmp_path, ["batch", "seq"], dims={"btach": 1, "seq": 2})


def test_a_negative_size_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch"):
        relu(tmp_path, ["batch"], dims={"batch": -1})


def test_an_input_that_nothing_reads_may_stay_open(tmp_path: Path) -> None:
    made = model([node("Relu", ["x"], ["y"], name="relu")], {"x": [2], "unused": ["batch"]}, ["y"])
    assert load_onnx(save(tmp_path, made)).op_names == ("input:x", "relu", "output:y")


def heads_model() -> onnx.ModelProto:
    """x [batch, seq, 12] to [batch, 3 heads, seq, 4], by a chain as PyTorch exports it."""
    weights = {
        "zero": ints(0), "one": ints(1), "three": ints(3), "minus": ints(-1), "all": ints(4),
        "end": ints(1 << 62), "scale": np.array([2.0], np.float32),
    }  # fmt: skip
    one = helper.make_tensor("one", INT64, [1], [1])
    nodes = [
        node("Shape", ["x"], ["s"], name="shape"),
        node("Gather", ["s", "zero"], ["batch"], name="g0"),
        node("Slice", ["s", "one", "all", "zero"], ["rest"], name="rest"),
        node("Gather", ["rest", "zero"], ["seq"], name="g1"),
        node("ReduceProd", ["s"], ["total"], name="prod"),
        node("Mul", ["batch", "seq"], ["rows"], name="rows"),
        node("Div", ["total", "rows"], ["width"], name="div"),
        node("Div", ["width", "three"], ["size"], name="size"),
        node("Concat", ["batch", "seq", "three", "size"], ["target"], axis=0, name="concat"),
        node("Equal", ["target", "minus"], ["guard"], name="equal"),
        node("ConstantOfShape", ["four"], ["ones"], name="ones", value=one),
        node("Where", ["guard", "ones", "target"], ["safe"], name="where"),
        node("Reshape", ["x", "safe"], ["split"], name="split"),
        node("Transpose", ["split"], ["y"], perm=[0, 2, 1, 3], name="swap"),
        # A position per token: Range over the sequence, cast and added.
        node("Squeeze", ["seq"], ["length"], name="squeeze"),
        node("Range", ["from", "length", "step"], ["positions"], name="range"),
        node("Cast", ["positions"], ["floats"], to=FLOAT, name="cast"),
        node("Unsqueeze", ["floats", "one"], ["column"], name="column"),
        node("Add", ["y", "column"], ["z"], name="add"),
    ]
    weights |= {"four": ints(4), "from": np.int64(0), "step": np.int64(1)}
    return model(nodes, {"x": ["batch", "seq", 12]}, ["z"], weights)


def test_shape_arithmetic_is_computed_and_leaves_no_ops(tmp_path: Path) -> None:
    found = load_onnx_model(save(tmp_path, heads_model()), {"batch": 2, "seq": 5})
    assert found.graph.op_names == ("input:x", "split", "swap", "add", "output:z")
    assert output_shapes(found.graph) == [(2, 3, 5, 4)]
    # What the added column hangs on is a constant that the op holds: 5 floats.
    assert found.graph.weight_bytes[found.graph.op_index["add"]] == 20


def test_a_shape_that_depends_on_data_names_the_first_open_tensor(tmp_path: Path) -> None:
    made = model(
        [node("NonZero", ["x"], ["where"], name="find"), node("Abs", ["where"], ["y"], name="abs")],
        {"x": [4]}, ["y"],
    )  # fmt: skip
    path = save(tmp_path, made)
    with pytest.raises(
        ModelError,
        match=r"'where', made by node 'find' \(NonZero\).*\[1, \?\].*--dim where:1=VALUE",
    ):
        load_onnx(path)
    assert output_shapes(load_onnx(path, {"where:1": 3})) == [(1, 3)]


def test_a_declared_shape_fills_what_inference_leaves_open(tmp_path: Path) -> None:
    nodes = [
        node("NonZero", ["x"], ["where"], name="find"),
        node("Abs", ["where"], ["y"], name="abs"),
    ]
    info = [value("where", [1, "found"], INT64)]
    path = save(tmp_path, model(nodes, {"x": [4]}, ["y"], value_info=info))
    assert output_shapes(load_onnx(path, {"found": 2})) == [(1, 2)]
    with pytest.raises(ModelError, match="--dim found=VALUE"):
        load_onnx(path)


def test_a_shape_operand_in_a_missing_file_is_named(tmp_path: Path) -> None:
    made = model([node("Reshape", ["x", "to"], ["y"], name="reshape")], {"x": [6]}, ["y"])
    made.graph.initializer.append(external("to", INT64, [2], "shapes.bin"))
    path = save(tmp_path, made)
    with pytest.raises(ModelError, match=r"'y'.*'to' is missing: it lies in 'shapes.bin'"):
        load_onnx(path)
    (tmp_path / "shapes.bin").write_bytes(ints(2, 3).tobytes())
    assert output_shapes(load_onnx(path)) == [(2, 3)]


def test_weights_in_missing_files_are_known_by_shape(tmp_path: Path) -> None:
    made = model(
        [node("MatMul", ["x", "w"], ["y"], name="mul")],
        {"x": (TensorProto.BFLOAT16, [2, 3])}, ["y"],
    )  # fmt: skip
    made.graph.initializer.append(external("w", TensorProto.BFLOAT16, [3, 50_000], "none.data"))
    found = load_onnx_model(save(tmp_path, made))
    assert found.graph.weight_bytes[found.graph.op_index["mul"]] == 300_000


def branch(name: str, nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(output, None)])


def if_model(condition: np.ndarray | None) -> onnx.ModelProto:
    """Then: x @ w [4, 4] (2*2*4*4 = 64 FLOPs). Else: relu(x) (8 FLOPs)."""
    then = branch("then", [node("MatMul", ["x", "w"], ["a"])], "a")
    other = branch("else", [node("Relu", ["x"], ["b"])], "b")
    nodes = [node("If", ["c"], ["y"], name="choose", then_branch=then, else_branch=other)]
    weights = {"w": zeros(4, 4)} | ({} if condition is None else {"c": condition})
    inputs = {"x": [2, 4]} | ({"c": (BOOL, [])} if condition is None else {})
    return model(nodes, inputs, ["y"], weights)


@pytest.mark.parametrize(("condition", "flop"), [(True, 64), (False, 8)])
def test_if_with_a_known_condition_costs_its_branch(
    tmp_path: Path, condition: bool, flop: int
) -> None:
    found = load_onnx_model(save(tmp_path, if_model(np.array(condition))))
    graph = found.graph
    op = graph.op_index["choose"]
    assert graph.flop[op] == flop
    assert not found.assumptions
    # The value that a body reads from outside is a use of the op.
    assert ("input:x", "choose") in named_edges(graph)


def test_if_with_an_open_condition_costs_the_dearer_branch_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = load_onnx_model(save(tmp_path, if_model(None)))
    op = found.graph.op_index["choose"]
    assert found.graph.flop[op] == 64
    assert found.graph.weight_bytes[op] == 64  # w, read inside the branch
    assert found.graph.memory_traffic_bytes[op] == 4 * (8 + 16 + 8)
    assert "then branch" in found.assumptions[0]
    assert "then branch" in caplog.text


def named_edges(graph: OpGraph) -> set[tuple[str, str]]:
    src, dst = graph.edges
    return {(graph.op_names[i], graph.op_names[j]) for i, j in zip(src, dst, strict=True)}


def loop_model(trips: np.ndarray | None, *, grow: bool = False) -> onnx.ModelProto:
    """Per trip: h = h @ w [4, 4], 2*2*4*4 = 64 FLOPs on [2, 4]; h is also stacked. Growing: the
    rows of h double after the product."""
    body_nodes = [node("MatMul", ["h", "w"], ["g"]), node("Identity", ["go"], ["still"])]
    if grow:
        body_nodes += [node("Concat", ["g", "g"], ["h2"], axis=0)]
    else:
        body_nodes += [node("Identity", ["g"], ["h2"])]
    body = helper.make_graph(
        [*body_nodes, node("ReduceSum", ["h2"], ["total"], keepdims=0)],
        "body",
        [value("i", [], INT64), value("go", [], BOOL), value("h", None)],
        [value("still", [], BOOL), value("h2", None), value("total", [])],
    )
    weights = {"w": zeros(4, 4), "yes": np.array(True)}
    inputs: dict[str, object] = {"x": [2, 4]}
    if trips is None:
        inputs["n"] = (INT64, [])
    else:
        weights["n"] = trips
    loop = node("Loop", ["n", "yes", "x"], ["last", "totals"], name="loop", body=body)
    return model([loop], inputs, ["last", "totals"], weights)


def test_a_loop_costs_its_body_times_its_constant_trip_count(tmp_path: Path) -> None:
    """5 trips of 64 (product) + 8 (sum) FLOPs."""
    found = load_onnx_model(save(tmp_path, loop_model(np.array(5))))
    op = found.graph.op_index["loop"]
    assert found.graph.flop[op] == 5 * (64 + 8)
    assert found.graph.weight_bytes[op] == 64 + 8 + 1  # w, the trip count and the condition
    assert output_shapes(found.graph) == [(2, 4), (5,)]
    assert not found.assumptions


def test_a_loop_whose_state_grows_is_followed(tmp_path: Path) -> None:
    """Rows 2, 4, 8 enter the product; 4, 8, 16 leave: 32 FLOPs and 4 sums per row."""
    graph = load_onnx(save(tmp_path, loop_model(np.array(3), grow=True)))
    assert graph.flop[graph.op_index["loop"]] == 32 * (2 + 4 + 8) + 4 * (4 + 8 + 16)
    assert output_shapes(graph) == [(16, 4), (3,)]


def test_a_loop_that_never_runs_costs_nothing(tmp_path: Path) -> None:
    graph = load_onnx(save(tmp_path, loop_model(np.array(0))))
    assert graph.flop[graph.op_index["loop"]] == 0
    assert output_shapes(graph) == [(2, 4), (0,)]


def test_an_open_trip_count_is_assumed_and_said_or_given(tmp_path: Path) -> None:
    path = save(tmp_path, loop_model(None))
    once = load_onnx_model(path)
    assert once.graph.flop[once.graph.op_index["loop"]] == 72
    assert "'loop' (Loop): the trip count depends on data" in once.assumptions[0]
    given = load_onnx_model(path, trips=7)
    assert given.graph.flop[given.graph.op_index["loop"]] == 7 * 72
    assert output_shapes(given.graph) == [(2, 4), (7,)]
    assert not given.assumptions


def test_a_scan_costs_its_body_per_step(tmp_path: Path) -> None:
    """6 steps of h = h + x[t] on 4 numbers; the sums are stacked along a new last axis."""
    body = helper.make_graph(
        [node("Add", ["h", "x"], ["h2"]), node("Neg", ["h2"], ["out"])],
        "body",
        [value("h", [4]), value("x", [4])],
        [value("h2", [4]), value("out", [4])],
    )
    scan = node(
        "Scan", ["h0", "xs"], ["last", "all"], name="scan", body=body,
        num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[-1],
    )  # fmt: skip
    made = model([scan], {"h0": [4], "xs": [4, 6]}, ["last", "all"])
    graph = load_onnx(save(tmp_path, made))
    assert graph.flop[graph.op_index["scan"]] == 6 * (4 + 4)
    assert output_shapes(graph) == [(4,), (4, 6)]


def test_sequences_are_followed_tensor_by_tensor(tmp_path: Path) -> None:
    """[6, 4] split in 1, 2 and 3 rows; the second piece, and all of them joined again."""
    nodes = [
        node("SplitToSequence", ["x", "sizes"], ["pieces"], axis=0, name="split"),
        node("SequenceAt", ["pieces", "one"], ["second"], name="at"),
        node("ConcatFromSequence", ["pieces"], ["joined"], axis=0, name="join"),
    ]
    weights = {"sizes": ints(1, 2, 3), "one": np.int64(1)}
    graph = load_onnx(save(tmp_path, model(nodes, {"x": [6, 4]}, ["second", "joined"], weights)))
    assert output_shapes(graph) == [(2, 4), (6, 4)]


def test_operators_of_the_runtime_need_no_declared_shapes(tmp_path: Path) -> None:
    """A decoder step as ONNX Runtime GenAI exports it: 2 tokens after 5 cached ones."""
    nodes = [
        node("SimplifiedLayerNormalization", ["x", "gamma"], ["n"], name="norm", axis=-1),
        node(
            "MatMulNBits", ["n", "packed", "scales"], ["qkv"], name="qkv",
            domain="com.microsoft", K=32, N=64, bits=4, block_size=32,
        ),
        node(
            "GroupQueryAttention", ["qkv", "", "", "past_k", "past_v", "seqlens", "total"],
            ["a", "present_k", "present_v"], name="gqa", domain="com.microsoft",
            num_heads=4, kv_num_heads=2,
        ),
    ]  # fmt: skip
    weights = {
        "gamma": zeros(32), "packed": np.zeros((64, 1, 16), np.uint8), "scales": zeros(64),
        "total": np.array(7, np.int32),
    }  # fmt: skip
    inputs = {
        "x": [1, 2, 32], "past_k": [1, 2, 5, 8], "past_v": [1, 2, 5, 8],
        "seqlens": (TensorProto.INT32, [1]),
    }  # fmt: skip
    made = model(
        nodes, inputs, ["a", "present_k", "present_v"], weights, domains={"com.microsoft": 1}
    )
    graph = load_onnx(save(tmp_path, made))
    assert output_shapes(graph) == [(1, 2, 32), (1, 2, 7, 8), (1, 2, 7, 8)]
    # 4 heads, 2 queries, 7 keys, head size 8.
    assert graph.flop[graph.op_index["gqa"]] == 4 * 2 * 7 * (16 + 1 + 5 + 16)


def test_a_custom_operator_is_estimated_on_request(tmp_path: Path) -> None:
    nodes = [
        node("Mystery", ["x"], ["m"], name="what", domain="my.ops"),
        node("Relu", ["m"], ["y"], name="relu"),
    ]
    path = save(tmp_path, model(nodes, {"x": [2, 3]}, ["y"], domains={"my.ops": 1}))
    with pytest.raises(ModelError, match=r"'what'.*'Mystery'.*domain 'my.ops'"):
        load_onnx(path)
    found = load_onnx_model(path, unknown="estimate")
    assert found.estimated == ("what",)
    assert "'m' is assumed to be like its first input, [2, 3]" in found.assumptions[0]
