"""Free answers know the plans of restricted ones: never behind them, and bounds hold for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdp
from gdp import api
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.fuse import class_parts, fuse
from gdp.graph.op_graph import make_graph
from gdp.models import Generation, load
from tests.gguf_models import MIB, box, sayable, write_gguf

NUM_MODELS = 4
COUNTED = gdp.Search(seconds=None, evaluations=20, simplicity=0.0)


def question(folder: Path, seed: int) -> tuple[gdp.OpGraph, gdp.Cluster]:
    """A request to a small model, mostly a mixture of experts, on a CPU and a GPU whose memory
    holds a part of it."""
    rng = np.random.default_rng(seed)
    experts = int(rng.choice([0, 2, 4]))
    path = write_gguf(folder / "m.gguf", layers=int(rng.integers(1, 3)), experts=experts)
    graph = load(
        Generation(str(path), prompt=int(rng.integers(8, 64)), new=int(rng.integers(2, 9)))
    )
    held = int(graph.weight_bytes.sum())
    size = int(held * rng.uniform(0.3, 1.1)) + MIB
    return graph, box(size, cpu_bytes=2 * held + 16 * MIB)


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_a_bound_holds_for_whatever_flags_can_say(seed: int, tmp_path: Path) -> None:
    """Experts on the processor and blocks without them are in the space of a free answer."""
    graph, cluster = question(tmp_path, seed)
    how: dict[str, Any] = {"costs": roofline, "search": COUNTED}
    free = gdp.place(graph, cluster, **how)
    scores = [
        api.simulate(graph, plan, cluster, costs=roofline) for plan in sayable(graph, cluster)
    ]
    least_s = min(score.value_s for score in scores if score.feasible)
    assert free.bound_s <= least_s * (1 + 1e-9)
    assert free.bound_s <= free.value_s
    restricted = gdp.place(graph, cluster, target="llamacpp", **how)
    assert restricted.bound_s <= free.value_s * (1 + 1e-9)
    assert free.value_s <= restricted.value_s * (1 + 1e-9)
    for result in (free, restricted):  # neither is behind its list, which has another tool's plan
        listed = [row.value_s for row in result.candidates if row.feasible and row.value_s]
        assert listed
        assert result.value_s <= min(listed) * (1 + 1e-9)
    simulated = api.simulate(graph, free.placement, cluster, costs=roofline)
    assert simulated.value_s == pytest.approx(free.value_s, rel=1e-9)


def test_without_time_the_answer_is_blocks_and_not_one_device() -> None:
    """A chain of four equal ops, of which the fast device holds three: 3 s + 10 s by hand. The slow
    one alone takes 40 s."""
    graph = make_graph(
        "chain", list("abcd"), ["MatMul"] * 4, [(i, 8) for i in range(3)],
        [(i, i + 1) for i in range(3)], flop=[1.0] * 4, weight_bytes=[1 << 20] * 4,
    )  # fmt: skip
    fast = Device("fast", "gpu", {"default": 1.0}, 1e18, memory_bytes=(3 << 20) + 64)
    slow = Device("slow", "cpu", {"default": 0.1}, 1e18, memory_bytes=1 << 30)
    cluster = make_cluster("two", [slow, fast], default_bytes_per_s=1e18, default_latency_s=0.0)
    result = api.place(graph, cluster, costs=roofline, search=gdp.Search(seconds=0.0))
    assert result.value_s == pytest.approx(13.0, rel=1e-6)
    untried = [row.method for row in result.candidates if row.reason == "no time was left"]
    assert untried
    assert "blocks" not in untried


def test_a_fused_op_is_cut_between_modules_that_hold_weights() -> None:
    """The add joins the product before it, which is of another module: two parts, and the ReLU
    without weights stays with the add that it reads."""
    graph = make_graph(
        "g", ["product", "add", "relu", "other"], ["MatMul", "Add", "Relu", "MatMul"],
        [(0, 1 << 20), (1, 1 << 20), (2, 1 << 20), (3, 8)], [(0, 1), (1, 2), (2, 3)],
        weight_bytes=[8, 0, 0, 8], colocate=[0, 1, 2, 1], flop=[1e9, 1, 1, 1e9],
    )  # fmt: skip
    fused = fuse(graph)
    assert fused.group_of.tolist() == [0, 0, 0, 1]
    parts = class_parts(graph, fused, graph.colocate)
    assert parts is not None
    assert fuse(graph, apart=parts).group_of.tolist() == [0, 1, 1, 2]
    assert class_parts(graph, fused, np.array([0, 0, 2, 3])) is None
