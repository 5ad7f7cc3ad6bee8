"""The event simulator against a slow reference, to the last bit, and against hand-worked runs."""

import numpy as np
import pytest
from reference_simulator import run
from tiny import plain_graph, random_devices, random_problem, unit_cluster

from gdp.sim.latency import latencies, simulate
from gdp.sim.problem import make_problem


def ranks_for(kind: str, num_ops: int, seed: int) -> np.ndarray | None:
    """No ranks, distinct ranks, or ranks with ties."""
    rng = np.random.default_rng(seed)
    if kind == "none":
        return None
    return rng.permutation(num_ops) if kind == "distinct" else rng.integers(3, size=num_ops)


@pytest.mark.parametrize("kind", ["none", "distinct", "tied"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_schedules_equal_the_reference_to_the_bit(kind: str, num_devices: int) -> None:
    for seed in range(40):
        problem = random_problem(seed, num_devices=num_devices, num_ops=4 + seed)
        device = random_devices(problem, seed)[0]
        rank = ranks_for(kind, problem.num_ops, seed)
        wanted = run(problem, device.tolist(), None if rank is None else rank.tolist())
        found = simulate(problem, device, rank)
        assert found.start_s.tolist() == wanted.start_s
        assert found.finish_s.tolist() == wanted.finish_s
        assert found.busy_s.tolist() == wanted.busy_s
        assert found.latency_s == wanted.latency_s
        transfers = found.transfers
        sent = [
            transfers.tensor, transfers.source, transfers.destination,
            transfers.start_s, transfers.arrive_s,
        ]  # fmt: skip
        assert [list(vars(s).values()) for s in wanted.sent] == [
            list(row) for row in zip(*(column.tolist() for column in sent), strict=True)
        ]
        assert found.peak_bytes.tolist() == wanted.peak_bytes


def test_a_batch_equals_its_members_with_and_without_ranks() -> None:
    problem = random_problem(3, num_ops=40)
    devices = random_devices(problem, 0, count=30)
    ranks = np.random.default_rng(1).integers(5, size=devices.shape)
    ranks[0] = 2  # all equal: first ready first
    for rank_of in (None, ranks[1], ranks):
        found_s, found_bytes = latencies(problem, devices, rank_of, threads=2)
        for b, device in enumerate(devices):
            rank = rank_of if rank_of is None or rank_of.ndim == 1 else rank_of[b]
            one = simulate(problem, device, rank)
            assert found_s[b] == one.latency_s
            over = np.maximum(one.peak_bytes - problem.cluster.memory_bytes, 0).sum()
            assert np.isfinite(one.latency_s)
            assert found_bytes[b] == over
    assert (found_bytes > 0).any()


def test_a_run_that_never_ends_holds_its_weights_and_says_so() -> None:
    """o1 cannot run on d1: latency inf, and of memory the weights, 6 and 9 bytes of 8 each."""
    graph = plain_graph(3, [(0, 1), (1, 2)], 1, weight_bytes=[6, 4, 5])
    compute_s = np.array([[1.0, 1.0], [1.0, np.inf], [1.0, 1.0]])
    problem = make_problem(graph, unit_cluster(2, memory_bytes=8), compute_s)
    devices = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    latency_s, overflow = latencies(problem, devices)
    assert np.isinf(latency_s).tolist() == [True, False, False]
    one = simulate(problem, devices[0])
    assert one.latency_s == np.inf
    assert one.peak_bytes.tolist() == [6, 9]
    assert overflow[0] == 1
