"""Gaps that are decoded again: of three kinds, and groups whole."""

import numpy as np
from tiny import plain_graph, unit_cluster

from gdp.learn.ppo import gap
from gdp.methods.priorities import timing
from gdp.problem.problem import make_problem


def test_gaps_are_windows_parts_of_a_device_and_neighbourhoods() -> None:
    """Two interleaved chains: only a neighbourhood stays within one and spans several ops.

    Devices follow neither: only the part of a window on one device has one device and both chains.
    """
    n = 48
    graph = plain_graph(n, [(i, i + 2) for i in range(n - 2)])
    problem = make_problem(graph, unit_cluster(3), np.ones((n, 3)))
    device = np.arange(n) // 2 % 3
    place = np.argsort(timing(problem).order)
    rng = np.random.default_rng(0)
    seen = {"window": 0, "device": 0, "near": 0}
    for _ in range(300):
        ops = gap(problem, device, rng)
        assert 1 <= len(ops) <= n // 4
        if len(ops) < 4:
            continue
        one_chain = len(set((ops % 2).tolist())) == 1
        one_device = len(set(device[ops].tolist())) == 1
        in_a_row = np.ptp(place[ops]) == len(ops) - 1
        seen["near"] += one_chain and not one_device and not in_a_row
        seen["device"] += one_device and not one_chain and not in_a_row
        seen["window"] += in_a_row and not one_chain and not one_device
    assert min(seen.values()) >= 5, seen


def test_a_gap_frees_groups_whole() -> None:
    n = 24
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)])
    together = np.arange(n) % 12
    problem = make_problem(graph, unit_cluster(2), np.ones((n, 2)), together=together)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ops = gap(problem, np.zeros(n, dtype=np.int64), rng)
        freed = set(problem.group[ops].tolist())
        assert set(np.flatnonzero(np.isin(problem.group, list(freed))).tolist()) == set(
            ops.tolist()
        )
