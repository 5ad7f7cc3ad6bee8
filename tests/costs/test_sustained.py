"""Seconds and joules of eager PyTorch over a whole image or video, by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster.types import Cluster
from gdp.costs.default import resolve_costs
from gdp.costs.measured.costs import ELEMENTWISE_S, LIBRARY_S
from gdp.costs.measured.kernels import descriptor_of
from gdp.costs.power import Power
from gdp.costs.sustained import (
    PACES,
    CallSeconds,
    call_joules,
    call_seconds,
)
from gdp.graph.op_graph import INPUT, OUTPUT, OpDetail, OpGraph
from tests.tiny import plain_graph

CARD = 1
"""Device of a machine with a processor and one GPU."""


def one(op_type: str, detail: OpDetail, flop: float, moved: float) -> OpGraph:
    """A graph of PyTorch of one op."""
    plain = plain_graph(3, [(0, 1), (1, 2)])
    return replace(
        plain, op_types=(INPUT, op_type, OUTPUT), flop=np.array([0, flop, 0.0]),
        memory_traffic_bytes=np.array([0, moved, 0.0]), detail=(OpDetail(), detail, OpDetail()),
        source="torch",
    )  # fmt: skip


def seconds_of(graph: OpGraph, machine: str = "cpu+h100") -> CallSeconds:
    cluster = Cluster.load(machine)
    return call_seconds(graph, cluster, resolve_costs(None, cluster, graph)[0])


def attention(head: int, tokens: int = 32_768, heads: int = 12) -> OpGraph:
    shape = (1, heads, tokens, head)
    flop = 4.0 * heads * tokens**2 * head
    return one("scaled_dot_product_attention", OpDetail("bfloat16", (shape,) * 3, (shape,)),
               flop, 8.0 * heads * tokens * head)  # fmt: skip


@pytest.mark.parametrize(("head", "padded", "share"), [(128, 128, 1.0), (72, 96, 1.0),
                                                       (64, 64, PACES.narrow)])  # fmt: skip
def test_long_attention_is_as_fast_as_its_instructions(
    head: int, padded: int, share: float
) -> None:
    """132 multiprocessors of an H100 at 1.98 GHz (its preset), heads padded to 32."""
    graph = attention(head)
    device = Cluster.load("cpu+h100").devices[CARD]
    seconds = seconds_of(graph).kernel_s[1, CARD]
    silicon = descriptor_of(device)
    rate = PACES.attention * silicon.units * silicon.clock_hz * share
    assert seconds == pytest.approx(graph.flop[1] * padded / head / rate)
    assert graph.flop[1] / seconds < device.speed("bfloat16")


def convolution(shape: tuple[int, ...], weights: tuple[int, ...]) -> OpGraph:
    """A convolution that keeps the size of its input."""
    out = (shape[0], weights[0], *shape[2:])
    flop = 2.0 * np.prod(out) * np.prod(weights[1:])
    moved = 2.0 * (np.prod(shape) + np.prod(out) + np.prod(weights))
    name = "conv3d" if len(shape) == 5 else "conv2d"
    return one(name, OpDetail("bfloat16", (shape, weights), (out,)), float(flop), float(moved))


def test_volumes_are_slower_than_planes_of_their_work() -> None:
    plane = convolution((8, 256, 128, 128), (256, 256, 3, 9))
    volume = convolution((1, 256, 8, 128, 128), (256, 256, 3, 3, 3))
    assert volume.flop[1] == plane.flop[1]
    ratio = seconds_of(volume).kernel_s[1, CARD] / seconds_of(plane).kernel_s[1, CARD]
    assert ratio == pytest.approx(PACES.volumes, rel=0.05)


def test_a_depthwise_convolution_moves_bytes() -> None:
    """11,200 channels of 32 x 32, as of SANA: 92 MB over 3.35 TB/s are 27 us; as products of one
    channel each they were 4.2 ms."""
    graph = convolution((2, 11_200, 32, 32), (11_200, 1, 3, 3))
    least_s = graph.memory_traffic_bytes[1] / 3.35e12
    assert least_s <= seconds_of(graph).kernel_s[1, CARD] < 5 * least_s


def test_launches_are_counted_beside_kernels() -> None:
    product = one("linear", OpDetail("bfloat16", ((8, 64), (64, 64)), ((8, 64),)), 65_536, 10_240)
    added = one("add", OpDetail("bfloat16", ((8, 64),) * 2, ((8, 64),)), 512, 3_072)
    assert seconds_of(product).launch_s[1].tolist() == [0.0, LIBRARY_S]
    assert seconds_of(added).launch_s[1].tolist() == [0.0, ELEMENTWISE_S]


def test_newer_libraries_are_further_from_their_kernels() -> None:
    """A product on B200, over the seconds that the network has for it."""
    shapes = ((1, 8192, 8192), (8192, 8192))
    graph = one("linear", OpDetail("bfloat16", shapes, ((1, 8192, 8192),)), 2 * 8192**3, 4e8)
    cluster = Cluster.load("cpu+b200")
    base = resolve_costs(None, cluster, graph)[0](graph, cluster)[1, CARD]
    assert seconds_of(graph, "cpu+b200").kernel_s[1, CARD] == pytest.approx(
        PACES.products * PACES.new_products * base, rel=0.05
    )


def test_joules_stay_below_the_limit() -> None:
    graph, cluster = attention(128), Cluster.load("cpu+h100")
    kernel_s = seconds_of(graph).kernel_s
    power = Power.of(cluster)
    joules = call_joules(graph, cluster, kernel_s)[1, CARD]
    most = (power.limit[CARD] - power.idle[CARD]) * kernel_s[1, CARD]
    assert 0.5 * most < joules <= most
    # The same work in half of the time is more than the card draws.
    assert call_joules(graph, cluster, kernel_s / 4)[1, CARD] == pytest.approx(most / 4)
