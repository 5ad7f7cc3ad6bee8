"""Cuts are acyclic, cover every op, never mix devices, and are as few as they can be."""

import numpy as np
import pytest

from gdp.cluster.types import Device, Link, make_cluster
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph, topological_order
from gdp.problem.problem import Problem, make_problem
from gdp.sim.segments import (
    latency_segments,
    segment_problem,
    segment_values,
    segments,
)


def random_graph(seed: int, num_ops: int) -> OpGraph:
    """A random graph with an input, an output and about two uses per op."""
    rng = np.random.default_rng(seed)
    uses = {(int(rng.integers(op)), op) for op in range(1, num_ops) for _ in range(2)}
    uses |= {(num_ops - 1, num_ops)}
    return make_graph(
        "random",
        [f"op{i}" for i in range(num_ops + 1)],
        [INPUT, *["X"] * (num_ops - 1), OUTPUT],
        [(op, int(rng.integers(1, 100))) for op in range(num_ops)],
        sorted(uses),
    )


def is_acyclic(graph: OpGraph, segment: np.ndarray) -> bool:
    src, dst = segment[graph.edges[0]], segment[graph.edges[1]]
    cross = src != dst
    count = int(segment.max()) + 1
    return len(topological_order(count, src[cross], dst[cross])) == count


def is_valid(graph: OpGraph, device: np.ndarray, segment: np.ndarray) -> bool:
    """Every id is used, on one device, in topological order, and io ops stand alone."""
    count = int(segment.max()) + 1
    src, dst = segment[graph.edges[0]], segment[graph.edges[1]]
    return (
        set(segment) == set(range(count))
        and all(len(set(device[segment == s])) == 1 for s in range(count))
        and bool((src <= dst).all())
        and all((segment == segment[op]).sum() == 1 for op in np.flatnonzero(graph.is_io))
    )


def fewest_by_enumeration(graph: OpGraph, device: np.ndarray) -> int:
    """The least number of segments that hold ops, by trying every partition. Bell(N) of them."""
    works = np.flatnonzero(~graph.is_io)
    best = len(works)
    for labels in partitions(len(works)):
        if max(labels) + 1 >= best:
            continue
        segment = np.empty(graph.num_ops, dtype=np.int64)
        segment[works] = labels
        segment[graph.is_io] = max(labels) + 1 + np.arange(graph.is_io.sum())
        one_device = all(len(set(device[segment == s])) == 1 for s in range(max(labels) + 1))
        if one_device and is_acyclic(graph, segment):
            best = max(labels) + 1
    return best


def partitions(n: int) -> list[list[int]]:
    """Every way to put n things in groups, as labels in order of first appearance."""
    if n == 1:
        return [[0]]
    return [[*head, x] for head in partitions(n - 1) for x in range(max(head) + 2)]


def two_cores(dispatch_s: float = 0.0, per: str = "segment", link_s: float = 0.0) -> tuple:
    speed = {"default": 1.0}
    cores = [
        Device(f"core{i}", "cpu-core", speed, 1e9, dispatch_s=dispatch_s, dispatch_per=per)
        for i in range(2)
    ]
    return tuple(cores), make_cluster("two", cores, [Link("core0", "core1", 1e12, link_s)])


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_any_placement_is_cut_into_an_acyclic_quotient(seed: int, num_devices: int) -> None:
    graph = random_graph(seed, 60)
    device = np.random.default_rng(seed).integers(num_devices, size=graph.num_ops)
    assert is_valid(graph, device, segments(graph, device))


@pytest.mark.parametrize("seed", range(12))
def test_two_devices_get_the_fewest_segments_of_all_partitions(seed: int) -> None:
    graph = random_graph(seed, 8)
    device = np.random.default_rng(seed + 100).integers(2, size=graph.num_ops)
    found = int(segments(graph, device).max()) + 1 - int(graph.is_io.sum())
    assert found == fewest_by_enumeration(graph, device)


@pytest.mark.parametrize("seed", range(6))
def test_three_devices_get_at_most_one_segment_too_many(seed: int) -> None:
    graph = random_graph(seed, 8)
    device = np.random.default_rng(seed + 200).integers(3, size=graph.num_ops)
    found = int(segments(graph, device).max()) + 1 - int(graph.is_io.sum())
    assert found <= fewest_by_enumeration(graph, device) + 1


def test_one_device_is_one_segment_and_blocks_are_one_each() -> None:
    graph = random_graph(1, 40)
    one = np.zeros(graph.num_ops, dtype=np.int64)
    assert segments(graph, one).tolist() == [0, *[1] * 39, 2]
    blocks = (np.arange(graph.num_ops) >= 20).astype(np.int64)
    assert segments(graph, blocks).tolist() == [0, *[1] * 19, *[2] * 20, 3]


def test_a_graph_of_inputs_and_outputs_alone_has_nothing_to_run() -> None:
    graph = make_graph("io", ["x", "y"], [INPUT, OUTPUT], [(0, 4)], [(0, 1)])
    assert segments(graph, np.zeros(2, dtype=np.int64)).tolist() == [0, 1]


def branches() -> tuple[OpGraph, np.ndarray]:
    """x -> trunk (1 s), then left (4 s) and right (4 s), then join (1 s) -> y; right elsewhere."""
    graph = make_graph(
        "branches",
        ["x", "trunk", "left", "right", "join", "y"],
        [INPUT, "X", "X", "X", "X", OUTPUT],
        [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)],
        flop=[0.0, 1.0, 4.0, 4.0, 1.0, 0.0],
    )
    return graph, np.array([0, 0, 0, 1, 0, 0])


def problem_of(graph: OpGraph, dispatch_s: float, per: str = "segment") -> Problem:
    _, cluster = two_cores(dispatch_s, per)
    return make_problem(graph, cluster, np.repeat(graph.flop[:, None], 2, axis=1))


def test_fewest_segments_join_the_trunk_with_a_branch() -> None:
    graph, device = branches()
    assert segments(graph, device).tolist() == [0, 1, 1, 2, 3, 4]


def test_a_segment_problem_pays_dispatch_once_per_segment_and_keeps_what_crosses() -> None:
    """Three segments of 5, 4 and 1 s: 5 + 0.5, 4 + 0.5, 1 + 0.5 one after the other."""
    graph, device = branches()
    problem = problem_of(graph, 0.5)
    segment = segments(graph, device)
    cut = segment_problem(problem, segment)
    assert cut.compute_s[:, 0].tolist() == [0.0, 5.0, 4.0, 1.0, 0.0]
    assert cut.graph.op_types == (INPUT, "Segment", "Segment", "Segment", OUTPUT)
    assert cut.graph.tensor_names == ("t0", "t1", "t2", "t3", "t4")
    assert [d.dispatch_per for d in cut.cluster.devices] == ["op", "op"]
    assert [d.dispatch_s for d in cut.cluster.devices] == [0.5, 0.5]


def test_a_device_that_dispatches_ops_pays_for_each_inside_the_segment() -> None:
    graph, device = branches()
    cut = segment_problem(problem_of(graph, 0.5, "op"), segments(graph, device))
    assert cut.compute_s[:, 0].tolist() == [0.0, 6.0, 4.5, 1.5, 0.0]
    assert [d.dispatch_s for d in cut.cluster.devices] == [0.0, 0.0]


def test_tied_weights_count_once_in_a_segment() -> None:
    graph = make_graph(
        "tied", ["a", "b", "c"], ["X"] * 3, [(0, 1), (1, 1)], [(0, 1), (1, 2)],
        weight_bytes=[10, 10, 10], weight_id=[7, 7, 7],
    )  # fmt: skip
    problem = problem_of(graph, 0.0)
    cut = segment_problem(problem, segments(graph, np.array([0, 0, 1])))
    assert cut.graph.weight_bytes.tolist() == [10, 10]


def test_segment_values_are_the_smallest_of_each_segment() -> None:
    assert segment_values(np.array([5, 3, 9]), np.array([0, 0, 1])).tolist() == [3, 9]


def test_latency_segments_let_the_other_core_start_after_the_trunk() -> None:
    """trunk 1, left and right 4 side by side, join 1: 6 s; had the trunk joined left, 10 s."""
    latency = pytest.importorskip("gdp.sim.latency")
    graph, device = branches()
    problem = problem_of(graph, 0.0)
    segment = latency_segments(problem, device)
    assert segment.tolist() == [0, 1, 2, 3, 4, 5]
    cut = segment_problem(problem, segment)
    assert latency.simulate(cut, segment_values(device, segment), None).latency_s == pytest.approx(
        6.0
    )


def test_latency_segments_do_not_cut_where_dispatch_costs_more_than_it_saves() -> None:
    """With 5 s per segment: four segments 6 + 3 * 5 = 21 s, three 10 + 3 * 5 = 25 s; one core
    takes 15 s, but the placement is given. With 5 s the parallel cut still wins."""
    graph, device = branches()
    pytest.importorskip("gdp.sim.latency")
    assert latency_segments(problem_of(graph, 5.0), device).max() == 5
    one = np.zeros(graph.num_ops, dtype=np.int64)
    assert latency_segments(problem_of(graph, 5.0), one).tolist() == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_latency_segments_are_valid_and_no_slower_than_the_fewest(seed: int) -> None:
    latency = pytest.importorskip("gdp.sim.latency")
    graph = random_graph(seed, 30)
    rng = np.random.default_rng(seed)
    device = rng.integers(2, size=graph.num_ops)
    device[graph.is_io] = 0
    _, cluster = two_cores(0.05, "segment", 0.01)
    compute_s = np.repeat(rng.uniform(0.1, 2.0, (graph.num_ops, 1)), 2, axis=1)
    compute_s[graph.is_io] = 0.0
    problem = make_problem(graph, cluster, compute_s)
    segment = latency_segments(problem, device)
    assert is_valid(graph, device, segment)
    latency_s = [
        latency.simulate(segment_problem(problem, s), segment_values(device, s), None).latency_s
        for s in (segment, segments(graph, device))
    ]
    assert latency_s[0] <= latency_s[1]


def turns_by_hand(graph: OpGraph, device: np.ndarray, first: int) -> tuple[list[int], int]:
    """The rule of `segments`: a device runs all that is ready, then the one whose ready ops are
    furthest from the exit, counted in changes of device."""
    src, dst = (ends.tolist() for ends in graph.edges)
    works = [op for op in range(graph.num_ops) if not graph.is_io[op]]
    pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a in works and b in works]
    hops = [0] * graph.num_ops
    for a, b in sorted(pairs, reverse=True):
        hops[a] = max(hops[a], hops[b] + int(device[a] != device[b]))
    turn, d, count = dict[int, int](), first, 0
    while len(turn) < len(works):
        waiting = [op for op in works if op not in turn]
        while run := [op for op in waiting if op not in turn and device[op] == d
                      and all(a in turn for a, b in pairs if b == op)]:  # fmt: skip
            turn |= dict.fromkeys(run, count)
        ready = [op for op in works
                 if op not in turn and all(a in turn for a, b in pairs if b == op)]  # fmt: skip
        count += 1
        if ready:
            d = min(ready, key=lambda op: (-hops[op], device[op]))
            d = int(device[d])
    return [turn.get(op, -1) for op in range(graph.num_ops)], count


@pytest.mark.parametrize("seed", range(12))
def test_devices_take_turns_by_the_rule(seed: int) -> None:
    graph = random_graph(seed, 24)
    device = np.random.default_rng(seed).integers(3, size=graph.num_ops)
    src, dst = graph.edges
    waits = np.bincount(dst, ~graph.is_io[src], graph.num_ops) > 0
    entries = np.flatnonzero(~graph.is_io & ~waits)
    ways = [turns_by_hand(graph, device, int(d)) for d in np.unique(device[entries])]
    turn, _ = min(ways, key=lambda way: way[1])
    works = ~graph.is_io
    found = segments(graph, device)[works]
    wanted = np.array(turn)[works]
    assert ((found[:, None] == found) == (wanted[:, None] == wanted)).all()
