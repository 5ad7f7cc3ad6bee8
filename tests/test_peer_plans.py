"""Plans of other tools as yardsticks: llama.cpp's fit by hand, accelerate's own maps, device maps
that gdp and accelerate wrote."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.answer import answer
from gdp.cli.main import cli
from gdp.cluster.presets import cluster_preset
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.methods.base import Search
from gdp.question.question import Question
from gdp.sim.objectives import OBJECTIVES, Score
from gdp.targets.hf_accelerate import plan
from gdp.targets.hf_accelerate.plan import balanced_map
from gdp.targets.llamacpp.fit_rule import FIT_MARGIN_BYTES, FitSizes, fit_plan
from gdp.targets.peers import compared
from tests.decoders import decoder

BOX = cluster_preset("cpu+2xt4")


def sizes(dense: list[int], experts: list[int], memory: list[int], buffers: int = 0) -> FitSizes:
    return FitSizes(np.array(dense), np.array(experts), np.array(memory), buffers)


@pytest.mark.parametrize(
    ("given", "layers", "experts"),
    [
        # All fits: in proportion to memory, 1 to 3.
        (sizes([1] * 4, [0] * 4, [10, 30]), [0, 1, 1, 1], [0, 1, 1, 1]),
        # Five of six fit beside the margin of 2 and buffers of 1: the first stays on the CPU.
        (sizes([10] * 6, [0] * 6, [33, 23], 1), [-1, 0, 0, 0, 1, 1], [-1, 0, 0, 0, 1, 1]),
        # Two of three beside the margin of 2 and buffers of 1, without which all three would fit.
        (sizes([10] * 3, [0] * 3, [32], 1), [-1, 0, 0], [-1, 0, 0]),
        # Not even the dense part of a mixture fits: every expert is on the CPU.
        (sizes([10] * 4, [90] * 4, [22]), [-1, -1, 0, 0], [-1] * 4),
        # 140 for dense parts of 40: one block is whole, the first.
        (sizes([10] * 4, [90] * 4, [142]), [0] * 4, [0, -1, -1, -1]),
        # 120 for one whole block of 100, but not for the dense rest of 30 besides.
        (sizes([10] * 4, [90] * 4, [122]), [0] * 4, [-1] * 4),
        # The first GPU takes two whole blocks, as the second has room for the dense rest.
        (sizes([10] * 4, [90] * 4, [202, 22]), [0, 0, 1, 1], [0, 0, -1, -1]),
        # The first has room for one whole block, but the second not for three dense ones.
        (sizes([10] * 4, [90] * 4, [112, 22]), [0, 0, 1, 1], [-1] * 4),
    ],
)
def test_llama_cpp_fits_by_its_rule(given: FitSizes, layers: list[int], experts: list[int]) -> None:
    """With a margin of 2 bytes a GPU."""
    found = fit_plan(given, margin_bytes=2)
    assert found.layers.tolist() == layers
    assert found.experts.tolist() == experts


def test_a_gpu_smaller_than_the_margin_is_left_empty() -> None:
    found = fit_plan(sizes([1, 1], [0, 0], [FIT_MARGIN_BYTES]))
    assert found.layers.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("value_s", "over", "said"),
    [
        (2.04, 0, "2.0 times as fast as X"),
        (1.003, 0, "as fast as X"),
        (0.98, 0, "0.98 times as fast as X"),
        (1.0, 3 << 30, "X does not fit: 3.00 GiB over device memory"),
    ],
)
def test_plans_are_compared_in_words(value_s: float, over: int, said: str) -> None:
    own = Score(1.0, 1.0, 0, np.zeros(1, np.int64), 1.0)
    other = replace(own, value_s=value_s, overflow_bytes=over)
    assert compared(own, other, "X", OBJECTIVES["latency"]) == said
    joules = said.replace("times as fast as", "times less energy than").replace(
        "fast as", "good as"
    )
    assert compared(own, other, "X", OBJECTIVES["energy"]) == joules


def split() -> OpGraph:
    """full (root, no inputs) and embed feed layers.0, add (root), layers.1; weights of 8 bytes."""
    names = ["x", "full", "embed", "l0", "add", "act", "l1", "y"]
    return make_graph(
        "lm", names, [INPUT, "Full", "Gather", "Gemm", "Add", "Gelu", "Gemm", OUTPUT],
        [(i, 4 if i != 1 else 2) for i in range(7)],
        [(0, 2), (1, 3), (2, 3), (3, 4), (2, 4), (4, 5), (5, 6), (6, 7)],
        weight_bytes=[0, 0, 8, 8, 0, 0, 8, 0],
        scope=["", "", "m.embed", "m.layers.0", "m", "m.act", "m.layers.1", ""],
    )  # fmt: skip


def test_accelerates_maps_place_ops_of_the_root_where_their_inputs_are() -> None:
    entries: dict[str, Any] = {"m.embed": 1, "m.layers.0": 0, "m.layers.1": "cuda:1"}
    found = gdp.make_placement(split(), BOX, entries)
    assert found.device_map() == {
        "x": "cpu", "full": "t4:1", "embed": "t4:1", "l0": "t4:0", "add": "t4:0", "act": "t4:0",
        "l1": "t4:1", "y": "cpu",
    }  # fmt: skip
    assert found.streamed_bytes == 0
    by_name = {"m.embed": "t4:1", "m.layers": "t4:0", "m.act": "t4:0"}
    named = gdp.make_placement(split(), BOX, by_name)
    assert named.device_map()["full"] == "t4:1", "the first device of the map"
    assert named.device_map()["add"] == "t4:0"


def test_ops_that_share_a_device_stay_together_in_accelerates_maps() -> None:
    """`act`, which has no entry, would follow `add` to 0 but has to lie with `l1`."""
    graph = split()
    together = graph.colocate.copy()
    together[5] = together[6]
    entries: dict[str, Any] = {"m.embed": 1, "m.layers.0": 0, "m.layers.1": 1}
    apart = gdp.make_placement(graph, BOX, entries).device_map()
    found = gdp.make_placement(replace(graph, colocate=together), BOX, entries).device_map()
    assert (apart["act"], found["act"], found["l1"]) == ("t4:0", "t4:1", "t4:1")


def test_cpu_beside_numbers_means_weights_that_stream() -> None:
    entries: dict[str, Any] = {"m.embed": 0, "m.layers.0": "cpu", "m.layers.1": "disk"}
    found = gdp.make_placement(split(), BOX, entries)
    assert found.device_names == ("cpu", "t4:0", "t4:1", "cpu offload", "disk offload")
    assert found.device_map()["l0"] == "cpu offload"
    assert found.streamed_bytes == 8 + 12, "the largest module, and what one op reads and makes"
    assert gdp.simulate(split(), entries, BOX).feasible
    alone = gdp.make_placement(split(), BOX, {"": "cpu"})
    assert alone.ops_on["cpu"] == 8, "without numbers the device of that name"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"m": 2}, "device 2; cluster 'cpu.2xt4' has cpu, t4:0, t4:1, 0, 1"),
        ({"m.embed": 0, "m.layers.0": 0}, "leaves out op 'l1' of module 'm.layers.1'"),
        ({"n": 0}, "leaves out op 'embed'"),
    ],
)
def test_maps_that_do_not_fit_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(gdp.PlacementError, match=message):
        gdp.make_placement(split(), BOX, entries)


def test_a_device_map_is_simulated_as_the_placement_it_was_made_from(tmp_path: Path) -> None:
    """The map that gdp exported, as a file: through the library and the command line."""
    from gdp.graph.file import save_graph

    graph, path = split(), tmp_path / "g.json"
    save_graph(graph, path)
    placement = gdp.make_placement(graph, BOX, np.array([0, 1, 1, 1, 1, 1, 2, 0]))
    (written,) = gdp.export(placement, path, "accelerate", tmp_path / "map", BOX)
    own = gdp.simulate(graph, placement, BOX)
    assert gdp.simulate(graph, written, BOX).value_s == own.value_s
    command = ["simulate", str(path), str(written), "--cluster", "cpu+2xt4", "--json"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["latency_s"] == own.latency_s
    bad = tmp_path / "bad.json"
    bad.write_text('{"m.embed": [1]}')
    with pytest.raises(gdp.PlacementError, match="not a placement file"):
        gdp.simulate(graph, bad, BOX)


def test_accelerates_own_map_is_a_candidate() -> None:
    """Four equal layers: accelerate gives each GPU two, gdp leaves the slower GPU out."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from gdp.importers.pytorch.model import TorchModel

    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
        model = TorchModel("four", module, (torch.zeros(1, 2048),), {})
    graph = model.trace().graph
    placed = answer(
        Question(
            graph,
            cluster_preset("cpu+rtx4090+t4"),
            target="accelerate",
            model=model,
            search=Search(seconds=None, evaluations=50),
        )
    )
    row = next(c for c in placed.candidates if c.method == "accelerate, auto")
    assert row.feasible
    assert row.value_s is not None
    assert row.value_s > 1.3 * placed.value_s
    assert any("times as fast as accelerate's own map" in note for note in placed.notes)


@pytest.mark.parametrize(("bits", "fits"), [(32, False), (8, True), (4.5, True)])
def test_accelerates_own_map_counts_quantised_weights(bits: float, fits: bool) -> None:
    """64 MiB as float32; usable memory of 32 MiB."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from gdp.importers.pytorch.model import TorchModel

    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))
        graph = TorchModel("four", module, (torch.zeros(1, 2048),), {}).trace().graph
    graph = replace(graph, weight_bytes=(graph.weight_bytes * bits / 32).astype(np.int64))
    cluster = cluster_preset("cpu+rtx4090")
    small = [d if d.is_cpu else replace(d, memory_bytes=32 << 20) for d in cluster.devices]
    entries = balanced_map(module, graph, replace(cluster, devices=tuple(small)))
    assert entries is not None
    assert (set(entries.values()) == {0}) == fits


def test_the_clock_starts_behind_the_map_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a module of 70 billion weights takes longer than a short search."""
    order: list[str] = []
    peer, budget = plan.accelerate_peer, gdp.Search.budget

    def told_peer(*arguments: Any) -> Any:
        order.append("map")
        return peer(*arguments)

    def told_budget(search: gdp.Search, work_s: float | None = None) -> Any:
        order.append("clock")
        return budget(search, work_s)

    monkeypatch.setattr(plan, "accelerate_peer", told_peer)
    monkeypatch.setattr(gdp.Search, "budget", told_budget)
    once = gdp.Search(seconds=None, evaluations=5)
    gdp.place(decoder(), "cpu+2xt4-pcie4", target="accelerate", costs=roofline, search=once)
    assert order[0] == "map"
    assert "clock" in order
