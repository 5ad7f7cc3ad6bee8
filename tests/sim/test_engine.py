"""The event simulator against a slow reference, to the last bit, and against hand-worked runs."""

import functools

import numpy as np
import pytest
from reference_simulator import Run, overflow_bytes, run
from tiny import (
    cpu,
    plain_graph,
    random_devices,
    random_problem,
    unit_cluster,
    without_queues,
)

from gdp.cluster.types import Link, make_cluster
from gdp.problem.problem import Problem, make_problem
from gdp.sim.latency import latencies, simulate

pytestmark = pytest.mark.usefixtures("both_ways")


def ranks_for(kind: str, num_ops: int, seed: int) -> np.ndarray | None:
    """No ranks, distinct ranks, or ranks with ties."""
    rng = np.random.default_rng(seed)
    if kind == "none":
        return None
    return rng.permutation(num_ops) if kind == "distinct" else rng.integers(3, size=num_ops)


Case = tuple[Problem, np.ndarray, np.ndarray | None]


def reference(problem: Problem, device: np.ndarray, rank: np.ndarray | None) -> Run:
    return run(problem, device.tolist(), None if rank is None else rank.tolist())


def assert_as_the_reference(problem: Problem, device: np.ndarray, rank: np.ndarray | None) -> None:
    assert_equal((problem, device, rank), reference(problem, device, rank))


def assert_equal(case: Case, wanted: Run) -> None:
    """All times, transfers and peaks are the reference's, to the last bit."""
    problem, device, rank = case
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


@functools.cache
def cases(num_devices: int | None, share: float, kind: str) -> list[tuple[Case, Run]]:
    """Random problems of which a share of the links has no queue, and the reference's runs, for
    both simulators."""
    made = []
    for seed in range(40):
        count = num_devices or 2 + seed % 4
        problem = random_problem(
            seed, num_devices=count, num_ops=4 + seed, runs=seed % 2 == 1, varied=True
        )
        problem = without_queues(problem, seed, share) if share else problem
        device = random_devices(problem, seed)[0]
        case = problem, device, ranks_for(kind, problem.num_ops, seed)
        made.append((case, reference(*case)))
    return made


@pytest.mark.parametrize("kind", ["none", "distinct", "tied"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_schedules_equal_the_reference_to_the_bit(kind: str, num_devices: int) -> None:
    for case, wanted in cases(num_devices, 0.0, kind):
        assert_equal(case, wanted)


@pytest.mark.parametrize("kind", ["none", "distinct", "tied"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_schedules_without_queues_equal_the_reference(kind: str, share: float) -> None:
    for case, wanted in cases(None, share, kind):
        assert_equal(case, wanted)


def test_copies_that_do_not_queue_overtake_on_a_long_lane() -> None:
    """90 tensors of 90, 89, ..., 1 bytes leave d0 at the same instant: the last arrives first.

    The lane holds more than one chunk, and each new arrival goes before all others. d1 computes a
    second per op, so that it works through them in order of arrival: op 90 - t starts at t.
    """
    count = 90
    graph = plain_graph(
        2 * count,
        [(t, count + t) for t in range(count)],
        [count - t for t in range(count)] + [1] * count,
    )
    compute_s = np.repeat(np.array([[0.0]] * count + [[1.0]] * count), 2, axis=1)
    devices = [cpu("d0"), cpu("d1")]
    cluster = make_cluster(
        "free", devices, default_bytes_per_s=1.0, default_latency_s=0.0, default_contention=False
    )
    problem = make_problem(graph, cluster, compute_s)
    device = np.repeat([0, 1], count)
    run_ = simulate(problem, device)
    assert run_.start_s[count:].tolist() == [float(count - t) for t in range(count)]
    assert run_.latency_s == count + 1
    assert_as_the_reference(problem, device, None)


def test_several_copies_at_once_take_the_time_of_one() -> None:
    """o0 sends 6 bytes to d1 and then o1 sends 2: queued 6 + 2 s, at once 6 s and 2 s."""
    graph = plain_graph(4, [(0, 2), (1, 3)], [6, 2, 1, 1])
    compute_s = np.repeat(np.array([[0.0], [0.0], [1.0], [1.0]]), 2, axis=1)
    device = np.array([0, 0, 1, 1])
    latency_s = []
    for contention in (True, False):
        cluster = make_cluster(
            "two", [cpu("d0"), cpu("d1")], [Link("d0", "d1", 1.0, contention=contention)],
            default_bytes_per_s=1.0, default_latency_s=0.0,
        )  # fmt: skip
        latency_s.append(simulate(make_problem(graph, cluster, compute_s), device).latency_s)
    assert latency_s == [9.0, 7.0]


def test_a_batch_equals_its_members_with_and_without_ranks() -> None:
    problem = random_problem(3, num_ops=40, varied=True)
    devices = random_devices(problem, 0, count=30)
    ranks = np.random.default_rng(1).integers(5, size=devices.shape)
    ranks[0] = 2  # all equal: first ready first
    for rank_of in (None, ranks[1], ranks):
        found_s, found_bytes = latencies(problem, devices, rank_of, threads=2)
        for b, device in enumerate(devices):
            rank = rank_of if rank_of is None or rank_of.ndim == 1 else rank_of[b]
            one = simulate(problem, device, rank)
            assert found_s[b] == one.latency_s
            assert np.isfinite(one.latency_s)
            assert found_bytes[b] == overflow_bytes(problem, one.peak_bytes.tolist())
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
