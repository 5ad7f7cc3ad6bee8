"""What becomes an op, a weight or an edge; names; and that a prepared model computes the same."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_tiny import BOOL, INT8, INT64, ints, model, node, save, value, zeros
from test_onnx_shapes import heads_model, if_model, loop_model, named_edges

from gdp.importers.onnx.model import load_onnx, load_onnx_model, prepare
from gdp.question.models import summary


def test_weights_made_of_constants_belong_to_their_readers(tmp_path: Path) -> None:
    """An IR 3 model as the light ones: weights filled from shapes that are listed as inputs."""
    fill = helper.make_tensor("v", 1, [1], [0.5])
    nodes = [
        node("ConstantOfShape", ["w__shape"], ["w"], value=fill),
        node("ConstantOfShape", ["b__shape"], ["flat"], value=fill),
        node("Unsqueeze", ["flat"], ["b"], axes=[0]),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b"], ["y"]),
    ]
    weights = {"w__shape": ints(3, 4), "b__shape": ints(4), "dead": zeros(9)}
    inputs = {"dead": [9], "w__shape": (INT64, [2]), "x": [2, 3], "b__shape": (INT64, [1])}
    made = model(nodes, inputs, ["y"], weights, opset=9, ir_version=3)
    found = load_onnx_model(save(tmp_path, made))
    graph = found.graph
    assert graph.op_names == ("input:x", "h", "y", "output:y")
    assert graph.op_types == ("Input", "MatMul", "Add", "Output")
    assert graph.weight_bytes.tolist() == [0, 48, 16, 0]
    assert graph.memory_traffic_bytes.tolist() == [0, 24 + 48 + 32, 32 + 16 + 32, 0]
    assert found.weight_nodes == ("w", "flat", "b")
    assert [value.name for value in found.model.graph.inputs] == ["x"]


def test_tied_weights_share_an_id_and_scalars_do_not_tie(tmp_path: Path) -> None:
    """An embedding that is also the output layer, and a constant that two ops share."""
    nodes = [
        node("Gather", ["table", "ids"], ["e"], name="embed"),
        node("Mul", ["e", "two"], ["s"], name="scale"),
        node("MatMul", ["s", "inner"], ["m"], name="inner"),
        node("Add", ["m", "two"], ["a"], name="shift"),
        node("Transpose", ["table"], ["head"], perm=[1, 0], name="turn"),
        node("MatMul", ["a", "head"], ["y"], name="head"),
    ]
    weights = {"table": zeros(10, 4), "inner": zeros(4, 4), "two": np.float32(2)}
    found = load_onnx_model(save(tmp_path, model(nodes, {"ids": (INT64, [3])}, ["y"], weights)))
    graph, at = found.graph, found.graph.op_index
    ids = graph.weight_id
    assert ids[at["embed"]] == ids[at["head"]]
    assert ids[at["scale"]] == ids[at["shift"]]  # they hold nothing but the scalar
    assert len({ids[at[name]] for name in ("embed", "scale", "inner")}) == 3
    assert graph.weight_bytes[at["embed"]] == graph.weight_bytes[at["head"]] == 160
    assert summary(graph)["weight_bytes"] == 160 + 64 + 4


def test_quantised_weights_keep_their_stored_size(tmp_path: Path) -> None:
    """int8 [4, 4] expanded to float32 by a node: 16 bytes and a scale, not 64."""
    nodes = [
        node("DequantizeLinear", ["q", "scale"], ["w"], name="expand"),
        node("MatMul", ["x", "w"], ["y"], name="mul"),
    ]
    weights = {"q": np.zeros((4, 4), np.int8), "scale": np.float32(0.1)}
    graph = load_onnx(save(tmp_path, model(nodes, {"x": [2, 4]}, ["y"], weights)))
    assert graph.op_names == ("input:x", "mul", "output:y")
    assert graph.weight_bytes[1] == 20
    assert graph.memory_traffic_bytes[1] == 32 + 20 + 32


def test_random_values_are_made_by_ops(tmp_path: Path) -> None:
    nodes = [
        node("RandomNormal", [], ["noise"], name="noise", shape=[4]),
        node("Add", ["x", "noise"], ["y"], name="add"),
    ]
    graph = load_onnx(save(tmp_path, model(nodes, {"x": [4]}, ["y"])))
    assert ("noise", "add") in named_edges(graph)


def test_a_constant_that_is_an_output_stays_an_op(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["shape"], name="shape"),
        node("Reshape", ["x", "shape"], ["y"], name="view"),
        node("Identity", ["w"], ["copy"], name="copy"),
    ]
    made = model(nodes, {"x": [2, 3]}, ["shape", "y", "copy", "w"], {"w": zeros(5)})
    graph = load_onnx(save(tmp_path, made))
    assert named_edges(graph) == {
        ("input:x", "shape"), ("shape", "output:shape"), ("input:x", "view"),
        ("view", "output:y"), ("copy", "output:copy"),
    }  # fmt: skip
    assert "output:w" in graph.op_names  # a stored weight needs no op to make it


def test_optional_inputs_and_outputs_may_be_left_out(tmp_path: Path) -> None:
    nodes = [
        node("Clip", ["x", "", "top"], ["c"], name="clip"),
        node("LSTM", ["c", "w", "r", "", "", "h0"], ["", "h"], name="lstm", hidden_size=2),
    ]
    weights = {"top": np.float32(6), "w": zeros(1, 8, 3), "r": zeros(1, 8, 2)}
    made = model(nodes, {"x": [5, 1, 3], "h0": [1, 1, 2]}, ["h"], weights)
    graph = load_onnx(save(tmp_path, made))
    lstm = graph.op_index["lstm"]
    assert graph.detail[lstm].output_shapes == ((1, 1, 2),)
    assert graph.detail[lstm].input_shapes[3:] == ((0,), (0,), (1, 1, 2))


def test_names_are_made_unique_and_stay_the_same(tmp_path: Path) -> None:
    """Given names keep the name, repeated ones get a number, unnamed nodes that of their output."""
    nodes = [
        node("Relu", ["x"], ["a"], name="n"),
        node("Relu", ["a"], ["b"], name="n"),
        node("Relu", ["b"], ["c"]),
        node("Relu", ["c"], ["n_2"]),
        node("Relu", ["n_2"], ["d"], name="input:x"),
        node("Relu", ["d"], ["y"], name="c"),
    ]
    path = save(tmp_path, model(nodes, {"x": [2]}, ["y"]))
    names = load_onnx(path).op_names
    assert names == ("input:x", "n", "n_2", "c_2", "n_2_2", "input:x_2", "c", "output:y")
    assert load_onnx(path).digest == load_onnx(path).digest


def test_ops_are_nodes_of_the_prepared_model(tmp_path: Path) -> None:
    found = load_onnx_model(save(tmp_path, heads_model()), {"batch": 2, "seq": 5})
    nodes = list(found.model.graph)
    for name, index in zip(found.graph.op_names, found.node_of_op, strict=True):
        assert (index is None) == name.startswith(("input:", "output:"))
        assert index is None or nodes[index].name == name
    ops = {index for index in found.node_of_op if index is not None}
    assert {node.name for i, node in enumerate(nodes) if i not in ops} == set(found.weight_nodes)


def test_scopes_come_from_metadata_else_from_slashes(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"], name="/model/layers.0/mlp/Relu"),
        node("Relu", ["a"], ["b"], name="relu_1"),
        node("Relu", ["b"], ["c"], name="relu_2"),
        node("Relu", ["c"], ["y"], name="plain"),
    ]
    made = model(nodes, {"x": [2]}, ["y"])
    scopes = "['', 'model', 'model.layers.0', 'model.layers.0.act', 'relu']"
    made.graph.node[1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    made.graph.node[1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="secret")
    namespace = ": my.Model/encoder: my.Encoder/relu: aten.relu.default"
    made.graph.node[2].metadata_props.add(key="namespace", value=namespace)
    found = load_onnx_model(save(tmp_path, made))
    assert found.graph.scope[1:5] == ("model.layers.0.mlp", "model.layers.0.act", "encoder", "")
    assert "secret" not in str(ir.to_proto(found.model))


def functions_model() -> object:
    """f(a, b) = relu(a @ b), called twice, the second time from inside g."""
    f = helper.make_function(
        "local", "f", ["a", "b"], ["r"],
        [node("MatMul", ["a", "b"], ["m"], name="mul"), node("Relu", ["m"], ["r"], name="act")],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    g = helper.make_function(
        "local", "g", ["a", "b"], ["r"],
        [node("f", ["a", "b"], ["r"], domain="local", name="call")],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )  # fmt: skip
    nodes = [
        node("f", ["x", "w"], ["h"], domain="local", name="first"),
        node("g", ["h", "w"], ["y"], domain="local", name="second"),
    ]
    return model(
        nodes, {"x": [2, 3]}, ["y"], {"w": np.eye(3, dtype=np.float32) - 0.5},
        functions=[f, g], domains={"local": 1},
    )  # fmt: skip


def test_functions_are_inlined(tmp_path: Path) -> None:
    graph = load_onnx(save(tmp_path, functions_model()))
    assert graph.op_types == ("Input", "MatMul", "Relu", "MatMul", "Relu", "Output")
    assert len(set(graph.weight_id[[1, 3]])) == 1  # both calls read one weight


def filled(made: object, seed: int) -> object:
    """Float weights with random numbers: equal constants would hide a mistake."""
    rng = np.random.default_rng(seed)
    for tensor in made.graph.initializer:
        if tensor.data_type == 1:
            data = rng.standard_normal(tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(data, tensor.name))
    return made


MODELS = {
    "shape arithmetic": (heads_model, {"batch": 2, "seq": 5}, {"x": (2, 5, 12)}),
    "functions": (functions_model, {}, {"x": (2, 3)}),
    "if": (lambda: if_model(np.array(True)), {}, {"x": (2, 4)}),
    "loop": (lambda: loop_model(np.array(3), grow=True), {}, {"x": (2, 4)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """ONNX Runtime on the file and on what was prepared of it; shapes agree with what it makes."""
    make, dims, shapes = MODELS[name]
    path = save(tmp_path, filled(make(), seed=0))
    prepared = prepare(path, dims)
    rng = np.random.default_rng(1)
    feeds = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    run = [
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        for data in (path.read_bytes(), ir.to_proto(prepared).SerializeToString())
    ]
    expected, got = (session.run(None, feeds) for session in run)
    for a, b, out in zip(expected, got, prepared.graph.outputs, strict=True):
        np.testing.assert_array_equal(a, b)
        assert tuple(out.shape) == a.shape


def test_weights_are_kept_on_request_and_change_nothing(tmp_path: Path) -> None:
    big = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)  # 160 kB
    nodes = [
        node("Constant", [], ["c"], value=numpy_helper.from_array(big)),
        node("MatMul", ["x", "w"], ["h"], name="one"),
        node("MatMul", ["h", "c"], ["y"], name="two"),
    ]
    path = save(tmp_path, model(nodes, {"x": [2, 200]}, ["y"], {"w": big}))
    bare, full = load_onnx_model(path), load_onnx_model(path, weights=True)
    assert bare.graph.digest == full.graph.digest
    assert bare.graph.weight_bytes.sum() == 2 * 160_000
    np.testing.assert_array_equal(full.model.graph.initializers["w"].const_value.numpy(), big)
    assert isinstance(bare.model.graph.initializers["w"].const_value, ir.ExternalTensor)


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    nodes = [node("Abs", ["b"], ["y"]), node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"])]
    graph = load_onnx(save(tmp_path, model(nodes, {"x": [2]}, ["y"])))
    assert graph.op_types == ("Input", "Relu", "Neg", "Abs", "Output")


def test_an_output_that_is_an_input_or_comes_twice(tmp_path: Path) -> None:
    made = model([node("Relu", ["x"], ["y"], name="relu")], {"x": [2], "z": (BOOL, [1])}, ["y"])
    made.graph.output.append(value("z", [1], BOOL))
    made.graph.output.append(value("y", None))
    graph = load_onnx(save(tmp_path, made))
    assert graph.op_names[-3:] == ("output:y", "output:z", "output:y#3")
    assert ("input:z", "output:z") in named_edges(graph)


def test_sub_byte_types_are_packed(tmp_path: Path) -> None:
    q = helper.make_tensor("q", INT8, [3, 5], [0] * 15)
    q4 = helper.make_tensor("q4", 22, [3, 5], [0] * 15)  # int4
    nodes = [
        node("DequantizeLinear", ["q", "s"], ["a"], name="a"),
        node("DequantizeLinear", ["q4", "s"], ["b"], name="b"),
        node("MatMul", ["x", "a"], ["h"], name="eight"),
        node("MatMul", ["x", "b"], ["g"], name="four"),
    ]
    made = model(nodes, {"x": [2, 3]}, ["h", "g"], {"s": np.float32(1)}, opset=21, ir_version=10)
    made.graph.initializer.extend([q, q4])
    graph = load_onnx(save(tmp_path, made))
    assert graph.weight_bytes[graph.op_index["eight"]] == 15 + 4
    assert graph.weight_bytes[graph.op_index["four"]] == 8 + 4
