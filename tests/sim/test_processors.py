"""Devices that share a processor, or a thread that launches their ops, take turns at it."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import Launches, make_problem
from gdp.sim.engine import arrays
from gdp.sim.plain import serial_seconds
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
    assert not arrays(problem(("x", ""))).is_serial
    assert arrays(problem(("x", "y", "x"))).is_serial
    three = problem(("x", "y", "x"))
    # The processor x: 3 + 2, and the copy from d0 to d2; the copy from y is no work of x alone.
    # In the run d1 ends at 4, its copy at 5 and the last op at 7.
    apart = np.array([0, 1, 2])
    assert score(three, apart).latency_s == 7.0
    assert score(problem(("x", "y", "x"), "throughput"), apart).value_s == 3.0 + 2.0 + 1.0


@pytest.mark.parametrize(
    ("threads", "launch_s", "latency_s"),
    [
        ((0, 0), 1.0, 6.0),  # 3 s of launches hide behind the run
        ((0, 0), 4.0, 12.0),
        ((0, 1), 4.0, 8.0),  # two ops of one thread
        ((-1, 0), 4.0, 8.0),
        ((-1, -1), 4.0, 6.0),
    ],
)
def test_a_run_takes_as_long_as_its_launches(threads, launch_s, latency_s) -> None:
    launches = Launches(np.full((3, 2), launch_s), np.array(threads))
    launched = replace(problem(("", "")), launches=launches)
    assert score(launched, SPLIT).latency_s == latency_s
    assert arrays(launched).is_serial == (max(threads) >= 0)
    of_first = np.array([True, False, False])
    assert serial_seconds(launched, SPLIT, of_first) == (launch_s if threads[0] >= 0 else 0.0)
    if threads == (0, 0):
        assert serial_seconds(launched, SPLIT, ~of_first) == 2 * launch_s
    pipelined = replace(problem(("", ""), "throughput"), launches=launches)
    assert score(pipelined, SPLIT).value_s == latency_s


def test_a_processor_goes_before_a_thread() -> None:
    launches = Launches(np.full((3, 2), 9.0), np.zeros(2, np.int64))
    assert score(replace(problem(("x", "x")), launches=launches), SPLIT).latency_s == 10.0


def test_dispatch_is_work_of_the_thread() -> None:
    """Three ops of half a second of dispatch, and one of launching: 4.5 s, where the run takes 3 +
    0.5, a second of sending, and 2.5."""
    plain = problem(("", ""))
    cluster = plain.cluster.with_dispatch(np.array([0.5, 0.5]))
    launches = Launches(np.full((3, 2), 1.0), np.zeros(2, np.int64))
    timed = replace(plain, cluster=cluster, launches=launches)
    assert score(timed, SPLIT).latency_s == 7.0
    longer = launches._replace(seconds=np.full((3, 2), 2.0))
    assert score(replace(timed, launches=longer), SPLIT).latency_s == 7.5
