"""Teams as single devices: what they are busy for, and that auto with teams is never worse."""

import dataclasses

import numpy as np
import pytest
from tiny import random_problem

from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import NO_CHANNEL
from gdp.methods.base import Answer, Search
from gdp.methods.exact.method import without_replicas
from gdp.methods.portfolio import auto
from gdp.methods.search.replica_groups import contract_replicas, search_teams
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem
from gdp.sim.latency import periods
from gdp.sim.score import may_replicate, period_s, score


def drawn(rng: np.random.Generator, num_ops: int, num_devices: int) -> Problem:
    """Random ops of an inference whose stages may be replicated."""
    problem = random_problem(
        int(rng.integers(1 << 30)), num_ops=num_ops, num_devices=num_devices, objective="throughput"
    )
    forward = np.zeros_like(problem.graph.is_backward)
    graph = dataclasses.replace(problem.graph, is_backward=forward)
    problem = dataclasses.replace(problem, graph=graph, replicas=True)
    assert may_replicate(problem)
    return problem


def alike(rng: np.random.Generator, channels: str, num_devices: int = 6) -> Problem:
    """Random ops on devices that are all alike, links too, with channels of one of three kinds."""
    problem = drawn(rng, 8, num_devices)
    d = num_devices
    ids = {
        "pairs": np.arange(d * d).reshape(d, d),
        "senders": np.repeat(np.arange(d)[:, None], d, axis=1),
        "bus": np.zeros((d, d), dtype=np.int64),
        "free": np.full((d, d), NO_CHANNEL),
    }[channels]
    apart = 1.0 - np.eye(d)
    cluster = dataclasses.replace(
        problem.cluster,
        devices=tuple(
            dataclasses.replace(device, dispatch_s=0.25, dispatch_per="op", memory_bytes=1 << 40)
            for device in problem.cluster.devices
        ),
        link_bytes_per_s=np.where(apart > 0, 2.0, np.inf), link_latency_s=0.125 * apart,
        channel=ids, host=0,
    )  # fmt: skip
    io = problem.graph.is_io
    compute_s = rng.integers(1, 9, (problem.num_ops, 1)).repeat(d, axis=1) * ~io[:, None] * 1.0
    allowed = np.ones_like(problem.allowed)
    allowed[io, 1:] = False
    return dataclasses.replace(
        problem, cluster=cluster, compute_s=compute_s, allowed=allowed,
        group=np.arange(problem.num_ops),
    )  # fmt: skip


@pytest.mark.parametrize("channels", ["pairs", "senders", "bus", "free"])
@pytest.mark.parametrize("teams", [((1, 2),), ((1, 2, 3), (4, 5)), ((1, 3), (2, 4))])
def test_a_team_is_busy_as_one_device_that_is_as_many_times_faster(
    channels: str, teams: Teams
) -> None:
    """Against a cycle of samples, each placed by itself, as `gdp.sim.score` has it."""
    rng = np.random.default_rng(len(channels) + len(teams))
    for _ in range(8):
        problem = alike(rng, channels)
        option = contract_replicas(problem, teams)
        assert option is not None
        size = option.problem.num_devices
        assert size == 6 - sum(len(team) - 1 for team in teams)
        device = rng.integers(size, size=problem.num_ops)
        device[problem.graph.is_io] = option.problem.cluster.host
        judged = option.judged(device)
        (value,), _ = periods(option.problem, device[None], threads=1)
        placed = judged.assignment.device
        assert judged.value_s == period_s(problem, placed, teams)
        assert period_s(problem, placed, ()) == periods(problem, placed[None], threads=1)[0][0]
        assert value == pytest.approx(judged.value_s, rel=1e-10)
        assert (option.project(placed) == device).all()


def test_one_team_of_all_leaves_nothing_to_search() -> None:
    problem = alike(np.random.default_rng(0), "pairs", 3)
    assert contract_replicas(problem, ((0, 1, 2),)) is None


def test_the_search_of_teams_gets_its_budget_only_where_it_is_near() -> None:
    """A first look costs one evaluation for each choice of teams; beyond that it must be wanted."""
    problem = alike(np.random.default_rng(1), "pairs", 4)
    asked = []

    def plain(small: Problem, search: Search, extra: object) -> Answer:
        asked.append(search.evaluations)
        return auto(small, search)

    near, _ = search_teams(problem, None, Search(seconds=None, evaluations=50), np.inf, plain)
    assert asked == [1, 50]
    far, _ = search_teams(problem, None, Search(seconds=None, evaluations=50), 0.0, plain)
    assert asked == [1, 50, 1]
    assert near is not None
    assert far is not None
    assert near.value_s <= far.value_s


@pytest.mark.slow
@pytest.mark.parametrize("evaluations", [0, 40, 400])
def test_auto_with_replicas_is_never_worse_with_the_same_evaluations(evaluations: int) -> None:
    """Random graphs on unlike and on alike devices; and teams do win where they can."""
    rng = np.random.default_rng(evaluations)
    wins = 0
    for k in range(6):
        if k % 2:
            problem = alike(rng, ("pairs", "senders", "bus")[k % 3], 4)
        else:
            problem = drawn(rng, 10, 3)
        search = Search(seed=k, seconds=None, evaluations=evaluations)
        with_teams, without = auto(problem, search), auto(without_replicas(problem), search)
        if without.assignment is None:
            continue
        found = with_teams.assignment
        assert found is not None
        judged = score(problem, found.device, found.rank, found.teams)
        assert judged.feasible
        alone = score(problem, without.assignment.device, without.assignment.rank)
        assert judged.value_s <= alone.value_s
        wins += judged.value_s < alone.value_s * (1 - 1e-9)
    assert wins >= 3


def test_search_finds_better_teams_than_the_program_along_linear_orders() -> None:
    """On a cluster of one CPU and two cards, for a graph that is no chain."""
    from gdp.costs.base import roofline
    from gdp.learn.instances import random_graph
    from gdp.methods.pipeline.method import replicated_pipeline
    from gdp.methods.scoring import Evaluated
    from gdp.problem.problem import make_problem

    cluster, graph = cluster_preset("cpu+2xt4"), random_graph("layered-60-3")
    problem = make_problem(
        graph, cluster, roofline(graph, cluster), "throughput", replicas=True
    )  # fmt: skip
    first = replicated_pipeline(problem, Search(seconds=None), linear_only=True).assignment
    assert first is not None
    before = score(problem, first.device, None, first.teams)
    start = Evaluated(first, before.overflow_bytes, before.value_s)
    search = Search(seconds=None, evaluations=2000)
    best, spent = search_teams(problem, start, search, np.inf, auto)
    assert best is not None
    assert best.value_s <= before.value_s
    assert best.assignment.teams
    assert spent >= 2000
