"""Caches that lie on another device than their ops: by hand, and as every kernel counts them."""

from dataclasses import replace

import numpy as np
import pytest
from reference_simulator import weight_bytes
from tiny import cpu, plain_graph, random_devices, random_problem

from gdp.base.clock import Clock
from gdp.cluster.types import make_cluster
from gdp.methods import repair as repair_module
from gdp.methods.annealing.annealer_kernels import make_loads, new_loads
from gdp.methods.base import Assignment
from gdp.methods.heuristics.list_schedule import heft_assignments
from gdp.methods.heuristics.list_schedule_kernels import heft_plan
from gdp.methods.repair import repair
from gdp.methods.scoring import proven_misfit, score_all
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.problem.symmetry import classes_of, links_alike
from gdp.sim.latency import simulate
from gdp.sim.memory import held_over_time, pipeline_peaks, weights_held
from gdp.sim.score import peak_bytes, score

pytestmark = pytest.mark.usefixtures("both_ways")


def three(objective: str = "latency", memory_bytes: int = 100, **fields) -> Problem:
    """Ops of 10, 20 and 40 bytes, of which 1, 2 and 4 are caches; d2 keeps its caches on d0."""
    devices = [cpu("d0"), cpu("d1"), cpu("d2", runs_on="d0")]
    devices = [replace(device, memory_bytes=memory_bytes) for device in devices]
    cluster = make_cluster("three", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    graph = plain_graph(3, [], 0, weight_bytes=[10, 20, 40], cache_bytes=[1, 2, 4], **fields)
    sent_s = np.zeros(3) if objective == "max_load" else None
    return make_problem(graph, cluster, np.ones((3, 3)), objective, sent_s=sent_s)


@pytest.mark.parametrize("objective", ["latency", "throughput", "max_load"])
def test_a_device_holds_its_weights_and_the_caches_that_lie_there(objective: str) -> None:
    problem = three(objective)
    for device, held in (
        ([0, 1, 2], [10 + 4, 20, 36]),
        ([2, 2, 2], [1 + 2 + 4, 0, 9 + 18 + 36]),
        ([0, 0, 0], [70, 0, 0]),
    ):
        assert score(problem, np.array(device)).peak_bytes.tolist() == held
    full = three(objective, 63)
    assert score(full, np.array([2, 2, 2])).overflow_bytes == 0
    assert score(full, np.array([0, 0, 0])).overflow_bytes == 7


def test_one_cache_of_two_ops_lies_once_where_both_keep_it() -> None:
    """o0 on d0 and o1 on d2 share weights of 10 bytes, of which 1 is a cache."""
    problem = three(weight_id=[5, 5, 6])
    graph = replace(
        problem.graph, weight_bytes=np.array([10, 10, 40]), cache_bytes=np.array([1, 1, 4])
    )
    problem = make_problem(graph, problem.cluster, problem.compute_s)
    assert weights_held(problem, np.array([0, 2, 1])).tolist() == [10, 40, 9]
    assert weights_held(problem, np.array([1, 2, 1])).tolist() == [1, 50, 9]


def test_a_home_that_the_cluster_lacks_is_the_device_itself() -> None:
    cluster = three().cluster
    assert cluster.runs_on.tolist() == [0, 1, 0]
    lost = make_cluster("lost", [cpu("d0"), cpu("d1", runs_on="gone")])
    assert lost.runs_on.tolist() == [0, 1]
    assert not lost.streams.any()


def test_teams_keep_the_caches_of_all_samples_on_one_device() -> None:
    """d1 and d2 serve o0 in turn, d3 and d4 o1. The caches of d2 (1 byte) and of d3 (2 bytes) lie
    on d0, though no sample is served by both."""
    homes = ["", "", "d0", "d0", ""]
    devices = [cpu(f"d{i}", runs_on=home) for i, home in enumerate(homes)]
    cluster = make_cluster("five", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    graph = plain_graph(2, [], 0, weight_bytes=[10, 20], cache_bytes=[1, 2])
    problem = make_problem(graph, cluster, np.ones((2, 5)), "throughput")
    held = peak_bytes(problem, np.array([1, 3]), ((1, 2), (3, 4)))
    assert held.tolist() == [1 + 2, 10, 9, 18, 20]


def varied(count: int, **fields) -> list[Problem]:
    """Random problems in which caches of some devices lie on others; ops of one weight agree on
    its size, which kernels and simulator take to be the largest of all and of those on a device."""
    found = []
    for seed in range(100):
        problem = random_problem(seed, num_ops=12, varied=True, **fields)
        graph = problem.graph
        _, first, of_op = np.unique(graph.weight_id, return_index=True, return_inverse=True)
        same = {"weight_bytes": graph.weight_bytes[first][of_op],
                "cache_bytes": graph.cache_bytes[first][of_op]}  # fmt: skip
        problem = replace(problem, graph=replace(graph, **same))
        if len(problem.held_on) > 1:
            found.append(problem)
        if len(found) == count:
            break
    assert len(found) == count
    return found


def placed(problem: Problem, seed: int) -> np.ndarray:
    """A random device for every group."""
    chance = np.random.default_rng(seed).random(problem.group_allowed.shape)
    return np.where(problem.group_allowed, chance, -1.0).argmax(axis=1)[problem.group]


def test_the_curve_over_time_begins_with_weights_and_caches_and_ends_at_the_peak() -> None:
    for problem in varied(10):
        device = random_devices(problem, 0)[0]
        run = simulate(problem, device)
        curves = held_over_time(problem, run, device)
        assert [curve.held_bytes.max() for curve in curves] == run.peak_bytes.tolist()
        held = weight_bytes(problem, device.tolist())
        assert weights_held(problem, device).tolist() == held
        assert (run.peak_bytes >= held).all()


def test_an_annealer_counts_no_less_than_the_simulator() -> None:
    """And of weights and caches as much: without tensors the two agree."""
    for seed, problem in enumerate(varied(10, objective="throughput")):
        a, device = arrays_of(problem), placed(problem, seed)
        loads = new_loads(a)
        make_loads(a, loads, device.astype(np.int32))
        assert (loads.room_bytes >= pipeline_peaks(problem, device)).all()
        bare = a._replace(held_bytes=np.zeros_like(a.held_bytes))
        make_loads(bare, loads, device.astype(np.int32))
        assert loads.room_bytes.tolist() == weight_bytes(problem, device.tolist())


def test_a_list_schedule_counts_the_weights_and_caches_of_its_placement() -> None:
    for problem in varied(10):
        plan = heft_plan(arrays_of(problem), np.arange(problem.num_ops), True, True)
        assert plan.weight_bytes.tolist() == weight_bytes(problem, plan.device.tolist())


def tight(memory_bytes: int, second_bytes: int = 8) -> Problem:
    """Six ops of 4 bytes, 2 of them caches, on a fast device or on another, of which the first
    keeps all caches: k ops take 12 + 2 k bytes there, the others 2 each on the second."""
    devices = [
        cpu("d0", memory_bytes=memory_bytes),
        cpu("d1", runs_on="d0", memory_bytes=second_bytes),
    ]
    cluster = make_cluster("tight", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    graph = plain_graph(6, [], 0, weight_bytes=[4] * 6, cache_bytes=[2] * 6)
    return make_problem(graph, cluster, np.array([[1.0, 9.0]] * 6))


def test_plans_in_lowered_limits_leave_room_for_caches_of_other_devices() -> None:
    *_, last = heft_assignments(tight(18))
    assert score(tight(18), last.device, last.rank).peak_bytes.tolist() == [18, 6]


def test_weights_are_shed_and_packed_where_their_caches_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of six ops on d0, 24 bytes of 18, three leave 2 each. From nothing, packing ends as well."""
    monkeypatch.setattr(repair_module, "anneal_to_fit", None)
    problem, start = tight(18), Assignment(np.zeros(6, dtype=np.int64))
    assert score_all(problem, [start])[0].overflow_bytes == 6
    shed = repair(problem, score_all(problem, [start])[0], Clock(None), 0)
    assert shed.overflow_bytes == 0
    assert shed.assignment.device.sum() == 3
    monkeypatch.setattr(repair_module, "_shedding", lambda *_: iter(()))
    assert repair(problem, score_all(problem, [start])[0], Clock(None), 0).overflow_bytes == 0


def test_caches_alone_are_proven_not_to_fit() -> None:
    """12 bytes of caches on d0, 12 of weights on both devices."""
    assert proven_misfit(tight(16)) is None
    assert "caches need 12 B, d0 holds 11 B" in (proven_misfit(tight(11, 100)) or "")
    assert "weights need 12 B and caches 12 B" in (proven_misfit(tight(15)) or "")


def test_devices_that_keep_caches_differ_from_those_that_do_not() -> None:
    """Of four equal devices d1 and d2 keep theirs on d0: these two alone may be exchanged."""
    devices = [cpu("d0"), cpu("d1", runs_on="d0"), cpu("d2", runs_on="d0"), cpu("d3")]
    cluster = make_cluster("four", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    graph = plain_graph(1, [], weight_bytes=[2], cache_bytes=[1])
    problem = make_problem(graph, cluster, np.ones((1, 4)))
    assert classes_of(links_alike(problem)) == [[0], [1, 2], [3]]
