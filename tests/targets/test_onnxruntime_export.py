"""The exported folder runs by itself and computes what the model computes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from gdp.api.run import export
from gdp.base.errors import ModelError, PlacementError
from gdp.base.files.writing import TargetError
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx_model
from gdp.placement.placement import Placement, Teams
from gdp.targets.onnxruntime import export as exporter
from gdp.targets.onnxruntime.export import export_onnxruntime
from gdp.targets.table import EXPORTERS

CORES = cluster_preset("2xcpu-core")


def branches() -> onnx.ModelProto:
    """x -> stem -> left and right -> join -> y, and the input `z` straight to the output `z`."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((32, 32)).astype(np.float32) for n in ("s", "l", "r")}
    nodes = [
        helper.make_node("MatMul", ["x", "s"], ["stem/0"], name="stem"),
        helper.make_node("MatMul", ["stem/0", "l"], ["left"], name="left"),
        helper.make_node("MatMul", ["stem/0", "r"], ["right"], name="right"),
        helper.make_node("Tanh", ["right"], ["tanh"], name="tanh"),
        helper.make_node("Add", ["left", "tanh"], ["y"], name="join"),
    ]
    tensors = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32]) for name in "xyz"
    }
    graph = helper.make_graph(
        nodes,
        "branches",
        [tensors["x"], tensors["z"]],
        [tensors["y"], tensors["z"]],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def imported(folder: Path, **save: object) -> tuple[onnx.ModelProto, OpGraph]:
    onnx.save_model(branches(), folder / "m.onnx", **save)
    found = load_onnx_model(folder / "m.onnx", weights=True)
    return ir.to_proto(found.model), found.graph


def placed(graph: OpGraph, elsewhere: tuple[str, ...] = ("right", "tanh")) -> Placement:
    return Placement(
        graph_digest=graph.digest,
        op_names=graph.op_names,
        device_names=("core0", "core1"),
        device=np.array([int(name in elsewhere) for name in graph.op_names]),
        rank=np.zeros(graph.num_ops, dtype=np.int64),
        made_by="a test",
    )


def run(folder: Path, inputs: Path, outputs: Path, samples: int) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-I",
        str(folder / "run.py"),
        str(inputs),
        str(outputs),
        str(samples),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("external", [False, True])
def test_the_runner_alone_computes_the_same_outputs(
    external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an isolated interpreter, from another place than where it was written."""
    if external:
        monkeypatch.setattr(exporter, "MAX_INLINE_BYTES", 10)
    source = tmp_path / "source"
    source.mkdir()
    save = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    model, graph = imported(source, **(save if external else {}))
    files = export_onnxruntime(model, source, graph, placed(graph), CORES, tmp_path / "out")
    names = {path.name for path in files}
    assert {"manifest.json", "run.py", "segment_000.onnx", "segment_002.onnx"} <= names
    assert ("segment_000.data" in names) == external
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((4, 32)).astype(np.float32) for name in "xz"}
    np.savez(tmp_path / "in.npz", **feeds)
    done = run(moved, tmp_path / "in.npz", tmp_path / "out.npz", 5)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("samples/s\n")
    found = np.load(tmp_path / "out.npz")
    expected = ReferenceEvaluator(branches()).run(None, feeds)
    np.testing.assert_allclose(found["y"], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["z"], feeds["z"])
    command = [sys.executable, "-I", str(moved / "run.py")]
    unsaid = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert unsaid.returncode == 1
    assert "python run.py INPUTS.npz OUTPUTS.npz" in unsaid.stderr


@pytest.mark.parametrize("teams", [((0, 2),), ((0, 2), (1, 3, 4))])
def test_devices_that_take_samples_in_turn_keep_their_order(teams: Teams, tmp_path: Path) -> None:
    """Seven samples, each another one, come out in their order, through two by three devices."""
    model, graph = imported(tmp_path)
    placement = dataclasses.replace(
        placed(graph), device_names=("cpu:0", "cpu:1", "cpu:2", "cpu:3", "cpu:4"), teams=teams
    )
    export_onnxruntime(model, tmp_path, graph, placement, cluster_preset("5xcpu"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    others = {s["device"]: s["others"] for s in manifest["segments"]}
    assert others == {0: [2], 1: [3, 4] if len(teams) > 1 else []}
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); import run\n"
        "feeds = [{n: np.full((4, 32), i, np.float32) for n in 'xz'} for i in range(7)]\n"
        "found = list(run.run(feeds))\n"
        "np.savez(sys.argv[2], y=[f['y'] for f in found], z=[f['z'] for f in found])\n"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "out"), str(tmp_path / "o.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, evaluator = np.load(tmp_path / "o.npz"), ReferenceEvaluator(branches())
    assert found["z"][:, 0, 0].tolist() == [float(i) for i in range(7)]
    for i in range(7):
        feeds = {n: np.full((4, 32), i, np.float32) for n in "xz"}
        wanted = evaluator.run(None, feeds)[0]
        np.testing.assert_allclose(found["y"][i], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "target", sorted(name for name, row in EXPORTERS.items() if not row.replicates)
)
def test_other_targets_refuse_replicas_in_one_line(target: str, tmp_path: Path) -> None:
    _, graph = imported(tmp_path)
    placement = dataclasses.replace(placed(graph, ()), teams=((0, 1),))
    message = rf"target '{target}' .* core0, core1 take samples in turn .* --no-replicas$"
    with pytest.raises(PlacementError, match=message):
        export(placement, str(tmp_path / "m.onnx"), target, tmp_path / "out", CORES)
    assert not (tmp_path / "out").exists()
    written = export(placement, str(tmp_path / "m.onnx"), "onnxruntime", tmp_path / "out", CORES)
    assert tmp_path / "out" / "run.py" in written


def test_a_failing_segment_ends_the_runner(tmp_path: Path) -> None:
    model, graph = imported(tmp_path)
    export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")
    wrong = {"x": np.zeros((3, 3), np.float32), "z": np.zeros((4, 32), np.float32)}
    np.savez(tmp_path / "in.npz", **wrong)
    done = run(tmp_path / "out", tmp_path / "in.npz", tmp_path / "out.npz", 5)
    assert done.returncode == 1
    assert "Got invalid dimensions for input: x" in done.stderr


def test_the_manifest_says_what_is_where(tmp_path: Path) -> None:
    model, graph = imported(tmp_path)
    export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["graph_digest"] == graph.digest
    assert [device["core"] for device in manifest["devices"]] == [0, 1]
    assert [s["device"] for s in manifest["segments"]] == [0, 1, 0]
    assert manifest["inputs"] == {
        name: {"dtype": "float32", "shape": [4, 32]} for name in ("x", "z")
    }
    assert [tuple(link) for link in manifest["links"]] == [
        ("feed", "segment_000"), ("segment_000", "segment_001"),
        ("segment_000", "segment_002"), ("segment_001", "segment_002"),
        ("segment_002", "result"), ("feed", "result"),
    ]  # fmt: skip
    assert set(manifest["versions"]) == {"gdp", "onnx", "onnxruntime"}


def test_devices_are_addressed_by_their_kinds() -> None:
    """Names say nothing but the number of a core: cores of other names are the next ones."""
    kinds = {"core3": "cpu-core", "cpu": "a100", "gpu": "cpu", "slow": "cpu-core", "t4": "t4"}
    devices = [Device(name, kind, {"default": 1.0}, 1.0) for name, kind in kinds.items()]
    devices.append(Device("core0", "cpu", {"default": 1.0}, 1.0))
    entries = exporter._devices(make_cluster("box", devices))
    assert [(e.core, e.provider) for e in entries] == [
        (3, "CPUExecutionProvider"), (None, "CUDAExecutionProvider"),
        (None, "CPUExecutionProvider"), (0, "CPUExecutionProvider"),
        (None, "CUDAExecutionProvider"), (None, "CPUExecutionProvider"),
    ]  # fmt: skip
    options = [e.provider_options for e in entries]
    assert [o["device_id"] for o in options if o] == ["0", "1"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    model, graph = imported(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(TargetError, match="holds files that gdp did not write"):
        export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    with pytest.raises(TargetError, match="is a file"):
        export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "m.onnx")


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    model, graph = imported(tmp_path)
    export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")
    export_onnxruntime(model, tmp_path, graph, placed(graph, ()), CORES, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gdp.json", "manifest.json", "run.py", "segment_000.onnx",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "out"]


def test_a_failed_export_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = imported(tmp_path)
    export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(exporter.shutil, "copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        export_onnxruntime(model, tmp_path, graph, placed(graph, ()), CORES, tmp_path / "out")
    assert (tmp_path / "out" / "segment_002.onnx").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "out"]


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    model, graph = imported(
        tmp_path, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="weights of 'segment_") as error:
        export_onnxruntime(model, tmp_path, graph, placed(graph), CORES, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
