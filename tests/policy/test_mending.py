"""What the policy's placements go through before they are answered: moves until memory fits."""

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

from gdp.learn.rollout import gap
from gdp.methods.priorities import timing
from gdp.policy.evaluate import evaluate
from gdp.policy.repair import move_until_fits
from gdp.problem.problem import Problem, make_problem


def weighty(objective: str, num_devices: int = 3) -> Problem:
    """Twelve ops in a chain, 4 bytes of weights each; every device holds six ops' worth."""
    graph = plain_graph(12, [(i, i + 1) for i in range(11)], 0, weight_bytes=[4] * 12)
    cluster = unit_cluster(num_devices, memory_bytes=24)
    allowed = np.ones((12, num_devices), dtype=bool)
    allowed[3, 1:] = False
    together = np.arange(12)
    together[8] = together[2]
    return make_problem(
        graph,
        cluster,
        np.ones((12, num_devices)),
        objective,
        allowed=allowed,
        together=together,
        tensor_s=np.ones(12) if objective == "max_load" else None,
    )


@pytest.mark.parametrize("objective", ["latency", "throughput", "max_load"])
def test_moves_turn_a_misfit_into_a_fit(objective: str) -> None:
    problem = weighty(objective)
    all_on_one = np.zeros(12, dtype=np.int64)
    assert evaluate(problem, all_on_one[None])[1][0] == 24
    device, spent = move_until_fits(problem, all_on_one, seed=0)
    assert evaluate(problem, device[None])[1][0] == 0
    assert spent > 1
    assert problem.allowed[np.arange(12), device].all()
    assert device[8] == device[2]
    assert all_on_one.tolist() == [0] * 12, "the argument stays as it was"
    again, _ = move_until_fits(problem, all_on_one, seed=0)
    assert (again == device).all()


def test_what_fits_is_left_alone() -> None:
    problem = weighty("latency")
    device = np.repeat([0, 1], 6)
    device[8] = device[2]
    device[3] = 0
    device[0] = 1
    found, spent = move_until_fits(problem, device, seed=0)
    assert (found == device).all()
    assert spent == 5, "once under every rule"


def test_moves_end_where_nothing_helps() -> None:
    """One device of 24 bytes for 48: no move exists, and the rounds end early."""
    problem = weighty("latency", num_devices=1)
    device, spent = move_until_fits(problem, np.zeros(12, dtype=np.int64), seed=0)
    assert device.tolist() == [0] * 12
    assert spent < 5 * 400


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
