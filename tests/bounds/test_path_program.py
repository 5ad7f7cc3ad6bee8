"""The program of paths, work, transfers and memory against all placements in all orders."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
from tiny import (
    all_devices,
    brute_force_s,
    fork_join,
    plain_graph,
    random_problem,
    tight_latency,
    unit_cluster,
    without_queues,
)

from gdp.bounds import latency, linear_program
from gdp.bounds.best import all_bounds, load_bounds
from gdp.bounds.budget import WorkBudget
from gdp.bounds.linear_program import dual_value_s, least_whole
from gdp.bounds.path_program import build_paths, timing_graph
from gdp.cluster.types import NO_CHANNEL
from gdp.problem.problem import Problem, make_problem

NAME = "paths, work, transfers and memory"


def least_s(problem: Problem) -> float:
    """The value of the program with whole placements."""
    model = build_paths(problem, 1.0, timing_graph(problem, WorkBudget(2.0)))
    return least_whole(model, (0.0, np.inf), None, 1e-9).bound


@pytest.mark.slow
@pytest.mark.parametrize("interior", [0, 1 << 30])
@pytest.mark.parametrize("devices", [2, 3])
def test_no_placement_that_fits_is_faster_than_a_bound(
    monkeypatch: pytest.MonkeyPatch, devices: int, interior: int
) -> None:
    """Memory at 1, 1.2 and 1.5 times the least that any placement needs; by the interior-point
    method and by the simplex method."""
    monkeypatch.setattr(linear_program, "_INTERIOR", interior)
    proven = []
    for seed in range(18):
        problem = tight_latency(seed, devices, (1.0, 1.2, 1.5)[seed % 3])
        best_s = brute_force_s(problem)
        bounds = all_bounds(problem, 2.0)
        for bound in bounds:
            assert bound.value_s <= best_s * (1 + 1e-9), (seed, bound.argument)
        if any(NAME in bound.argument for bound in bounds) and best_s > 0:
            proven.append(max(bound.value_s for bound in bounds) / best_s)
    assert len(proven) >= 9
    assert np.median(proven) > 0.99


@pytest.mark.slow
def test_a_clock_that_ends_the_program_leaves_the_bound_of_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program of paths has the rows of the loads; where the clock ends it, the smaller program
    of loads is solved, so that no bound is lower than without paths."""
    seen = 0
    for seed in range(12):
        problem = tight_latency(seed, 3, 1.2)
        with monkeypatch.context() as patched:
            patched.setattr(latency, "dual_weights", lambda program, seconds: None)
            ended = all_bounds(problem, 2.0)
        loads = [b.value_s for b in load_bounds(problem, WorkBudget(2.0), only_memory=True)]
        seen += bool(loads)
        known_s = max(bound.value_s for bound in ended)
        assert known_s >= max(loads, default=0.0) * (1 - 1e-9), seed
        assert known_s <= brute_force_s(problem) * (1 + 1e-9), seed
    assert seen


def test_a_path_that_does_not_fit_changes_devices_once() -> None:
    """a then b, 6 bytes each; the fast device holds 8, so 1 + 10 s and 1 s to send: 12 s."""
    graph = plain_graph(2, [(0, 1)], weight_bytes=[6, 6])
    cluster = unit_cluster(2)
    devices = (replace(cluster.devices[0], memory_bytes=8), cluster.devices[1])
    compute_s = np.array([[1.0, 10.0], [1.0, 10.0]])
    problem = make_problem(graph, replace(cluster, devices=devices), compute_s)
    assert least_s(problem) == pytest.approx(12.0)


def test_a_fork_and_join_is_exact() -> None:
    """6 s, as worked out by hand: the work between a and d is 5 s on one device."""
    assert least_s(fork_join()) == pytest.approx(6.0)


def test_what_an_op_reads_and_makes_is_there_beside_the_weights() -> None:
    """Two ops in a row, weights of 3 bytes, tensors of 4; 9 bytes a device.

    One device would hold both weights, what b reads and what it makes: 14 bytes. Apart it is 11 for
    b as well, where only 9 fit: no placement at all.
    """
    graph = plain_graph(2, [(0, 1)], 4, weight_bytes=[3, 3])
    problem = make_problem(graph, unit_cluster(2, memory_bytes=9), np.ones((2, 2)))
    model = build_paths(problem, 1.0, timing_graph(problem, WorkBudget(1.0)))
    assert least_whole(model, (0.0, np.inf), None, 1e-9).is_infeasible
    enough = make_problem(graph, unit_cluster(2, memory_bytes=11), np.ones((2, 2)))
    assert least_s(enough) == pytest.approx(6.0) == brute_force_s(enough)  # 4 s to send


def test_tensors_side_by_side_take_as_long_as_the_longest() -> None:
    """Tensors of 3 and 2 bytes from a on d0 to b on d1, where nothing queues: 1 + 3 + 1 s.

    One after the other they would take 5 s, and a bound that says 7 s is wrong.
    """
    graph = replace_uses()
    allowed = np.array([[True, False], [False, True]])
    cluster = unit_cluster(2)
    channel = np.array(cluster.channel)
    channel[~np.eye(2, dtype=bool)] = NO_CHANNEL
    problem = make_problem(
        graph, replace(cluster, channel=channel), np.ones((2, 2)), allowed=allowed
    )
    assert brute_force_s(problem) == pytest.approx(5.0)
    assert max(b.value_s for b in all_bounds(problem, 1.0)) == pytest.approx(5.0)
    assert least_s(problem) == pytest.approx(5.0)


def replace_uses():
    """Two ops; the first makes two tensors that the second reads."""
    from gdp.graph.op_graph import make_graph

    return make_graph("two", ["a", "b"], ["Op", "Op"], [(0, 3), (0, 2)], [(0, 1), (1, 1)])


def test_both_ways_to_solve_a_linear_program_prove_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(12):
        problem = tight_latency(seed, 2 + seed % 2, 1.2)
        model = build_paths(problem, 1.0, timing_graph(problem, WorkBudget(1.0)))
        proven_s = []
        for interior in (0, 1 << 30):
            monkeypatch.setattr(linear_program, "_INTERIOR", interior)
            solved = linear_program.dual_weights(model, 10.0)
            assert solved is not None
            proven_s.append(dual_value_s(model, solved[0]))
        assert proven_s[0] == pytest.approx(proven_s[1], rel=1e-6)


@pytest.mark.parametrize("spent", [False, True])
def test_what_the_interior_point_method_fails_at_is_left_to_the_simplex_method(
    monkeypatch: pytest.MonkeyPatch, spent: bool
) -> None:
    """Unless no time is left for it."""
    problem = tight_latency(0, 2, 1.2)
    program = build_paths(problem, 1.0, timing_graph(problem, WorkBudget(1.0)))
    expected = linear_program.dual_weights(program, 10.0)
    assert expected is not None
    solver, methods = scipy.optimize.linprog, []

    def failing(*args, method: str, options: dict[str, float], **kwargs):
        methods.append(method)
        assert options["time_limit"] <= 10.0
        if method == "highs-ipm":
            return scipy.optimize.OptimizeResult(status=4, message="numerical difficulties")
        return solver(*args, method=method, options=options, **kwargs)

    monkeypatch.setattr(scipy.optimize, "linprog", failing)
    monkeypatch.setattr(linear_program, "_INTERIOR", 0)
    found = linear_program.dual_weights(program, 0.0 if spent else 10.0)
    assert methods == (["highs-ipm"] if spent else ["highs-ipm", "highs"])
    assert (found is None) == spent
    if found is not None:
        assert found[0] == pytest.approx(expected[0])


@pytest.mark.parametrize("seed", range(6))
def test_any_weights_of_the_rows_prove_a_bound(seed: int) -> None:
    problem = tight_latency(seed, 2, 1.2)
    best_s = brute_force_s(problem)
    model = build_paths(problem, 1.0, timing_graph(problem, WorkBudget(1.0)))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        weight = rng.random(model.a.shape[0]) * rng.integers(0, 2, model.a.shape[0])
        assert dual_value_s(model, weight) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_are_not_about_memory_hold_where_it_is_ample(seed: int) -> None:
    problem = without_queues(random_problem(seed, num_ops=6, num_devices=2), seed, 0.5)
    assert least_s(problem) <= brute_force_s(problem) * (1 + 1e-6) + 1e-9
    assert len(all_devices(problem)) > 1
