"""Cut models compute what the whole computes, judged by onnx's own reference evaluator."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx_model
from gdp.sim.segments import segments
from gdp.targets.onnxruntime.export import Cut, cut_model

FLOAT = TensorProto.FLOAT


def model_of(
    nodes: list, inputs: list, outputs: list, weights: dict | None = None
) -> onnx.ModelProto:
    """A model over [2, 3] floats."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in inputs],
        [helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def random_model(seed: int, num_ops: int = 14) -> onnx.ModelProto:
    """A random graph of element-wise ops and weights, with two inputs, two outputs or more."""
    rng = np.random.default_rng(seed)
    values, nodes, weights = ["x", "y"], [], {}
    for i in range(num_ops):
        kind = rng.choice(["Add", "Mul", "Tanh", "weight", "Sub"])
        a, b = (str(rng.choice(values)) for _ in range(2))
        if kind == "weight":
            weights[f"w{i}"] = rng.standard_normal((2, 3)).astype(np.float32)
            nodes.append(helper.make_node("Add", [a, f"w{i}"], [f"v{i}"], name=f"n{i}"))
        elif kind == "Tanh":
            nodes.append(helper.make_node("Tanh", [a], [f"v{i}"], name=f"n{i}"))
        else:
            nodes.append(helper.make_node(str(kind), [a, b], [f"v{i}"], name=f"n{i}"))
        values.append(f"v{i}")
    read = {name for node in nodes for name in node.input}
    ends = [f"v{i}" for i in range(num_ops) if f"v{i}" not in read]
    return model_of(nodes, ["x", "y"], [*ends, "v3"] if "v3" not in ends else ends, weights)


def imported(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, OpGraph]:
    onnx.save_model(model, folder / "m.onnx")
    found = load_onnx_model(folder / "m.onnx", weights=True)
    return ir.to_proto(found.model), found.graph


def run_pieces(cut: Cut, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor that leaves a piece, with the pieces run one after the other."""
    values = dict(feeds)
    for piece in cut.pieces:
        session = ort.InferenceSession(
            piece.model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        made = session.run(list(piece.outputs), {name: values[name] for name in piece.inputs})
        values |= dict(zip(piece.outputs, made, strict=True))
    return values


def feeds_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.standard_normal((2, 3)).astype(np.float32) for v in model.graph.input}


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_random_placements_compute_the_same(
    seed: int, num_devices: int, tmp_path: Path
) -> None:
    original = random_model(seed)
    model, graph = imported(original, tmp_path)
    device = np.random.default_rng(seed).integers(num_devices, size=graph.num_ops)
    cut = cut_model(model, graph, segments(graph, device))
    feeds = feeds_of(original, seed)
    expected = ReferenceEvaluator(original).run(None, feeds)
    found = run_pieces(cut, feeds)
    for name, array in zip(cut.outputs, expected, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
    placed = sorted(op for piece in cut.pieces for op in piece.ops)
    assert placed == sorted(np.array(graph.op_names)[~graph.is_io])
    for piece in cut.pieces:
        onnx.checker.check_model(piece.model, full_check=True)


def chain(num_ops: int = 4) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Tanh", ["x" if i == 0 else f"v{i - 1}"], [f"v{i}"], name=f"n{i}")
        for i in range(num_ops)
    ]
    return model_of(nodes, ["x"], [f"v{num_ops - 1}"])


def test_only_what_another_piece_reads_leaves_a_piece(tmp_path: Path) -> None:
    model, graph = imported(chain(), tmp_path)
    cut = cut_model(model, graph, segments(graph, np.array([0, 0, 0, 1, 1, 0])))
    assert [(p.inputs, p.outputs, p.ops) for p in cut.pieces] == [
        (("x",), ("v1",), ("n0", "n1")),
        (("v1",), ("v3",), ("n2", "n3")),
    ]
    assert cut.crossing == ("v1",)
    assert cut.maker() == {"v1": 0, "v3": 1}


def test_the_source_operator_set_is_kept_and_the_ir_version_can_run(tmp_path: Path) -> None:
    source = chain()
    source.ir_version = 3
    model, graph = imported(source, tmp_path)
    piece = cut_model(
        model, graph, segments(graph, np.zeros(graph.num_ops, dtype=np.int64))
    ).pieces[0]
    assert piece.model.ir_version == 4
    assert [(o.domain, o.version) for o in piece.model.opset_import] == [("", 17)]


def test_weights_made_by_nodes_go_to_every_piece_that_reads_them(tmp_path: Path) -> None:
    """`w` is made by ConstantOfShape and Cos, and read on both devices."""
    value = helper.make_tensor("value", FLOAT, [1], [0.5])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["c"], name="c", value=value),
        helper.make_node("Cos", ["c"], ["w"], name="cos"),
        helper.make_node("Add", ["x", "w"], ["a"], name="add"),
        helper.make_node("Mul", ["a", "w"], ["b"], name="mul"),
    ]
    source = model_of(nodes, ["x"], ["b"], {"shape": np.array([2, 3], dtype=np.int64)})
    model, graph = imported(source, tmp_path)
    assert [op for op, io in zip(graph.op_names, graph.is_io, strict=True) if not io] == [
        "add",
        "mul",
    ]
    device = np.array([int(name == "mul") for name in graph.op_names])
    cut = cut_model(model, graph, segments(graph, device))
    assert [p.inputs for p in cut.pieces] == [("x",), ("a",)]
    feeds = feeds_of(source)
    expected = ReferenceEvaluator(source).run(None, feeds)
    np.testing.assert_allclose(run_pieces(cut, feeds)["b"], expected[0], rtol=1e-6)


def test_values_that_a_body_captures_are_handed_over(tmp_path: Path) -> None:
    """The branches of `If` read `a`, which another device makes."""
    out = helper.make_tensor_value_info("r", FLOAT, [2, 3])
    then = helper.make_graph([helper.make_node("Tanh", ["a"], ["r"], name="t")], "then", [], [out])
    other = helper.make_graph([helper.make_node("Neg", ["a"], ["r"], name="e")], "else", [], [out])
    nodes = [
        helper.make_node("Sin", ["x"], ["a"], name="sin"),
        helper.make_node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
        helper.make_node("Less", ["s", "zero"], ["less"], name="less"),
        helper.make_node("If", ["less"], ["b"], name="if", then_branch=then, else_branch=other),
    ]
    source = model_of(nodes, ["x"], ["b"], {"zero": np.array(0.0, dtype=np.float32)})
    model, graph = imported(source, tmp_path)
    device = np.array([int(name == "if") for name in graph.op_names])
    cut = cut_model(model, graph, segments(graph, device))
    assert cut.pieces[1].inputs == ("less", "a")
    feeds = feeds_of(source)
    expected = ReferenceEvaluator(source).run(None, feeds)
    np.testing.assert_allclose(run_pieces(cut, feeds)["b"], expected[0], rtol=1e-6)


def test_an_output_that_is_an_input_needs_no_piece(tmp_path: Path) -> None:
    source = model_of([helper.make_node("Tanh", ["x"], ["a"], name="n")], ["x", "y"], ["a", "y"])
    model, graph = imported(source, tmp_path)
    cut = cut_model(model, graph, segments(graph, np.zeros(graph.num_ops, dtype=np.int64)))
    assert (cut.inputs, cut.outputs) == (("x", "y"), ("a", "y"))
    assert cut.pieces[0].outputs == ("a",)


def test_a_graph_of_another_model_is_named(tmp_path: Path) -> None:
    model, _ = imported(chain(3), tmp_path)
    _, graph = imported(chain(4), tmp_path)
    with pytest.raises(ModelError, match=r"1 ops of graph 'm' are no nodes .* 'n3'"):
        cut_model(model, graph, segments(graph, np.zeros(graph.num_ops, dtype=np.int64)))


def test_segments_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    model, graph = imported(chain(2), tmp_path)
    with pytest.raises(ModelError, match="'v0' is read by a segment that runs before"):
        cut_model(model, graph, np.array([0, 2, 1, 3]))


def test_a_sequence_cannot_cross(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"], name="make"),
        helper.make_node("ConcatFromSequence", ["s"], ["c"], name="join", axis=0),
        helper.make_node("Slice", ["c", "from", "to"], ["b"], name="slice"),
    ]
    ends = {"from": np.array([0]), "to": np.array([2])}
    model, graph = imported(model_of(nodes, ["x"], ["b"], ends), tmp_path)
    device = np.array([int(name == "join") for name in graph.op_names])
    with pytest.raises(ModelError, match=r"'s' is a sequence_type, which cannot cross"):
        cut_model(model, graph, segments(graph, device))
