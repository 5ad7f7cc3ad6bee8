"""Runs of one step per op against the slow reference: latency and overflow, to the last bit."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from reference_simulator import Run, overflow_bytes, run
from tiny import (
    cpu,
    plain_graph,
    random_devices,
    random_problem,
    unit_cluster,
    with_memory,
    without_queues,
)

from gdp.cluster.types import make_cluster
from gdp.problem.problem import Problem, make_problem
from gdp.sim.latency import arrays, latencies, simulate

pytestmark = pytest.mark.usefixtures("both_ways")


def with_links(problem: Problem, latency_s: np.ndarray, channel: np.ndarray) -> Problem:
    """The same problem with other latencies [D, D] in seconds and other channels [D, D]."""
    np.fill_diagonal(latency_s, 0.0)
    np.fill_diagonal(channel, 0)
    cluster = replace(problem.cluster, link_latency_s=latency_s, channel=channel)
    return replace(problem, cluster=cluster)


@functools.cache
def drawn(seed: int, num_devices: int, channels: str) -> Problem:
    """A random problem whose transfers all take time; times tie where its compute times do."""
    problem = random_problem(
        seed, num_devices=num_devices, num_ops=4 + seed % 40, runs=seed % 2 == 1, varied=True
    )
    rng = np.random.default_rng(seed)
    of_link = np.arange(num_devices**2).reshape(num_devices, num_devices)
    channel = of_link if channels == "links" else np.repeat(np.arange(num_devices), num_devices)
    steps = rng.choice([1.0, 2.0] if seed % 2 else [0.25, 0.7], size=of_link.shape)
    problem = with_links(problem, steps, channel.reshape(of_link.shape).copy())
    if channels == "free":
        problem = without_queues(problem, seed, 0.5 + 0.5 * (seed % 2))
    return problem


def drawn_rank(kind: str, num_ops: int, seed: int) -> np.ndarray | None:
    """No ranks, distinct ranks, or ranks with ties."""
    rng = np.random.default_rng(seed)
    if kind == "none":
        return None
    return rng.permutation(num_ops) if kind == "distinct" else np.arange(num_ops) % 3


def runs_of(problem: Problem, devices: np.ndarray, rank: np.ndarray | None) -> list[Run]:
    """What the reference makes of each placement, whatever the memory."""
    ranks = None if rank is None else rank.tolist()
    return [run(problem, device.tolist(), ranks) for device in devices]


def assert_equal(
    problem: Problem, devices: np.ndarray, rank: np.ndarray | None, runs: list[Run]
) -> np.ndarray:
    """The overflows [B] in bytes."""
    found_s, found_bytes = latencies(problem, devices, rank, threads=1)
    for b, wanted in enumerate(runs):
        assert found_s[b] == wanted.latency_s
        assert found_bytes[b] == overflow_bytes(problem, wanted.peak_bytes)
    return found_bytes


def assert_as_the_reference(
    problem: Problem, devices: np.ndarray, rank: np.ndarray | None
) -> np.ndarray:
    """The overflows [B] in bytes."""
    return assert_equal(problem, devices, rank, runs_of(problem, devices, rank))


Case = tuple[Problem, np.ndarray, np.ndarray | None, list[Run]]


@functools.cache
def cases(num_devices: int, channels: str, kind: str) -> list[Case]:
    """Problems, placements, ranks and the reference's runs, for both simulators."""
    made = []
    for seed in range(40):
        problem = drawn(seed, num_devices, channels)
        devices = random_devices(problem, seed, count=3)
        rank = drawn_rank(kind, problem.num_ops, seed)
        made.append((problem, devices, rank, runs_of(problem, devices, rank)))
    return made


@pytest.mark.parametrize("kind", ["none", "distinct", "tied"])
@pytest.mark.parametrize("channels", ["links", "sources", "free"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_a_step_per_op_is_the_reference_to_the_bit(
    num_devices: int, channels: str, kind: str
) -> None:
    over = 0
    for problem, devices, rank, runs in cases(num_devices, channels, kind):
        for each in (problem, with_memory(problem, 25)):
            assert arrays(each).direct
            over += int((assert_equal(each, devices, rank, runs) > 0).sum())
    assert over > 0


def test_ops_that_no_device_can_run_never_end() -> None:
    """Those that cannot run, and those that wait for them, while others go on."""
    never = 0
    for seed in range(40):
        problem = drawn(seed, 3, "links")
        compute_s = problem.compute_s.copy()
        op = np.random.default_rng(seed).choice(np.flatnonzero(~problem.graph.is_io))
        compute_s[op, 1:] = np.inf
        problem = make_problem(problem.graph, problem.cluster, compute_s)
        devices = np.random.default_rng(seed).integers(3, size=(3, problem.num_ops))
        assert arrays(problem).direct
        found_s, _ = latencies(problem, devices, threads=1)
        wanted = [run(problem, device.tolist(), None).latency_s for device in devices]
        assert found_s.tolist() == wanted
        never += int(np.isinf(found_s).sum())
    assert 0 < never < 3 * 40


@pytest.mark.parametrize("kind", ["none", "distinct", "tied"])
def test_what_goes_by_events_is_the_reference_too(kind: str) -> None:
    """A bus that two devices share, and links that take no time."""
    for seed in range(40):
        problem = drawn(seed, 3, "links")
        shared, latency_s = problem.cluster.channel.copy(), problem.cluster.link_latency_s.copy()
        shared[0, 1] = shared[1, 2] = 7
        bus = with_links(problem, latency_s.copy(), shared)
        latency_s[1, 0] = 0.0
        at_once = replace(
            bus.cluster, link_bytes_per_s=np.full_like(latency_s, np.inf), link_latency_s=latency_s,
            channel=problem.cluster.channel,
        )  # fmt: skip
        devices = random_devices(problem, seed, count=3)
        for each in (bus, replace(problem, cluster=at_once)):
            if problem.graph.num_tensors:
                assert not arrays(each).direct
            assert_as_the_reference(each, devices, drawn_rank(kind, problem.num_ops, seed))


@pytest.mark.parametrize("kind", ["none", "distinct"])
def test_transfers_shorter_than_half_a_tick_go_by_events(kind: str) -> None:
    """They take no time: arrivals of one instant, in rounds."""
    for seed in range(60):
        problem = drawn(seed, 3, "links")
        latency_s = np.full((3, 3), 1e-30)
        problem = with_links(problem, latency_s, problem.cluster.channel.copy())
        cluster = replace(problem.cluster, link_bytes_per_s=np.full((3, 3), np.inf))
        problem = replace(problem, cluster=cluster)
        assert not arrays(problem).direct
        devices = random_devices(problem, seed, count=3)
        assert_as_the_reference(problem, devices, drawn_rank(kind, problem.num_ops, seed))


def test_what_is_ready_first_runs_first_though_it_was_known_later() -> None:
    """o4 runs on d1 until second 10; o0's 7 bytes are there at 9, o1's one byte at 4.

    o0 ends at 1 and o1 at 2, so o2 is known to be ready at 9 before o3 is known to be at 4.
    """
    graph = plain_graph(6, [(0, 2), (1, 3), (3, 5)], [7, 1, 1, 1, 1, 1])
    compute_s = np.repeat(np.array([[1.0], [1.0], [1.0], [1.0], [10.0], [5.0]]), 3, axis=1)
    cluster = make_cluster(
        "three", [cpu(f"d{i}") for i in range(3)], default_bytes_per_s=1.0, default_latency_s=1.0
    )
    problem = make_problem(graph, cluster, compute_s)
    devices = np.array([[0, 0, 1, 1, 1, 2]])
    own = problem.cluster.channel.copy()
    own[0, 1] = -1  # at once, so that o1's byte is not held up by o0's
    problem = replace(problem, cluster=replace(cluster, channel=own))
    assert arrays(problem).direct
    # o3 from 10 to 11 on d1, one byte in 2 s, o5 from 13 to 18; o2 from 11 to 12.
    assert latencies(problem, devices)[0].tolist() == [18.0]
    assert_as_the_reference(problem, devices, None)


@pytest.mark.parametrize("count", [3, 32, 33, 80])
def test_what_overtakes_a_long_queue_is_the_reference_too(count: int) -> None:
    """While d0 is busy, d1 makes what arrives long after, and d2, later, what arrives before.

    A long op waits for what d0 makes of one of the latter, so that the latency tells their order.
    """
    made, last = range(1, 1 + 2 * count), 1 + 4 * count
    graph = plain_graph(last + 1, [*((i, i + 2 * count) for i in made), (1 + 3 * count, last)])
    name = np.array([int(name[1:]) for name in graph.op_names])
    far, near = (name > 0) & (name <= count), (name > count) & (name <= 2 * count)
    device = np.select([far | (name == last), near], [1, 2])
    compute_s = np.select([name == 0, far, near, name == last], [1e5, 0.0, 1.0, 1e6], 1.0)
    links_s = np.array([[0.0, 1.0, 1.0], [3e3, 0.0, 1.0], [1.0, 1.0, 0.0]])
    problem = make_problem(graph, unit_cluster(3), np.repeat(compute_s[:, None], 3, axis=1))
    problem = with_links(problem, links_s, np.arange(9).reshape(3, 3))
    assert arrays(problem).direct
    assert_as_the_reference(problem, device[None], None)


def test_ops_that_never_run_have_no_times() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)])
    compute_s = np.array([[1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    assert arrays(problem).direct
    assert simulate(problem, np.array([1, 1, 1])).start_s.tolist() == [0.0, 1.0, 2.0]
    never = simulate(problem, np.array([0, 0, 0]))
    assert never.latency_s == np.inf
    assert never.start_s.tolist() == [0.0, 1.0, np.inf]
    assert never.finish_s.tolist() == [1.0, np.inf, np.inf]
