"""Free answers know the plans of restricted ones: never behind them, and bounds hold for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdp
from gdp.base.errors import ArgumentError, InfeasibleError, ModelError, PlacementError
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.fuse import class_parts, fuse
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, make_graph
from gdp.question import solve
from gdp.question.models import Generation, load
from gdp.question.question import Question
from gdp.targets.table import PLANNERS
from tests.gguf_models import MIB, box, sayable, write_gguf

COUNTED = gdp.Search(seconds=None, evaluations=5, simplicity=0.0)
HOW: dict[str, Any] = {"costs": roofline, "search": COUNTED}
SAME = 1 + 1e-9
CANNOT = (ArgumentError, InfeasibleError, ModelError, PlacementError)
"""Errors of targets that cannot answer a question."""


def question(folder: Path, seed: int) -> tuple[gdp.OpGraph, gdp.Cluster]:
    """A request to a small model, dense or a mixture of experts, on a CPU and one or two GPUs whose
    memory holds a part of it."""
    rng = np.random.default_rng(seed)
    path = write_gguf(folder / "m.gguf", layers=1 + seed % 2, experts=2 * (seed % 2))
    graph = load(
        Generation(str(path), prompt=int(rng.integers(8, 64)), new=int(rng.integers(2, 9)))
    )
    held = int(graph.weight_bytes.sum())
    sizes = [int(held * rng.uniform(0.3, 1.1)) + MIB for _ in range(2 - seed % 2)]
    return graph, box(*sizes, cpu_bytes=2 * held + 16 * MIB)


def answers(graph: gdp.OpGraph, cluster: gdp.Cluster, **more: Any) -> dict[str, gdp.Result]:
    """Answers of all planning targets that have one. Weights are not streamed: a device that does
    so is none of a free answer's."""
    found = {}
    for name, row in PLANNERS.items():
        own = {"offload": "none"} if row.offloads else {}
        try:
            found[name] = gdp.place(graph, cluster, target=name, **HOW, **own, **more)
        except CANNOT:
            continue
    return found


def require_best(free: gdp.Result, restricted: dict[str, gdp.Result]) -> None:
    """A free answer is not behind any other of whole ops, its bound holds for all of these, and
    none is behind what stands in its own list."""
    for name, result in restricted.items():
        if not result.placement.splits:
            assert free.value_s <= result.value_s * SAME, name
            assert free.bound_s <= result.value_s * SAME, name
        assert result.bound_s <= result.value_s * SAME, name
    for result in (free, *restricted.values()):
        listed = [row.value_s for row in result.candidates if row.feasible and row.value_s]
        assert result.value_s <= min(listed, default=np.inf) * SAME


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_free_answer_is_behind_no_target_and_its_bound_holds_for_all(
    seed: int, tmp_path: Path
) -> None:
    """Also for whatever flags of llama.cpp can say, one by one: experts on the processor and blocks
    without them are in the space of a free answer."""
    graph, cluster = question(tmp_path, seed)
    free, restricted = gdp.place(graph, cluster, **HOW), answers(graph, cluster)
    require_best(free, restricted)
    assert {"accelerate", "llamacpp", "onnxruntime", "openvino"} <= restricted.keys()
    scores = [
        solve.simulate(Question(graph, cluster, costs=roofline), plan)
        for plan in sayable(graph, cluster)
    ]
    least_s = min(score.value_s for score in scores if score.feasible)
    assert free.bound_s <= least_s * SAME
    flags = restricted["llamacpp"]
    assert flags.placement.splits or flags.value_s >= least_s / SAME
    simulated = solve.simulate(Question(graph, cluster, costs=roofline), free.placement)
    assert simulated.value_s == pytest.approx(free.value_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_free_pipeline_is_behind_no_target(seed: int) -> None:
    """Random rows of four layers of unlike sizes on two or three unlike cards."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder()
    x = builder.make_tensor(builder.add_op("x", INPUT), 64)
    for i in range(4):
        op = builder.add_op(
            f"layers.{i}/mm", "mm", reads=[x], flop=float(rng.integers(1, 9)), traffic_bytes=1.0,
            scope=f"layers.{i}", weight_bytes=int(rng.integers(20, 60)),
        )  # fmt: skip
        x = builder.make_tensor(op, int(rng.integers(1, 9)))
    builder.add_op("y", OUTPUT, reads=[x])
    graph = builder.build("row")
    cards = [
        Device(f"g{i}", "gpu", {"default": float(speed)}, 1e9, memory_bytes=int(size))
        for i, (speed, size) in enumerate(rng.integers((1, 150), (4, 400), (2 + seed, 2)))
    ]
    host = Device("cpu", "cpu", {"default": 0.1}, 1e9, memory_bytes=1 << 20)
    cluster = make_cluster("cards", [host, *cards], default_bytes_per_s=64.0)
    free = gdp.place(graph, cluster, objective="throughput", **HOW)
    restricted = answers(graph, cluster, objective="throughput")
    require_best(free, restricted)
    assert {"accelerate", "onnxruntime", "openvino", "vllm"} <= restricted.keys()


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
    result = solve.solve(Question(graph, cluster, costs=roofline, search=gdp.Search(seconds=0.0)))
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


@pytest.mark.parametrize("seed", range(4))
def test_more_to_place_on_or_less_to_place_is_no_slower(seed: int, tmp_path: Path) -> None:
    """More memory, a further card, a shorter prompt and fewer bits leave a plan feasible, so that
    the exact program over blocks answers nothing slower."""
    rng = np.random.default_rng(seed)
    bits = {kind: tmp_path / f"{kind}.gguf" for kind in ("Q8_0", "Q4_K")}
    for kind, path in bits.items():
        write_gguf(path, layers=3, kind=kind)
    graph = load(Generation(bits["Q8_0"], prompt=64, new=4))
    size = int(graph.weight_bytes.sum() * rng.uniform(0.2, 0.9)) + MIB

    def seconds(kind: str = "Q8_0", prompt: int = 64, sizes: tuple[int, ...] = (size,)) -> float:
        asked = Generation(bits[kind], prompt=prompt, new=4)
        return gdp.place(asked, box(*sizes), target="llamacpp", **HOW).value_s

    least_s = seconds()
    assert seconds(sizes=(2 * size,)) <= least_s * SAME
    assert seconds(sizes=(size, size)) <= least_s * SAME
    assert seconds(prompt=32) <= least_s * SAME
    assert seconds(kind="Q4_K") <= least_s * SAME
