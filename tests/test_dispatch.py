"""A module on its devices computes what it did alone, and misfits are refused in one line.

Devices here are cores, which are one device to torch: hooks move nothing, but stand everywhere.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdp
from gdp.cluster.presets import cluster_preset
from gdp.graph.op_graph import OpGraph
from tests.generating_configs import generating_config

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

ONCE = gdp.Search(seconds=None, evaluations=30)
BOX = "cpu+2xt4"


def folder_of(tmp_path: Path, name: str, **changed: Any) -> Path:
    document = {**generating_config(name), **changed}
    folder = tmp_path / f"{name}-{len(changed)}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def built(folder: Path, task: str = "AutoModelForCausalLM") -> Any:
    """The model of a folder with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, task).from_config(config).eval()


class Residual(torch.nn.Module):
    """Two blocks that add what a part makes to what it reads."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def graph_of(module: Any) -> OpGraph:
    return gdp.trace_torch(module, (torch.zeros(3, 8),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task"), [("llama", "AutoModelForCausalLM"), ("t5", "AutoModelForSeq2SeqLM")]
)
def test_a_model_generates_the_tokens_that_it_does_alone(
    name: str, task: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, name)
    model = built(folder, task)
    ids = torch.arange(4, 12).reshape(1, 8)
    settings = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    alone = model.generate(ids, **settings)
    asked = gdp.Generation(folder, prompt=8, new=6)
    graph = gdp.load(asked)
    # The second block of every list is on another core.
    second = [p for p, _ in model.named_modules() if re.fullmatch(r"[a-z.]+\.1", p)]
    cores = {"": "core0"} | dict.fromkeys(second, "core1")
    split = gdp.make_placement(graph, cluster_preset("2xcpu-core"), cores)
    placed = gdp.on_devices(model, split, asked, "2xcpu-core")
    assert placed is model
    assert len(placed.hf_device_map) > 2
    assert torch.equal(placed.generate(ids, **settings), alone)


def test_a_result_says_all_that_is_needed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    result = gdp.place(
        f"hf:{folder}?sequence=8", "2xcpu-core", target="accelerate", objective="throughput",
        search=ONCE,
    )  # fmt: skip
    model = built(folder)
    ids = torch.arange(4, 12).reshape(1, 8)
    alone = model(ids).logits.detach()
    for _ in range(2):  # called again, it moves the module again
        placed = gdp.on_devices(model, result)
        torch.testing.assert_close(placed(ids).logits.detach(), alone)
    path = tmp_path / "p.json"
    gdp.save_placement(result.placement, path)
    torch.testing.assert_close(gdp.on_devices(model, path)(ids).logits.detach(), alone)


def test_a_plain_module_runs_with_the_graph_that_was_placed() -> None:
    module, x = Residual(), torch.randn(3, 8)
    alone, graph = module(x).detach(), graph_of(module)
    result = gdp.place(graph, "2xcpu-core", search=ONCE)
    with pytest.raises(gdp.PlacementError, match=r"does not say of which model .* give the model"):
        gdp.on_devices(module, result)
    torch.testing.assert_close(gdp.on_devices(module, result, graph)(x).detach(), alone)
    by_map = gdp.on_devices(module, {"": "core1"}, graph, "2xcpu-core")
    torch.testing.assert_close(by_map(x).detach(), alone)


class Rooted(torch.nn.Module):
    """A parameter of its own before a part, and another one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = (torch.nn.Parameter(torch.rand(8, 8)) for _ in range(2))
        self.part, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.other(torch.relu(self.part(x @ self.before)) @ self.behind)


def test_parameters_beside_the_parts_compute_on_the_first_device() -> None:
    module, x = Rooted(), torch.randn(3, 8)
    alone, graph = module(x).detach(), graph_of(module)
    split = {"": "core0", "other": "core1"}
    placed = gdp.on_devices(module, split, graph, "2xcpu-core")
    assert list(placed.hf_device_map) == ["before", "behind", "part", "other"]
    torch.testing.assert_close(placed(x).detach(), alone)
    with pytest.raises(gdp.PlacementError, match=r"reads from cuda:0 and cuda:1, and only inputs"):
        gdp.on_devices(module, {"": "t4:0", "part": "t4:1"}, graph, BOX)


def test_a_device_that_torch_lacks_is_named() -> None:
    module = Residual()
    entries = {"blocks.0": "t4:0", "blocks.1": "t4:1"}
    cards = torch.cuda.device_count()
    if cards > 1:
        pytest.skip("torch has both devices")
    with pytest.raises(gdp.ClusterError, match=rf"'t4:{cards}' as cuda:{cards}, .* has {cards} "):
        gdp.on_devices(module, entries, graph_of(module), BOX)
    assert not hasattr(module, "hf_device_map")
    on_cpu = gdp.on_devices(module, {"": "cpu"}, graph_of(module), BOX)
    assert on_cpu.hf_device_map == {"": torch.device("cpu")}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Residual(blocks=3), r"another model, 'Residual': it has no weights in 'blocks.2'"),
        (Residual(blocks=1), r"another model, .* weights in 'blocks.1.down', which the module lac"),
        (Residual(width=16), r"another model, .* it has 2.\d* KiB of weights, the module has 8"),
        (Residual().double(), r"another model, .* it has 2.\d* KiB of weights, the module has 4"),
    ],
)  # fmt: skip
def test_another_module_than_the_placed_one_is_refused(module: Any, message: str) -> None:
    graph = graph_of(Residual())
    with pytest.raises(gdp.PlacementError, match=message):
        gdp.on_devices(module, {"": "core0"}, graph, "2xcpu-core")


def test_a_placement_of_another_graph_is_refused() -> None:
    other = gdp.place(graph_of(Residual(blocks=3)), "2xcpu-core", search=ONCE)
    module = Residual()
    with pytest.raises(gdp.PlacementError, match="for another graph"):
        gdp.on_devices(module, other, graph_of(module))


def test_a_sum_of_results_of_two_devices_is_refused_with_a_way_out() -> None:
    """`down` on another device than `up` leaves its block a sum of two devices; blocks on two
    devices do not."""
    module = Residual()
    graph = graph_of(module)
    torn = {"blocks.0": "cpu", "blocks.1.up": "cpu", "blocks.1.down": "t4:1"}
    with pytest.raises(gdp.PlacementError, match=r"'blocks.1' reads from cpu and cuda:1, .*layer"):
        gdp.on_devices(module, torn, graph, BOX)
    with pytest.raises(gdp.ClusterError, match="'t4:1' as cuda:1"):
        gdp.on_devices(module, {"blocks.0": "cpu", "blocks.1": "t4:1"}, graph, BOX)


def test_offloaded_weights_and_replicas_are_refused() -> None:
    module = Residual()
    graph = graph_of(module)
    with pytest.raises(gdp.PlacementError, match="offloads weights"):
        gdp.on_devices(module, {"blocks.0": 0, "blocks.1": "cpu"}, graph, BOX)
    whole = gdp.make_placement(graph, cluster_preset("2xcpu-core"), {"": "core0"})
    turns = replace(whole, teams=((0, 1),), device=np.where(graph.is_io, 0, whole.device))
    with pytest.raises(gdp.PlacementError, match=r"replicas|replicated|team"):
        gdp.on_devices(module, turns, graph, "2xcpu-core")


def test_a_module_without_weights_or_no_module_is_refused() -> None:
    with torch.device("meta"):
        module = Residual()
    with pytest.raises(gdp.ModelError, match="meta device; load them"):
        gdp.on_devices(module, {"": "core0"}, graph_of(module), "2xcpu-core")
    with pytest.raises(gdp.ArgumentError, match="is needed, got function"):
        gdp.on_devices(graph_of, {"": "core0"}, graph_of(module), "2xcpu-core")
    with pytest.raises(gdp.ArgumentError, match="give the cluster"):
        gdp.on_devices(module, {"": "core0"}, graph_of(module))
