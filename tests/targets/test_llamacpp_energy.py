"""Plans of llama.cpp of the least joules, against all that its flags can say."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf_models import MIB, box, sayable, write_gguf

import gdp
from gdp.cluster.types import Cluster
from gdp.question import solve
from gdp.question.models import Generation, load
from gdp.question.question import Question
from gdp.targets.llamacpp.plan import plan_llamacpp

GPU, FRUGAL, HUNGRY = (300.0, 60.0), (20.0, 1.0), (200.0, 150.0)
"""Watts, and of these idle ones."""


def drawing(cluster: Cluster, *watts: tuple[float, float], base_watts: float = 0.0) -> Cluster:
    """The cluster with watts of its devices."""
    devices = tuple(
        replace(device, watts=most, idle_watts=idle)
        for device, (most, idle) in zip(cluster.devices, watts, strict=True)
    )
    return replace(cluster, devices=devices, base_watts=base_watts)


@pytest.mark.parametrize(
    ("experts", "sizes", "watts", "base_watts"),
    [
        (0, (9.0,), (FRUGAL, GPU), 0.0),  # the slow processor is the frugal one
        (4, (2.2,), (FRUGAL, HUNGRY), 0.0),
        (0, (9.0,), (FRUGAL, GPU), 500.0),  # the rest of the system draws while it waits
        (0, (9.0, 9.0), (HUNGRY, GPU, FRUGAL), 0.0),
        (4, (1.0, 1.6), (FRUGAL, GPU, GPU), 0.0),
    ],
)
def test_the_plan_takes_the_least_joules_that_the_flags_can_say(
    experts: int, sizes: tuple[float, ...], watts: tuple[tuple[float, float], ...],
    base_watts: float, tmp_path: Path,
) -> None:  # fmt: skip
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=experts)}?decode&sequence=64")
    cluster = drawing(box(*(int(s * MIB) for s in sizes)), *watts, base_watts=base_watts)
    question = Question(graph, cluster, objective="energy")
    scores = [solve.simulate(question, placed) for placed in sayable(graph, cluster)]
    best = min((s for s in scores if s.feasible), key=lambda s: s.value_s)
    found = plan_llamacpp(question)
    assert found.score.feasible
    assert found.bound_s <= best.value_s * (1 + 1e-9)
    assert best.value_s * (1 - 1e-9) <= found.value_s <= best.value_s * 1.03


@pytest.mark.parametrize("share", [1.01, 0.6, 0.3])
def test_within_a_limit_the_plan_is_fast_enough_and_nearly_the_most_frugal(
    share: float, tmp_path: Path
) -> None:
    """Between the seconds of the most frugal plan, on the processor, and those of the fastest."""
    path = write_gguf(tmp_path / "m.gguf", experts=0)
    cluster = drawing(box(9 * MIB), (2.0, 0.1), GPU)
    spec = f"{path}?decode&sequence=64"
    graph = load(spec)
    question = Question(graph, cluster, objective="energy")
    scores = [solve.simulate(question, placed) for placed in sayable(graph, cluster)]
    frugal = min(scores, key=lambda s: s.value_s)
    fastest_s = min(s.latency_s for s in scores)
    within_s = fastest_s + share * (frugal.latency_s - fastest_s)
    kept = [s for s in scores if s.latency_s <= within_s]
    found = plan_llamacpp(replace(question, within_s=within_s))
    assert found.score.latency_s <= within_s * (1 + 1e-6)
    assert found.value_s <= 1.5 * min(s.value_s for s in kept)
    if share > 1:
        assert found.value_s == pytest.approx(frugal.value_s, rel=0.01)


def test_a_limit_that_no_plan_keeps_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts=0)
    cluster = drawing(box(9 * MIB), (2.0, 0.1), GPU)
    with pytest.raises(gdp.InfeasibleError, match=r"no plan within 1\.000 us"):
        gdp.place(
            f"{path}?decode&sequence=64", cluster, target="llamacpp", objective="energy",
            within=1e-6,
        )  # fmt: skip


def test_other_objectives_are_refused(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode&sequence=64")
    with pytest.raises(gdp.GdpError, match=r"of one pass, or its energy, not throughput"):
        plan_llamacpp(Question(graph, box(MIB), objective="throughput"))


@pytest.mark.parametrize("devices", ["cpu-server-ddr5", "cpu-server-ddr5+rtx4090"])
def test_the_value_is_the_joules_of_the_request(devices: str, tmp_path: Path) -> None:
    """Steps are launched again and again, for which nothing is drawn."""
    request = Generation(str(write_gguf(tmp_path / "m.gguf")), prompt=64, new=16)
    found = gdp.place(request, devices, target="llamacpp", objective="energy")
    answer = found.generation
    assert answer is not None
    assert found.score.value_s == pytest.approx(answer.joules_per_request, rel=2e-3)
    assert found.bound_s <= found.score.value_s * (1 + 1e-9)
