"""Whole ticks: exact sums, one answer in any unit, no device whose name matters."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import plain_graph, random_devices, random_problem, unit_cluster

import gdp
from gdp.base.errors import GdpError
from gdp.cluster.types import Cluster
from gdp.problem.problem import Problem, make_problem
from gdp.problem.symmetry import twins
from gdp.problem.ticks import common_divisor, in_ticks, rounding_share, send_time
from gdp.question import solve
from gdp.sim.score import score

FACTORS = (2.0**-30, 1e-3, 0.7)
SLOW = ("auto", "exact")
# What a cut may take beyond its prediction is a number of seconds on real machines: no unit's.
QUICK = gdp.Search(seed=3, seconds=None, evaluations=60, simplicity=0.0)


def in_unit(cluster: Cluster, factor: float) -> Cluster:
    """The machine where a second is so many units."""
    devices = tuple(replace(d, dispatch_s=d.dispatch_s * factor) for d in cluster.devices)
    return replace(
        cluster, devices=devices, link_bytes_per_s=cluster.link_bytes_per_s / factor,
        link_latency_s=cluster.link_latency_s * factor,
    )  # fmt: skip


def seconds_problem(seed: int, objective: str, *, num_ops: int = 6, ties: bool = True) -> Problem:
    """A random problem in seconds; with ties, ops take a few tenths."""
    problem = random_problem(seed, objective=objective, num_ops=num_ops)
    rng = np.random.default_rng(seed)
    shape = (problem.num_ops, problem.num_devices)
    compute_s = rng.choice([0.1, 0.2, 0.3, 1.0], shape) if ties else rng.uniform(0.1, 1.0, shape)
    return make_problem(problem.graph, problem.cluster, compute_s, objective)


def placed(method: str, problem: Problem, factor: float) -> gdp.Result | None:
    """The answer of a method in some unit; None where nothing fits."""
    try:
        return gdp.place(
            problem.graph, in_unit(problem.cluster, factor), objective=problem.objective,
            method=method, costs=lambda graph, cluster: factor * problem.compute_s, search=QUICK,
        )  # fmt: skip
    except GdpError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(solve.methods()) - {"hsdag"}))
def test_any_unit_of_time_gives_the_same_answer(method: str) -> None:
    answered = 0
    for objective, seed in (("latency", 1), ("throughput", 2)):
        problem = seconds_problem(seed, objective)
        first = placed(method, problem, 1.0)
        for factor in FACTORS[1:2] if method in SLOW else FACTORS:
            other = placed(method, problem, factor)
            assert (first is None) == (other is None)
            if first is None or other is None:
                continue
            answered += 1
            assert other.placement.device.tolist() == first.placement.device.tolist()
            assert other.placement.teams == first.placement.teams
            assert other.value_s == pytest.approx(first.value_s * factor, rel=1e-12)
            assert other.bound_s == pytest.approx(first.bound_s * factor, rel=1e-9)
            assert len(other.notes) == len(first.notes)
    assert answered


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 500), factor=st.floats(1e-9, 1e9))
def test_any_scale_of_the_seconds_scales_a_score(
    objective: str, ties: bool, seed: int, factor: float
) -> None:
    problem = seconds_problem(seed, objective, num_ops=12, ties=ties)
    scaled = make_problem(
        problem.graph, in_unit(problem.cluster, factor), problem.compute_s * factor, objective
    )
    device = random_devices(problem, seed)[0]
    one, other = score(problem, device), score(scaled, device)
    assert other.value_s == pytest.approx(one.value_s * factor, rel=1e-9)
    assert (other.peak_bytes == one.peak_bytes).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 500), shared=st.booleans(), tenths=st.booleans())
def test_the_names_of_alike_devices_change_no_score(seed: int, shared: bool, tenths: bool) -> None:
    """Also where costs tie and all transfers go over one bus."""
    rng = np.random.default_rng(seed)
    graph = random_problem(seed, num_ops=10).graph
    cluster = unit_cluster(4, 0.1, memory_bytes=30)
    if shared:
        cluster = replace(cluster, channel=np.zeros_like(cluster.channel))
    one = (
        rng.choice([0.1, 0.2, 0.7], (graph.num_ops, 1))
        if tenths
        else rng.uniform(1.0, 9.0, (graph.num_ops, 1))
    )
    for objective in ("latency", "throughput"):
        problem = make_problem(graph, cluster, np.repeat(one, 4, axis=1), objective)
        device = rng.integers(4, size=problem.num_groups)[problem.group]
        alike = [(i, int(j)) for i, j in enumerate(twins(problem)) if j >= 0]
        assert alike
        for i, j in alike:
            name = np.arange(4)
            name[[i, j]] = j, i
            before, after = score(problem, device), score(problem, name[device])
            assert before.value_s == after.value_s
            assert before.latency_s == after.latency_s
            assert before.overflow_bytes == after.overflow_bytes


def test_sums_of_ticks_are_exact_in_any_order() -> None:
    for seed in range(20):
        problem = in_ticks(seconds_problem(seed, "latency", num_ops=30, ties=seed % 2 == 0))
        times = problem.compute_s[np.isfinite(problem.compute_s)]
        ticks = times / problem.unit.grid
        assert (ticks == np.round(ticks)).all()
        assert ticks.sum() < 2.0**52
        latency = problem.cluster.link_latency_s / problem.unit.grid
        assert (latency == np.round(latency)).all()
        rng = np.random.default_rng(seed)
        assert len({float(np.cumsum(rng.permutation(times))[-1]) for _ in range(10)}) == 1


def test_rounding_changes_no_value_by_more_than_is_said() -> None:
    for seed in range(20):
        problem = seconds_problem(seed, "latency", num_ops=30, ties=False)
        ticks = in_ticks(problem)
        assert rounding_share(problem) < 1e-10
        error = np.abs(ticks.compute_s * ticks.unit.seconds - problem.compute_s).max()
        work_s = problem.compute_s.min(axis=1).sum() / problem.num_devices
        assert error * problem.num_ops <= 2 * rounding_share(problem) * work_s


def test_ticks_of_a_problem_in_ticks_are_the_problem() -> None:
    problem = in_ticks(seconds_problem(3, "latency"))
    assert in_ticks(problem) is problem
    assert problem.compute_s.max() <= 1.0


@pytest.mark.parametrize(
    ("times", "divisor"),
    [
        ([0.1, 0.2, 0.7], 0.1),
        ([6.0, 10.0, 15.0], 1.0),
        ([0.25], 0.25),
        ([1e-3, 0.7, 1.2345], 5e-4),
        ([1.0, 2**0.5], None),
        ([1e-9, 1.0], None),  # too fine for a share of 1e-6
    ],
)
def test_the_common_divisor_of_times(times: list[float], divisor: float | None) -> None:
    found = common_divisor(np.array(sorted(times)), 1e-6)
    assert found == (None if divisor is None else pytest.approx(divisor, rel=1e-9))


def test_launches_and_latencies_stay_what_they_are_to_other_times() -> None:
    """Ops of 0.3 and 0.9 s, launches of 0.1 s, latencies of 0.3 s, transfers of 0.6 s in all."""
    machine = unit_cluster(2)
    cluster = replace(
        machine, devices=tuple(replace(d, dispatch_s=0.1) for d in machine.devices),
        link_latency_s=0.3 * (1 - np.eye(2)),
        link_bytes_per_s=np.array([[np.inf, 10.0], [10.0, np.inf]]),
    )  # fmt: skip
    graph = plain_graph(3, [(0, 1), (1, 2)], [3, 3, 3])
    times = np.array([[0.3, 0.9], [0.9, 0.3], [0.3, 0.3]])
    ticks = in_ticks(make_problem(graph, cluster, times))
    launch, latency = ticks.cluster.devices[0].dispatch_s, float(ticks.cluster.link_latency_s[0, 1])
    assert (3 * launch, 9 * launch, 3 * launch) == (*sorted({*ticks.compute_s.flat}), latency)


def test_transfers_are_whole_ticks() -> None:
    grid = 2.0**-20
    seconds = send_time(0.3, np.arange(1, 9.0), 7.0, 1.5 * 2.0**52 * grid)
    assert (seconds / grid == np.round(seconds / grid)).all()
    assert np.abs(seconds - (0.3 + np.arange(1, 9.0) / 7.0)).max() <= grid / 2
    assert send_time(0.0, 5.0, np.inf, 1.5 * 2.0**52 * grid) == 0.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_no_answer_is_worse_than_its_own_candidates(objective: str, seed: int) -> None:
    """Alike devices and costs that tie: chains of equal tiles whose times are tenths."""
    rng = np.random.default_rng(seed)
    tiles, depth = 4, 5
    edges = [
        (d * tiles + int(k), (d + 1) * tiles + i)
        for d in range(depth - 1)
        for i in range(tiles)
        for k in rng.choice(tiles, 2, replace=False)
    ]
    graph = plain_graph(tiles * depth, edges, 3)
    cost_s = rng.choice([0.1, 0.2, 0.3], (tiles * depth, 1))
    result = gdp.place(
        graph, unit_cluster(4, 0.05), objective=objective,
        costs=lambda graph, cluster: np.repeat(cost_s, 4, axis=1),
        search=gdp.Search(seed=seed, seconds=None, evaluations=2000, simplicity=0.0),
    )  # fmt: skip
    assert result.candidates
    for row in result.candidates:
        assert not row.feasible or row.value_s is None or result.value_s <= row.value_s
    assert result.bound_s <= result.value_s


def test_progress_and_notes_are_in_seconds() -> None:
    """Ops of 4 s each: no value is below that, whatever the unit inside."""
    problem = random_problem(1, num_ops=6)
    values: list[float] = []
    search = replace(QUICK, progress=lambda share, value_s: values.append(value_s))
    result = gdp.place(
        problem.graph, unit_cluster(problem.num_devices), method="auto", search=search,
        costs=lambda graph, cluster: np.full((graph.num_ops, cluster.num_devices), 4.0),
    )  # fmt: skip
    fitting = [row.value_s for row in result.candidates if row.feasible and row.value_s]
    assert min(values) >= result.bound_s >= 4.0
    assert min(fitting) == pytest.approx(result.value_s, rel=0.5)
    assert result.curve[-1][1] == min(values)
