"""Repair turns a placement that overflows memory into one that fits, and says so."""

import numpy as np
import pytest
from tiny import cpu, plain_graph, unit_cluster

from gdp.base.clock import Clock
from gdp.cluster.types import make_cluster
from gdp.methods import repair as repair_module
from gdp.methods.base import Assignment, Search
from gdp.methods.priorities import depth_first_rank
from gdp.methods.repair import repair, repair_and_select
from gdp.methods.scoring import (
    Evaluated,
    best_of,
    missing_text,
    nearest_allowed,
    proven_misfit,
    score_all,
)
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score

FOREVER = Clock(None)


def start_of(problem: Problem, device: list[int], rank: list[int] | None = None) -> Evaluated:
    """A placement as the simulator scores it."""
    order = None if rank is None else np.array(rank)
    return score_all(problem, [Assignment(np.array(device), order)])[0]


def fits(problem: Problem, found: Evaluated) -> bool:
    """Whether the placement really fits and keeps the constraints."""
    device, rank = found.assignment.device, found.assignment.rank
    judged = score(problem, device, rank)
    whole = all(len(set(device[problem.group == g])) == 1 for g in problem.group)
    allowed = problem.allowed[np.arange(problem.num_ops), device].all()
    return bool(judged.feasible and allowed and whole and found.overflow_bytes == 0)


def branches() -> Problem:
    """Two branches of a 6-byte tensor that is read down to 1 byte; the device holds 9.

    Depth first keeps 6 + 1 bytes; breadth first would keep both tensors of 6.
    """
    graph = plain_graph(5, [(0, 2), (1, 3), (2, 4), (3, 4)], [6, 6, 1, 1, 1])
    return make_problem(graph, unit_cluster(1, memory_bytes=9), np.ones((5, 1)))


def test_another_order_repairs_what_breadth_first_overfills() -> None:
    """The only placement there is: nothing but priorities can mend it."""
    problem = branches()
    begun = start_of(problem, [0] * 5, [0, 1, 2, 3, 4])
    assert begun.overflow_bytes == 12 + 1 - 9
    found = repair(problem, begun, FOREVER, 0)
    assert fits(problem, found)
    assert found.evaluations > begun.evaluations


def test_a_fast_placement_that_fits_in_another_order_beats_a_slow_one_that_fits() -> None:
    """All on the fast device fits, but longest way first: not in the order that it comes with."""
    cluster = make_cluster(
        "two",
        [cpu("fast", memory_bytes=9), cpu("slow")],
        default_bytes_per_s=1.0,
        default_latency_s=0.0,
    )
    problem = make_problem(
        branches().graph, cluster, np.outer([1.0, 1.0, 5.0, 1.0, 1.0], [1.0, 10.0])
    )
    fast = Assignment(np.zeros(5, dtype=np.int64), np.arange(5))
    slow = Assignment(np.ones(5, dtype=np.int64))
    assert score_all(problem, [fast])[0].overflow_bytes > 0
    answer = repair_and_select(problem, Search(seconds=None), [slow, fast], "test")
    assert answer.assignment is not None
    assert not answer.assignment.device.any()
    assert score(problem, answer.assignment.device, answer.assignment.rank).value_s == 9.0
    assert answer.evaluations > 2


def test_a_depth_first_order_finishes_a_branch_before_the_next() -> None:
    assert depth_first_rank(branches()).tolist() == [0, 2, 1, 3, 4]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_shedding_moves_no_more_than_has_to_go(objective: str) -> None:
    """Twelve weights of 4 bytes, ten of them on the first of two devices of 24."""
    graph = plain_graph(12, [], 0, weight_bytes=[4] * 12)
    problem = make_problem(graph, unit_cluster(2, memory_bytes=24), np.ones((12, 2)), objective)
    begun = start_of(problem, [0] * 10 + [1] * 2)
    found = repair(problem, begun, FOREVER, 0)
    assert fits(problem, found)
    assert int((found.assignment.device != begun.assignment.device).sum()) == 4
    assert found.evaluations < 40


def test_what_is_shed_goes_where_it_is_read() -> None:
    """o5 has to leave d0, and what it exchanges is on d2, not on the emptier d1."""
    graph = plain_graph(6, [(4, 5)], [0, 0, 0, 0, 2, 0], weight_bytes=[4, 4, 4, 0, 1, 4])
    allowed = np.ones((6, 3), dtype=bool)
    allowed[:4, 1:] = allowed[4, :2] = False
    problem = make_problem(
        graph, unit_cluster(3, memory_bytes=12), np.ones((6, 3)), allowed=allowed
    )
    begun = start_of(problem, [0, 0, 0, 0, 2, 0])
    assert begun.overflow_bytes > 0
    found = repair(problem, begun, FOREVER, 0)
    assert fits(problem, found)
    assert found.assignment.device.tolist() == [0, 0, 0, 0, 2, 2]


def even(objective: str = "latency") -> Problem:
    """Weights of 6, 6, 4, 4, 2, 2 bytes on two devices of 12: one of each on either."""
    graph = plain_graph(6, [], 0, weight_bytes=[6, 6, 4, 4, 2, 2])
    return make_problem(graph, unit_cluster(2, memory_bytes=12), np.ones((6, 2)), objective)


def lumpy(objective: str = "latency") -> Problem:
    """Weights of 7, 5, 4, 4, 4 bytes on two devices of 12: only as 7 + 5 and 4 + 4 + 4."""
    graph = plain_graph(5, [], 0, weight_bytes=[7, 5, 4, 4, 4])
    return make_problem(graph, unit_cluster(2, memory_bytes=12), np.ones((5, 2)), objective)


def without_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the stages before annealing do not suffice."""

    def never(*_: object) -> Evaluated:
        raise AssertionError("an earlier stage fits")

    monkeypatch.setattr(repair_module, "anneal_to_fit", never)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_packing_starts_anew_where_nothing_can_be_shed(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 + 4 + 4 | 6 + 2 + 2: what lies on the full device is larger than what is left."""
    without_annealing(monkeypatch)
    problem = even(objective)
    found = repair(problem, start_of(problem, [0, 1, 0, 0, 1, 1]), FOREVER, 0)
    assert fits(problem, found)


def test_priorities_are_tried_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_annealing(monkeypatch)
    problem = branches()
    assert fits(problem, repair(problem, start_of(problem, [0] * 5), FOREVER, 0))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_annealing_fills_devices_to_the_last_byte(objective: str) -> None:
    """No greedy order leads to 7 + 5 and 4 + 4 + 4; what annealing spends counts."""
    problem = lumpy(objective)
    begun = start_of(problem, [0, 1, 0, 1, 0])
    found = repair(problem, begun, FOREVER, 0)
    assert fits(problem, found)
    assert sorted(np.bincount(found.assignment.device, [7, 5, 4, 4, 4]).tolist()) == [12, 12]
    assert found.evaluations > begun.evaluations + 10


@pytest.mark.parametrize("seed", range(6))
def test_random_misfits_are_mended_where_there_is_room(seed: int) -> None:
    """Chains with weights, groups and barred devices; half as much room again as weights."""
    rng = np.random.default_rng(seed)
    n = 30
    weights = rng.integers(0, 20, n)
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)], 1, weight_bytes=weights)
    memory = int(weights.sum() * 1.5) // 3 + 10
    allowed = rng.random((n, 3)) < 0.9
    allowed[~allowed.any(axis=1)] = True
    together = np.arange(n)
    together[1::7] = together[0]
    allowed[together == together[0]] = True
    problem = make_problem(
        graph,
        unit_cluster(3, memory_bytes=memory),
        np.ones((n, 3)),
        allowed=allowed,
        together=together,
    )
    wanted = nearest_allowed(problem, np.zeros(problem.num_groups, dtype=np.int64))
    begun = start_of(problem, wanted[problem.group].tolist())
    assert begun.overflow_bytes > 0
    found = repair(problem, begun, FOREVER, seed)
    assert fits(problem, found)
    again = repair(problem, begun, FOREVER, seed)
    assert (again.assignment.device == found.assignment.device).all()


def test_settling_says_that_a_placement_was_repaired() -> None:
    problem = lumpy()
    wrong = Assignment(np.zeros(5, dtype=np.int64))
    answer = repair_and_select(problem, Search(seconds=None), [wrong], "blocks")
    assert answer.assignment is not None
    assert answer.reason == "blocks overflowed device memory; its placement was repaired"
    right = Assignment(np.array([0, 0, 1, 1, 1]))
    answer = repair_and_select(problem, Search(seconds=None), [wrong, right], "blocks")
    assert answer.assignment is right
    assert answer.reason == ""


def test_what_fits_comes_before_what_is_fast() -> None:
    """All on one device is over by 12 bytes and 5 s; the slow placement of 50 s fits."""
    graph = plain_graph(5, [], 0, weight_bytes=[7, 5, 4, 4, 4])
    compute_s = np.array([[1.0, 25.0]] * 5)
    problem = make_problem(graph, unit_cluster(2, memory_bytes=12), compute_s)
    rows = [Assignment(np.array(row)) for row in ([0] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 1, 1])]
    assert best_of(problem, rows).assignment is rows[1]


def test_what_is_missing_names_the_devices_and_the_bytes() -> None:
    problem = lumpy()
    wrong = Assignment(np.zeros(5, dtype=np.int64))
    assert missing_text(problem, wrong) == "12 B on d0 (needs 24 B of 12 B)"


def test_weights_that_are_confined_to_some_devices_are_proven_not_to_fit() -> None:
    """10 bytes may use d0 alone, which holds 8, though d1 has room for all."""
    graph = plain_graph(3, [], 0, weight_bytes=[5, 5, 1])
    cluster = unit_cluster(2, memory_bytes=8)
    free = make_problem(graph, cluster, np.ones((3, 2)))
    assert proven_misfit(free) is None
    allowed = np.array([[True, False], [True, False], [True, True]])
    reason = proven_misfit(make_problem(graph, cluster, np.ones((3, 2)), allowed=allowed))
    assert reason == ("no placement can fit: weights need 10 B, d0 holds 8 B: 2 B missing")


def test_an_op_that_takes_no_time_holds_its_inputs_and_outputs_one_after_the_other() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)], [6, 6, 0])
    for seconds, fits_it in ((0.0, True), (1.0, False)):
        compute_s = np.array([[1.0], [seconds], [1.0]])
        problem = make_problem(graph, unit_cluster(1, memory_bytes=11), compute_s)
        assert score(problem, np.zeros(3, dtype=np.int64)).feasible == fits_it
        assert (proven_misfit(problem) is None) == fits_it
