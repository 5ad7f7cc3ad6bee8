"""The critical-path scheduler on graphs worked by hand: lots, waiting ops, the price of sending."""

import numpy as np
from tiny import brute_force_s, plain_graph, unit_cluster

from gdp.methods.base import Search
from gdp.methods.heuristics.list_schedule import critical_path, critical_path_assignments
from gdp.methods.heuristics.list_schedule_kernels import critical_plan
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score, values

SEARCH = Search(seconds=None)


def two_pairs() -> Problem:
    """s is read by 1..4 (1 s each, 3 bytes); 5 reads 1 and 2, 6 reads 3 and 4 (1 s each).

    All of 1..4 have the same way to go. Each pair on its own device ends at 3 s; taken in their
    order, 1 and 2 go to two devices, 3 and 4 likewise: 5 waits for a link until 4 s, 6 until 5 s.
    """
    graph = plain_graph(
        7, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (2, 5), (3, 6), (4, 6)], [0, 3, 3, 3, 3, 0, 0]
    )
    compute_s = np.repeat([[0.0], *[[1.0]] * 6], 2, axis=1)
    return make_problem(graph, unit_cluster(2), compute_s)


def test_lots_find_what_a_fixed_order_of_equals_misses() -> None:
    problem = two_pairs()
    fixed = critical_plan(
        arrays_of(problem), np.arange(7), np.zeros(7, bool), 0.0, np.tile([0.0, 1.0], (7, 1))
    )
    assert fixed.finish_s.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 5.0, 6.0]
    answer = critical_path(problem, SEARCH)
    assert answer.assignment is not None
    device = answer.assignment.device
    assert score(problem, device, answer.assignment.rank).value_s == 3.0
    assert device[1] == device[2] == device[5] != device[3] == device[4] == device[6]


def test_the_same_seed_draws_the_same_plans_and_another_draws_others() -> None:
    problem = two_pairs()

    def drawn(seed: int) -> list[list[int]]:
        return [x.device.tolist() for x in critical_path_assignments(problem, seed)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_stored_weight_goes_where_its_first_reader_goes() -> None:
    """w (9 bytes, 0 s) has the longest way to go, x (1 byte, only on d1) is read with it by r.

    On its own w would go to either device; with r on d1, where x is, nothing is sent: 2 s.
    """
    graph = plain_graph(3, [(0, 2), (1, 2)], [9, 4, 0])
    compute_s = np.array([[0.0, 0.0], [np.inf, 1.0], [1.0, 1.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    a, order = arrays_of(problem), np.array([0, 1, 2])
    lot = np.tile([0.0, 1.0], (3, 1))
    alone = critical_plan(a, order, np.zeros(3, bool), 0.0, lot)
    waiting = critical_plan(a, order, np.array([True, False, False]), 0.0, lot)
    assert alone.device.tolist() == [0, 1, 0]
    assert alone.finish_s.max() == 6.0
    assert waiting.device.tolist() == [1, 1, 1]
    assert waiting.finish_s.max() == 2.0
    assert all(x.device.tolist() == [1, 1, 1] for x in critical_path_assignments(problem, 0))


def test_a_price_keeps_the_links_free() -> None:
    """b and c (2 s each) read a (2 bytes) from d0, where it is alone; both devices end c at 4 s.

    Free sending takes d1 for c by lot; priced at a tenth, a stays where it is.
    """
    graph = plain_graph(3, [(0, 1), (0, 2)], [2, 0, 0])
    compute_s = np.array([[0.0, np.inf], [2.0, np.inf], [2.0, 2.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    lot = np.tile([1.0, 0.0], (3, 1))
    for price, wanted in ((0.0, 1), (0.1, 0)):
        plan = critical_plan(arrays_of(problem), np.arange(3), np.zeros(3, bool), price, lot)
        assert plan.finish_s.max() == 4.0
        assert plan.device[2] == wanted


def test_what_waits_is_counted_in_its_readers_memory() -> None:
    """Two stored weights of 6 bytes and devices of 10: the second reader goes to the other one,
    slow as it is."""
    graph = plain_graph(4, [(0, 2), (1, 3)], [0, 0, 0, 0], weight_bytes=[6, 6, 0, 0])
    compute_s = np.tile([1.0, 9.0], (4, 1))
    problem = make_problem(graph, unit_cluster(2, memory_bytes=10), compute_s)
    for assignment in critical_path_assignments(problem, 0):
        assert assignment.device[0] == assignment.device[2] != assignment.device[1]
        assert values(problem, assignment.device[None])[1][0] == 0


def sent_and_hidden() -> Problem:
    """y reads 10 bytes of x on d0: 10 s beside x, on d1 11 s with the transfer. z reads 12 bytes of
    w on d0, which arrive while v runs on d1: 10 s on d0, 1 s on d1.

    The optimum is 32 s: x and y 11 s, v 20 s, z 1 s. A plan that takes sending for free moves y;
    one that only prices it keeps z on d0 too at each price that keeps y there.
    """
    graph = plain_graph(5, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)], [10, 0, 12, 0, 0])
    never = np.inf
    compute_s = np.array([[1.0, never], [10.0, 1.0], [1.0, never], [never, 20.0], [10.0, 1.0]])
    return make_problem(graph, unit_cluster(2), compute_s)


def test_sending_counts_where_it_delays_and_not_where_it_is_hidden() -> None:
    problem = sent_and_hidden()
    assert brute_force_s(problem) == 32.0
    answer = critical_path(problem, SEARCH)
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device, answer.assignment.rank).value_s == 32.0


def test_what_waits_takes_its_time_on_the_readers_device() -> None:
    """w takes 9 s on d0 and 1 s on d1, its reader 1 s and 2 s: on d1 both take 3 s, not 10."""
    compute_s = np.array([[9.0, 1.0], [1.0, 2.0]])
    problem = make_problem(plain_graph(2, [(0, 1)], 9), unit_cluster(2), compute_s)
    assert brute_force_s(problem) == 3.0
    answer = critical_path(problem, SEARCH)
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device, answer.assignment.rank).value_s == 3.0


def test_plans_begin_with_what_has_far_to_send() -> None:
    """On d0, a (1 s) sends 10 bytes to d1 and b (1 s) is followed by 3 s there: a first."""
    graph = plain_graph(4, [(0, 1), (2, 3)], [0, 0, 10, 0])
    never = np.inf
    compute_s = np.array([[1.0, never], [3.0, never], [1.0, never], [never, 1.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s)
    for assignment in critical_path_assignments(problem, 0):
        assert score(problem, assignment.device, assignment.rank).value_s == 12.0
