"""Small problems on which `auto` was behind a simpler method, found by evolving random ones.

Each with its optimum by hand, which `auto` reaches with 1,000 evaluations.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from small_optimum import optimum
from tiny import all_devices, cpu, plain_graph

from gdp.cluster.types import Cluster, Link, make_cluster
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.method import exact
from gdp.methods.fix_and_optimise.latency import latency_fit
from gdp.methods.portfolio import auto
from gdp.methods.scoring import Evaluated
from gdp.methods.search.local_search import improve, local_search
from gdp.methods.search.replica_groups import grow_teams
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import in_ticks
from gdp.sim.score import score_of, values

SEARCH = Search(seed=0, seconds=None, evaluations=1000)


def linked(num_devices: int, *odd: Link) -> Cluster:
    """Devices whose links carry a byte a second, but for some."""
    devices = [cpu(f"d{i}") for i in range(num_devices)]
    return make_cluster("c", devices, odd, default_bytes_per_s=1.0, default_latency_s=0.0)


def far_apart() -> Problem:
    """o0 takes 1 s on d1 alone, o2 3 s on d0 and d2, and o1 sends o2 9 bytes: apart 9 s, together
    3.5 s. From o1 on d1 with o0, as it is fastest there, each single move is worse."""
    graph = plain_graph(3, [(0, 2), (1, 2)], [1, 9, 1])
    compute_s = np.array([[7.0, 1.0, 7.0], [0.5, 0.1, 0.5], [3.0, 2.0, 3.0]])
    allowed = np.ones((3, 3), dtype=bool)
    allowed[1, 0] = allowed[2, 1] = False
    cluster = linked(
        3, Link("d2", "d0", 0.3, one_way=True), Link("d1", "d2", 1.0, 1.0, one_way=True)
    )
    return make_problem(graph, cluster, compute_s, "throughput", allowed=allowed)


def unlike_links() -> Problem:
    """7 s of work on three devices that links tell apart, beside 0.1 s on the fourth: 7 / 3 s."""
    cluster = linked(
        4, Link("d0", "d1", 2.0, 0.5), Link("d1", "d2", 3.0), Link("d2", "d3", 2.0, 1.0)
    )
    compute_s = np.repeat([[7.0], [0.1]], 4, axis=1)
    allowed = np.ones((2, 4), dtype=bool)
    allowed[1, [0, 2]] = False
    graph = plain_graph(2, [])
    return make_problem(graph, cluster, compute_s, "throughput", allowed=allowed, replicas=True)


def unlike_devices() -> Problem:
    """7 s of work on any, and 1 s that takes 7 s on d1: o0 on d1 and d2 in turn is 3.5 s, while
    in the placement that grows from one device each, two devices are the busiest."""
    cluster = linked(3, Link("d2", "d1", 10.0, one_way=True))
    compute_s = np.array([[7.0, 7.0, 7.0], [1.0, 7.0, 1.0]])
    return make_problem(plain_graph(2, []), cluster, compute_s, "throughput", replicas=True)


def of_no_time() -> Problem:
    """Two ops that take no time where they fit, 5 bytes each on devices of 5 bytes."""
    graph = plain_graph(2, [(0, 1)], 0, weight_bytes=[5, 5])
    devices = [cpu(f"d{i}", memory_bytes=5) for i in range(2)]
    cluster = make_cluster("c", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    return make_problem(graph, cluster, np.zeros((2, 2)), "latency")


def one_large_tensor() -> Problem:
    """o0 sends 60 bytes to o1 and o4. All that reads it on d2 with it, and o2, o3 and o5 beside
    that on d1."""
    graph = plain_graph(7, [(0, 1), (0, 4), (1, 6), (2, 4), (2, 5), (5, 6)], [60, 1, 1, 1, 1, 1, 1])
    compute_s = np.array(
        [[6.9, 1.0, 0.1], [7.0, 1.0, 0.1], [2.0, 1.0, 2.0], [0.0, 1.0, 0.1], [3.1, 1.0, 3.1],
         [7.0, 1.0, 0.1], [1.0, 1.0, 0.1]]
    )  # fmt: skip
    allowed = np.ones((7, 3), dtype=bool)
    allowed[1, 0] = allowed[3, 2] = False
    cluster = linked(3, Link("d2", "d1", 10.0, one_way=True))
    return make_problem(graph, cluster, compute_s, "latency", allowed=allowed)


CASES: dict[str, tuple[Callable[[], Problem], float]] = {
    "far_apart": (far_apart, 3.5),
    "unlike_links": (unlike_links, 7 / 3),
    "unlike_devices": (unlike_devices, 3.5),
    "of_no_time": (of_no_time, 0.0),
}


def value_of(problem: Problem, answer: Answer) -> float:
    """In seconds; the placement fits."""
    assert answer.assignment is not None
    scored = score_of(problem, answer.assignment)
    assert scored.feasible
    return scored.value_s * problem.unit.seconds


@pytest.mark.parametrize("name", CASES)
def test_auto_reaches_the_optimum(name: str) -> None:
    make, best_s = CASES[name]
    problem = in_ticks(make())
    least = optimum(problem)
    assert least is not None
    assert least * problem.unit.seconds == pytest.approx(best_s, rel=1e-9)
    assert value_of(problem, auto(problem, SEARCH)) == pytest.approx(best_s, rel=1e-9)


def test_few_placements_are_all_tried_by_plain_search() -> None:
    """12 placements cost 12 evaluations beside the start's, and annealing nothing; 11 are too few
    to try all."""
    problem = in_ticks(far_apart())
    assert len(all_devices(problem)) == 12
    answer = local_search(problem, SEARCH)
    assert value_of(problem, answer) == pytest.approx(3.5)
    start = Assignment(np.array([2, 1, 0]))
    value_s, _ = values(problem, start.device[None])
    given = [Evaluated(start, 0, float(value_s[0]))]
    assert improve(problem, given, SEARCH, SEARCH.budget()).evaluations == 13
    few = replace(SEARCH, evaluations=11)
    assert improve(problem, given, few, few.budget()).evaluations == 11


def test_rounds_without_a_better_placement_are_followed_by_hotter_ones() -> None:
    """From o0 and o1 on d1, each move of fewer ops than all behind o0 sends 60 bytes more: rounds
    as cold as for large graphs stay at 5.1 s under all of these seeds."""
    problem, reached = in_ticks(one_large_tensor()), 0
    for seed in range(6):
        answer = local_search(problem, replace(SEARCH, seed=seed))
        reached += value_of(problem, answer) < 3.1 * (1 + 1e-9)
    assert reached >= 4


def test_teams_grow_over_devices_that_are_not_alike() -> None:
    """Each join takes the busiest device's period down: 7 s, 3.5 s, 7 / 3 s."""
    problem = in_ticks(unlike_links())
    device = np.array([0, 1])
    value_s, _ = values(problem, device[None])
    start = Evaluated(Assignment(device), 0, float(value_s[0]))
    end = grow_teams(problem, start, SEARCH.budget())
    assert end.assignment.teams == ((0, 2, 3),)
    assert end.value_s * problem.unit.seconds == pytest.approx(7 / 3)
    # d0 with each of three others, 0 and one with each of two, and the three with the last: but
    # those with d1, on whose op d0 and d2 are barred.
    assert end.evaluations == 3


def test_what_takes_no_time_is_optimal_and_divides_nothing() -> None:
    """Programs measure times in the value that they improve on."""
    problem = in_ticks(of_no_time())
    with np.errstate(all="raise"):
        answer = exact(problem, SEARCH)
        assert value_of(problem, answer) == 0.0
        assert answer.proven_optimal
        assert value_of(problem, latency_fit(problem, SEARCH)) == 0.0
