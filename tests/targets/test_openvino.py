"""Placements are executed by OpenVINO's HETERO on two devices: its CPU plug-in, registered twice.

The second one computes in bfloat16 where asked, which tells in the compiled model who runs what.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from onnx import TensorProto, numpy_helper

from gdp.api.run import export
from gdp.base.errors import PlacementError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx
from gdp.placement.placement import make_placement
from gdp.targets.intel_openvino.export import export_openvino

WIDTH, LAYERS, PLUGIN = 32, 4, "openvino_intel_cpu_plugin"  # its device is called CPU...


def machine(*kinds: str) -> Cluster:
    devices = [Device(f"d{i}", kind, {"default": 1e9}, 1e9) for i, kind in enumerate(kinds)]
    return make_cluster("machine", devices)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Layers of a product, a normalisation (which OpenVINO breaks up) and an activation, with a
    residual; the last op loses its name to the model's output."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(LAYERS):
        weights.append(
            numpy_helper.from_array(
                rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6, f"w{i}"
            )
        )
        weights += [
            numpy_helper.from_array(np.full(WIDTH, v, np.float32), f"{n}{i}")
            for n, v in (("scale", 1.5), ("shift", 0.1))
        ]
        nodes += [
            oh.make_node("MatMul", [x, f"w{i}"], [f"m{i}"], name=f"product{i}"),
            oh.make_node(
                "LayerNormalization",
                [f"m{i}", f"scale{i}", f"shift{i}"],
                [f"n{i}"],
                name=f"norm{i}",
            ),
            oh.make_node("Gelu", [f"n{i}"], [f"g{i}"], name=f"act{i}"),
            oh.make_node("Add", [f"g{i}", x], [f"y{i}"], name=f"add{i}"),
        ]
        x = f"y{i}"
    shape = [2, 5, WIDTH]
    made = oh.make_model(
        oh.make_graph(nodes, "m", [oh.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
                      [oh.make_tensor_value_info(x, TensorProto.FLOAT, shape)], weights),
        ir_version=10, opset_imports=[oh.make_opsetid("", 20)],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    return path


def halves(graph: OpGraph, cluster: Cluster) -> Any:
    """The first two layers on d0, the others on d1."""
    late = [name[-1] in "23" for name in graph.op_names]
    device = np.where(graph.is_io, 0, np.array(late)).astype(np.int64)
    return make_placement(graph, cluster, device)


def exported(model: Path, folder: Path) -> ModuleType:
    """The loader of an export whose second device is the second CPU."""
    graph, cluster = load_onnx(str(model)), machine("cpu", "t4")
    export_openvino(graph, halves(graph, cluster), cluster, folder)
    names = json.loads((folder / "devices.json").read_text())
    assert names == {"d0": "CPU", "d1": "GPU.0"}
    (folder / "devices.json").write_text(json.dumps({"d0": "CPU", "d1": "CPUB"}))
    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def core() -> Any:
    openvino = pytest.importorskip("openvino")
    made = openvino.Core()
    made.register_plugin(PLUGIN, "CPUB")
    return made


def sample() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 5, WIDTH)).astype(np.float32)


def reference(core: Any, model: Path) -> np.ndarray:
    config = {"INFERENCE_PRECISION_HINT": "f32"}
    return core.compile_model(core.read_model(model), "CPU", config)([sample()])[0]


def test_two_devices_compute_what_one_does(core: Any, model: Path, tmp_path: Path) -> None:
    compiled = exported(model, tmp_path / "out").load(model, core=core)
    assert set(compiled.get_property("EXECUTION_DEVICES")) == {"CPU", "CPUB"}
    assert compiled.get_property("HETERO_NUMBER_OF_SUBMODELS") == 2
    expected = reference(core, model)
    np.testing.assert_allclose(compiled([sample()])[0], expected, atol=1e-5 * abs(expected).max())


def test_every_product_runs_where_it_was_placed(core: Any, model: Path, tmp_path: Path) -> None:
    """Only the second device computes in bfloat16, where the processor can."""
    if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16")
    config = {"DEVICE_PROPERTIES": {
        "CPU": {"INFERENCE_PRECISION_HINT": "f32"}, "CPUB": {"INFERENCE_PRECISION_HINT": "bf16"},
    }}  # fmt: skip
    compiled = exported(model, tmp_path / "out").load(model, core=core, config=config)
    precision = {
        op.get_friendly_name(): op.get_rt_info()["runtimePrecision"].astype(str)
        for op in compiled.get_runtime_model().get_ops()
    }
    found = [precision[f"product{i}"] for i in range(LAYERS)]
    assert found == ["f32", "f32", "bf16", "bf16"]
    expected, made = reference(core, model), compiled([sample()])[0]
    assert 1e-4 < np.abs(made - expected).max() / np.abs(expected).max() < 0.05


def test_ops_that_the_model_does_not_name_go_with_those_they_serve(
    core: Any, model: Path, tmp_path: Path
) -> None:
    loader = exported(model, tmp_path / "out")
    read = core.read_model(model)
    plan = json.loads((tmp_path / "out" / "affinity.json").read_text())
    loader.place(read, plan, {"d0": "CPU", "d1": "CPUB"})
    placed = [(op.get_type_name(), op.get_rt_info()["affinity"]) for op in read.get_ordered_ops()]
    for kind in ("MVN", "MatMul", "Gelu"):
        assert [d for t, d in placed if t == kind] == ["CPU", "CPU", "CPUB", "CPUB"]
    assert plan["order"] == ["d0", "d1"]


def test_a_piece_too_many_is_noticed(core: Any, model: Path, tmp_path: Path) -> None:
    """As when the parts of a normalisation stayed on the first device."""
    loader = exported(model, tmp_path / "out")
    whole = loader.place

    def forgetful(read: Any, plan: Any, names: Any) -> None:
        whole(read, plan, names)
        for op in read.get_ops():
            if op.get_type_name() == "MVN":
                op.get_rt_info()["affinity"] = names["d0"]

    loader.place = forgetful
    with pytest.raises(RuntimeError, match="some op is not where it was placed"):
        loader.load(model, core=core)


def test_a_device_is_a_processor_by_its_kind(model: Path, tmp_path: Path) -> None:
    graph = load_onnx(str(model))
    cluster = make_cluster("odd", [
        Device("epyc", "cpu", {"default": 1e9}, 1e9),
        Device("core-killer", "t4", {"default": 1e9}, 1e9),
        Device("cpu2", "t4", {"default": 1e9}, 1e9),
    ])  # fmt: skip
    export_openvino(graph, halves(graph, cluster), cluster, tmp_path / "out")
    names = json.loads((tmp_path / "out" / "devices.json").read_text())
    assert names == {"epyc": "CPU", "core-killer": "GPU.0", "cpu2": "GPU.1"}
    with pytest.raises(ValueError, match="give the cluster"):
        export(halves(graph, cluster), str(model), "openvino", tmp_path / "other")


def test_a_device_that_is_entered_twice_is_refused(model: Path, tmp_path: Path) -> None:
    graph, cluster = load_onnx(str(model)), machine("cpu", "t4")
    device = np.array([int(name[-1] == "1") for name in graph.op_names])
    placement = make_placement(graph, cluster, np.where(graph.is_io, 0, device))
    with pytest.raises(PlacementError, match="enters its 2 devices 3 times"):
        export_openvino(graph, placement, cluster, tmp_path / "out")
