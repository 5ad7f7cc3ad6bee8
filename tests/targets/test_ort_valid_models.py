"""Models of odd kinds run in pieces as they run whole, whatever the placement."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.base.cores import usable_cores
from gdp.base.errors import ModelError
from gdp.cluster.presets import device_preset
from gdp.cluster.types import make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx
from gdp.measure.compare import OutputCheck
from gdp.measure.plan import make_plan, roofline_prediction
from gdp.targets.onnx_source import load_source
from gdp.targets.onnxruntime import run
from gdp.targets.onnxruntime.run import check_outputs, cut_plan, make_inputs, prepare
from gdp.targets.onnxruntime.sessions import from_array, to_array

FLOAT, INT64, BOOL, BFLOAT16 = (
    TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.BFLOAT16,
)  # fmt: skip
CORES = usable_cores()
node = helper.make_node


def info(name: str, dtype: int = FLOAT, shape: list | None = None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def saved(
    folder: Path, nodes: list, inputs: list, outputs: list, weights: dict[str, np.ndarray]
) -> Path:
    stored = [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()]
    graph = helper.make_graph(nodes, "odd", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 17)]
    path = folder / "odd.onnx"
    onnx.save_model(helper.make_model(graph, ir_version=8, opset_imports=opsets), path)
    return path


def checked(path: Path, graph: OpGraph, device: np.ndarray) -> OutputCheck:
    """The pieces of a placement on two workers, which may share a core, beside the whole model."""
    cluster = make_cluster("two", [device_preset("cpu-core", f"core{i}") for i in range(2)])
    source = load_source(path)
    prediction = roofline_prediction(graph, cluster, device, "latency")
    plan = cut_plan(source.model, graph, make_plan(prediction, "latency"))
    assert not device.any() or len(plan.cut.pieces) > 1 or len(set(device[~graph.is_io])) == 1
    return check_outputs(prepare(source, graph, plan, [CORES[0], CORES[-1]], 0))


def everywhere(path: Path) -> list[OutputCheck]:
    """Every op alone on the second device, and all ops on the first."""
    graph = load_onnx(path)
    works = np.flatnonzero(~graph.is_io)
    verdicts = []
    for alone in (None, *works.tolist()):
        device = np.zeros(graph.num_ops, np.int64)
        if alone is not None:
            device[alone] = 1
        verdicts.append(checked(path, graph, device))
    assert len(verdicts) > 1
    return verdicts


def all_equal(path: Path) -> bool:
    verdicts = everywhere(path)
    return all(v.equal and v.outputs_equal and v.tensors and not v.random_ops for v in verdicts)


def test_inputs_of_one_number(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["w", "i"], ["a"], name="gather"),
        node("Mul", ["a", "f"], ["b"], name="mul"),
        node("Relu", ["b"], ["y"], name="relu"),
    ]
    inputs = [info("i", INT64, []), info("f", FLOAT, [])]
    weights = {"w": np.ones((2, 3), np.float32)}
    path = saved(tmp_path, nodes, inputs, [info("y", FLOAT, [3])], weights)
    made = make_inputs(load_source(path).model, load_onnx(path), 0)
    assert {name: (type(a), a.shape) for name, a in made.items()} == {
        "i": (np.ndarray, ()), "f": (np.ndarray, ()),
    }  # fmt: skip
    assert all_equal(path)


def test_an_initialiser_that_is_an_output(tmp_path: Path) -> None:
    nodes = [
        node("Add", ["x", "w"], ["a"], name="add"),
        node("Relu", ["a"], ["y"], name="relu"),
        node("Transpose", ["w"], ["t"], name="turn"),
    ]
    outputs = [info(name, FLOAT, [3, 3]) for name in ("y", "w", "t")]
    w = np.arange(9, dtype=np.float32).reshape(3, 3)
    assert all_equal(saved(tmp_path, nodes, [info("x", FLOAT, [3, 3])], outputs, {"w": w}))


def test_bfloat16_goes_in_across_and_out(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["b"], ["i"], name="in"),
        node("Cast", ["x"], ["h"], to=BFLOAT16, name="narrow"),
        node("Identity", ["h"], ["k"], name="between"),
        node("Cast", ["k"], ["y"], to=FLOAT, name="widen"),
    ]
    inputs = [info("x", FLOAT, [3, 4]), info("b", BFLOAT16, [2])]
    outputs = [info("y", FLOAT, [3, 4]), info("k", BFLOAT16, [3, 4]), info("i", BFLOAT16, [2])]
    assert all_equal(saved(tmp_path, nodes, inputs, outputs, {}))


def test_a_loop_of_unknown_length_hands_its_results_to_another_piece(tmp_path: Path) -> None:
    """The sum of the input is the trip count, another one for every sample; what is made of the
    stack's shape must be computed when it runs."""
    body = helper.make_graph(
        [node("Add", ["s", "a"], ["t"]), node("Identity", ["c"], ["go"]),
         node("Identity", ["t"], ["row"])],
        "body",
        [info("i", INT64, []), info("c", BOOL, []), info("s", FLOAT, [3])],
        [info("go", BOOL, []), info("t", FLOAT, [3]), info("row", FLOAT, [3])],
    )  # fmt: skip
    nodes = [
        node("Abs", ["x"], ["a"], name="abs"),
        node("ReduceSum", ["k"], ["trips"], keepdims=0, name="count"),
        node("Loop", ["trips", "", "x"], ["last", "stack"], body=body, name="loop"),
        node("Relu", ["stack"], ["r"], name="relu"),
        node("Shape", ["r"], ["shape"], name="shape"),
        node("ReduceSum", ["r", "zero"], ["q"], keepdims=0, name="sum"),
    ]
    inputs = [info("x", FLOAT, [3]), info("k", INT64, [6])]
    outputs = [info("last", FLOAT, [3]), info("q", FLOAT, [3]), info("shape", INT64, [2])]
    path = saved(tmp_path, nodes, inputs, outputs, {"zero": np.array([0])})
    graph = load_onnx(path)
    source = load_source(path)
    trips = {int(make_inputs(source.model, graph, seed)["k"].sum()) for seed in range(4)}
    assert len(trips) > 1
    assert "shape" in graph.op_names
    assert all_equal(path)


def test_data_that_only_a_branch_reads_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = branch_with_external_data(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert all_equal(path)
    (tmp_path / "branch.bin").unlink()
    with pytest.raises(ModelError, match=r"its weights are missing, no file .*branch.bin"):
        load_source(path)


def branch_with_external_data(folder: Path) -> Path:
    data = np.linspace(1, 2, 400, dtype=np.float32)
    (folder / "branch.bin").write_bytes(data.tobytes())
    weight = onnx.TensorProto(name="w", data_type=FLOAT, dims=[400])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="branch.bin")
    then, other = (
        helper.make_graph([node(op, read, [out])], out, [], [info(out, FLOAT, [400])], held)
        for op, read, out, held in (
            ("Mul", ["x", "w"], "left", [weight]), ("Abs", ["x"], "right", []),
        )
    )  # fmt: skip
    nodes = [
        node("If", ["c"], ["z"], name="if", then_branch=then, else_branch=other),
        node("Exp", ["z"], ["y"], name="exp"),
    ]
    inputs = [info("x", FLOAT, [400]), info("c", BOOL, [])]
    return saved(folder, nodes, inputs, [info("y", FLOAT, [400])], {})


@pytest.mark.parametrize(
    ("op_type", "data", "ids", "attributes"),
    [
        ("Gather", (1, 4), [3], {}),
        ("Gather", (4, 1), [3], {"axis": -1}),
        ("GatherElements", (1, 4), [1, 4], {}),
        ("GatherND", (4, 1), [5, 2], {}),
    ],
)
@pytest.mark.parametrize("through", [(), ("Cast", "Unsqueeze", "Squeeze")])
def test_indices_are_made_up_within_the_axis_that_they_count(
    tmp_path: Path, op_type: str, data: tuple, ids: list, attributes: dict, through: tuple
) -> None:
    nodes, last = [], "ids"
    for op in through:
        made = f"{op}_out"
        nodes.append(
            node(op, [last], [made], to=INT64) if op == "Cast" else node(op, [last, "axis"], [made])
        )
        last = made
    nodes += [
        node(op_type, ["table", last], ["found"], name="look", **attributes),
        node("Relu", ["found"], ["y"], name="relu"),
    ]
    weights = {"table": np.ones(data, np.float32), "axis": np.array([0])}
    free = node("Identity", ["mask"], ["z"], name="free")
    inputs = [info("ids", INT64, ids), info("mask", INT64, [64])]
    path = saved(tmp_path, [*nodes, free], inputs, [info("y"), info("z", INT64)], weights)
    assert all_equal(path)
    made = make_inputs(load_source(path).model, load_onnx(path), 0)
    assert set(made["mask"].tolist()) == {0, 1}  # not looked up anywhere


def test_inputs_that_a_model_cannot_take_are_one_line(tmp_path: Path) -> None:
    """A reshape to what the input says: no made-up number fits."""
    nodes = [
        node("Reshape", ["x", "to"], ["r"], name="reshape"),
        node("Relu", ["r"], ["y"], name="relu"),
    ]
    inputs = [info("x", FLOAT, [7]), info("to", INT64, [1])]
    path = saved(tmp_path, nodes, inputs, [info("y", FLOAT, [7])], {})
    graph = onnx.load(path)
    graph.graph.value_info.append(info("r", FLOAT, [7]))
    onnx.save(graph, path)
    with pytest.raises(ModelError, match="does not run, uncut, on inputs that are made up") as e:
        everywhere(path)
    assert "\n" not in str(e.value)


def test_a_quantised_model_is_equal_to_itself(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
        node("MatMul", ["d", "w"], ["m"], name="mul"),
        node("MatMulInteger", ["q", "wq"], ["mi"], name="mul_integer"),
        node("Softmax", ["m"], ["y"], name="softmax"),
    ]
    weights = {
        "s": np.float32(0.1), "z": np.uint8(3), "w": rng.standard_normal((4, 4), np.float32),
        "wq": rng.integers(0, 9, (4, 4), np.uint8),
    }  # fmt: skip
    outputs = [info("y", FLOAT, [2, 4]), info("mi", TensorProto.INT32, [2, 4])]
    assert all_equal(saved(tmp_path, nodes, [info("x", FLOAT, [2, 4])], outputs, weights))


def noisy(folder: Path, *, also_certain: bool) -> Path:
    nodes = [
        node("Relu", ["x"], ["r"], name="relu"),
        node("RandomNormalLike", ["r"], ["n"], name="noise"),
        node("Add", ["r", "n"], ["y"], name="add"),
    ]
    outputs = [info("y", FLOAT, [64])] + [info("r", FLOAT, [64])] * also_certain
    return saved(folder, nodes, [info("x", FLOAT, [64])], outputs, {})


def test_random_operators_are_named_and_what_they_reach_is_not_judged(tmp_path: Path) -> None:
    for verdict in everywhere(noisy(tmp_path, also_certain=True)):
        assert (verdict.outputs_equal, verdict.equal) == (True, True)
        assert verdict.random_ops == ("RandomNormalLike 'noise'",)
        assert verdict.tensors
    for verdict in everywhere(noisy(tmp_path, also_certain=False)):
        assert verdict.outputs_equal is None
        assert verdict.random_ops == ("RandomNormalLike 'noise'",)


def quantised(folder: Path) -> tuple[Path, OpGraph, np.ndarray]:
    """A product with quantised weights, whose floats ONNX Runtime rounds to 8 bits where their
    quantiser is in another piece."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], name="d"),
        node("DequantizeLinear", ["stored", "s", "z"], ["w"], name="w"),
        node("MatMul", ["d", "w"], ["m"], name="mm"),
        node("QuantizeLinear", ["m", "big", "z"], ["r"], name="r"),
        node("DequantizeLinear", ["r", "big", "z"], ["y"], name="y"),
    ]
    weights = {
        "s": np.float32(0.1), "z": np.uint8(3), "big": np.float32(1000),
        "stored": np.ones((16, 8), np.uint8),
    }  # fmt: skip
    path = saved(folder, nodes, [info("x", FLOAT, [2, 16])], [info("y", FLOAT, [2, 8])], weights)
    graph = load_onnx(path)
    device = np.zeros(graph.num_ops, np.int64)
    device[graph.op_index["mm"]] = 1
    return path, graph, device


def test_rounding_to_8_bits_by_the_runtime_is_no_fault_of_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, graph, device = quantised(tmp_path)
    found = checked(path, graph, device)
    assert (found.equal, found.outputs_equal, found.inner_equal) == (True, True, True)
    # A piece that computes something else is found out in either kind of session.
    whole = run.reference_values

    def wrong(*args: Any) -> Any:
        expected = whole(*args)
        for values in expected:
            values["m"] = from_array(to_array(values["m"]) * np.float32(1.1))
        return expected

    monkeypatch.setattr(run, "reference_values", wrong)
    found = checked(path, graph, device)
    assert (found.equal, found.outputs_equal, found.inner_equal) == (False, True, False)
