"""Replicated stages against samples that are dealt out one by one, and by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from reference_simulator import LAUNCH_NOTHING, pipeline_peaks, tables, weight_bytes
from tiny import plain_graph, random_devices, random_problem, unit_cluster

from gdp.cluster.types import NO_CHANNEL
from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem, make_problem
from gdp.sim.latency import periods
from gdp.sim.score import may_replicate, peak_bytes, period_s, replicated_score, score

pytestmark = pytest.mark.usefixtures("both_ways")

TEAMS: list[Teams] = [((0, 1),), ((0, 1, 2),), ((1, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3, 4))]


def dealt_s(problem: Problem, device: list[int], teams: Teams, samples: int) -> float:
    """The busiest device's, channel's, processor's or launching thread's seconds a sample, added up
    by samples.

    Shares no code with the package: where an op of a sample runs, what it sends and to whom.
    """
    graph, cluster = problem.graph, problem.cluster
    reads, makes, readers = tables(problem)
    del makes
    busy: dict[tuple[str, int], float] = {}
    names = [device.processor for device in cluster.devices]
    shared = {d for d, name in enumerate(names) if name and names.count(name) > 1}
    for i in range(samples):
        where = []
        for op, lead in enumerate(device):
            team = [t for t in teams if lead in t]
            is_io = graph.op_types[op] in (INPUT, OUTPUT)
            where.append(lead if is_io or not team else team[0][i % len(team[0])])
        for op, d in enumerate(where):
            entry, seconds = cluster.devices[d], 0.0
            if graph.op_types[op] not in LAUNCH_NOTHING:
                makers = [int(graph.producer[t]) for t in reads[op]]
                opens = not makers or any(
                    where[m] != d or graph.op_types[m] == INPUT for m in makers
                )
                seconds += entry.dispatch_s * (entry.dispatch_per == "op" or opens)
            if problem.launches is not None and d not in shared:
                thread = "thread", int(problem.launches.thread[d])
                launch_s = float(problem.launches.seconds[op, d]) + seconds
                if thread[1] >= 0:
                    busy[thread] = busy.get(thread, 0.0) + launch_s
            seconds += float(problem.compute_s[op, d])
            busy["device", d] = busy.get(("device", d), 0.0) + seconds
            if entry.processor:
                busy[entry.processor, 0] = busy.get((entry.processor, 0), 0.0) + seconds
        for tensor, maker in enumerate(graph.producer.tolist()):
            home = where[maker]
            for to in {where[op] for op in readers[tensor]} - {home}:
                seconds = float(cluster.link_latency_s[home, to])
                seconds += float(graph.sent_bytes[tensor] / cluster.link_bytes_per_s[home, to])
                channel = ("channel", int(cluster.channel[home, to]))
                if channel[1] != NO_CHANNEL:
                    busy[channel] = busy.get(channel, 0.0) + seconds
                inside = cluster.devices[home].processor
                if inside and inside == cluster.devices[to].processor:
                    busy[inside, 0] = busy.get((inside, 0), 0.0) + seconds
    return max(busy.values(), default=0.0) / samples


def served(problem: Problem, seed: int, teams: Teams) -> np.ndarray:
    """A random placement in which members of teams other than the first hold no op."""
    leads: dict[int, int] = {d: team[0] for team in teams for d in team}
    device = random_devices(problem, seed)[0]
    io = problem.graph.is_io
    return np.where(io, device, np.array([leads.get(d, d) for d in device.tolist()]))


@pytest.mark.parametrize("teams", TEAMS)
def test_the_period_is_that_of_samples_dealt_out_in_turn(teams: Teams) -> None:
    compared = 0
    for seed in range(20):
        problem = random_problem(
            seed, objective="throughput", num_devices=5, num_ops=16, runs=seed % 2 == 1, varied=True
        )
        device = served(problem, seed, teams)
        wanted = dealt_s(problem, device.tolist(), teams, 6 * 5)
        assert period_s(problem, device, teams) == pytest.approx(wanted, rel=1e-12)
        compared += wanted > 0
    assert compared > 10


def test_two_replicas_of_one_op_take_half_the_time() -> None:
    """One op of 1 s on two devices: a sample every 0.5 s, each after 1 s; 3 bytes of weights each.

    With its input of 1 byte at the host d0, which takes 1 s to d1: every other sample is sent, so
    the link is busy for 0.5 s a sample, and the sample that goes that way takes 2 s. d1 holds two
    buffers of the input; d0 holds the input that it reads, and the one that it sends.
    """
    graph = plain_graph(1, [], weight_bytes=[3])
    problem = make_problem(graph, unit_cluster(), np.ones((1, 2)), "throughput", replicas=True)
    assert may_replicate(problem)
    found = score(problem, np.zeros(1, np.int64), None, ((0, 1),))
    assert (found.period_s, found.latency_s, found.value_s) == (0.5, 1.0, 0.5)
    assert found.peak_bytes.tolist() == [4, 4]
    graph = plain_graph(2, [(0, 1)], op_types=[INPUT, "Op"], weight_bytes=[0, 3])
    compute_s = np.array([[0.0, np.inf], [1.0, 1.0]])
    problem = make_problem(graph, unit_cluster(), compute_s, "throughput", replicas=True)
    found = score(problem, np.zeros(2, np.int64), None, ((0, 1),))
    assert (found.period_s, found.latency_s) == (0.5, 2.0)
    assert found.peak_bytes.tolist() == [3 + 1 + 1 + 1, 3 + 2 + 1]


def test_two_teams_of_two_meet_in_two_pairs() -> None:
    """a | b on two devices each, 4 s each, a tensor of 6 bytes between them: samples 0, 2, ... go
    d0 to d2 and the others d1 to d3, so each of two links carries 6 s every second sample."""
    graph = plain_graph(2, [(0, 1)], [6, 0])
    problem = make_problem(graph, unit_cluster(4), np.full((2, 4), 4.0), "throughput")
    device, teams = np.array([0, 2]), ((0, 1), (2, 3))
    assert period_s(problem, device, teams) == 3.0
    # Beside three devices each of the three links from d3 carries one sample of three.
    assert period_s(problem, np.array([3, 0]), ((0, 1, 2),)) == 4.0


@pytest.mark.parametrize("teams", TEAMS)
def test_each_member_holds_what_a_plain_pipeline_holds_there(teams: Teams) -> None:
    for seed in range(20):
        problem = random_problem(
            seed, objective="throughput", num_devices=5, num_ops=16, runs=seed % 2 == 1, varied=True
        )
        device, host = served(problem, seed, teams), problem.cluster.host
        held = peak_bytes(problem, device, teams)
        for i in range(6):
            way = device.copy()
            for team in teams:
                moved = (device == team[0]) & ~problem.graph.is_io
                way[moved] = team[i % len(team)]
            assert (held >= pipeline_peaks(problem, way.tolist())).all()
        if not any(host in team for team in teams):
            ways = [
                np.where(
                    np.isin(device, [t[0] for t in teams]) & ~problem.graph.is_io,
                    [next((t[i % len(t)] for t in teams if t[0] == d), d) for d in device],
                    device,
                ).tolist()
                for i in range(6)
            ]  # fmt: skip
            own = [np.subtract(pipeline_peaks(problem, x), weight_bytes(problem, x)) for x in ways]
            assert held.tolist() == (np.max(own, axis=0) + weight_bytes(problem, *ways)).tolist()


def test_without_teams_the_score_is_the_plain_one() -> None:
    for seed in range(5):
        problem = random_problem(
            seed, objective="throughput", num_devices=3, runs=seed % 2 == 1, varied=True
        )
        device = random_devices(problem, seed)[0]
        plain = score(problem, device)
        assert period_s(problem, device, ()) == periods(problem, device[None])[0][0]
        assert peak_bytes(problem, device, ()).tolist() == plain.peak_bytes.tolist()


def test_who_may_replicate() -> None:
    graph = plain_graph(2, [(0, 1)])
    training = plain_graph(2, [(0, 1)], is_backward=[False, True])
    for objective, made, replicas, devices in itertools.product(
        ("throughput", "latency"), (graph, training), (True, False), (1, 2)
    ):
        problem = make_problem(
            made, unit_cluster(devices), np.ones((2, devices)), objective, replicas=replicas
        )
        wanted = objective == "throughput" and made is graph and replicas and devices == 2
        assert may_replicate(problem) == wanted


@pytest.mark.parametrize(
    ("teams", "message"),
    [
        (((0,),), "must be two devices or more"),
        (((1, 0),), "ascending"),
        (((0, 9),), "outside 0..2"),
        (((0, 1), (1, 2)), "device 1 is in two teams"),
        (((0, 2),), "member of a team that is not its first"),
    ],
)
def test_teams_that_cannot_serve_are_refused(teams: Teams, message: str) -> None:
    problem = make_problem(plain_graph(2, [(0, 1)]), unit_cluster(3), np.ones((2, 3)), "throughput")
    with pytest.raises(ValueError, match=message):
        replicated_score(problem, np.array([0, 2]), None, teams)


def test_other_objectives_know_no_teams() -> None:
    problem = make_problem(
        plain_graph(1, []), unit_cluster(), np.ones((1, 2)), "max_load", sent_s=np.ones(1)
    )
    with pytest.raises(ValueError, match="'max_load' knows no replicated stages"):
        score(problem, np.zeros(1, np.int64), None, ((0, 1),))
    latency = dataclasses.replace(problem, objective="latency", sent_s=None)
    assert score(latency, np.zeros(1, np.int64), None, ((0, 1),)).value_s == 1.0
