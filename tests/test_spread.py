"""Of equally fast plans one that leaves the largest share of memory free on the fullest card."""

import json
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.cluster.types import Cluster, Device, fullness, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import EQUAL
from gdp.question import solve
from gdp.question.models import Generation, load
from gdp.question.question import Question
from gdp.sim.objectives import Score
from tests.gguf_models import sayable, write_gguf

QUICK = gdp.Search(seconds=None, evaluations=20)


def three_cards(graph: OpGraph, share: float) -> Cluster:
    """A processor and three equal cards that hold such a share of the model each; borders between
    them cost next to nothing."""
    size = int(graph.weight_bytes.sum() * share) + int(graph.tensor_bytes.max() * 8)
    cards = [Device(f"gpu{i}", "gpu", {"default": 1e9}, 1e9, size) for i in range(3)]
    cpu = Device("cpu", "cpu", {"default": 1e7}, 1e7, 64 << 20)
    return make_cluster(
        "three", [cpu, *cards], default_latency_s=1e-12, default_bytes_per_s=1e15
    )  # fmt: skip


def fullest(cluster: Cluster, score: Score) -> float:
    """Share of the fullest card's memory that is taken."""
    return max(fullness(cluster, score.peak_bytes.tolist())[1:])


def test_flags_spread_blocks_evenly_over_three_equal_cards(tmp_path: Path) -> None:
    """As evenly as the evenest of all plans of flags that are as fast, within half a percent of
    memory; not asked for, the fastest may fill two cards beside an idle one. With this cache
    llama.cpp divides no ops."""
    path = write_gguf(tmp_path / "m.gguf", layers=6)
    graph = load(Generation(f"{path}?cache=q5_0", prompt=16, new=4))
    cluster = three_cards(graph, 0.6)
    result = gdp.place(graph, cluster, target="llamacpp", costs=roofline, search=QUICK)
    scores = [
        solve.simulate(Question(graph, cluster, costs=roofline), p) for p in sayable(graph, cluster)
    ]
    fits = [score for score in scores if score.feasible]
    least_s = min(score.value_s for score in fits)
    equal = [fullest(cluster, s) for s in fits if s.value_s <= least_s * (1 + EQUAL)]
    assert result.value_s <= least_s * (1 + EQUAL)
    assert fullest(cluster, result.score) <= min(equal) + 0.005 < max(equal) - 0.2
    assert any("spread evenly" in note for note in result.notes)


@pytest.mark.slow
def test_maps_of_accelerate_spread_layers_evenly_over_three_equal_cards(tmp_path: Path) -> None:
    """Two layers a card, each with the embedding or the head where these are."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.generating_configs import generating_config

    config = {**generating_config("llama"), "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = Generation(f"hf:{tmp_path}", prompt=16, new=4)
    graph = load(asked)
    cluster = three_cards(graph, 0.7)
    result = gdp.place(
        asked, cluster, target="accelerate", offload="none", costs=roofline, search=QUICK
    )
    where = [
        set(result.placement.device[[s.startswith(f"model.layers.{i}.") for s in graph.scope]])
        for i in range(6)
    ]
    assert all(len(devices) == 1 for devices in where)
    counts = np.unique([devices.pop() for devices in where], return_counts=True)[1]
    assert counts.tolist() == [2, 2, 2]
    assert result.score.feasible
