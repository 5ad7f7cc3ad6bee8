"""Answers say what a request gains where one device reads the prompt and another writes tokens."""

import re
from dataclasses import replace

import pytest

import gdp
from gdp.api.answer import phases_apart
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.costs.offload import sends_weights
from gdp.graph.generation import generation_graph
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpGraph
from gdp.graph.request import Request
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.question.solve import solve

NEW = 20


def phase(flop: float, traffic: float, cache: int = 0, repeats: int = 1) -> OpGraph:
    """One product with 1,000 bytes of weights, whose traffic is that of all its runs."""
    b = GraphBuilder()
    x = b.make_tensor(b.add_op("ids", INPUT), 0)
    op = b.add_op(
        "m/mul", "mm", reads=[x], flop=flop, traffic_bytes=traffic / repeats, scope="m",
        weight_bytes=1000 + cache, cache_bytes=cache, repeats=repeats,
    )  # fmt: skip
    b.add_op("out", OUTPUT, reads=[b.make_tensor(op, 0)])
    return b.build("phase")


def request(repeats: int = 1) -> OpGraph:
    """A prompt of 9,000 FLOP, and steps that read 100 bytes each beside a cache of 60, in so many
    runs of an op, as of a model that drafts."""
    prompt, step = phase(9000.0, 0.0), phase(0.0, 100.0, cache=60, repeats=repeats)
    return generation_graph("g", prompt, step, Request(8, NEW))


def laptop(memory_bytes: int = 10_000, pool: str = "", npu_flop_per_s: float = 900.0) -> Cluster:
    """A processor of 100 FLOP/s that reads 100 bytes/s; an NPU of nine times the arithmetic and
    half the bandwidth; 30 bytes/s between them."""
    cpu, npu = (
        Device(name, name, {"default": flop}, rate, memory_bytes, memory_pool=pool)
        for name, flop, rate in (("cpu", 100.0, 100.0), ("npu", npu_flop_per_s, 50.0))
    )
    return make_cluster("laptop", [cpu, npu], default_bytes_per_s=30.0, default_latency_s=0.0)


def answered(cluster: Cluster, repeats: int = 1) -> Result:
    search = gdp.Search(seconds=None, evaluations=20)
    return solve(
        Question(request(repeats), cluster, costs=roofline, search=search, method="single")
    )


@pytest.mark.parametrize("repeats", [1, 5])
def test_each_phase_on_the_device_that_is_faster_at_it(repeats: int) -> None:
    """10 s of the prompt on the NPU, 2 s for the cache, 20 steps of 1 s on the processor, beside
    some bytes of taking tokens: 32 s, where the NPU alone takes 50 and the processor 110."""
    result = answered(laptop(), repeats)
    assert result.value_s == pytest.approx(50, rel=0.02)
    note = phases_apart(result)
    assert "read by npu and the tokens written by cpu" in note
    assert "(1000 B more)" in note
    seconds = float(re.search(r"would take ([0-9.]+) s", note)[1])  # pyright: ignore[reportOptionalSubscript]
    assert seconds == pytest.approx(32, rel=0.02)
    told = float(re.search(r"([0-9.]+) times as fast", note)[1])  # pyright: ignore[reportOptionalSubscript]
    assert told == pytest.approx(result.value_s / seconds, abs=0.01)


@pytest.mark.parametrize(
    ("cluster", "tells"),
    [
        (laptop(), True),
        (laptop(1500), True),
        (laptop(3000, "ram"), True),
        (laptop(2000, "ram"), False),  # both hold weights and caches in one memory
        (laptop(npu_flop_per_s=300.0), True),  # 30 + 2 + 20 of 70 s
        (laptop(npu_flop_per_s=110.0), False),  # 82 + 2 + 20 of 110 s, less than a tenth
    ],
)
def test_nothing_is_told_without_room_or_gain(cluster: Cluster, tells: bool) -> None:
    assert bool(phases_apart(answered(cluster))) == tells


def test_answers_have_the_note_and_alike_devices_none() -> None:
    search = gdp.Search(seconds=None, evaluations=20)
    found = gdp.place(request(), laptop(), costs=roofline, search=search)
    assert sum("read by npu" in note for note in found.notes) == 1
    alike = laptop()
    alike = replace(alike, devices=tuple(replace(d, kind="x") for d in alike.devices))
    assert not phases_apart(answered(alike))


def test_no_weights_are_sent_to_an_npu() -> None:
    """llama.cpp's op offload is one of its GPU backends."""
    for kind, sends in (("npu", False), ("npu-xdna", False), ("rtx3060", True), ("gpu", True)):
        devices = (laptop().devices[0], replace(laptop().devices[1], kind=kind))
        assert sends_weights(replace(laptop(), devices=devices)) == sends
