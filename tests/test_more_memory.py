"""A card more, or more memory, makes no answer worse, for the runtimes that have planners."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.base.errors import InfeasibleError
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question.models import load
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.hf_accelerate.plan import plan_accelerate
from gdp.targets.llamacpp.plan import plan_llamacpp
from gdp.targets.modules import whole_modules
from gdp.targets.vllm.plan import plan_vllm
from tests.decoders import Sizes, decoder
from tests.gguf_models import write_gguf

MB = 10**6
SEARCH = Search(seconds=None, evaluations=60)
EXACT = 0.02
"""Share by which a search may miss the best."""


def layers(rng: np.random.Generator) -> OpGraph:
    """A chain of layers of one weight each; some run once, some many times, as decoders do beside
    encoders."""
    count = int(rng.integers(3, 7))
    names = ["in", *(f"mul{i}" for i in range(count)), "out"]
    scope = ["", *(f"layers.{i}" for i in range(count)), ""]
    weights = (rng.integers(1, 5, count) * 5 * MB).tolist()
    flop = (rng.integers(1, 40, count) * 1e6).tolist()
    return make_graph(
        "layers", names, [INPUT, *["MatMul"] * count, OUTPUT],
        [(i, int(rng.integers(4, 100_000))) for i in range(count + 1)],
        [(i, i + 1) for i in range(count + 1)], flop=[0, *flop, 0],
        weight_bytes=[0, *weights, 0], scope=scope,
        repeats=[1, *rng.choice([1, 1, 20], count).tolist(), 1],
    )  # fmt: skip


def box(cards: list[tuple[float, int]]) -> Cluster:
    """A processor and cards of (GFLOP/s, megabytes) behind links of 1 GB/s."""
    cpu = Device("epyc", "cpu", {"default": 1e12}, 1e12)
    gpus = [
        Device(f"g{i}", f"gpu-{speed}", {"default": speed * 1e9}, 1e12, mb * MB)
        for i, (speed, mb) in enumerate(cards)
    ]
    links = [Link("epyc", gpu.name, 1e9) for gpu in gpus]
    return make_cluster("box", [cpu, *gpus], links, default_bytes_per_s=1e9, default_latency_s=0.0)


@pytest.mark.parametrize("seed", [1, 5, 8, 9])
def test_another_card_makes_no_map_for_accelerate_worse(seed: int) -> None:
    """The first card holds some of the layers; the second is slower, equal or quicker. Under seed 8
    the slow one has room, and streaming what runs once is quicker than computing it there."""
    rng = np.random.default_rng(seed)
    graph = layers(rng)
    held = int(graph.weight_bytes.sum()) // MB
    first = (10.0, int(held * rng.uniform(0.5, 1.1)))
    second = (float(rng.choice([0.5, 2.0, 10.0, 40.0])), int(held * rng.uniform(0.3, 1.0)))
    whole = Constraints(whole=whole_modules(None, graph, "layer"))
    question = Question(graph, box([first]), constraints=whole, costs=roofline, search=SEARCH)
    small = plan_accelerate(question)
    large = plan_accelerate(replace(question, cluster=box([first, second])))
    assert large.value_s <= small.value_s * (1 + EXACT), (small.value_s, large.value_s)
    assert large.bound_s <= large.value_s


Card = tuple[float, float, float]
"""TFLOP/s, usable memory over the model's bytes, reserve over them."""


def cards(graph: OpGraph, specs: list[Card]) -> Cluster:
    """A processor and GPUs."""
    held = int(graph.weight_bytes.sum())
    gpus = [
        Device(f"g{i}", f"k{rate}", {"default": rate * 1e12}, rate * 1e10, int(held * size),
               reserve_bytes=int(held * reserve))
        for i, (rate, size, reserve) in enumerate(specs)
    ]  # fmt: skip
    cpu = Device("cpu", "cpu", {"default": 1e11}, 1e9, 1 << 30)
    return make_cluster(
        "cards", [cpu, *gpus], default_latency_s=1e-6, default_bytes_per_s=1e9
    )  # fmt: skip


def drawn(rng: np.random.Generator) -> Card:
    """A card that holds a tenth of the model to one and a half of it."""
    return (
        float(rng.choice([0.3, 1.0, 1.0, 3.0])), float(rng.uniform(0.1, 1.4)),
        float(rng.choice([0.05, 0.11, 0.3])),
    )  # fmt: skip


def value_s(plan: Callable[[Question], Result], graph: OpGraph, specs: list[Card]) -> float:
    """Seconds of a plan; inf where nothing fits."""
    try:
        return plan(Question(graph, cards(graph, specs), costs=roofline)).value_s
    except InfeasibleError:
        return np.inf


def require_monotone(
    plan: Callable[[Question], Result], graph: OpGraph, rng: np.random.Generator
) -> None:
    """Neither a card before or behind the others nor more memory on each makes a plan slower than
    by what an even one may cost."""
    own = [drawn(rng) for _ in range(int(rng.integers(1, 3)))]
    more, small_s = drawn(rng), value_s(plan, graph, own)
    roomier = [(rate, 1.3 * size, reserve) for rate, size, reserve in own]
    for specs in ([*own, more], [more, *own], roomier):
        large_s = value_s(plan, graph, specs)
        assert large_s <= small_s * (1 + EXACT), (own, specs, small_s, large_s)


@pytest.mark.parametrize("seed", range(10))
def test_another_card_makes_no_layout_of_vllm_worse(seed: int) -> None:
    """A card with much reserve leaves the smallest share, which vLLM takes of all that it uses."""
    rng = np.random.default_rng(seed)
    sizes = Sizes(layers=int(rng.integers(2, 6)), experts=int(rng.choice([0, 4])))
    require_monotone(plan_vllm, decoder(sizes, 64, int(rng.choice([1, 4, 32]))), rng)


@pytest.mark.parametrize("seed", range(4))
def test_another_card_makes_no_plan_for_llamacpp_worse(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(2, 6)), int(rng.choice([0, 4]))
    model = write_gguf(tmp_path / "m.gguf", layers=layers, experts=experts)
    graph = load(gdp.Generation(model, prompt=64, new=int(rng.choice([1, 4, 32]))))
    require_monotone(plan_llamacpp, graph, rng)
