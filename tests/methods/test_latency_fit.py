"""Latencies where memory is tight: rounds of the program of paths on one region after another."""

import numpy as np
import pytest
from tiny import all_devices, brute_force_s, plain_graph, tight_latency, unit_cluster, with_memory

from gdp.base.clock import Clock
from gdp.bounds.budget import WorkBudget
from gdp.bounds.path_program import build_paths, timing_graph
from gdp.methods.base import Assignment, Search
from gdp.methods.fix_and_optimise import latency as fit
from gdp.methods.fix_and_optimise.latency import applies, latency_fit, region
from gdp.methods.portfolio import auto
from gdp.methods.scoring import Evaluated, best_of
from gdp.methods.search.chains import ChainLimits
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import memory_binds
from gdp.sim.score import score, values


def knapsack() -> Problem:
    """Seven ops in a row; d0 is ten times as fast and holds 10 bytes, d1 20. Sending takes 1 s.

    Work on d1 is 10 s a byte of weight for some ops and 4 s for others, so that what stays on d0
    is chosen by weight, and moving away from what is nearly full takes several ops at once.
    """
    weight = np.array([5, 4, 3, 5, 4, 3, 2])
    slow_s = np.array([50.0, 16.0, 30.0, 20.0, 40.0, 12.0, 20.0])
    graph = plain_graph(7, [(i, i + 1) for i in range(6)], 1, weight_bytes=weight)
    compute_s = np.stack([slow_s / 10.0, slow_s], axis=1)
    problem = make_problem(graph, unit_cluster(2), compute_s)
    return with_memory(problem, 16)


@pytest.mark.slow
def test_rounds_reach_the_optimum_from_the_worst_start() -> None:
    problem = knapsack()
    assert applies(problem)
    best_s = brute_force_s(problem)
    seconds, overflow = values(problem, all_devices(problem))
    fits = np.flatnonzero(overflow == 0)
    worst = all_devices(problem)[fits[seconds[fits].argmax()]]
    assert seconds[fits].max() > 1.5 * best_s
    answer = latency_fit(problem, Search(seconds=None, start=Assignment(worst)))
    assert answer.assignment is not None
    judged = score(problem, answer.assignment.device, answer.assignment.rank)
    assert judged.feasible
    assert judged.value_s == pytest.approx(best_s)


@pytest.mark.slow
def test_chains_alone_find_it_where_the_program_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = knapsack()
    monkeypatch.setattr(fit, "_MOST_ENTRIES", 0)
    monkeypatch.setattr(fit, "build_paths", None)  # never asked for
    assert applies(problem)
    answer = latency_fit(problem, Search(seconds=None))
    assert answer.assignment is not None
    found_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
    assert found_s == pytest.approx(brute_force_s(problem))


@pytest.mark.slow
def test_the_program_alone_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the local search after each round: the first solution is the optimum already."""
    problem = knapsack()
    monkeypatch.setattr(fit, "_POLISH", (0, 0))
    monkeypatch.setattr(fit, "_HOT_CHAINS", ChainLimits(0))
    answer = latency_fit(problem, Search(seconds=None))
    assert answer.assignment is not None
    found_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
    assert found_s == pytest.approx(brute_force_s(problem), rel=fit._GAP)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3])
def test_never_worse_than_its_start_and_repeats(num_devices: int) -> None:
    bound = 0
    for seed in range(5):
        problem = tight_latency(seed, num_devices, 1.2)
        if not applies(problem):
            continue
        bound += 1
        seconds, overflow = values(problem, all_devices(problem))
        value_s = np.where(overflow == 0, seconds, np.inf)
        start = all_devices(problem)[int(value_s.argmin())]
        search = Search(seconds=None, start=Assignment(start))
        first, second = latency_fit(problem, search), latency_fit(problem, search)
        assert first.assignment is not None
        assert second.assignment is not None
        assert (first.assignment.device == second.assignment.device).all()
        assert first.evaluations == second.evaluations
        judged = score(problem, first.assignment.device, first.assignment.rank)
        assert judged.feasible
        assert judged.value_s <= value_s.min() * (1 + 1e-12)
        assert judged.value_s >= brute_force_s(problem) * (1 - 1e-12)
    assert bound >= 3


def best_on(problem: Problem, device: np.ndarray) -> Evaluated:
    return best_of(problem, [Assignment(device)])


def test_a_region_is_two_devices_or_a_stretch_and_the_rest_stays() -> None:
    graph = plain_graph(60, [(i, i + 1) for i in range(59)], weight_bytes=np.ones(60, dtype=int))
    problem = make_problem(graph, unit_cluster(3, memory_bytes=100), np.ones((60, 3)))
    device = np.arange(60) // 20
    best = best_on(problem, device)
    assert best.overflow_bytes == 0
    for k in range(6):
        may = region(problem, best, np.random.default_rng(k), k)
        assert may[np.arange(60), device].all()
        moves = np.flatnonzero(may.sum(axis=1) > 1)
        if k % 2 == 0:
            pair = np.flatnonzero(may[moves[0]])
            assert len(pair) == 2
            assert set(moves) == set(np.flatnonzero(np.isin(device, pair)))
        else:
            assert len(moves) == fit._WINDOW[0] == moves[-1] - moves[0] + 1
            assert may[moves].all()


def test_a_region_keeps_to_where_ops_may_run() -> None:
    allowed = np.ones((7, 2), dtype=bool)
    allowed[3, 1] = False
    problem = knapsack()
    bound = make_problem(problem.graph, problem.cluster, problem.compute_s, allowed=allowed)
    best = best_on(bound, np.zeros(7, dtype=np.int64))
    for k in range(4):
        assert not region(bound, best, np.random.default_rng(k), k)[3, 1]


def test_what_was_tried_is_not_proposed_again() -> None:
    """Every solution of a round differs from all before in two groups at least."""
    problem = knapsack()
    best = best_on(problem, np.array([1, 0, 0, 0, 0, 0, 1]))
    model = build_paths(problem, best.value_s / 1000.0, timing_graph(problem, WorkBudget(1.0)))
    tried: list[np.ndarray] = []
    high = Evaluated(best.assignment, 1, best.value_s)  # so that no solution is too slow
    for _ in range(4):
        free = problem.group_allowed
        solved = fit._solved(model, free, tried, high, Clock(None))
        assert solved.values is not None
        device = solved.values[: free.size].reshape(free.shape).argmax(axis=1)
        assert all((device != before).sum() >= 2 for before in tried)
        tried.append(device)


def test_auto_runs_the_program_where_memory_binds_and_only_there() -> None:
    problem = knapsack()
    names = {row.method for row in auto(problem, Search(seconds=None, evaluations=50)).candidates}
    assert "latency_fit" in names
    roomy = with_memory(problem, 1 << 40)
    names = {row.method for row in auto(roomy, Search(seconds=None, evaluations=50)).candidates}
    assert "latency_fit" not in names


def test_the_program_is_left_out_where_one_device_holds_all_weights_and_any_op() -> None:
    """All tensors at once do not fit (8 bytes a device), but no row of the program says so."""
    graph = plain_graph(8, [(i, i + 1) for i in range(7)], 2, weight_bytes=[1] + [0] * 7)
    problem = make_problem(graph, unit_cluster(2, memory_bytes=8), np.ones((8, 2)))
    assert memory_binds(problem)
    assert not applies(problem)
    assert applies(with_memory(problem, 4))
