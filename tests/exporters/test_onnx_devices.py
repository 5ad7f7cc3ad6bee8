"""The ONNX standard's device annotations survive saving, and ONNX Runtime still loads the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gdp.cluster.presets import cluster_preset
from gdp.errors import ModelError, PlacementError
from gdp.exporters.onnx_devices import CONFIGURATION, export_onnx_devices, validate
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx, prepare
from gdp.placement import Placement, make_placement


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return load_onnx("onnx:light_squeezenet")


def halves(graph: OpGraph) -> Placement:
    device = (np.arange(graph.num_ops) >= graph.num_ops // 2).astype(np.int64)
    device[graph.is_io] = 0
    return make_placement(graph, cluster_preset("2xcpu-core"), device)


def test_every_node_names_its_device_and_stage(graph: OpGraph, tmp_path: Path) -> None:
    placement = halves(graph)
    (path,) = export_onnx_devices(prepare("onnx:light_squeezenet"), graph, placement, tmp_path)
    assert validate(path, graph, placement) == []
    model = onnx.load(path)
    (configuration,) = model.configuration
    assert (configuration.name, list(configuration.device)) == (CONFIGURATION, ["core0", "core1"])
    stages = {
        node.device_configurations[0].pipeline_stage
        for node in model.graph.node
        if node.name in graph.op_index
    }
    assert stages == {0, 1}
    assert model.ir_version <= 13


def test_onnxruntime_still_loads_the_annotated_model(graph: OpGraph, tmp_path: Path) -> None:
    import onnxruntime

    (path,) = export_onnx_devices(prepare("onnx:light_squeezenet"), graph, halves(graph), tmp_path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert len(session.get_outputs()) == 1


def test_validation_finds_a_wrong_device(graph: OpGraph, tmp_path: Path) -> None:
    placement = halves(graph)
    (path,) = export_onnx_devices(prepare("onnx:light_squeezenet"), graph, placement, tmp_path)
    swapped = make_placement(graph, cluster_preset("2xcpu-core"), 1 - placement.device)
    assert "are wrong" in validate(path, graph, swapped)[0]


def test_a_model_without_a_placed_node_is_refused(graph: OpGraph, tmp_path: Path) -> None:
    model = prepare("onnx:light_squeezenet")
    model.graph[-1].name = "renamed"
    with pytest.raises(PlacementError, match="lacks 1 nodes of the placement"):
        export_onnx_devices(model, graph, halves(graph), tmp_path)
    assert not list(tmp_path.glob("*.onnx"))


def with_external_data(folder: Path) -> Path:
    """Weights in three files: of the graph, of a branch alone, and of a node's attribute."""

    def stored(name: str, factor: float) -> TensorProto:
        data = factor * np.arange(100, dtype=np.float32)
        (folder / f"{name}.bin").write_bytes(data.tobytes())
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[100])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"{name}.bin")
        return tensor

    def info(name: str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        shape = [] if dtype == TensorProto.BOOL else [100]
        return helper.make_tensor_value_info(name, dtype, shape)

    node = helper.make_node
    then = helper.make_graph(
        [node("Mul", ["a", "b"], ["t"])], "then", [], [info("t")], [stored("b", 2.0)]
    )
    other = helper.make_graph([node("Abs", ["a"], ["e"])], "else", [], [info("e")])
    constant = node("Constant", [], ["c"], name="constant")
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(
        stored("c", 3.0)
    )
    nodes = [
        constant,
        node("Add", ["x", "w"], ["a"], name="add"),
        node("If", ["go"], ["z"], name="if", then_branch=then, else_branch=other),
        node("Mul", ["z", "c"], ["y"], name="mul"),
    ]
    inputs = [info("x"), info("go", TensorProto.BOOL)]
    graph = helper.make_graph(nodes, "g", inputs, [info("y")], [stored("w", 1.0)])
    made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    path = folder / "external.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_weights_in_other_files_are_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x = 1: (1 + i) * 2i * 3i, wherever the exported model is loaded from."""
    import onnxruntime

    source, output = tmp_path / "source", tmp_path / "elsewhere" / "out"
    source.mkdir()
    path = with_external_data(source)
    graph = load_onnx(path)
    files = export_onnx_devices(prepare(path), graph, halves(graph), output)
    assert [file.name for file in files] == ["model.onnx", "model.onnx.data"]
    assert sorted(output.iterdir()) == [output / "gdp.json", *files]
    for file in source.iterdir():
        file.unlink()
    monkeypatch.chdir(tmp_path)
    session = onnxruntime.InferenceSession(files[0], providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.ones(100, np.float32), "go": np.array(True)})
    i = np.arange(100, dtype=np.float32)
    np.testing.assert_allclose(np.asarray(found), (1 + i) * 2 * i * 3 * i, rtol=1e-6)


@pytest.mark.parametrize("name", ["w", "b", "c"])
def test_missing_weights_are_one_line_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    path = with_external_data(tmp_path)
    graph = load_onnx(path)
    (tmp_path / f"{name}.bin").unlink()
    with pytest.raises(ModelError, match=rf"weights of 'external' are missing, .*{name}.bin"):
        export_onnx_devices(prepare(path), graph, halves(graph), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_weights_of_the_source_are_not_written_over(tmp_path: Path) -> None:
    path = with_external_data(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "model.onnx.data"
    (tmp_path / "w.bin").rename(tmp_path / "model.onnx.data")
    before = (tmp_path / "model.onnx.data").read_bytes()
    path.write_bytes(model.SerializeToString())
    graph = load_onnx(path)
    with pytest.raises(PlacementError, match="holds the weights of the model that is exported"):
        export_onnx_devices(prepare(path), graph, halves(graph), tmp_path)
    assert (tmp_path / "model.onnx.data").read_bytes() == before
