"""Both objectives of Tarnawski et al. 2020, against hand-worked values and the definition."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from host_memory import load_problem
from tiny import plain_graph, unit_cluster

from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.methods.host_memory import load as host_load
from gdp.problem.problem import Problem, make_problem
from gdp.sim.memory import weights_held
from gdp.sim.score import score, values

KINDS = ("accelerator", "accelerator", "cpu")


def chain_problem(objective: str) -> Problem:
    """a -> b -> c -> d and a -> d; 1, 2, 3, 4 s on accelerators, ten times that on the CPU.

    Moving the outputs of a, b, c costs 1, 10 and 100 s.
    """
    graph = plain_graph(4, [(0, 1), (1, 2), (2, 3), (0, 3)], weight_bytes=[1, 2, 4, 8])
    devices = [Device(f"d{i}", kind, {"default": 1.0}, 1.0) for i, kind in enumerate(KINDS)]
    fast = np.arange(1.0, 5.0)
    return make_problem(
        graph,
        make_cluster("three", devices),
        np.stack([fast, fast, 10 * fast], axis=1),
        objective,
        sent_s=np.array([1.0, 10.0, 100.0, 1000.0]),
    )


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ([0, 0, 0, 0], [10.0, 0.0, 0.0]),
        # a, b leave d0 (a is read by d); b and a enter d1.
        ([0, 0, 1, 1], [1 + 2 + 10 + 1, 3 + 4 + 10 + 1, 0]),
        # a enters d1 once although two ops of d1 read it; c enters and b leaves it.
        ([0, 1, 0, 1], [1 + 3 + 1 + 10 + 100, 2 + 4 + 1 + 10 + 100, 0]),
        # The CPU pays for nothing, those who read from it or are read by it do.
        ([2, 0, 0, 2], [2 + 3 + 1 + 100, 0, 50]),
    ],
)
def test_loads_by_hand(device: list[int], wanted: list[float]) -> None:
    problem = chain_problem("max_load")
    np.testing.assert_allclose(host_load.loads(problem, np.array(device)), wanted)
    value_s, overflow = host_load.values(problem, np.array([device]))
    assert value_s[0] == max(wanted)
    assert overflow[0] == 0


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ([0, 0, 0, 0], 10.0),
        # a, b: 1 + 2, both stored: 11; then c, d load both (11), compute 7.
        ([0, 0, 1, 1], 14 + 11 + 7),
        # d0 holds a, c and d1 holds b, d: each is called twice.
        # a 1+1=2; b 2 + 1+2+10 = 15; c 15 + 10+3+100 = 128; d 128 + 1+100+4 = 233.
        ([0, 1, 0, 1], 233.0),
        # CPU ops run alone: a 10; b, c: 10 + 1 + 5 + 100 = 116; d 116 + 40.
        ([2, 0, 0, 2], 156.0),
    ],
)
def test_latencies_by_hand(device: list[int], wanted: float) -> None:
    problem = chain_problem("block_latency")
    assert host_load.block_values(problem, np.array([device]))[0][0] == wanted


def test_ranks_cut_a_block_in_two() -> None:
    """a | b, c, d on one accelerator: a stores (1+1), the rest loads a and computes: 2 + 1 + 9."""
    problem = chain_problem("block_latency")
    rank = np.array([0, 1, 1, 1])
    assert host_load.block_values(problem, np.zeros((1, 4), int), rank)[0][0] == 12.0
    assert host_load.blocks(problem, np.zeros(4, int), rank).tolist() == [0, 1, 1, 1]


def test_blocks_that_need_each_other_have_no_latency() -> None:
    """a -> d and b -> c with {a, c} and {b, d}: each block waits for the other."""
    graph = plain_graph(4, [(0, 3), (1, 2)])
    devices = [Device(f"d{i}", "accelerator", {"default": 1.0}, 1.0) for i in range(2)]
    problem = make_problem(
        graph, make_cluster("two", devices), np.ones((4, 2)), "block_latency",
        sent_s=np.zeros(4),
    )  # fmt: skip
    value_s, overflow = host_load.block_values(problem, np.array([[0, 1, 0, 1], [0, 1, 1, 0]]))
    assert value_s.tolist() == [np.inf, 2.0]
    assert overflow.tolist() == [0, 0]


def test_a_tied_weight_is_as_large_as_its_largest_reader_says() -> None:
    """One weight that o0 says has 9 bytes and o1 says has 4, on a device of 8."""
    graph = plain_graph(2, [(0, 1)], 1, weight_bytes=[9, 4])
    graph = replace(graph, weight_id=np.zeros(2, dtype=np.int64))
    cluster = unit_cluster(2, memory_bytes=8)
    problem = make_problem(graph, cluster, np.ones((2, 2)), "max_load", sent_s=np.ones(2))
    for values_of in (host_load.values, host_load.block_values):
        overflow = values_of(problem, np.array([[0, 0], [0, 1], [1, 0]]))[1]
        assert overflow.tolist() == [1, 1, 1]


def test_tied_weights_count_once_per_device() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = load_problem(rng, memory_bytes=4)
        graph = problem.graph
        device = rng.integers(problem.num_devices, size=problem.num_ops)
        wanted = 0
        for d, limit in enumerate(problem.cluster.memory_bytes):
            held: dict[int, int] = {}
            for op in np.flatnonzero(device == d):
                key = int(graph.weight_id[op])
                held[key] = max(held.get(key, 0), int(graph.weight_bytes[op]))
            wanted += max(0, sum(held.values()) - int(limit))
        for values_of in (host_load.values, host_load.block_values):
            assert values_of(problem, device[None])[1][0] == wanted


@pytest.mark.parametrize("training", [False, True])
def test_loads_equal_the_sum_over_cut_edges(training: bool) -> None:
    """Against the definition: tails of edges with exactly one end inside, each counted once."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        problem = load_problem(rng, num_ops=7, training=training)
        graph = problem.graph
        device = rng.integers(problem.num_devices, size=problem.num_ops)
        compute_s = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
        if np.isinf(problem.compute_s[np.arange(problem.num_ops), device]).any():
            continue
        wanted = []
        for d, entry in enumerate(problem.cluster.devices):
            load = compute_s[device == d, d].sum()
            if not entry.is_cpu:
                cut = {
                    int(t)
                    for t, op in zip(graph.use_tensor, graph.use_op, strict=True)
                    if (device[graph.producer[t]] == d) != (device[op] == d)
                }
                load += sum(problem.sent_s[t] for t in cut)
            wanted.append(load)
        np.testing.assert_allclose(host_load.loads(problem, device), wanted, rtol=1e-12)


def test_convex_parts_are_one_block_each() -> None:
    """Contiguous stages of accelerators stay whole, so that latency follows from the quotient."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        problem = load_problem(rng, num_ops=8, accelerators=3, cpus=0, objective="block_latency")
        graph = problem.graph
        device = np.sort(rng.integers(3, size=problem.num_ops))
        block = host_load.blocks(problem, device)
        assert len(np.unique(block)) == len(np.unique(device))
        quotient = nx.DiGraph()
        quotient.add_nodes_from(np.unique(block))
        src, dst = graph.edges
        quotient.add_edges_from(
            (block[a], block[b]) for a, b in zip(src, dst, strict=True) if block[a] != block[b]
        )
        finish: dict[int, float] = {}
        for b in nx.topological_sort(quotient):
            ops = set(np.flatnonzero(block == b))
            seconds = sum(problem.compute_s[op, device[op]] for op in ops)
            uses = list(zip(graph.use_tensor, graph.use_op, strict=True))
            into = {t for t, op in uses if op in ops and graph.producer[t] not in ops}
            out = {t for t, op in uses if op not in ops and graph.producer[t] in ops}
            seconds += sum(problem.sent_s[t] for t in into | out)
            finish[b] = seconds + max((finish[a] for a in quotient.predecessors(b)), default=0.0)
        value_s = host_load.block_values(problem, device[None])[0][0]
        assert value_s == pytest.approx(max(finish.values()), rel=1e-12)


def test_without_transfer_times_the_objective_is_refused() -> None:
    graph = plain_graph(1, [])
    devices = [Device("a", "accelerator", {"default": 1.0}, 1.0)]
    problem = make_problem(graph, make_cluster("one", devices), np.ones((1, 1)), "max_load")
    with pytest.raises(ValueError, match="max_load needs sent_s"):
        host_load.values(problem, np.zeros((1, 1), int))


def test_the_score_of_devices_that_meet_in_host_memory() -> None:
    """a, b on d0 and c, d on d1: loads 14 and 18 s, latency 32 s, weights of 3 and 12 bytes."""
    found = score(chain_problem("max_load"), np.array([0, 0, 1, 1]))
    assert (found.period_s, found.latency_s, found.overflow_bytes) == (18.0, 32.0, 0)
    assert found.peak_bytes.tolist() == [3, 12, 0]
    assert found.value_s == found.period_s == 18.0
    assert found.latency_s == 32.0
    cases: list[tuple[str, float]] = [("max_load", 18.0), ("block_latency", 32.0)]
    for objective, wanted in cases:
        value_s, overflow = values(chain_problem(objective), np.array([[0, 0, 1, 1]]))
        assert (value_s[0], overflow[0]) == (wanted, 0)


def test_held_bytes_are_those_of_the_kernel() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = load_problem(rng, 6, 2, 1, memory_bytes=4)
        device = rng.integers(3, size=problem.num_ops)
        over = weights_held(problem, device) - problem.cluster.memory_bytes
        overflow = host_load.values(problem, device[None])[1][0]
        assert np.maximum(over, 0).sum() == overflow


def test_transfers_to_the_host_take_the_slowest_link_of_an_accelerator() -> None:
    devices = [Device(n, k, {"default": 1.0}, 1.0) for n, k in zip("abc", KINDS, strict=True)]
    links = [Link("c", "a", 4.0, 0.5), Link("c", "b", 2.0), Link("a", "b", 1e-3)]
    graph = plain_graph(2, [(0, 1)], [8, 2])
    cluster = make_cluster("three", devices, links, host="c")
    assert host_load.host_transfer_s(graph, cluster).tolist() == [4.0, 1.0]


def test_every_kind_of_cpu_pays_for_no_transfer() -> None:
    """On two cores of a preset, whose kind is "cpu-core", a cut costs nothing: 3 and 7 s."""
    cluster = Cluster.load("2xcpu-core")
    assert [device.is_cpu for device in cluster.devices] == [True, True]
    graph = plain_graph(4, [(0, 1), (1, 2), (2, 3)], sizes=1000)
    assert host_load.host_transfer_s(graph, cluster).tolist() == [0.0] * 4
    compute_s = np.repeat(np.arange(1.0, 5.0)[:, None], 2, axis=1)
    problem = make_problem(graph, cluster, compute_s, "max_load", sent_s=np.ones(4))
    assert host_load.loads(problem, np.array([0, 0, 1, 1])).tolist() == [3.0, 7.0]
    mixed = Cluster.load("1xcpu-core+1xa100")
    assert [device.is_cpu for device in mixed.devices] == [True, False]
    assert (host_load.host_transfer_s(graph, mixed) > 0).all()
