"""Energy of a run: by hand, against brute force, and its bound."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import all_devices, plain_graph, random_devices, random_problem

import gdp
from gdp.bounds.best import best_bound
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.power import BUSY
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.methods.table import METHODS
from gdp.placement.placement import Assignment, Split
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import in_ticks
from gdp.sim.energy import run_power, values
from gdp.sim.latency import latencies
from gdp.sim.score import score, score_of

SEARCH = Search(seed=1, seconds=None, evaluations=400)


def fast_and_frugal() -> Problem:
    """Two ops after each other: 1 s each on a card of 100 W (20 idle), 3 s each on one of 10 W (2
    idle); the work of both is negligible beside their seconds, and so is the link."""
    power = {"fast": (100.0, 20.0), "frugal": (10.0, 2.0)}
    devices = [
        Device(name, f"unheard-of-{name}", {"default": 1e12}, 1e12, watts=w, idle_watts=idle)
        for name, (w, idle) in power.items()
    ]
    cluster = make_cluster("two", devices, [Link("fast", "frugal", 1e12)])
    graph = plain_graph(2, [(0, 1)], flop=[1.0, 1.0])
    return make_problem(graph, cluster, np.array([[1.0, 3.0], [1.0, 3.0]]), "energy")


@pytest.mark.parametrize(
    ("device", "joules"),
    [
        ([0, 0], 20.0 * 2 + 80.0 * BUSY * 2),
        ([1, 1], 2.0 * 6 + 8.0 * BUSY * 6),
        ([0, 1], 22.0 * 4 + 80.0 * BUSY * 1 + 8.0 * BUSY * 3),
    ],
)
def test_used_devices_idle_for_the_whole_run(device: list[int], joules: float) -> None:
    problem = fast_and_frugal()
    judged = score(problem, np.array(device))
    assert judged.value_s == pytest.approx(joules, rel=1e-6)
    assert values(problem, np.array([device]))[0][0] == pytest.approx(joules, rel=1e-6)


def test_the_frugal_device_takes_all_though_it_is_slower() -> None:
    answer = METHODS["auto"](in_ticks(fast_and_frugal()), SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == [1, 1]


def test_members_of_a_split_draw_together() -> None:
    """Both cards compute the op for 1 s: the idle watts and the work of both."""
    problem = fast_and_frugal()
    twice = Assignment(np.array([0, 0]), np.zeros(2, np.int64), (), (Split((0, 1)),))
    joules = 22.0 * 2 + (80.0 + 8.0) * BUSY * 2
    assert score_of(problem, twice).value_s == pytest.approx(joules, rel=1e-6)
    assert run_power(problem, twice).used.tolist() == [True, True]


def test_a_replica_group_idles_with_all_members() -> None:
    problem = fast_and_frugal()
    team = Assignment(np.array([0, 0]), np.zeros(2, np.int64), ((0, 1),), ())
    scored = score_of(problem, team)
    joules = 22.0 * scored.latency_s + 80.0 * BUSY * 2
    assert scored.value_s == pytest.approx(joules, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_below_the_bound(seed: int) -> None:
    problem = random_problem(seed, objective="energy", num_ops=6, num_devices=2, runs=seed % 2 == 0)
    problem = with_work(problem, seed)
    joules, overflow = values(problem, all_devices(problem))
    bound = best_bound(problem, 0.2)
    assert 0.0 < bound.value_s <= joules[overflow == 0].min(initial=np.inf) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_values_of_many_are_those_of_each_and_do_not_depend_on_the_unit(seed: int) -> None:
    problem = with_work(random_problem(seed, objective="energy", varied=True), seed)
    devices = random_devices(problem, seed, 5)
    joules, overflow = values(problem, devices)
    for b, device in enumerate(devices):
        judged = score(problem, device)
        assert judged.value_s == joules[b]
        assert judged.overflow_bytes == overflow[b]
        power = run_power(problem, Assignment(device, np.zeros(problem.num_ops, np.int64)))
        seconds = judged.latency_s * problem.unit.seconds
        assert power.joules(seconds) == pytest.approx(joules[b])


def with_work(problem: Problem, seed: int) -> Problem:
    """The problem with FLOP and bytes of its ops, on devices of unlike power."""
    rng = np.random.default_rng([seed, 7])
    works = ~problem.graph.is_io & np.isfinite(problem.compute_s).all(axis=1)
    graph = replace(
        problem.graph, flop=np.where(works, rng.uniform(0, 1e12, problem.num_ops), 0.0),
        memory_traffic_bytes=np.where(works, rng.uniform(0, 1e10, problem.num_ops), 0.0),
    )  # fmt: skip
    devices = tuple(
        replace(device, watts=float(w), idle_watts=float(w) * share)
        for device, w, share in zip(
            problem.cluster.devices, rng.choice([5.0, 50.0, 400.0], problem.num_devices),
            rng.uniform(0.05, 0.5, problem.num_devices), strict=True,
        )
    )  # fmt: skip
    return replace(problem, graph=graph, cluster=replace(problem.cluster, devices=devices))


def test_unknown_watts_are_named() -> None:
    graph = plain_graph(2, [(0, 1)], flop=[1.0, 1.0])
    device = Device("card", "unheard-of", {"default": 1.0}, 1.0)
    with pytest.raises(gdp.GdpError, match="no watts are known of device 'card'"):
        gdp.place(graph, make_cluster("one", [device]), objective="energy", search=SEARCH)


@pytest.mark.parametrize(("within_s", "device"), [(6.0, [1, 1]), (5.9, [0, 0]), (2.0, [0, 0])])
def test_the_least_joules_within_a_limit_by_hand(within_s: float, device: list[int]) -> None:
    """6 s on the frugal card (21 J), 4 s on both (125 J), 2 s on the fast one (98 J)."""
    problem = replace(fast_and_frugal(), within_s=within_s)
    answer = METHODS["auto"](in_ticks(problem), SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == device


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_within_a_limit_is_that_of_brute_force(seed: int) -> None:
    plain = random_problem(seed, objective="energy", num_ops=5, num_devices=2)
    plain = with_work(plain, seed)
    devices = all_devices(plain)
    joules, overflow = values(plain, devices)
    seconds = latencies(plain, devices)[0] * plain.unit.seconds
    fits = overflow == 0
    within_s = float(np.quantile(seconds[fits], 0.3))
    problem = replace(plain, within_s=within_s)
    limited, _ = values(problem, devices)
    kept = fits & (seconds <= within_s)
    best = joules[kept].min()
    assert limited[kept].tolist() == joules[kept].tolist()
    assert (limited[seconds > within_s * 1.001] > joules[seconds <= within_s].max()).all()
    assert best_bound(problem, 0.2).value_s <= best * (1 + 1e-9)
    found = METHODS["auto"](in_ticks(problem), SEARCH).assignment
    assert found is not None
    scored = score_of(problem, found)
    assert scored.latency_s * problem.unit.seconds <= within_s * 1.001
    assert scored.value_s <= best * (1 + 1e-6)


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    problem = fast_and_frugal()

    def costs(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        return np.where(graph.is_io[:, None], 0.0, problem.compute_s)

    def within(limit: float | str, objective: str = "energy") -> float:
        return gdp.place(
            problem.graph, problem.cluster, objective=objective, costs=costs, search=SEARCH,
            within=limit,
        ).score.latency_s  # fmt: skip

    assert within("6.1s") == pytest.approx(6.0)
    assert within(2.1) == pytest.approx(2.0)
    with pytest.raises(gdp.InfeasibleError, match=r"no plan within 1\.000 s .* takes 2\.000 s"):
        within("1s")
    with pytest.raises(gdp.GdpError, match="--objective energy"):
        within("1s", "latency")
    with pytest.raises(gdp.GdpError, match="above 0"):
        within(0.0)
    with pytest.raises(gdp.GdpError, match="--traffic"):
        within("token=30ms")
