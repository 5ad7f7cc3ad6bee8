"""Pipelines with replicated stages against every placement with every team on small graphs."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from host_memory import is_pipeline
from tiny import plain_graph, random_problem, unit_cluster

from gdp.bounds.best import all_bounds
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.methods.base import Search
from gdp.methods.exact.method import without_replicas
from gdp.methods.pipeline import method as module
from gdp.methods.pipeline.method import best_pipeline, contract, pipeline_dp, replicated_pipeline
from gdp.methods.pipeline.stage_costs import device_classes, find_replica_groups
from gdp.methods.portfolio import auto
from gdp.methods.table import METHODS
from gdp.placement.constraints import Constraints, merge
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem, make_problem
from gdp.question import solve
from gdp.question.question import Question
from gdp.sim.latency import periods
from gdp.sim.score import may_replicate, peak_bytes, period_s, score

SEARCH = Search(seconds=None)


def every_teams(num_devices: int) -> Iterator[Teams]:
    """Every way to form teams: the set partitions of the devices, without the single ones."""

    def split(left: list[int]) -> Iterator[list[list[int]]]:
        if not left:
            yield []
            return
        for parts in split(left[1:]):
            yield [[left[0]], *parts]
            for k in range(len(parts)):
                yield [*parts[:k], [left[0], *parts[k]], *parts[k + 1 :]]

    for parts in split(list(range(num_devices))):
        yield tuple(sorted(tuple(part) for part in parts if len(part) > 1))


def alike(problem: Problem, team: tuple[int, ...]) -> bool:
    """Whether all ops that work take the same time on all devices of a team."""
    works = ~problem.graph.is_io
    times = problem.compute_s[works][:, list(team)]
    return bool((times == times[:, :1]).all())


def placements(problem: Problem, teams: Teams) -> Iterator[np.ndarray]:
    """Every assignment of ops that work to single devices and to the first ones of teams."""
    leads = sorted(set(range(problem.num_devices)) - {d for team in teams for d in team[1:]})
    works = np.flatnonzero(~problem.graph.is_io)
    device = np.full(problem.num_ops, problem.cluster.host)
    for chosen in itertools.product(leads, repeat=len(works)):
        device[works] = chosen
        yield device.copy()


def least_s(problem: Problem, *, contiguous: bool) -> float:
    """The shortest period of all placements that fit with all teams of like devices."""
    best_s, contraction = np.inf, contract(problem)
    inside = contraction.element < contraction.num_elements
    for teams in every_teams(problem.num_devices):
        if not all(alike(problem, team) for team in teams):
            continue
        for device in placements(problem, teams):
            of_element = np.full(contraction.num_elements, -1)
            of_element[contraction.element[inside]] = device[inside]
            if contiguous and not is_pipeline(of_element, contraction.src, contraction.dst):
                continue
            if not teams:
                value, over = periods(problem, device[None], threads=1)
                best_s = min(best_s, float(value[0])) if over[0] == 0 else best_s
            elif (value_s := period_s(problem, device, teams)) < best_s:
                over_bytes = peak_bytes(problem, device, teams) - problem.cluster.memory_bytes
                best_s = value_s if (over_bytes <= 0).all() else best_s
    return best_s


def pipeline_problem(rng: np.random.Generator, num_devices: int, **fields) -> Problem:
    """Four ops between an input and an output, on devices of which some are alike, each with one
    channel for all that it receives and sends."""
    n = 4
    ops = ["in", *[f"o{i}" for i in range(n)], "out"]
    edges = [(0, 1 + int(rng.integers(n))) for _ in range(2)]
    edges += [(1 + a, 1 + b) for b in range(n) for a in range(b) if rng.random() < 0.25]
    edges += [(n, n + 1)]
    graph = make_graph(
        "io", ops, [INPUT, *["Op"] * n, OUTPUT],
        [(i, int(rng.integers(1, 5))) for i in range(n + 1)], sorted(set(edges)),
        weight_bytes=[0, *rng.integers(0, 9, n).tolist(), 0],
    )  # fmt: skip
    devices = [Device(f"d{i}", "gpu", {"default": 1.0}, 1.0, **fields) for i in range(num_devices)]
    cluster = make_cluster("io", devices, default_bytes_per_s=2.0, default_latency_s=0.25)
    channel = np.repeat(np.arange(num_devices)[None], num_devices, axis=0)
    cluster = dataclasses.replace(cluster, channel=np.ascontiguousarray(channel))
    kinds = (rng.random(num_devices) < 0.25).astype(int)
    compute_s = rng.integers(1, 9, (n + 2, 2)).astype(float)[:, kinds]
    compute_s[[0, -1]] = 0.0
    compute_s[[0, -1], 1:] = np.inf
    return make_problem(graph, cluster, compute_s, "throughput", replicas=True)


@pytest.mark.parametrize(("num_devices", "memory_bytes"), [(2, 1 << 40), (3, 1 << 40), (3, 30)])
def test_no_pipeline_with_replicas_is_shorter_where_it_says_so(
    num_devices: int, memory_bytes: int
) -> None:
    rng = np.random.default_rng(num_devices + memory_bytes)
    certain = replicated = 0
    for _ in range(10):
        problem = pipeline_problem(rng, num_devices, memory_bytes=memory_bytes)
        assert may_replicate(problem)
        best_s = least_s(problem, contiguous=True)
        plain = pipeline_dp(without_replicas(problem), SEARCH)
        answer = pipeline_dp(problem, SEARCH)
        if answer.assignment is None:
            assert plain.assignment is None
            continue
        found = score(problem, answer.assignment.device, None, answer.assignment.teams)
        assert found.feasible
        assert answer.bound_s <= best_s * (1 + 1e-12) <= found.value_s * (1 + 2e-12)
        if plain.assignment is not None:
            alone = score(problem, plain.assignment.device)
            assert found.value_s <= alone.value_s
            replicated += found.value_s < alone.value_s * (1 - 1e-9)
        if answer.reason.startswith("no contiguous pipeline is better") or answer.proven_optimal:
            certain += 1
            assert found.value_s == pytest.approx(best_s, rel=1e-12)
    assert certain >= 7 or memory_bytes < 1 << 40
    assert replicated >= 3


def test_low_targets_first_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low targets leave few down-sets; where they are too low, the last one decides."""
    rng = np.random.default_rng(5)
    problems = [pipeline_problem(rng, 4) for _ in range(8)]
    by_value = [best_pipeline(p, SEARCH, replicas=True).cost_s for p in problems]
    monkeypatch.setattr(module, "_FEW_SETS", 0)
    assert [best_pipeline(p, SEARCH, replicas=True).cost_s for p in problems] == by_value


@pytest.mark.parametrize("seed", range(16))
def test_no_placement_with_any_team_is_below_a_bound(seed: int) -> None:
    """Teams of unlike devices, too: a bound holds for whatever takes samples in turn."""
    problem = random_problem(seed, objective="throughput", num_ops=5, num_devices=3)
    problem = dataclasses.replace(problem, replicas=True)
    if not may_replicate(problem):
        problem = dataclasses.replace(problem, graph=dataclasses.replace(
            problem.graph, is_backward=np.zeros(problem.num_ops, dtype=bool)
        ))  # fmt: skip
    bounds = [*((b.value_s, b.argument) for b in all_bounds(problem, 1.0)), *_answers(problem)]
    for teams in every_teams(3):
        for device in placements(problem, teams):
            if not problem.allowed[np.arange(problem.num_ops), device].all():
                continue
            value_s = period_s(problem, device, teams)
            for bound_s, argument in bounds:
                if value_s < bound_s * (1 - 1e-9):
                    held = peak_bytes(problem, device, teams)
                    assert (held > problem.cluster.memory_bytes).any(), (teams, argument)


def _answers(problem: Problem) -> list[tuple[float, str]]:
    """What methods say to be bounds where stages may be replicated."""
    answers = [METHODS[name](problem, Search(seconds=1.0)) for name in ("pipeline_dp", "exact")]
    return [(answer.bound_s, answer.bound_by) for answer in answers]


def test_a_hybrid_is_found_on_four_devices() -> None:
    """a (9 s) | b (3 s) with 9 bytes of weights each, on four devices of 15 bytes: no device holds
    both, so the whole model cannot be replicated. Three devices for a and one for b: 3 s a sample;
    two and two take 4.5 s, one and one 9 s. 12 s of work on four devices prove it."""
    graph = plain_graph(2, [(0, 1)], weight_bytes=[9, 9])
    cluster = unit_cluster(4, memory_bytes=15)
    compute_s = np.repeat([[9.0], [3.0]], 4, axis=1)
    problem = make_problem(graph, cluster, compute_s, "throughput", replicas=True)
    for method in (auto, pipeline_dp, METHODS["exact"]):
        answer = method(problem, Search(seconds=None, evaluations=50))
        assert answer.assignment is not None
        assert sorted(map(len, answer.assignment.teams)) == [3]
        found = score(problem, answer.assignment.device, None, answer.assignment.teams)
        assert (found.value_s, found.feasible) == (3.0, True)
        assert answer.bound_s == pytest.approx(3.0) or method is auto


def test_two_replicas_answer_what_a_note_said_before() -> None:
    """One op cannot be cut: two devices that take samples in turn do 2 samples a second."""
    graph = make_graph("g", ["a"], ["X"], [], [])
    devices = [Device(n, "d", {"default": 1.0}, 1.0) for n in "xy"]
    cluster = make_cluster("c", devices)
    problem = make_problem(graph, cluster, np.ones((1, 2)), "throughput", replicas=True)
    answer = auto(problem, Search(seconds=None, evaluations=10))
    assert answer.assignment is not None
    assert answer.assignment.teams == ((0, 1),)
    assert answer.notes == ()
    row = next(c for c in answer.candidates if c.method == "replicas")
    assert row.value_s == 0.5


def test_more_sizes_than_are_looked_at_are_said_to_be_left_out() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)])
    problem = make_problem(
        graph, unit_cluster(26), np.repeat([[5.0], [3.0], [1.0]], 26, axis=1), "throughput",
        replicas=True,
    )  # fmt: skip
    groups, every = find_replica_groups(problem, device_classes(problem))
    assert [group.size for group in groups] == [1, 2, 4, 8, 16, 26]
    assert not every
    answer = replicated_pipeline(problem, SEARCH)
    assert answer.proven_optimal  # 26 replicas of the whole take 9 s of work / 26
    assert not best_pipeline(problem, SEARCH, replicas=True).is_optimal


def test_ops_bound_to_the_host_keep_it_out_of_teams() -> None:
    """An op that shares a group with an input stays on the host, where no sample may go round it;
    without that, the host serves with the other device, which is like it otherwise."""
    for colocate, sizes in (([0, 1, 1, 2], [1, 1]), ([0, 1, 2, 3], [1, 1, 2])):
        graph = plain_graph(
            4, [(0, 2), (1, 2), (2, 3)], op_types=[INPUT, INPUT, "Op", "Op"], colocate=colocate
        )
        compute_s = np.array([[0.0, np.inf], [0.0, np.inf], [1.0, 1.0], [1.0, 1.0]])
        problem = make_problem(graph, unit_cluster(), compute_s, "throughput", replicas=True)
        groups, _ = find_replica_groups(problem, device_classes(problem))
        assert [group.size for group in groups] == sizes


def test_placing_replicates_unless_told_not_to() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)], flop=[5e9, 1e9, 1e9])
    cluster, search = cluster_preset("2xcpu-core"), Search(seconds=None, evaluations=50)
    how: dict[str, Any] = {"costs": roofline, "search": search, "method": "pipeline_dp"}
    latency = solve.solve(Question(graph, cluster, **how))
    assert latency.placement.teams == ()
    how["objective"] = "throughput"
    free = solve.solve(Question(graph, cluster, **how))
    assert free.placement.teams == ((0, 1),)
    assert free.to_json()["teams"] == [["core0", "core1"]]
    assert free.to_json()["devices"] == {"core0": 3, "core1": 3}
    assert free.proven_optimal
    plain = solve.solve(Question(graph, cluster, **how, constraints=Constraints(replicas=False)))
    assert plain.placement.teams == ()
    assert free.value_s < plain.value_s
    assert free.bound_s <= free.value_s
    assert solve.simulate(
        Question(graph, cluster, objective="throughput", costs=roofline), free.placement
    ).value_s == pytest.approx(free.value_s)
    again = solve.evaluate(
        Question(graph, cluster, objective="throughput", costs=roofline), free.placement
    )
    assert again.value_s == pytest.approx(free.value_s)
    assert not merge([Constraints(), Constraints(replicas=False)]).replicas
