"""Devices that may be exchanged: the simulator sees no difference."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster

from gdp.cluster.types import Link, make_cluster
from gdp.costs.base import roofline
from gdp.problem.problem import Problem, make_problem
from gdp.problem.symmetry import canonical, classes_of, links_alike, same, twins
from gdp.sim.score import score


def test_a_relation_is_cut_into_classes() -> None:
    kind = np.array([3, 1, 3, 2, 1])
    assert classes_of(same(kind)) == [[0, 2], [1, 4], [3]]
    assert classes_of(same(kind, np.arange(5))) == [[0], [1], [2], [3], [4]]


def swapped(device: np.ndarray, i: int, j: int) -> np.ndarray:
    name = np.arange(max(*device, i, j) + 1)
    name[[i, j]] = j, i
    return name[device]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_exchanging_twins_changes_no_score(objective: str) -> None:
    exchanged = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        graph = random_problem(seed, num_ops=14).graph
        # No two times are equal, so that no tie is broken by the number of a device.
        compute_s = np.repeat(rng.uniform(1.0, 9.0, (graph.num_ops, 1)), 4, axis=1)
        problem = make_problem(graph, unit_cluster(4, 0.1, memory_bytes=30), compute_s, objective)
        device = rng.integers(4, size=problem.num_groups)[problem.group]
        for i, j in enumerate(twins(problem).tolist()):
            if j >= 0:
                one, two = score(problem, device), score(problem, swapped(device, i, j))
                assert one.value_s == pytest.approx(two.value_s, rel=1e-9)
                assert one.overflow_bytes == two.overflow_bytes
                exchanged += 1
    assert exchanged > 30


def linked(*links: Link) -> Problem:
    cluster = unit_cluster(4)
    cluster = make_cluster(
        "linked", list(cluster.devices), links, default_bytes_per_s=1.0, default_latency_s=0.0
    )
    graph = plain_graph(2, [(0, 1)])
    return make_problem(graph, cluster, roofline(graph, cluster))


def test_links_tell_devices_apart() -> None:
    assert classes_of(links_alike(linked())) == [[0, 1, 2, 3]]
    # d0 and d1 share a fast link: exchanging them keeps it, exchanging d1 and d2 does not.
    assert classes_of(links_alike(linked(Link("d0", "d1", 5.0)))) == [[0, 1], [2, 3]]
    # One channel for two pairs: d0 has both of them.
    bus = [Link("d0", d, 1.0, 0.0, channel="bus") for d in ("d1", "d2")]
    assert classes_of(links_alike(linked(*bus))) == [[0], [1, 2], [3]]


def test_costs_memory_and_dispatch_tell_devices_apart() -> None:
    problem = linked()
    assert twins(problem).tolist() == [-1, 0, 1, 2]
    costs = problem.compute_s.copy()
    costs[0, 1] += 1.0
    assert twins(replace(problem, compute_s=costs)).tolist() == [-1, -1, 0, 2]
    devices = list(problem.cluster.devices)
    devices[2] = replace(devices[2], memory_bytes=7)
    cluster = replace(problem.cluster, devices=tuple(devices))
    assert twins(replace(problem, cluster=cluster)).tolist() == [-1, 0, -1, 1]


def test_devices_that_are_alike_are_named_by_first_use() -> None:
    """Of four equal devices; then the first differs from the three others."""
    problem = linked()
    problem = make_problem(plain_graph(4, []), problem.cluster, np.ones((4, 4)))
    order = np.arange(4)
    assert canonical(problem, np.array([2, 0, 2, 3]), order).tolist() == [0, 1, 0, 2]
    assert canonical(problem, np.array([2, 0, 2, 3]), order[::-1]).tolist() == [1, 2, 1, 0]
    costs = np.ones((4, 4))
    costs[0, 0] = 2.0
    problem = make_problem(problem.graph, problem.cluster, costs)
    assert canonical(problem, np.array([3, 0, 3, 2]), order).tolist() == [1, 0, 1, 2]


def test_renamed_placements_have_one_canonical_name() -> None:
    renamed = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        graph = plain_graph(6, [])
        kinds = rng.integers(2, size=4)
        problem = make_problem(graph, unit_cluster(4), np.ones((6, 4)) + kinds)
        device, order = rng.integers(4, size=6), rng.permutation(6)
        wanted = canonical(problem, device, order)
        for i, j in enumerate(twins(problem).tolist()):
            if j >= 0:
                other = swapped(device, i, j)
                renamed += (other != device).any()
                assert (canonical(problem, other, order) == wanted).all()
    assert renamed > 15
