"""Exports that are files of names: accelerate and OpenVINO."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.base.errors import PlacementError
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Device, make_cluster
from gdp.costs.offload import with_offload
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.placement.placement import Placement, make_placement
from gdp.targets.hf_accelerate.device_map import device_map, export_accelerate, hugging_face_names
from gdp.targets.intel_openvino.export import export_openvino
from gdp.targets.modules import kept_modules

BOX = cluster_preset("cpu+2xt4")


def layered() -> OpGraph:
    """embed -> layers.0.mlp -> layers.1.mlp -> add (no weights) -> head."""
    names = ["e", "m0", "m1", "add", "h"]
    return make_graph(
        "lm", names, ["Gather", "Gemm", "Gemm", "Add", "Gemm"],
        [(i, 4) for i in range(4)], [(i, i + 1) for i in range(4)],
        weight_bytes=[8, 8, 8, 0, 8],
        scope=["model.embed", "model.layers.0.mlp", "model.layers.1.mlp", "model", "head"],
    )  # fmt: skip


def placed(device: list[int], cluster: str = "cpu+2xt4") -> Placement:
    return make_placement(layered(), cluster_preset(cluster), np.array(device))


def test_a_device_map_covers_modules_and_merges_subtrees() -> None:
    """Layers 0 and 1 lie apart, the rest of `model` with layer 0: four entries."""
    found = device_map(layered(), placed([1, 1, 2, 1, 0]), BOX)
    assert found == {"head": "cpu", "model.embed": 0, "model.layers.0": 0, "model.layers.1": 1}


def test_a_device_is_a_cpu_by_its_kind_and_not_by_its_name() -> None:
    devices = [
        Device("core-killer", "gpu", {"default": 1e9}, 1e9),
        Device("epyc", "cpu", {"default": 1e9}, 1e9),
        Device("cpu2", "gpu", {"default": 1e9}, 1e9),
    ]
    cluster = make_cluster("odd", devices)
    assert hugging_face_names(cluster) == [0, "cpu", 1]
    assert hugging_face_names(with_offload(cluster, ["cpu", "disk"])) == [
        0,
        "cpu",
        1,
        "cpu",
        "disk",
    ]


def test_a_device_map_is_in_the_order_of_the_model() -> None:
    """Of eleven layers, the tenth is behind the second; the embedding is first, the head last."""
    paths = ["z.embed", *(f"z.layers.{i}" for i in range(11)), "z.norm", "a_head"]
    graph = make_graph(
        "lm", [f"op{i}" for i in range(14)], ["Gemm"] * 14, [(i, 4) for i in range(13)],
        [(i, i + 1) for i in range(13)], weight_bytes=[8] * 14, scope=paths,
    )  # fmt: skip
    device = np.array([2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1])
    found = device_map(graph, make_placement(graph, BOX, device), BOX)
    assert list(found) == paths
    assert list(found.values()) == [1, 0] * 7


def test_a_device_map_is_in_the_order_in_which_a_module_defines_its_parts() -> None:
    """`scale` has no op that reads it, and `late` is defined first and called last."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from gdp.importers.pytorch.model import TorchModel

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.Linear(4, 4)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.scale = torch.nn.Linear(4, 4)
            self.early = torch.nn.Linear(4, 4)

        def forward(self, x: object) -> object:
            return self.late(self.blocks[1](self.blocks[0](self.early(x))))

    module = Net()
    graph = TorchModel("net", module, (torch.zeros(1, 4),), {}).trace().graph
    on = {"early": 2, "blocks.0": 1, "blocks.1": 2, "late": 1}
    placement = make_placement(graph, BOX, np.array([on.get(s, 0) for s in graph.scope]))
    defined = ["late", "blocks.0", "blocks.1", "scale", "early"]
    assert list(device_map(graph, placement, BOX, module)) == defined
    assert list(device_map(graph, placement, BOX)) == ["early", "blocks.0", "blocks.1", "late"]


def test_what_computes_offloaded_weights_comes_first() -> None:
    """The embedding is on disk and the layers on accelerator 1: an entry of 0 leads."""
    cluster = with_offload(BOX, ["disk"])
    placement = make_placement(layered(), cluster, np.array([3, 2, 1, 2, 1]))
    found = device_map(layered(), placement, cluster)
    assert found == {"model.embed": "disk", "model.layers.0": 1, "model.layers.1": 0, "head": 0}
    assert list(found) == ["model.layers.1", "model.embed", "model.layers.0", "head"]


def test_children_that_lie_elsewhere_than_their_module_have_entries_of_their_own() -> None:
    """`model` holds a weight itself, as does its last layer, with two children on two devices."""
    scope = ["model", "model.a", "model.last", "model.last.b", "model.last.c", "head"]
    graph = make_graph(
        "lm", list("mabcdh"), ["Gemm"] * 6, [(i, 4) for i in range(5)],
        [(i, i + 1) for i in range(5)], weight_bytes=[8] * 6, scope=scope,
    )  # fmt: skip
    placement = make_placement(graph, BOX, np.array([1, 2, 2, 1, 2, 2]))
    assert device_map(graph, placement, BOX) == {
        "model": 0, "model.last.b": 0, "head": 1, "model.a": 1, "model.last": 1
    }  # fmt: skip
    apart = make_placement(graph, BOX, np.array([1, 2, 1, 1, 1, 2]))
    assert device_map(graph, apart, BOX) == {"model": 0, "head": 1, "model.a": 1}
    alone = make_placement(graph, BOX, np.array([2, 1, 2, 1, 1, 2]))
    assert device_map(graph, alone, BOX) == {
        "model.a": 0, "model.last.b": 0, "model.last.c": 0, "head": 1, "model": 1
    }  # fmt: skip


def test_a_weight_of_the_whole_model_that_no_op_reads_moves_nothing_else() -> None:
    module = Held({"unused": object(), "model.embed.weight": object()})
    found = device_map(layered(), placed([2, 1, 1, 1, 2]), BOX, module)
    assert found == {"unused": 0, "model.layers": 0, "head": 1, "model.embed": 1}


def rooted() -> OpGraph:
    """A parameter of the model itself, a part, and another such parameter behind it."""
    return make_graph(
        "rooted", ["a", "part", "b"], ["MatMul"] * 3, [(0, 4), (1, 4)], [(0, 1), (1, 2)],
        weight_bytes=[8] * 3, scope=["", "part", ""],
    )  # fmt: skip


def test_parameters_beside_the_parts_are_entries_by_name_and_come_first() -> None:
    """An entry of the whole model would take its parts along, and nothing streams such weights."""
    module = Held({"part.weight": object(), "b": object(), "a": object()})
    box = with_offload(BOX, ["cpu"])
    placement = make_placement(rooted(), box, np.array([1, 3, 1]))
    found = device_map(rooted(), placement, box, module)
    assert list(found.items()) == [("a", 0), ("b", 0), ("part", "cpu")]
    assert make_placement(rooted(), BOX, found).device.tolist() == [1, 3, 1]
    assert device_map(rooted(), make_placement(rooted(), BOX, np.ones(3, int)), BOX) == {"": 0}
    with pytest.raises(PlacementError, match="go by names that the PyTorch module knows"):
        device_map(rooted(), placement, box)
    away = make_placement(rooted(), box, np.array([3, 1, 3]))
    with pytest.raises(PlacementError, match="streams no parameters of the model itself"):
        device_map(rooted(), away, box, module)
    torn = make_placement(rooted(), box, np.array([1, 1, 2]))
    with pytest.raises(PlacementError, match="on several devices, first 'the model itself'"):
        device_map(rooted(), torn, box, module)


def test_modules_with_weights_of_their_own_or_named_by_the_model_stay_whole() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    block = type("Block", (torch.nn.Sequential,), {})
    model = torch.nn.Sequential(block(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert set(kept_modules(model)) == {"1.0"}
    model._no_split_modules = ["Block"]
    assert set(kept_modules(model)) == {"0", "1.0"}


def test_one_device_needs_one_entry() -> None:
    assert device_map(layered(), placed([2, 2, 2, 2, 2]), BOX) == {"": 1}


def test_a_module_on_two_devices_is_refused_with_a_way_out() -> None:
    graph = make_graph(
        "lm", ["q", "k"], ["Gemm", "Gemm"], [(0, 4)], [(0, 1)],
        weight_bytes=[8, 8], scope=["attn", "attn"],
    )  # fmt: skip
    placement = make_placement(graph, cluster_preset("2xt4"), np.array([0, 1]))
    with pytest.raises(PlacementError, match=r"first 'attn'; .* --for accelerate"):
        device_map(graph, placement, cluster_preset("2xt4"))


def test_a_graph_without_module_paths_is_refused() -> None:
    graph = make_graph("g", ["a"], ["Gemm"], [], [], weight_bytes=[8])
    placement = make_placement(graph, cluster_preset("2xt4"), np.array([0]))
    with pytest.raises(PlacementError, match="no module paths"):
        device_map(graph, placement, cluster_preset("2xt4"))


def test_the_device_map_is_written_as_json(tmp_path: Path) -> None:
    (path,) = export_accelerate(layered(), placed([2, 2, 2, 2, 2]), BOX, tmp_path)
    assert json.loads(path.read_text()) == {"": 1}


def test_a_map_of_offloaded_weights_alone_is_refused_with_what_does_it(tmp_path: Path) -> None:
    cluster = with_offload(BOX, ["cpu"])
    placement = make_placement(layered(), cluster, np.array([3, 3, 3, 1, 3]))
    with pytest.raises(PlacementError, match=r"every weight is offloaded.*cpu_offload\(model"):
        export_accelerate(layered(), placement, cluster, tmp_path / "map")
    assert not (tmp_path / "map").exists()


def test_the_loader_for_openvino_lets_its_tools_report_nothing(tmp_path: Path) -> None:
    """OpenVINO's tools look for the module that reports at import, and do without it."""
    export_openvino(layered(), placed([0, 1, 1, 2, 2]), BOX, tmp_path)
    (tmp_path / "openvino_telemetry.py").write_text("print('reports')\n")
    (tmp_path / "openvino.py").write_text(
        "try:\n    import openvino_telemetry\nexcept ImportError:\n    print('silent')\n"
        "raise SystemExit\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "load.py", "m.onnx"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "silent\n"


def test_an_export_to_accelerate_knows_the_devices_it_offloads_to(tmp_path: Path) -> None:
    """The placement names a device beside the cluster's; without the cluster none is known."""
    names = (*BOX.device_names, "cpu offload")
    placement = dataclasses.replace(placed([1, 1, 3, 3, 3]), device_names=names)
    with pytest.raises(ValueError, match=r"give the cluster \(--cluster\)$"):
        gdp.export(placement, layered(), "accelerate", tmp_path / "map")
    gdp.export(placement, layered(), "accelerate", tmp_path / "map", BOX)
    assert "cpu" in json.loads((tmp_path / "map" / "device_map.json").read_text()).values()


class Held:
    """Weights by name as a PyTorch module lists them; equal values are one tensor."""

    def __init__(self, tensors: dict[str, object]) -> None:
        self.tensors = tensors

    def named_parameters(self, remove_duplicate: bool = True) -> list[tuple[str, object]]:
        seen: set[int] = set()
        new = [not (id(t) in seen or seen.add(id(t))) for t in self.tensors.values()]
        return [
            pair for pair, first in zip(self.tensors.items(), new, strict=True)
            if first or not remove_duplicate
        ]  # fmt: skip

    def named_modules(self, remove_duplicate: bool = True) -> list[tuple[str, object]]:
        return [("", self), *((name.rpartition(".")[0], self) for name in self.tensors)]

    def named_buffers(self, remove_duplicate: bool = True) -> list[tuple[str, object]]:
        return []


def test_weights_that_no_op_reads_lie_where_those_tied_to_them_do() -> None:
    """The embedding is on the second GPU; a head that is tied to it is there too, wherever its name
    stands. A module that is tied to nothing goes with what is inside of it, or first."""
    embedding, other, free = object(), object(), object()
    placement = placed([2, 1, 1, 1, 1])
    module = Held({
        "before.weight": embedding, "model.embed.weight": embedding, "model.layers.0.scale": other,
        "head.weight": object(), "decoder.weight": embedding, "spare.weight": free,
    })  # fmt: skip
    found = device_map(layered(), placement, BOX, module)
    assert found["before"] == found["decoder"] == found["model.embed"] == 1
    assert found["spare"] == found["head"] == found["model.layers"] == 0
    inside = device_map(layered(), placed([1, 2, 2, 2, 1]), BOX, module)
    assert inside["model.layers"] == 1
    assert inside["spare"] == inside["before"] == 0
