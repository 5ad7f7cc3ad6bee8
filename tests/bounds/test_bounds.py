"""Bounds against the best of all placements and priorities, and against known optima."""

import time
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog
from tiny import (
    all_devices,
    brute_force_s,
    cpu,
    fork_join,
    plain_graph,
    random_problem,
    unit_cluster,
    with_memory,
    without_queues,
)

from gdp.bounds.best import CUT_SHORT, all_bounds, best_bound, shared_work_s
from gdp.bounds.budget import WorkBudget
from gdp.bounds.linear_program import dual_value_s, dual_weights, load_weights
from gdp.bounds.loads import build_loads, build_work, load_program_size, worst_points
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import INPUT, OUTPUT, UNREAD, make_graph
from gdp.methods.pipeline.stage_costs import _work
from gdp.problem.problem import Problem, make_problem
from gdp.sim.latency import periods
from gdp.sim.memory import pipeline_peaks
from gdp.sim.score import values

TOLERANCE = 1e-9


def with_groups(problem: Problem, seed: int) -> Problem:
    """The same problem in which some ops must share a device, where some device allows it."""
    rng = np.random.default_rng(seed)
    group = np.arange(problem.num_ops)
    for _ in range(int(rng.integers(0, 3))):
        a, b = rng.integers(problem.num_ops, size=2)
        merged = np.where(group == group[a], group[b], group)
        members = merged == group[b]
        if problem.allowed[members].all(axis=0).any():
            group = merged
    return make_problem(
        problem.graph,
        problem.cluster,
        problem.compute_s,
        problem.objective,
        allowed=problem.allowed,
        together=group,
    )


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_no_placement_in_any_order_is_faster_than_a_latency_bound(seed: int, devices: int) -> None:
    problem = random_problem(seed, num_ops=6 if devices == 2 else 5, num_devices=devices)
    problem = with_groups(without_queues(problem, seed) if seed % 4 == 3 else problem, seed)
    best_s = brute_force_s(problem)
    for bound in all_bounds(problem, 2.0):
        assert bound.value_s <= best_s * (1 + TOLERANCE), bound.argument


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_in_any_order_is_faster_on_graphs_that_fork_and_join(seed: int) -> None:
    """Modules in a row with slow and fast links: what the spans are made for."""
    rng = np.random.default_rng(seed)
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), *[(1, 4), (0, 5)][: seed % 3]]
    graph = plain_graph(6, edges, sizes=rng.integers(0, 4, size=6).tolist())
    cluster = random_problem(seed, num_ops=6, num_devices=2).cluster
    compute_s = rng.choice([0.5, 1.0, 2.0, 3.0], size=(6, 2))
    if seed % 2:
        compute_s[:, 1] = compute_s[:, 0]
    problem = with_groups(make_problem(graph, cluster, compute_s), seed)
    best_s = brute_force_s(problem)
    for bound in all_bounds(problem, 2.0):
        assert bound.value_s <= best_s * (1 + TOLERANCE), bound.argument


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_no_placement_has_a_period_below_a_throughput_bound(seed: int, devices: int) -> None:
    problem = random_problem(
        seed, objective="throughput", num_ops=9 if devices == 2 else 7, num_devices=devices
    )
    problem = with_groups(without_queues(problem, seed) if seed % 4 == 3 else problem, seed)
    period_s, overflow = periods(problem, all_devices(problem), threads=1)
    best_s = period_s[overflow == 0].min(initial=np.inf)
    bounds = all_bounds(problem, 2.0)
    for bound in bounds:
        assert bound.value_s <= best_s * (1 + TOLERANCE), bound.argument
    # Where memory cannot bind, whole placements give the period itself.
    unlimited = period_s.min()
    if (overflow == 0).all() and unlimited > 0 and "solved" in bounds[-1].argument:
        assert max(b.value_s for b in bounds) >= unlimited * (1 - 2e-4)


@pytest.mark.parametrize("seed", range(10))
def test_any_weights_of_the_rows_prove_a_bound(seed: int) -> None:
    problem = random_problem(seed, objective="throughput", num_ops=7, num_devices=2)
    period_s, overflow = periods(problem, all_devices(problem), threads=1)
    best_s = period_s[overflow == 0].min(initial=np.inf)
    model = build_loads(problem, 1.0)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        weight = rng.random(model.a.shape[0]) * rng.integers(0, 2, model.a.shape[0])
        weight[0] += 0.1
        assert dual_value_s(model, weight) <= best_s * (1 + TOLERANCE)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(20))
def test_work_within_memory_proves_a_bound(seed: int, objective: str) -> None:
    problem = random_problem(seed, objective=objective, num_ops=5, num_devices=2)
    cluster = problem.cluster
    small = [replace(device, memory_bytes=4 + seed % 5) for device in cluster.devices]
    problem = replace(problem, cluster=replace(cluster, devices=tuple(small)))
    if objective == "latency":
        best_s = brute_force_s(problem)
    else:
        period_s, overflow = periods(problem, all_devices(problem), threads=1)
        best_s = period_s[overflow == 0].min(initial=np.inf)
    program = build_work(problem, 1.0)
    solved = dual_weights(program, None)
    if solved is None or not solved[0][:2].any():  # the weights fit nowhere
        assert best_s == np.inf
        return
    value_s = dual_value_s(program, load_weights(program, solved[0]))
    assert 0.0 < value_s <= best_s * (1 + TOLERANCE)


@pytest.mark.parametrize("seed", range(10))
def test_equal_ops_are_one_column_of_the_program_of_work(seed: int) -> None:
    """Twins in seconds and weights: the program has a column for both and proves as much as one
    that keeps them apart, here by seconds that differ by a millionth."""
    rng = np.random.default_rng(seed)
    graph = plain_graph(6, [], weight_bytes=[2, 2, 2, 3, 3, 3], op_types=["Op"] * 6)
    seconds = np.repeat(rng.integers(1, 9, size=(2, 2)).astype(float), 3, axis=0)
    cluster = unit_cluster(2, memory_bytes=9)
    proven, columns = [], []
    for factor in (1.0, 1 + 1e-6 * np.arange(6)[:, None]):
        problem = make_problem(graph, cluster, seconds * factor, "throughput")
        program = build_work(problem, 1.0)
        solved = dual_weights(program, None)
        assert solved is not None
        proven.append(dual_value_s(program, load_weights(program, solved[0])))
        columns.append(program.num_shares)
        period_s, overflow = periods(problem, all_devices(problem), threads=1)
        best_s = period_s[overflow == 0].min()
        assert 0.0 < proven[-1] <= best_s * (1 + TOLERANCE)
    assert columns == [4, 12]
    assert proven[0] == pytest.approx(proven[1], rel=1e-5)


def tight_period(seed: int, over: float) -> Problem:
    """A random pipeline whose memory is so many times the least that any placement needs."""
    problem = random_problem(seed, objective="throughput", num_ops=6, num_devices=3)
    free = with_memory(problem, 1 << 40)
    least = min(int(pipeline_peaks(free, device).max()) for device in all_devices(free))
    return with_memory(free, max(1, int(least * over)))


@pytest.mark.parametrize("seed", range(10))
def test_a_program_that_keeps_some_tensors_proves_a_bound_and_less_than_the_whole(
    seed: int,
) -> None:
    """Memory at 1, 1.2 and 1.5 times the least; no, some and all tensors have rows."""
    problem = tight_period(seed, (1.0, 1.2, 1.5)[seed % 3])
    period_s, overflow = periods(problem, all_devices(problem), threads=1)
    best_s = period_s[overflow == 0].min()
    points = worst_points(problem, np.ones((problem.num_groups, problem.num_devices)))
    proven = []
    for most_entries in (0, 40, 80, np.inf):
        program = build_loads(problem, 1.0, points, most_entries)
        solved = dual_weights(program, None)
        assert solved is not None
        proven.append(dual_value_s(program, load_weights(program, solved[0])))
    assert proven == pytest.approx(sorted(proven))
    assert proven[-1] <= best_s * (1 + TOLERANCE)


def test_a_program_too_large_for_the_budget_keeps_the_work_and_the_weights() -> None:
    """Sixty ops of 1 s on the fast device that holds a half of their weights, of 10 s elsewhere.

    Work over speed says 60 s * 10 / 11; that 30 of the ops are outside says 300 s.
    """
    n = 60
    edges = [(i, j) for i in range(n) for j in range(i + 1, n)]
    graph = plain_graph(n, edges, sizes=0, weight_bytes=[2] * n)
    cluster = unit_cluster(2, memory_bytes=10**6)
    fast = replace(cluster.devices[0], memory_bytes=n)
    compute_s = np.tile([1.0, 10.0], (n, 1))
    problem = make_problem(
        graph, replace(cluster, devices=(fast, cluster.devices[1])), compute_s, "throughput"
    )
    budget = 0.01
    assert WorkBudget(budget).entries < load_program_size(problem)
    bound = best_bound(problem, budget)
    assert 300.0 * (1 - 1e-6) <= bound.value_s <= 300.0 * (1 + TOLERANCE)


def test_a_fork_and_join_is_proven_optimal_in_both_objectives() -> None:
    """6 s and 4 s, as worked out by hand; the critical path alone shows 5 s."""
    assert best_bound(fork_join("latency"), 5.0).value_s == pytest.approx(6.0)
    assert best_bound(fork_join("throughput"), 5.0).value_s == pytest.approx(4.0, rel=1e-4)


def test_slow_links_make_one_device_optimal_and_the_bound_shows_it() -> None:
    """Three modules of two equal branches, each 1 s; sending takes 10 s, so 3 * (2 + 1) + 1 s."""
    edges = []
    for k in range(3):
        a = 3 * k
        edges += [(a, a + 1), (a, a + 2), (a + 1, a + 3), (a + 2, a + 3)]
    graph = plain_graph(10, edges, sizes=10)
    problem = make_problem(graph, unit_cluster(2), np.ones((10, 2)))
    one_s, _ = values(problem, np.zeros((1, 10), dtype=np.int64))
    bound = best_bound(problem, 5.0)
    assert one_s[0] == pytest.approx(10.0)
    assert bound.value_s == pytest.approx(10.0)
    assert "module" in bound.argument


def test_an_input_on_the_host_must_be_sent_or_the_slow_host_must_work() -> None:
    """Host 5 s; elsewhere 1 s to send, 1 s to compute, 1 s to send back: 3 s."""
    graph = plain_graph(3, [(0, 1), (1, 2)], op_types=[INPUT, "Op", OUTPUT])
    compute_s = np.array([[0.0, np.inf], [5.0, 1.0], [0.0, np.inf]])
    bound = best_bound(make_problem(graph, unit_cluster(2), compute_s), 1.0)
    assert bound.value_s == pytest.approx(3.0)
    assert bound.argument.startswith("critical path")


def test_weights_that_do_not_fit_on_the_fast_device_force_work_elsewhere() -> None:
    """Two ops of 6 bytes; the fast device holds 8: one op takes 10 s on the slow one."""
    graph = plain_graph(2, [], sizes=0, weight_bytes=[6, 6])
    cluster = unit_cluster(2)
    devices = (replace(cluster.devices[0], memory_bytes=8), cluster.devices[1])
    compute_s = np.array([[1.0, 10.0], [1.0, 10.0]])
    problem = make_problem(graph, replace(cluster, devices=devices), compute_s)
    bound = best_bound(problem, 5.0)
    # The relaxation may split an op: 4 of 12 bytes stay outside, 20 s * 4 / 12.
    assert bound.value_s >= 20.0 * 4 / 12 * (1 - 1e-6)
    assert bound.value_s <= 10.0 * (1 + TOLERANCE)


def test_a_path_that_does_not_fit_on_the_fast_device_changes_devices() -> None:
    """a then b, 6 bytes each; the fast device holds 8, so 1 + 10 s and 1 s to send: 12 s.

    With a price of c a byte it is min(2 + 12 c, 12 + 6 c, 20) - 8 c, at most 8 s for c = 1.5.
    """
    graph = plain_graph(2, [(0, 1)], weight_bytes=[6, 6])
    cluster = unit_cluster(2)
    devices = (replace(cluster.devices[0], memory_bytes=8), cluster.devices[1])
    compute_s = np.array([[1.0, 10.0], [1.0, 10.0]])
    problem = make_problem(graph, replace(cluster, devices=devices), compute_s)
    bounds = all_bounds(problem, 5.0)
    path = next(bound for bound in bounds if bound.argument.startswith("memory"))
    assert 7.7 <= path.value_s <= 8.0 + 1e-9
    assert max(bound.value_s for bound in bounds) <= 12.0 * (1 + TOLERANCE)


def test_shared_work_of_unlike_devices_is_the_fractional_optimum() -> None:
    """One op each way at 1 s against 3 s and one alike: 1 + 1 s alone, 2 s shared in half."""
    op_s = np.array([[1.0, 3.0], [3.0, 1.0], [2.0, 2.0]])
    value_s, share = shared_work_s(op_s)
    assert value_s == pytest.approx(2.0)
    assert share.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_shares_by_a_sample_of_many_ops_prove_as_much(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the fractional optimum, by a linear program, and nearly all of it."""
    rng = np.random.default_rng(seed)
    op_s = rng.lognormal(0.0, 1.0, (400, 1)) / rng.uniform(0.2, 1.0, (400 if seed % 2 else 1, 3))
    op_s = np.broadcast_to(op_s, (400, 3)).copy()
    op_s[rng.random(400) < 0.2, 1] = np.inf  # cannot go there
    finite = np.where(np.isfinite(op_s), op_s, 0.0)
    cost = np.append(np.zeros(op_s.size), 1.0)
    loads = np.zeros((3, op_s.size + 1))
    for d in range(3):
        loads[d, d : op_s.size : 3] = finite[:, d]
        loads[d, -1] = -1.0
    whole = np.kron(np.eye(400), np.ones(3))
    solved = linprog(
        cost, A_ub=loads, b_ub=np.zeros(3), A_eq=np.hstack([whole, np.zeros((400, 1))]),
        b_eq=np.ones(400),
        bounds=[*((0.0, float(x)) for x in np.isfinite(op_s).reshape(-1)), (0.0, None)],
    )  # fmt: skip
    monkeypatch.setattr("gdp.bounds.work._SAMPLE", 100)
    value_s, share = shared_work_s(op_s)
    assert 0.98 * solved.fun <= value_s <= solved.fun * (1.0 + 1e-9)
    assert share.sum() == pytest.approx(1.0)


def test_the_argument_says_what_proved_the_bound_in_figures() -> None:
    for objective in ("latency", "throughput"):
        for bound in all_bounds(fork_join(objective), 5.0):
            assert any(c.isdigit() for c in bound.argument), bound.argument


def test_caches_along_a_path_are_priced_where_they_lie() -> None:
    """A chain of 4 ops of 10 bytes, 4 of them caches, which all lie on d0, of 28 bytes: 2 ops stay
    there, 1 s each, and 2 take 9 s on d1. At 10 bytes an op on d0 there would be room for 2.8."""
    devices = [cpu("d0", memory_bytes=28), cpu("d1", runs_on="d0")]
    cluster = make_cluster("two", devices, default_bytes_per_s=np.inf, default_latency_s=0.0)
    graph = plain_graph(
        4, [(i, i + 1) for i in range(3)], 0, weight_bytes=[10] * 4, cache_bytes=[4] * 4
    )
    problem = make_problem(graph, cluster, np.array([[1.0, 9.0]] * 4))
    priced = [bound for bound in all_bounds(problem, 1.0) if bound.argument.startswith("memory: ")]
    assert [bound.value_s for bound in priced] == [pytest.approx(20.0, rel=1e-2)]
    assert brute_force_s(problem) == pytest.approx(20.0)


def test_a_bound_without_time_is_still_a_bound() -> None:
    for seed in range(5):
        for objective in ("latency", "throughput"):
            problem = random_problem(seed, objective=objective, num_ops=30)
            quick, slow = best_bound(problem, 0.0), best_bound(problem, 0.5)
            assert 0.0 < quick.value_s <= slow.value_s * (1 + TOLERANCE)


def test_a_large_graph_gets_the_cheap_bounds() -> None:
    """A chain of 12,000 ops of 1 s: its latency is known, its period is half of it, or more."""
    n = 12_000
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)])
    for objective, least_s in (("latency", n), ("throughput", n / 2)):
        problem = make_problem(graph, unit_cluster(2), np.ones((n, 2)), objective)
        assert best_bound(problem, 0.1).value_s == pytest.approx(least_s)


def test_a_large_graph_gets_work_and_critical_path_when_the_clock_is_over(monkeypatch) -> None:
    """A chain of 6,000 ops of 1 s beside 6,000 that nothing orders: the path takes 6,000 s, the
    work 6,000 on each of two devices."""
    n = 12_000
    graph = plain_graph(n, [(i, i + 1) for i in range(n // 2 - 1)])
    problem = make_problem(graph, unit_cluster(2), np.ones((n, 2)))
    cut = all_bounds(problem, 0.1, cap_s=0.0)
    assert [bound.value_s for bound in cut] == pytest.approx([n / 2, n / 2])
    assert all(bound.argument.endswith(CUT_SHORT) for bound in cut)
    assert not any("window" in bound.argument for bound in cut)
    assert any("window" in bound.argument for bound in all_bounds(problem, 0.1, cap_s=1e6))
    monkeypatch.setattr("gdp.bounds.best.QUICK_OPS", n)  # a small graph has them all
    monkeypatch.setattr("gdp.bounds.latency.QUICK_OPS", n)
    assert any("window" in bound.argument for bound in all_bounds(problem, 0.1, cap_s=0.0))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_slow_machine_proves_what_a_quick_one_does(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is counted: a clock that runs three times as fast changes nothing."""
    problem = random_problem(5, objective=objective, num_ops=40)
    quick = all_bounds(problem, 0.3, cap_s=1e6)
    now = time.perf_counter
    monkeypatch.setattr("gdp.base.clock.time.perf_counter", lambda: 3.0 * now())
    slow = all_bounds(random_problem(5, objective=objective, num_ops=40), 0.3, cap_s=1e6)
    assert [(b.value_s, b.argument) for b in quick] == [(b.value_s, b.argument) for b in slow]


def test_a_proof_that_the_clock_ends_says_so() -> None:
    problem = random_problem(5, num_ops=40)
    cut = all_bounds(problem, 1.0, cap_s=0.0)
    whole = all_bounds(problem, 1.0, cap_s=1e6)
    assert all(bound.argument.endswith(CUT_SHORT) for bound in cut)
    assert not any(bound.argument.endswith(CUT_SHORT) for bound in whole)
    assert max(b.value_s for b in cut) <= max(b.value_s for b in whole)


def test_more_work_branches_more() -> None:
    assert [WorkBudget(s).branches > 0 for s in (0.0, 0.1)] == [False, True]
    assert (
        WorkBudget(1.0).nodes(10)
        > WorkBudget(1.0).nodes(2_000)
        > WorkBudget(1.0).nodes(10_000)
        == 0
    )
    assert (
        WorkBudget(1.0).nodes(50_000, paths=True) == 0 < WorkBudget(10.0).nodes(50_000, paths=True)
    )
    assert (
        WorkBudget(5.0).nodes(254_000, paths=True)
        == 0
        < WorkBudget(45.0).nodes(254_000, paths=True)
    )
    largest = [WorkBudget(s).entries for s in (0.1, 1.0, 10.0)]
    assert largest == sorted(set(largest))
    assert [WorkBudget(1.0).programs(k * largest[1] // 4) for k in (1, 2, 4, 5)] == [9, 3, 1, 0]


def test_the_bound_of_loads_knows_how_fast_devices_are() -> None:
    """Four ops of 1 s, on the second device of 3: three of them on the first take as long as one
    on the second."""
    problem = make_problem(
        plain_graph(4, []), unit_cluster(2), np.array([[1.0, 3.0]] * 4), "max_load",
        sent_s=np.zeros(4),
    )  # fmt: skip
    assert best_bound(problem, 1.0).value_s == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("per", ["op", "segment"])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_weights_at_rest_launch_nothing(per: str, objective: str) -> None:
    """One op of a second with a launch of a second, beside two ops that only hold weights."""
    graph = make_graph("m", ["a", "b", "c"], ["Op", UNREAD, UNREAD], [], [], weight_bytes=[1, 1, 1])
    device = Device("d", "d", {"default": 1.0}, 1.0, dispatch_s=1.0, dispatch_per=per)
    problem = make_problem(graph, make_cluster("one", [device]), np.array([[1.0], [0.0], [0.0]]),
                           objective)  # fmt: skip
    found = values(problem, np.zeros((1, 3), dtype=np.int64))
    assert float(np.ravel(found[0])[0]) == 2.0
    assert max(bound.value_s for bound in all_bounds(problem, 1.0)) == pytest.approx(2.0)
    work_s, _ = _work(problem, np.zeros(3, dtype=np.int64), 1, ((0,),))
    assert work_s[0, 0] == 2.0
