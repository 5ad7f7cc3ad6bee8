"""A placement is executed for real, and a wrong one would be noticed."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.api.place import simulate
from gdp.api.run import run
from gdp.base.cores import usable_cores
from gdp.base.errors import ModelError
from gdp.cluster.presets import device_preset
from gdp.cluster.types import Cluster, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx
from gdp.measure.compare import compare, merge_comparisons
from gdp.measure.measuring import Measuring
from gdp.measure.plan import make_plan, roofline_prediction
from gdp.measure.request import RunRequest
from gdp.placement.placement import load_placement, make_placement, save_placement
from gdp.targets.onnx_source import load_source
from gdp.targets.onnxruntime.run import check_outputs, cut_plan, make_inputs, prepare, run_onnx

CORES = usable_cores()


def cluster(count: int = 2) -> Cluster:
    """Cores of this machine; where it has one only, the one."""
    names = [f"core{core}" for core in CORES[:count]]
    return make_cluster("cores", [device_preset("cpu-core", name) for name in names])


def branches(tmp_path: Path, *, external: bool = False) -> Path:
    """x -> stem -> left (matmul, tanh) and right (matmul, relu) -> join -> y."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((64, 64)).astype(np.float32) / 8 for n in ("s", "l", "r")}
    nodes = [
        helper.make_node("MatMul", ["x", "s"], ["stem"], name="stem"),
        helper.make_node("MatMul", ["stem", "l"], ["l0"], name="left"),
        helper.make_node("Tanh", ["l0"], ["l1"], name="tanh"),
        helper.make_node("MatMul", ["stem", "r"], ["r0"], name="right"),
        helper.make_node("Relu", ["r0"], ["r1"], name="relu"),
        helper.make_node("Add", ["l1", "r1"], ["y"], name="join"),
    ]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "branches.onnx"
    onnx.save_model(model, path, save_as_external_data=external, size_threshold=0, location="w.bin")
    return path


def right_elsewhere(graph: OpGraph, devices: Cluster) -> np.ndarray:
    last = devices.num_devices - 1
    return np.array([last * (name in ("right", "relu")) for name in graph.op_names])


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_branch_on_another_core_gives_the_same_outputs(objective: str, tmp_path: Path) -> None:
    path, devices = branches(tmp_path), cluster()
    graph = load_onnx(path, {"batch": 16})
    report = run_onnx(RunRequest(
        path, graph, devices, right_elsewhere(graph, devices),
        dims={"batch": 16}, objective=objective, measuring=Measuring(seconds=0.2),
    ))  # fmt: skip
    assert report.outputs_equal
    assert report.max_abs_diff < 1e-4
    assert not report.random_weights
    assert report.compared_tensors >= 2 * report.samples_in_flight
    assert sum(s.ops for s in report.segments) == 6
    assert {s.device for s in report.segments} == set(devices.device_names)
    for value in (
        report.predicted_latency_s, report.measured_latency_s,
        report.predicted_throughput_per_s, report.measured_throughput_per_s,
    ):  # fmt: skip
        assert 0 < value < np.inf
    assert set(report.baselines) == {"single_device", "runtime_default", "replicas"}
    assert report.to_json()["baselines"]["replicas"]["throughput_per_s"] > 0


@pytest.mark.skipif(len(CORES) < 2, reason="replicas need two cores")
def test_replicas_give_the_same_outputs(tmp_path: Path) -> None:
    """The whole model on two cores in turn."""
    path, devices = branches(tmp_path), cluster()
    graph = load_onnx(path, {"batch": 16})
    place = make_placement(graph, devices, np.zeros(graph.num_ops, np.int64), teams=((0, 1),))
    save_placement(place, tmp_path / "p.json")
    report = run(
        str(path), devices, load_placement(tmp_path / "p.json"), dims=["batch=16"],
        objective="throughput", costs=roofline, measuring=Measuring(seconds=0.4),
    )  # fmt: skip
    assert report["outputs_equal"]
    assert {s["device"] for s in report["segments"]} == {",".join(devices.device_names)}
    assert report["samples_in_flight"] == 4
    scored = simulate(graph, place, devices, objective="throughput", costs=roofline)
    single = make_placement(graph, devices, np.zeros(graph.num_ops, np.int64))
    alone = simulate(graph, single, devices, objective="throughput", costs=roofline)
    # Datasheet costs are off here, so predictions are scaled to what one device took.
    one = report["baselines"]["single_device"]["predicted_throughput_per_s"]
    assert report["predicted_throughput_per_s"] / one == pytest.approx(
        alone.period_s / scored.period_s
    )
    assert alone.period_s / 2 <= scored.period_s < alone.period_s


def test_inputs_are_as_large_as_the_graph_says(tmp_path: Path) -> None:
    path = branches(tmp_path)
    graph = load_onnx(path, {"batch": 5})
    source = load_source(path, {"batch": 5})
    first, second = (make_inputs(source.model, graph, 3)["x"] for _ in range(2))
    assert first.shape == (5, 64)
    assert (first == second).all()
    assert (make_inputs(source.model, graph, 4)["x"] != first).any()


def test_integers_are_valid_for_any_vocabulary_and_masks_are_open() -> None:
    graph = helper.make_graph(
        [helper.make_node("Where", ["mask", "ids", "ids"], ["y"], name="where")],
        "g",
        [
            helper.make_tensor_value_info("mask", TensorProto.BOOL, [8]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, [8]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [8])],
    )
    from gdp.graph.op_graph import INPUT, make_graph

    op_graph = make_graph("g", ["input:mask", "input:ids"], [INPUT] * 2, [], [])
    found = make_inputs(helper.make_model(graph), op_graph, 0)
    assert found["mask"].all()
    assert set(found["ids"].tolist()) <= {0, 1}


def test_a_piece_that_computes_something_else_is_noticed(tmp_path: Path) -> None:
    """Relu for Tanh in one piece."""
    path, devices = branches(tmp_path), cluster()
    graph = load_onnx(path, {"batch": 16})
    source = load_source(path, {"batch": 16})
    device = right_elsewhere(graph, devices)
    prediction = roofline_prediction(graph, devices, device, "throughput")
    plan = cut_plan(source.model, graph, make_plan(prediction, "throughput"))
    good = prepare(source, graph, plan, CORES[:2], 0)
    assert check_outputs(good).equal
    for piece in plan.cut.pieces:
        for node in piece.model.graph.node:
            if node.op_type == "Tanh":
                node.op_type = "Relu"
    found = check_outputs(prepare(source, graph, plan, CORES[:2], 0))
    assert not found.equal
    assert found.max_relative_diff > 0.1
    assert good.plan.cut.crossing


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    path, dims = branches(tmp_path, external=True), {"batch": 2}
    graph = load_onnx(path, dims)
    device = np.zeros(graph.num_ops, int)
    request = RunRequest(path, graph, cluster(1), device, dims, measuring=Measuring(seconds=0.02))
    run_onnx(request)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"branches.onnx: its weights are missing, no file") as e:
        run_onnx(request)
    assert "\n" not in str(e.value)


def test_one_device_is_one_segment_of_the_whole_model(tmp_path: Path) -> None:
    path = branches(tmp_path)
    graph = load_onnx(path, {"batch": 2})
    report = run_onnx(RunRequest(
        path, graph, cluster(1), np.zeros(graph.num_ops, int),
        dims={"batch": 2}, measuring=Measuring(seconds=0.05),
    ))  # fmt: skip
    assert [s.ops for s in report.segments] == [6]
    assert report.max_abs_diff == 0.0


@pytest.mark.slow
def test_a_light_model_in_two_halves_equals_the_whole() -> None:
    graph = load_onnx("onnx:light_squeezenet")
    devices = cluster()
    device = (np.arange(graph.num_ops) > graph.num_ops // 2).astype(np.int64)
    device = np.minimum(np.where(graph.is_io, 0, device), devices.num_devices - 1)
    report = run_onnx(RunRequest(
        "onnx:light_squeezenet", graph, devices, device,
        objective="throughput", measuring=Measuring(seconds=0.5),
    ))  # fmt: skip
    assert report.outputs_equal
    assert report.random_weights


def values(**arrays: list) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    found = compare(values(a=[1000.0, 0.0]), values(a=[1000.0, 0.05]))
    assert found.equal
    assert (found.max_abs_diff, found.worst) == (0.05, "a")
    assert not compare(values(a=[10.0, 0.0]), values(a=[10.0, 0.05])).equal


def test_infinities_must_match_and_integers_be_equal() -> None:
    assert compare(values(a=[np.inf, 1.0, np.nan]), values(a=[np.inf, 1.0, np.nan])).equal
    assert not compare(values(a=[np.inf, 1.0]), values(a=[-np.inf, 1.0])).equal
    assert not compare(values(a=[1.0, 1.0]), values(a=[np.nan, 1.0])).equal
    assert not compare(values(a=[100000]), values(a=[100001])).equal
    assert not compare(values(a=[1.0]), values(a=[1.0, 1.0])).equal
    assert compare(values(a=[True]), values(a=[True])).equal


def test_the_worst_comparison_counts() -> None:
    good = compare(values(a=[1.0]), values(a=[1.0]))
    bad = compare(values(b=[1.0]), values(b=[2.0]))
    both = merge_comparisons([good, bad])
    assert (both.equal, both.worst, both.tensors, both.max_abs_diff) == (False, "b", 2, 1.0)
