"""Pipelines where memory is tight: rows of memory, rounds of the program, pairs of devices."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import (
    all_devices,
    brute_force_s,
    plain_graph,
    random_problem,
    unit_cluster,
    with_memory,
)

from gdp.base.clock import Clock
from gdp.bounds.best import load_bounds
from gdp.bounds.budget import WorkBudget
from gdp.bounds.loads import (
    NO_POINTS,
    SeparationPoints,
    more_points,
    placed_points,
    worst_points,
)
from gdp.methods.base import Assignment, Search
from gdp.methods.exact.method import least_period
from gdp.methods.fix_and_optimise import period as fit
from gdp.methods.fix_and_optimise.period import (
    applies,
    period_fit,
    solve_period,
)
from gdp.methods.portfolio import auto
from gdp.methods.scoring import best_of
from gdp.methods.search.chains import anneal_from_hot_starts
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.memory import pipeline_peaks
from gdp.sim.score import score, values


def tight_random(seed: int, num_devices: int) -> Problem:
    """An inference pipeline whose memory is a third above the least that any placement needs."""
    problem = random_problem(
        seed, num_ops=8 if num_devices == 2 else 6, num_devices=num_devices, objective="throughput"
    )
    size = problem.graph.weight_bytes
    graph = replace(
        problem.graph,
        is_backward=np.zeros(problem.num_ops, dtype=bool),
        # Tied weights of one size: where sizes differ the rows are a relaxation.
        weight_id=np.where(size == 3, 0, np.arange(1, problem.num_ops + 1)),
    )
    free = with_memory(replace(problem, graph=graph), 1 << 40)
    least = min(int(pipeline_peaks(free, device).max()) for device in all_devices(free))
    return with_memory(free, max(1, least * 4 // 3))


def test_what_a_placement_holds_is_read_off_the_mark_where_it_is_fullest() -> None:
    """The rows of memory are what the simulator's peaks are, at every op and device."""
    for seed in range(6):
        problem = tight_random(seed, 2)
        for device in all_devices(problem)[::5]:
            points = placed_points(problem, device)
            for i, op in zip(points.device.tolist(), points.op.tolist(), strict=True):
                assert _held_bytes(problem, device, i, op) == pipeline_peaks(problem, device)[i]


def test_rows_of_all_points_allow_what_fits_and_nothing_else() -> None:
    """One placement is all the program may choose: it has a solution exactly where that fits."""
    both = set()
    for seed in range(8):
        problem = tight_random(seed, 2)
        ops = np.arange(problem.num_ops)
        points = SeparationPoints(np.repeat([0, 1], len(ops)), np.tile(ops, 2))
        devices = all_devices(problem)[:: max(1, len(all_devices(problem)) // 12)]
        for device in devices:
            fits = int(values(problem, device[None])[1][0]) == 0
            may = np.zeros((problem.num_groups, 2), dtype=bool)
            may[problem.group, device] = True
            assert (
                solve_period(problem, np.inf, Clock(None), points, may=may).device is not None
            ) == fits
            both.add(fits)
    assert both == {True, False}


def _held_bytes(problem: Problem, device: np.ndarray, i: int, at: int) -> int:
    """Bytes on device i while op `at` would run, told tensor by tensor."""
    a, graph = arrays_of(problem), problem.graph
    held = 0
    for weight in np.unique(graph.weight_id):
        mine = [
            int(graph.weight_bytes[v])
            for v in np.flatnonzero(graph.weight_id == weight)
            if device[v] == i
        ]
        held += max(mine, default=0)
    for t, maker in enumerate(a.producer.tolist()):
        readers = a.use_op[a.use_start[t] : a.use_start[t + 1]].tolist()
        size = int(a.held_bytes[t])
        away = any(device[v] != device[maker] for v in readers)
        if device[maker] != i:
            held += 2 * size * any(device[v] == i for v in readers)
        elif maker <= at and (away or at <= max([maker, *readers])):
            held += size
    return held


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3])
def test_bounds_hold_and_the_program_is_exact_where_memory_is_tight(num_devices: int) -> None:
    """No bound is above the best of all placements that fit, and the program finds it."""
    for seed in range(6):
        problem = tight_random(seed, num_devices)
        best_s = brute_force_s(problem)
        for bound in load_bounds(problem, WorkBudget(5.0)):
            assert bound.value_s <= best_s * (1 + 1e-9), bound.argument
        answer = least_period(
            replace(problem, replicas=False), Search(seconds=None, evaluations=100, seed=1)
        )
        assert answer.assignment is not None
        judged = score(problem, answer.assignment.device, answer.assignment.rank)
        assert judged.feasible
        assert judged.value_s == pytest.approx(best_s, rel=1e-5)
        assert answer.bound_s <= best_s * (1 + 1e-9)


def alternating() -> Problem:
    """Six ops in a row on 2 devices of 46 bytes; work and weights lie at opposite ends.

    Ops 0 to 2 take 4 s and weigh 1 byte, ops 3 to 5 take 1 s and weigh 18; tensors have 1 byte and
    take 1 s to send. Three heavy ops (54 bytes) do not fit on one device, so the period of a cut in
    two is at least 12 s + 1 s, while two light ops against the rest balance 15 s of work better.
    """
    graph = plain_graph(
        6, [(i, i + 1) for i in range(5)], 1, weight_bytes=np.array([1, 1, 1, 18, 18, 18])
    )
    compute_s = np.repeat(np.array([[4.0], [4.0], [4.0], [1.0], [1.0], [1.0]]), 2, axis=1)
    return make_problem(graph, unit_cluster(2, memory_bytes=46), compute_s, "throughput")


def from_the_worst(problem: Problem) -> tuple[float, float]:
    """Seconds of the worst placement that fits, and of what is found from it."""
    seconds, overflow = values(problem, all_devices(problem))
    worst = int(np.where(overflow == 0, seconds, -np.inf).argmax())
    start = Assignment(all_devices(problem)[worst])
    answer = period_fit(problem, Search(seconds=None, start=start))
    assert answer.assignment is not None
    return float(seconds[worst]), score(problem, answer.assignment.device, None).value_s


def test_rounds_reach_the_optimum_from_the_worst_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any placement that fits, the program's rounds end within their gap of the optimum."""
    monkeypatch.setattr(fit, "_SEARCHED", 0)
    problem = alternating()
    assert applies(problem)
    best_s = brute_force_s(problem)
    worst_s, found_s = from_the_worst(problem)
    assert best_s <= found_s <= best_s * 1.006
    assert found_s < worst_s


def test_a_search_comes_before_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that find nothing leave what the search found from the worst start."""
    monkeypatch.setattr(fit, "solve_period", lambda *_, **__: fit.NOTHING)
    problem = alternating()
    _, found_s = from_the_worst(problem)
    assert found_s == pytest.approx(brute_force_s(problem))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_never_worse_than_its_start_and_repeats(num_devices: int) -> None:
    for seed in range(6, 10):
        problem = tight_random(seed, num_devices)
        if not applies(problem):
            continue
        seconds, overflow = values(problem, all_devices(problem))
        start = all_devices(problem)[int(np.where(overflow == 0, seconds, np.inf).argmin())]
        search = Search(seconds=None, start=Assignment(start))
        first, second = period_fit(problem, search), period_fit(problem, search)
        assert first.assignment is not None
        assert second.assignment is not None
        assert (first.assignment.device == second.assignment.device).all()
        found = score(problem, first.assignment.device, None)
        assert found.feasible
        assert found.value_s <= np.where(overflow == 0, seconds, np.inf).min() * (1 + 1e-12)


def test_auto_runs_the_program_where_memory_binds_and_only_there() -> None:
    problem = alternating()
    names = {row.method for row in auto(problem, Search(seconds=None, evaluations=50)).candidates}
    assert "period_fit" in names
    roomy = with_memory(problem, 1 << 40)
    names = {row.method for row in auto(roomy, Search(seconds=None, evaluations=50)).candidates}
    assert "period_fit" not in names


def test_points_are_kept_once() -> None:
    problem = alternating()
    x = np.full((problem.num_groups, 2), 0.5)
    once = worst_points(problem, x)
    assert len(more_points(more_points(NO_POINTS, once), once).op) == len(once.op)


@pytest.mark.parametrize("at_once", [True, False])
def test_many_devices_end_at_the_optimum(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices at once always; by chains and pairs on this instance, from one device full."""
    monkeypatch.setattr(fit, "_SEARCHED", 0)
    monkeypatch.setattr(fit, "_FEW_ENTRIES", 10_000 if at_once else 0)
    for seed in range(6) if at_once else (0,):
        _ends_at_the_optimum(replace(tight_random(seed, 4), replicas=False))


def _ends_at_the_optimum(problem: Problem) -> None:
    best_s = brute_force_s(problem)
    answer = period_fit(problem, Search(seconds=None))
    assert answer.assignment is not None
    judged = score(problem, answer.assignment.device, None)
    assert judged.feasible
    assert best_s <= judged.value_s * (1 + 1e-12)
    assert judged.value_s <= best_s * 1.01


def test_hot_chains_leave_a_pocket_of_the_memory_limits() -> None:
    """Two ops of 60 bytes and two of 40, 105 bytes a device: from 18 s, the slow pair together, to
    10 s only through placements that overflow, or by an exchange."""
    graph = plain_graph(4, (), [1, 1, 1, 1], weight_bytes=[60, 40, 60, 40])
    compute_s = np.array([[9.0, 9.0], [9.0, 9.0], [1.0, 1.0], [1.0, 1.0]])
    problem = make_problem(graph, unit_cluster(2, memory_bytes=105), compute_s, "throughput")
    start = best_of(problem, [Assignment(np.array([0, 0, 1, 1]))])
    assert start.overflow_bytes == 0
    best = anneal_from_hot_starts(problem, start, 1, Clock(None))
    assert best.overflow_bytes == 0
    assert (start.value_s, best.value_s) == (18.0, 10.0)
    assert best.evaluations > start.evaluations
    assert anneal_from_hot_starts(problem, start, 1, Clock(0.0)).assignment is start.assignment
