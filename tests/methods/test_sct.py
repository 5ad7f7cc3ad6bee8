"""Favourite children and the schedule that waits for them, on graphs worked by hand."""

import numpy as np
import pytest
import scipy.optimize
from tiny import cpu, plain_graph, random_problem, unit_cluster

from gdp.cluster.types import Link, make_cluster
from gdp.methods.base import Search
from gdp.methods.heuristics import favourites
from gdp.methods.heuristics.etf_kernels import etf_plan
from gdp.methods.heuristics.favourites import NO_CHILD, favourite_children
from gdp.methods.heuristics.sct import sct
from gdp.methods.heuristics.sct_kernels import sct_plan
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score

SEARCH = Search(seconds=None)


def fork() -> Problem:
    """o0 (1 s) is read by o1 (5 s) and o2 (1 s), 3 s to send each.

    With o1 kept the end is max(1 + 5, 1 + 3 + 1) = 6 s, with o2 kept 1 + 3 + 5 = 9 s.
    """
    graph = plain_graph(3, [(0, 1), (0, 2)], [3, 3])
    compute_s = np.repeat([[1.0], [5.0], [1.0]], 2, axis=1)
    return make_problem(graph, unit_cluster(2), compute_s)


@pytest.mark.parametrize("most_edges", [3000, 0])
def test_of_two_readers_the_one_with_the_longer_way_is_kept(
    monkeypatch: pytest.MonkeyPatch, most_edges: int
) -> None:
    """By the linear program, and by the longest paths."""
    monkeypatch.setattr(favourites, "MOST_EDGES", most_edges)
    child, saved_s = favourite_children(fork())
    assert child.tolist() == [1, NO_CHILD, NO_CHILD]
    assert saved_s.tolist() == [3.0, 0.0, 0.0]


def test_of_two_makers_one_keeps_the_reader() -> None:
    """o0 ends at 4 s and o1 at 1 s, o2 reads both, 2 s each: o0 keeps it, to start at 4 s."""
    graph = plain_graph(3, [(0, 2), (1, 2)], [2, 2])
    compute_s = np.repeat([[4.0], [1.0], [1.0]], 2, axis=1)
    child, saved_s = favourite_children(make_problem(graph, unit_cluster(2), compute_s))
    assert child.tolist() == [2, NO_CHILD, NO_CHILD]
    assert saved_s.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("most_edges", [3000, 0])
def test_favourites_are_readers_of_one_op_each(
    monkeypatch: pytest.MonkeyPatch, most_edges: int
) -> None:
    monkeypatch.setattr(favourites, "MOST_EDGES", most_edges)
    found = 0
    for seed in range(30):
        problem = random_problem(seed)
        child, saved_s = favourite_children(problem)
        parents = np.flatnonzero(child != NO_CHILD)
        assert len(set(child[parents])) == len(parents)
        edges = set(zip(*(x.tolist() for x in problem.graph.edges), strict=True))
        assert {(int(i), int(child[i])) for i in parents} <= edges
        assert (saved_s[child == NO_CHILD] == 0).all()
        maker, reader = problem.group[parents], problem.group[child[parents]]
        assert (maker != reader).all()
        assert (problem.group_allowed[maker] & problem.group_allowed[reader]).any(axis=1).all()
        found += len(parents)
    assert found > 100


@pytest.mark.parametrize("most_edges", [3000, 0])
def test_what_shares_a_device_anyway_is_nobodys_favourite(
    monkeypatch: pytest.MonkeyPatch, most_edges: int
) -> None:
    """o0 (1 s) is read by o1 (5 s), which is bound to it, and by o2 (4 s), 10 s to send.

    Alone o1 would be kept, as 1 + 10 + 4 < 1 + 10 + 5. Bound, it leaves that place to o2.
    """
    monkeypatch.setattr(favourites, "MOST_EDGES", most_edges)
    graph = plain_graph(3, [(0, 1), (0, 2)], 10)
    compute_s = np.repeat([[1.0], [5.0], [4.0]], 2, axis=1)
    child, saved_s = favourite_children(make_problem(graph, unit_cluster(2), compute_s))
    assert child.tolist() == [1, NO_CHILD, NO_CHILD]
    together = np.array([0, 0, 1])
    problem = make_problem(graph, unit_cluster(2), compute_s, together=together)
    child, saved_s = favourite_children(problem)
    assert child.tolist() == [2, NO_CHILD, NO_CHILD]
    assert saved_s.tolist() == [10.0, 0.0, 0.0]


@pytest.mark.parametrize("most_edges", [3000, 0])
def test_nothing_is_sent_inside_a_group(monkeypatch: pytest.MonkeyPatch, most_edges: int) -> None:
    """o0 (1 s) is read by o1 (2 s) and o2 (4 s), 3 s to send; o3 (1 s), bound to o1, reads it.

    o2 is kept: 1 + 3 + 2 + 1 = 7 s, instead of 1 + 3 + 4 = 8 s. If o1 were sent in 9 s o1 would be.
    """
    monkeypatch.setattr(favourites, "MOST_EDGES", most_edges)
    graph = plain_graph(4, [(0, 1), (0, 2), (1, 3)], [3, 9, 1, 1])
    compute_s = np.repeat([[1.0], [2.0], [4.0], [1.0]], 2, axis=1)
    together = np.array([0, 1, 2, 1])
    problem = make_problem(graph, unit_cluster(2), compute_s, together=together)
    child, _ = favourite_children(problem)
    assert child.tolist() == [2, NO_CHILD, NO_CHILD, NO_CHILD]


@pytest.mark.parametrize("most_edges", [3000, 0])
def test_what_groups_keep_apart_is_sent(monkeypatch: pytest.MonkeyPatch, most_edges: int) -> None:
    """o0 (1 s) is read by o1 (5 s) and o2 (1 s), 3 s to send; o3 (1 s) reads o2, 9 s to send.

    o2 runs on d0 alone and o3 is bound to o4, which runs on d1 alone: that transfer takes place.
    So o2 is kept: 1 + 1 + 9 + 1 = 12 s, instead of 15 s.
    """
    monkeypatch.setattr(favourites, "MOST_EDGES", most_edges)
    graph = plain_graph(5, [(0, 1), (0, 2), (2, 3)], [3, 1, 9, 1, 1])
    compute_s = np.array([[1.0, 1.0], [5.0, 5.0], [1.0, np.inf], [1.0, 1.0], [np.inf, 1.0]])
    together = np.array([0, 1, 2, 3, 3])
    problem = make_problem(graph, unit_cluster(2), compute_s, together=together)
    child, _ = favourite_children(problem)
    assert child.tolist() == [2, NO_CHILD, NO_CHILD, NO_CHILD, NO_CHILD]


def test_longest_paths_decide_where_the_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = scipy.optimize.OptimizeResult(x=None, success=False, message="numerical trouble")
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *_, **__: failed)
    child, saved_s = favourite_children(fork())
    assert child.tolist() == [1, NO_CHILD, NO_CHILD]
    assert saved_s.tolist() == [3.0, 0.0, 0.0]


def waiting() -> Problem:
    """o2 (10 s) reads o0 (1 s, 3 s to send) and o1 (2 s, nothing to send); o3 (10 s) is alone.

    ETF starts o1 and o0 on two devices at 0, o3 after o0 at 1, and o2 after o1 at 1 + 3 = 4: 14 s.
    A device that waits for o0's favourite child runs o2 from 2 on, the other o3 from 2 on: 12 s.
    """
    graph = plain_graph(4, [(0, 2), (1, 2)], [3, 0])
    compute_s = np.repeat([[1.0], [2.0], [10.0], [10.0]], 2, axis=1)
    return make_problem(graph, unit_cluster(2), compute_s)


def test_a_device_waits_for_the_favourite_child() -> None:
    problem = waiting()
    a = arrays_of(problem)
    level_s = np.array([11.0, 12.0, 10.0, 10.0])
    child, saved_s = favourite_children(problem)
    assert child.tolist() == [2, NO_CHILD, NO_CHILD, NO_CHILD]
    assert etf_plan(a, level_s, True).finish_s.tolist() == [1.0, 2.0, 14.0, 11.0]
    plan = sct_plan(a, level_s, child, saved_s, True)
    assert plan.finish_s.tolist() == [1.0, 2.0, 12.0, 12.0]
    assert plan.device[0] == plan.device[2] != plan.device[1] == plan.device[3]
    # It waits no longer than that: for half a second o3 goes first, and nothing is left idle.
    hasty = sct_plan(a, level_s, child, saved_s / 6, True)
    assert hasty.finish_s.tolist() == [1.0, 2.0, 14.0, 11.0]
    answer = sct(problem, SEARCH)
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device, answer.assignment.rank).value_s == 12.0


def test_no_device_waits_for_what_runs_elsewhere() -> None:
    """o2 (2 s) reads o0 (1 s, on d0 alone) and o1 (2 s, on d1 alone); o3 (10 s) is alone.

    From d0 to d1 nothing takes time, so o2, the favourite child of o0, runs on d1 from 2 to 4 s:
    back to d0 takes 9 s. From then on d0, free since 1 s, need not wait until 1 + 5 = 6 s (half of
    10 s, the mean of both ways): o3 runs there, not on d1 after o2.
    """
    there = Link("d0", "d1", np.inf, one_way=True)
    back = Link("d1", "d0", 1.0, one_way=True)
    cluster = make_cluster("two", [cpu("d0"), cpu("d1")], [there, back], default_latency_s=0.0)
    compute_s = np.array([[1.0, np.inf], [np.inf, 2.0], [2.0, 2.0], [10.0, 10.0]])
    problem = make_problem(plain_graph(4, [(0, 2), (1, 2)], [10, 9, 1, 1]), cluster, compute_s)
    child, saved_s = favourite_children(problem)
    assert (child[0], saved_s[0]) == (2, 5.0)
    levels = np.array([100.0, 99.0, 50.0, 10.0])
    plan = sct_plan(arrays_of(problem), levels, child, saved_s, True)
    assert plan.device.tolist() == [0, 1, 1, 0]
    assert plan.finish_s.tolist() == [1.0, 2.0, 4.0, 11.0]


def test_no_device_waits_for_what_is_bound_elsewhere() -> None:
    """o2 (1 s) reads o0 (1 s, 3 s to send) and o1 (1 s, 9 s to send); o3 (10 s) is alone.

    o0 runs on d0 and o1, bound to o2, on d1, both from 0 on: o2 can no longer be on d0, which does
    not wait for it until 1 + 3 = 4 s. So o3 runs on d0, and o2 on d1 from 4 s on: 11 s. Otherwise
    o3 would take d1 at 1 s and o2 follow it: 12 s.
    """
    graph = plain_graph(4, [(0, 2), (1, 2)], [3, 9, 1, 1])
    compute_s = np.repeat([[1.0], [1.0], [1.0], [10.0]], 2, axis=1)
    together = np.array([0, 1, 1, 2])
    problem = make_problem(graph, unit_cluster(2), compute_s, together=together)
    child = np.array([2, NO_CHILD, NO_CHILD, NO_CHILD])
    saved_s = np.array([3.0, 0.0, 0.0, 0.0])
    levels = np.array([100.0, 99.0, 50.0, 10.0])
    plan = sct_plan(arrays_of(problem), levels, child, saved_s, True)
    assert plan.device.tolist() == [0, 1, 1, 0]
    assert plan.finish_s.tolist() == [1.0, 1.0, 5.0, 11.0]


def test_without_favourites_it_is_etf() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        a, none = arrays_of(problem), np.full(problem.num_ops, NO_CHILD)
        level_s = np.random.default_rng(seed).random(problem.num_ops)
        for queues in (False, True):
            plan = sct_plan(a, level_s, none, np.zeros(problem.num_ops), queues)
            wanted = etf_plan(a, level_s, queues)
            assert plan.device.tolist() == wanted.device.tolist()
            assert plan.start_s.tolist() == wanted.start_s.tolist()


def test_no_device_waits_for_what_it_may_not_run() -> None:
    """o1, the favourite child of o0, may run on d1 alone, where o2 runs first; o3 may on d0."""
    graph = plain_graph(4, [(0, 1)], [2])
    compute_s = np.array([[1.0, 1.0], [np.inf, 1.0], [np.inf, 5.0], [1.0, np.inf]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    child, saved_s = favourite_children(problem)
    assert child.tolist() == [1, NO_CHILD, NO_CHILD, NO_CHILD]
    plan = sct_plan(arrays_of(problem), np.array([2.0, 1.0, 5.0, 1.0]), child, saved_s, True)
    assert plan.device.tolist() == [0, 1, 1, 0]
    assert plan.finish_s.tolist() == [1.0, 6.0, 5.0, 2.0]


def test_a_favourite_that_does_not_fit_goes_elsewhere() -> None:
    """o0 and its reader o1 have 4 bytes each, devices 6: o1 cannot stay. o2 may run on d0 alone."""
    graph = plain_graph(3, [(0, 1)], [1], weight_bytes=[4, 4, 1])
    compute_s = np.array([[1.0, np.inf], [1.0, 1.0], [1.0, np.inf]])
    problem = make_problem(graph, unit_cluster(2, memory_bytes=6), compute_s)
    child, saved_s = favourite_children(problem)
    assert child.tolist() == [1, NO_CHILD, NO_CHILD]
    plan = sct_plan(arrays_of(problem), np.array([2.0, 1.0, 1.0]), child, saved_s, True)
    assert plan.device.tolist() == [0, 1, 0]
    assert plan.finish_s.tolist() == [1.0, 3.0, 2.0]
    answer = sct(problem, SEARCH)
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device, answer.assignment.rank).feasible
