"""HEFT and ETF equal schedules worked by hand; METIS cuts where contiguous blocks cannot."""

from typing import NamedTuple

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster

from gdp.graph.op_graph import make_graph
from gdp.methods.base import Search
from gdp.methods.heuristics.blocks import block_inputs
from gdp.methods.heuristics.list_schedule import etf, heft
from gdp.methods.heuristics.list_schedule_kernels import etf_plan, heft_plan
from gdp.methods.priorities import upward_rank
from gdp.methods.table import METHODS
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score, values

SEARCH = Search(seconds=None)


def published() -> Problem:
    """Figure 3 of Topcuoglu et al. 2002: ten tasks, three processors, one message per edge."""
    compute_s = [
        [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
        [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
    ]  # fmt: skip
    messages = {
        (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16,
        (3, 7): 23, (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11,
        (9, 10): 13,
    }  # fmt: skip
    graph = make_graph(
        "published",
        [f"n{i}" for i in range(1, 11)],
        ["Task"] * 10,
        [(a - 1, size) for (a, _), size in messages.items()],
        [(t, b - 1) for t, (_, b) in enumerate(messages)],
    )
    return make_problem(graph, unit_cluster(3), np.array(compute_s, dtype=float))


def test_heft_has_the_published_ranks() -> None:
    """The order of Table 3 of the paper."""
    assert upward_rank(published()).tolist() == [0, 3, 2, 1, 4, 5, 7, 8, 6, 9]


def test_heft_makes_the_published_schedule_of_length_80() -> None:
    problem = published()
    plan = heft_plan(arrays_of(problem), np.argsort(upward_rank(problem)), True, False)
    assert plan.finish_s.max() == 80.0
    assert (plan.device + 1).tolist() == [3, 1, 3, 2, 3, 2, 3, 1, 2, 2]
    assert plan.start_s.tolist() == [0, 27, 9, 18, 28, 26, 38, 57, 56, 73]


def test_only_insertion_uses_the_gap_before_a_late_op() -> None:
    """a (1 s, fast on d0) -> b (9 s, only d1), 5 s to send; c (2 s, only d1) comes last by rank.

    d1 waits from 0 to 6 s for a's tensor: insertion runs c there at 0 s, append after b at 15 s.
    """
    graph = plain_graph(3, [(0, 1)], 5)
    compute_s = np.array([[1.0, np.inf], [np.inf, 9.0], [np.inf, 2.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    order = np.argsort(upward_rank(problem))
    assert order.tolist() == [0, 1, 2]
    starts = [
        heft_plan(arrays_of(problem), order, insertion, False).start_s.tolist()
        for insertion in (True, False)
    ]
    assert starts == [[0.0, 6.0, 0.0], [0.0, 6.0, 15.0]]


def test_gaps_are_cut_and_used_up_in_order_of_time() -> None:
    """As above with c, d of 2 s and e of 3 s: c and d fill 4 of the 6 s, e does not fit."""
    graph = plain_graph(5, [(0, 1)], 5)
    compute_s = np.array([[1.0, np.inf]] + [[np.inf, s] for s in (9.0, 2.0, 2.0, 3.0)])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    plan = heft_plan(arrays_of(problem), np.arange(5), True, False)
    assert plan.start_s.tolist() == [0.0, 6.0, 0.0, 2.0, 15.0]


def test_a_queueing_link_delays_the_second_message_in_the_plan() -> None:
    """Two messages of 3 s over one link: free links have both there at 4 s, a queue at 4 and 7."""
    graph = plain_graph(4, [(0, 2), (1, 3)], 3)
    compute_s = np.array([[0.5, np.inf], [0.5, np.inf], [np.inf, 1.0], [np.inf, 1.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    a = arrays_of(problem)
    ends = [heft_plan(a, np.arange(4), False, queues).start_s[2:] for queues in (False, True)]
    assert [end.tolist() for end in ends] == [[3.5, 4.5], [3.5, 6.5]]


def test_heft_passes_over_a_device_without_room() -> None:
    """d0 is faster, and holds two of the three weights."""
    graph = plain_graph(3, [], 0, weight_bytes=[4, 4, 4])
    problem = make_problem(
        graph, unit_cluster(2, memory_bytes=8), np.repeat([[1.0, 9.0]], 3, axis=0)
    )
    plan = heft_plan(arrays_of(problem), np.arange(3), True, False)
    assert plan.device.tolist() == [0, 0, 1]


def test_etf_equals_a_schedule_worked_by_hand() -> None:
    """Hwang et al. 1989: the earliest start first, ties by the longest way to the end.

    a 2 s, b 3 s, c 2 s (reads a), d 4 s (reads a and b), e 1 s (reads c and d); 1 s to send. Ways
    to the end: 7, 8, 3, 5, 1. b and a both start at 0 s, b first, on d0; a on d1. Then c can start
    at 2 s on d1 (3 s on d0), d at 3 s on d0 (4 s on d1), and e at 7 s on d0 (8 s on d1).
    """
    graph = plain_graph(5, [(0, 2), (0, 3), (1, 3), (2, 4), (3, 4)])
    compute_s = np.repeat([[2.0], [3.0], [2.0], [4.0], [1.0]], 2, axis=1)
    problem = make_problem(graph, unit_cluster(2), compute_s)
    plan = etf_plan(arrays_of(problem), levels(problem), False)
    assert plan.start_s.tolist() == [0.0, 0.0, 2.0, 3.0, 7.0]
    assert plan.device.tolist() == [1, 0, 1, 0, 0]
    answer = etf(problem, SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == plan.device.tolist()
    assert score(problem, answer.assignment.device, answer.assignment.rank).latency_s == 8.0


def test_etf_starts_early_where_heft_finishes_early() -> None:
    """Two ops without edges, 1 s on d0 and 10 s on d1: 10 s by earliest start, 2 s by finish."""
    problem = make_problem(plain_graph(2, []), unit_cluster(2), np.array([[1.0, 10.0]] * 2))
    lengths = []
    for method in (etf, heft):
        answer = method(problem, SEARCH)
        assert answer.assignment is not None
        lengths.append(score(problem, answer.assignment.device).latency_s)
    assert lengths == [10.0, 2.0]


def levels(problem: Problem) -> np.ndarray:
    """Mean compute seconds on the longest way to the end."""
    found = problem.compute_s.mean(axis=1)
    src, dst = problem.graph.edges
    for op in reversed(range(problem.num_ops)):  # in topological order
        found[op] += found[dst[src == op]].max(initial=0.0)
    return found


class Naive(NamedTuple):
    """A schedule by scanning every ready op and device at every step."""

    device: list[int]
    start_s: list[float]


def naive_etf(problem: Problem) -> Naive:
    """Hwang's rule as stated, with free links, for tensors of 1 s and one tensor per op."""
    n, d = problem.compute_s.shape
    level_s = levels(problem)
    src, dst = problem.graph.edges
    device, start_s, finish_s, free_s = [-1] * n, [0.0] * n, [0.0] * n, [0.0] * d
    for _ in range(n):
        pairs = []
        for op in range(n):
            makers = src[dst == op].tolist()
            if device[op] >= 0 or any(device[m] < 0 for m in makers):
                continue
            for e in range(d):
                ready = [finish_s[m] + (1.0 if device[m] != e else 0.0) for m in makers]
                pairs.append((max([free_s[e], *ready]), -level_s[op], e, op))
        start, _, e, op = min(pairs)
        device[op], start_s[op] = e, start
        finish_s[op] = free_s[e] = start + float(problem.compute_s[op, e])
    return Naive(device, start_s)


@pytest.mark.parametrize("seed", range(10))
def test_the_heaps_of_etf_take_what_a_scan_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 20
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < 0.12]
    compute_s = rng.uniform(0.5, 3.0, (n, 3))
    problem = make_problem(plain_graph(n, edges), unit_cluster(3), compute_s)
    wanted = naive_etf(problem)
    plan = etf_plan(arrays_of(problem), levels(problem), False)
    assert plan.device.tolist() == wanted.device
    np.testing.assert_allclose(plan.start_s, wanted.start_s, rtol=1e-12)


def cut_bytes(problem: Problem, device: np.ndarray) -> int:
    """Bytes of the tensors that leave their device."""
    graph = problem.graph
    src, dst = graph.edges
    crossing = np.unique(graph.use_tensor[device[src] != device[dst]])
    return int(graph.tensor_bytes[crossing].sum())


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_metis_finds_the_two_halves_that_blocks_cut_through(objective: str) -> None:
    """Two interleaved chains of 1 s ops with one thin edge between them: metis cuts that alone."""
    n = 24
    edges = [(i, i + 2) for i in range(n - 2)]
    tensors = [(i, 9) for i in range(n)] + [(0, 1)]
    uses = [*edges, (n, n - 1)]
    graph = make_graph("ladder", [f"o{i}" for i in range(n)], ["Op"] * n, tensors, uses)
    problem = make_problem(graph, unit_cluster(2), np.ones((n, 2)), objective)
    found = {}
    for method in ("metis", "blocks"):
        answer = METHODS[method](problem, SEARCH)
        assert answer.assignment is not None
        found[method] = answer.assignment
    assert cut_bytes(problem, found["metis"].device) == 1
    assert sorted(np.bincount(found["metis"].device).tolist()) == [12, 12]
    value_s = {m: values(problem, x.device[None], x.rank)[0][0] for m, x in found.items()}
    assert value_s["metis"] <= 13.0
    assert value_s["blocks"] > value_s["metis"]


def test_metis_cuts_few_bytes_rather_than_few_edges() -> None:
    """Two chains of 100-byte tensors; 1 byte of each op of the first goes to all of the second.

    Between the chains 16 uses of 4 bytes are cut; across both, 10 uses, of which 2 of 100 bytes.
    """
    tensors = [(i, 100) for i in range(8)] + [(i, 1) for i in range(4)]
    uses = [(i, i + 1) for i in (0, 1, 2, 4, 5, 6)]
    uses += [(8 + i, j) for i in range(4) for j in range(4, 8)]
    graph = make_graph("two", [f"o{i}" for i in range(8)], ["Op"] * 8, tensors, uses)
    problem = make_problem(graph, unit_cluster(2), np.ones((8, 2)), "throughput")
    answer = METHODS["metis"](problem, SEARCH)
    assert answer.assignment is not None
    assert cut_bytes(problem, answer.assignment.device) == 4


def test_metis_gives_each_device_its_share_of_the_work() -> None:
    """d0 is three times as fast: 18 of 24 equal ops without edges."""
    problem = make_problem(
        plain_graph(24, []), unit_cluster(2), np.array([[1.0, 3.0]] * 24), "throughput"
    )
    answer = METHODS["metis"](problem, SEARCH)
    assert answer.assignment is not None
    assert np.bincount(answer.assignment.device).tolist() == [18, 6]


def test_blocks_split_a_chain_where_its_largest_stage_is_least() -> None:
    """1, 1, 1, 5, 1, 1 s: 1 + 1 + 1 | 5 | 1 + 1 on three devices, 5 s; nothing is below 5 s."""
    compute_s = np.repeat(np.array([[1.0], [1.0], [1.0], [5.0], [1.0], [1.0]]), 3, axis=1)
    problem = make_problem(
        plain_graph(6, [(i, i + 1) for i in range(5)]), unit_cluster(3), compute_s, "throughput"
    )
    answer = METHODS["blocks"](problem, SEARCH)
    assert answer.assignment is not None
    assert values(problem, answer.assignment.device[None])[0][0] == 5.0
    changes = np.flatnonzero(np.diff(answer.assignment.device)).tolist()
    assert changes == [2, 3]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_block_receives_what_is_made_outside_and_read_inside(seed: int, in_order: bool) -> None:
    """By the definition, of every block; also where an op is before the maker of what it reads."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed)
    a, graph = arrays_of(problem), problem.graph
    work = np.flatnonzero(~graph.is_io[a.group_op[a.group_start[:-1]]])
    sequence = work if in_order else rng.permutation(work)[:-1]
    cuts = np.unique([0, len(sequence), *rng.integers(0, len(sequence), 5)])
    place = np.full(problem.num_groups, -1)
    place[sequence] = np.arange(len(sequence))
    place = place[problem.group]
    found = block_inputs(problem, sequence, cuts)
    uses = list(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True))
    for x, y in zip(*np.triu_indices(len(cuts), 1), strict=True):
        inside = (place >= cuts[x]) & (place < cuts[y])
        received = {t for t, op in uses if inside[op] and not inside[graph.producer[t]]}
        opens = set(np.flatnonzero(inside & (np.bincount(graph.use_op, minlength=24) == 0)))
        for t, op in uses:
            maker = graph.producer[t]
            first = place[maker] < cuts[x] or place[maker] > place[op]
            opens |= {op} if inside[op] and (first or a.is_input[maker]) else set()
        sent = sum(int(a.sent_bytes[t]) for t in received)
        assert found[:, x, y].tolist() == [len(received), sent, len(opens)]


def test_round_robin_deals_out_in_turn_and_passes_over_what_is_full() -> None:
    graph = plain_graph(6, [], 0, weight_bytes=[4] * 6)
    problem = make_problem(graph, unit_cluster(3), np.ones((6, 3)))
    answer = METHODS["round_robin"](problem, SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == [0, 1, 2, 0, 1, 2]
    graph = plain_graph(5, [], 0, weight_bytes=[8, 4, 4, 4, 4])
    problem = make_problem(graph, unit_cluster(3, memory_bytes=8), np.ones((5, 3)))
    answer = METHODS["round_robin"](problem, SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == [0, 1, 2, 1, 2]
    assert answer.reason == "", "nothing had to be repaired"


def test_single_takes_the_fastest_device_that_holds_the_model() -> None:
    """3 s on d2, which is too small, 6 s on d1, 9 s on d0."""
    from dataclasses import replace

    cluster = unit_cluster(3)
    small = replace(cluster.devices[2], memory_bytes=5)
    cluster = replace(cluster, devices=(*cluster.devices[:2], small))
    graph = plain_graph(3, [], 0, weight_bytes=[2, 2, 2])
    problem = make_problem(graph, cluster, np.array([[3.0, 2.0, 1.0]] * 3))
    answer = METHODS["single"](problem, SEARCH)
    assert answer.assignment is not None
    assert answer.assignment.device.tolist() == [1, 1, 1]
