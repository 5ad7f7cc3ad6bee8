"""Path relinking: parts of other placements, never worse, within the budget."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import (
    fork_join,
    plain_graph,
    random_devices,
    random_problem,
    unit_cluster,
    with_memory,
)

from gdp.base.clock import Clock
from gdp.methods.priorities import RULES, evaluate_rules, rules_of, timing
from gdp.policy.relink import parts_of, relink
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import OBJECTIVES


def two_chains(length: int, objective: str = "latency") -> Problem:
    """Two chains, o0, o2, ... and o1, o3, ..., that send nothing to each other, on four devices.

    An op of the first takes 1 s on d0, one of the second 1 s on d1, and any op 3 s elsewhere. A
    byte takes a second to send, so the best latency, and period, is `length` seconds.
    """
    edges = [(i, i + 2) for i in range(2 * length - 2)]
    own = np.tile([[1.0, 3.0, 3.0, 3.0], [3.0, 1.0, 3.0, 3.0]], (length, 1))
    return make_problem(plain_graph(2 * length, edges), unit_cluster(4), own, objective)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_two_placements_that_are_half_right_make_one_that_is_right(objective: str) -> None:
    problem = two_chains(8, objective)
    halves = np.stack([np.tile([0, 3], 8), np.tile([2, 1], 8)])
    rated = evaluate_rules(problem, halves)
    made = relink(problem, rated)
    np.testing.assert_array_equal(made.assignment.device, np.tile([0, 1], 8))
    assert rated.seconds.tolist() == [24.0, 24.0]
    assert evaluate_rules(problem, made.assignment.device[None]).seconds[0] == 8.0
    if objective == "latency":
        # Rules; two parts, alone and together; then, twice, eight ops, all of which do harm.
        assert made.evaluations == len(RULES) + 2 + 2 + 8 + 8


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_parts_that_gain_nothing_alone_are_taken_together(objective: str) -> None:
    """Three chains of 1 s an op on d0, d1 and d2. The best placement has the first two at 3 s an
    op, the other only the third, at 5 s: one chain alone that is mended leaves the other slow."""
    length = 4
    own = np.array([[1, 3, 3, 3, 3, 3], [3, 1, 3, 3, 3, 3], [5, 5, 1, 5, 5, 5]], dtype=float)
    graph = plain_graph(3 * length, [(i, i + 3) for i in range(3 * length - 3)])
    problem = make_problem(graph, unit_cluster(6), np.tile(own, (length, 1)), objective)
    devices = np.stack([np.tile([3, 4, 2], length), np.tile([0, 1, 5], length)])
    rated = evaluate_rules(problem, devices)
    assert rated.seconds.tolist() == [12.0, 20.0]
    made = relink(problem, rated)
    np.testing.assert_array_equal(made.assignment.device, np.tile([0, 1, 2], length))


def test_the_best_of_many_others_give_their_parts_first() -> None:
    """Only the second best of twelve has the second chain where it is fast."""
    problem = two_chains(8)
    poor = [np.tile([2 + k % 2] * 2, 8) for k in range(10)]
    devices = np.stack([np.tile([0, 3], 8), *poor[:5], np.tile([2, 1], 8), *poor[5:]])
    rated = evaluate_rules(problem, devices)
    assert sorted(rated.seconds)[1:3] == [24.0, 48.0]
    made = relink(problem, rated)
    np.testing.assert_array_equal(made.assignment.device, np.tile([0, 1], 8))


def test_a_part_makes_it_fit() -> None:
    """A device holds the weights of two of three ops; both placements put all three on one."""
    graph = plain_graph(3, [(0, 1), (1, 2)], weight_bytes=[10, 10, 10])
    problem = make_problem(graph, unit_cluster(2), np.tile([[1.0, 2.0]], (3, 1)))
    problem = with_memory(problem, 24)
    devices = np.array([[0, 0, 0], [1, 1, 1]])
    rated = evaluate_rules(problem, devices)
    assert (rated.overflow > 0).all()
    made = relink(problem, rated)
    again = evaluate_rules(problem, made.assignment.device[None])
    assert made.overflow_bytes == again.overflow[0] == 0


def grouped(seed: int, objective: str) -> tuple[Problem, np.ndarray]:
    """A random problem whose ops share devices by twos and threes, and placements [6, N]."""
    problem = random_problem(seed, objective=objective, num_ops=30)
    rng, io = np.random.default_rng(seed), problem.graph.is_io
    graph = replace(problem.graph, colocate=np.where(io, 100 + np.arange(30), np.arange(30) % 12))
    problem = make_problem(graph, problem.cluster, problem.compute_s, objective)
    by_group = rng.random((6, *problem.group_allowed.shape)) * problem.group_allowed
    return problem, by_group.argmax(axis=2)[:, problem.group]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_never_worse_within_the_budget_and_of_parts_of_what_was_given(objective: str) -> None:
    better = 0
    for seed in range(20):
        problem, devices = grouped(seed, objective)
        rated = evaluate_rules(problem, devices)
        best = min(zip(rated.overflow.tolist(), rated.seconds.tolist(), strict=True))
        for most in (None, 40, 0):
            made = relink(problem, rated, most=most)
            found = evaluate_rules(problem, made.assignment.device[None])
            key = (int(found.overflow[0]), float(found.seconds[0]))
            assert key <= best
            assert found.overflow[0] <= made.overflow_bytes
            assert most is None or made.evaluations <= most
            assert (devices == made.assignment.device).any(axis=0).all()
            for group in range(problem.num_groups):
                assert len(np.unique(made.assignment.device[problem.group == group])) == 1
            better += key < best
            again = relink(problem, rated, most=most)
            np.testing.assert_array_equal(again.assignment.device, made.assignment.device)
            assert again.evaluations == made.evaluations
    assert better > 20


def test_parts_are_runs_of_the_order_of_decoding() -> None:
    runs = 0
    for seed in range(20):
        problem = random_problem(seed, num_ops=30)
        order = timing(problem).order
        device, other = random_devices(problem, seed, count=2)
        for mask in parts_of(problem, device, other, 8):
            op = int(np.flatnonzero(mask)[0])
            pair = (device == device[op]) & (other == other[op])
            places = np.flatnonzero(mask[order][pair[order]])
            assert (np.diff(places) == 1).all()
            runs += 1 < len(places) < pair.sum()
    assert runs > 20


def test_what_fits_is_begun_from_however_slow_it_is() -> None:
    """One placement is as quick as can be and holds too much, the other fits."""
    graph = plain_graph(2, [], weight_bytes=[10, 10])
    problem = make_problem(graph, unit_cluster(2), np.array([[1.0, 9.0], [1.0, 9.0]]))
    problem = with_memory(problem, 15)
    devices = np.array([[0, 0], [0, 1]])
    rated = evaluate_rules(problem, devices)
    made = relink(problem, rated, most=0)
    assert made.assignment.device.tolist() == [0, 1]
    assert made.overflow_bytes == 0


def test_every_simulation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_chains(8)
    devices = random_devices(problem, 0, count=6)
    rated = evaluate_rules(problem, devices)
    counted, row = 0, OBJECTIVES[problem.objective]

    def counting(*arguments):
        nonlocal counted
        counted += len(arguments[1])
        return row.values(*arguments)

    monkeypatch.setitem(OBJECTIVES, problem.objective, replace(row, values=counting))
    made = relink(problem, rated)
    assert made.evaluations == counted > len(RULES)


def test_a_clock_that_is_over_leaves_the_best() -> None:
    problem = fork_join()
    devices = random_devices(problem, 0, count=4)
    rated = evaluate_rules(problem, devices)
    made = relink(problem, rated, clock=Clock(0.0))
    np.testing.assert_array_equal(made.assignment.device, devices[np.argmin(rated.seconds)])
    assert made.evaluations == len(rules_of(problem))


def test_parts_share_out_what_is_elsewhere() -> None:
    for seed in range(40):
        problem = random_problem(seed, num_ops=30)
        device, other = random_devices(problem, seed, count=2)
        for count in (1, 4, 100):
            masks = parts_of(problem, device, other, count)
            assert (masks.sum(axis=0) == (device != other)).all()  # each op is its own group
            for mask in masks:
                assert mask.any()
                assert len(np.unique(device[mask])) == len(np.unique(other[mask])) == 1
            if count == 100:
                assert len(masks) == (device != other).sum()
    assert not len(parts_of(problem, device, device, 4))
