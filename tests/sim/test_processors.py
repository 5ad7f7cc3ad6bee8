"""Devices that share a processor take one after the other what others do side by side."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import make_problem
from gdp.sim.latency import shares_processor
from gdp.sim.score import score, values

pytestmark = pytest.mark.usefixtures("both_ways")


def problem(processors, objective="latency"):
    """Two ops of 3 and 4 seconds that feed one of 2; a tensor takes a second between devices."""
    devices = [Device(f"d{i}", "cpu", {"default": 1.0}, 1.0) for i in range(len(processors))]
    cluster = make_cluster("c", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    cluster = replace(
        cluster,
        devices=tuple(
            replace(d, processor=name) for d, name in zip(devices, processors, strict=True)
        ),
    )
    graph = make_graph("g", list("abc"), ["X"] * 3, [(0, 1), (1, 1)], [(0, 2), (1, 2)])
    seconds = np.repeat([[3.0], [4.0], [2.0]], len(devices), axis=1)
    return make_problem(graph, cluster, seconds, objective)


SPLIT = np.array([0, 1, 1])


@pytest.mark.parametrize(
    ("processors", "latency_s", "period_s"),
    [
        (("", ""), 6.0, 6.0),  # the first op and its transfer beside the second
        (("x", "y"), 6.0, 6.0),
        (("x", "x"), 10.0, 10.0),  # 3 + 4 + 2, and a second of copying
        (("x", ""), 6.0, 6.0),
    ],
)
def test_what_shares_a_processor_adds_up(processors, latency_s, period_s) -> None:
    found = score(problem(processors), SPLIT)
    assert (found.latency_s, found.period_s) == (latency_s, period_s)
    pipelined = problem(processors, "throughput")
    assert score(pipelined, SPLIT).value_s == period_s
    for prepared, value in ((problem(processors), latency_s), (pipelined, period_s)):
        found_s, overflow = values(prepared, np.stack([SPLIT, SPLIT * 0]))
        np.testing.assert_array_equal(found_s, [value, 9.0])
        assert not overflow.any()


def test_one_device_takes_what_it_took() -> None:
    alone = np.zeros(3, np.int64)
    assert score(problem(("x", "x")), alone).latency_s == 9.0


def test_only_two_of_a_name_share() -> None:
    assert not shares_processor(problem(("x", "")))
    assert shares_processor(problem(("x", "y", "x")))
    three = problem(("x", "y", "x"))
    # The processor x: 3 + 2, and the copy from d0 to d2; the copy from y is no work of x alone.
    # In the run d1 ends at 4, its copy at 5 and the last op at 7.
    apart = np.array([0, 1, 2])
    assert score(three, apart).latency_s == 7.0
    assert score(problem(("x", "y", "x"), "throughput"), apart).value_s == 3.0 + 2.0 + 1.0
