"""Placements executed by OpenVINO: HETERO over two copies of its CPU plug-in, outputs checked."""

from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper

from gdp.api.run import run
from gdp.base.errors import ClusterError, ModelError, PlacementError, RefusedError
from gdp.cli.main import cli
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Device, make_cluster
from gdp.measure.measuring import Measuring
from gdp.placement.placement import make_placement
from gdp.question.models import load

pytest.importorskip("openvino", reason="needs the openvino package")
SHORT = Measuring(seconds=0.3)
WIDTH, LAYERS = 24, 4


@pytest.fixture(params=[False, True], ids=["inline", "external"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Products and activations of an open batch; weights inside or in a file beside."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for i in range(LAYERS):
        drawn = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 5
        weights.append(numpy_helper.from_array(drawn, f"w{i}"))
        nodes += [
            oh.make_node("MatMul", [f"x{i}", f"w{i}"], [f"m{i}"], name=f"product{i}"),
            oh.make_node("Tanh", [f"m{i}"], [f"x{i + 1}"], name=f"act{i}"),
        ]
    ends = [oh.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", WIDTH])
            for n in ("x0", f"x{LAYERS}")]  # fmt: skip
    made = oh.make_model(oh.make_graph(nodes, "m", ends[:1], ends[1:], weights), ir_version=10,
                         opset_imports=[oh.make_opsetid("", 20)])  # fmt: skip
    path = tmp_path / "model.onnx"
    outside = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0}
    onnx.save(made, path, **(outside if request.param else {}))
    return str(path)


def split(model: str, *late: str):
    """On two cores: ops whose names end so on the second."""
    graph, cluster = load(model, {"batch": 3}), cluster_preset("2xcpu-core")
    device = np.array([name.endswith(late) for name in graph.op_names]) & ~graph.is_io
    return make_placement(graph, cluster, device.astype(np.int64)), cluster


def test_a_placement_runs_on_the_devices_it_names(model: str) -> None:
    placed, cluster = split(model, "2", "3")
    report = run(
        model, cluster, placed, dims=["batch=3"], objective="throughput", measuring=SHORT,
        runtime="openvino",
    )  # fmt: skip
    assert report["outputs_equal"] is True
    assert report["compared_tensors"] == 1
    first, second = report["segments"]
    assert (first["device"], second["device"]) == ("core0", "core1")
    assert (first["ops"], second["ops"]) == (4, 4)
    crossing = 3 * WIDTH * 4
    assert [first["input_bytes"], first["output_bytes"], second["input_bytes"]] == [crossing] * 3
    assert min(first["measured_s"], second["measured_s"]) > 0
    assert report["baselines"]["single_device"]["predicted_throughput_per_s"] > 0
    assert "openvino" in report["versions"]


def test_wrong_pieces_would_be_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is another one after the cut makes outputs unequal."""
    module = import_module("gdp.targets.intel_openvino.run")
    read = module._read
    count = iter(range(100))

    def other(core, source, feeds):
        if next(count) == 1:  # behind the uncut model
            source = module.Source(onnx.ModelProto(), source.folder, source.weights)
            source.model.CopyFrom(changed)
        return read(core, source, feeds)

    monkeypatch.setattr(module, "_read", other)
    changed = onnx.load(model)
    next(n for n in changed.graph.node if n.name == "act3").op_type = "Sigmoid"
    placed, cluster = split(model, "2", "3")
    report = run(model, cluster, placed, dims=["batch=3"], measuring=SHORT, runtime="openvino")
    assert report["outputs_equal"] is False


@pytest.mark.parametrize("model", [False], indirect=True)
def test_what_openvino_does_not_compile_is_refused_and_faults_of_gdp_are_not(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdp.targets.intel_openvino import loader as openvino_loader

    placed, cluster = split(model, "2", "3")

    def outcome(kind: type[Exception], error: Exception) -> str:
        def raising(*given: object) -> None:
            raise error

        monkeypatch.setattr(openvino_loader, "prove", raising)
        with pytest.raises(kind) as caught:
            run(model, cluster, placed, dims=["batch=3"], measuring=SHORT, runtime="openvino")
        return str(caught.value)

    refused = outcome(RefusedError, RuntimeError("cut into 3 pieces"))
    assert refused == "OpenVINO does not execute this: RuntimeError: cut into 3 pieces"
    assert outcome(TypeError, TypeError("a fault")) == "a fault"


def test_what_it_cannot_run_is_said(model: str) -> None:
    twice, cluster = split(model, "1")
    with pytest.raises(PlacementError, match="enters its 2 devices 3 times"):
        run(model, cluster, twice, dims=["batch=3"], runtime="openvino")
    gpus = make_cluster("gpus", [
        Device("host", "cpu", {"default": 1e9}, 1e9), Device("card", "t4", {"default": 1e9}, 1e9),
        Device("card2", "t4", {"default": 1e9}, 1e9),
    ])  # fmt: skip
    placed = make_placement(load(model, {"batch": 3}), gpus, np.zeros(10, np.int64))
    with pytest.raises(ClusterError, match=r"'gpus' has 2 accelerators, OpenVINO sees \d"):
        run(model, gpus, placed, dims=["batch=3"], runtime="openvino")
    with pytest.raises(ValueError, match="no runtime 'tvm'; there are onnxruntime, openvino, jax"):
        run(model, cluster, twice, dims=["batch=3"], runtime="tvm")
    with pytest.raises(ModelError, match=r"torch does not execute .*; onnxruntime, openvino"):
        run(model, cluster, twice, dims=["batch=3"], runtime="torch")


def test_from_the_command_line(model: str) -> None:
    command = ["run", model, "--dim", "batch=2", "--cluster", "1xcpu-core", "--method", "single",
               "--runtime", "openvino", "--measure-seconds", "0.3"]  # fmt: skip
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert "outputs equal to the uncut model's" in done.output
    assert "HETERO over CPU" in done.output
