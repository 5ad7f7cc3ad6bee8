"""The ONNX standard's device annotations survive saving, and ONNX Runtime still loads the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.errors import PlacementError
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
