"""Moves chosen by a score: its facts by hand; the best is simulated, none twice in vain."""

import contextlib

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster, with_memory

from gdp.base.clock import Clock
from gdp.methods.annealing import move_score_kernels as rows
from gdp.methods.annealing.annealer import AnnealConfig, LatencyAnnealer, anneal, moves_as_drawn
from gdp.methods.base import Assignment, Search
from gdp.methods.scoring import score_all
from gdp.methods.search.local_search import improve, local_search
from gdp.methods.search.windows import WindowSearch
from gdp.problem.problem import Problem, make_problem

FOREVER = Clock(None)
SINGLE = AnnealConfig(hot=1e-12, cold=1e-12, shares=(1.0, 0, 0, 0, 0, 0, 0, 0))


def annealed(
    problem: Problem, start: list[int], steps: int, draws: int = 2, unscored: float = 0.0
) -> LatencyAnnealer:
    """Single moves from a placement, each the best of `draws`."""
    begun = score_all(problem, [Assignment(np.array(start), np.arange(problem.num_ops))])[0]
    chain = LatencyAnnealer(problem, begun, 1)
    chain.scorer = chain.scorer._replace(draws=draws, unscored=unscored)
    anneal(chain, steps, SINGLE, FOREVER, None)
    return chain


def lines(z: float) -> float:
    """Logarithm of 1 + |z| to base 2 by lines between powers of two, as a table has it."""
    powers = 2.0 ** np.arange(12)
    return float(np.sign(z) * np.interp(1.0 + abs(z), powers, np.arange(12)))


def score(slack: float, gained: float, more: float, fit: float) -> float:
    """The score of a move by hand, from its facts in seconds of an average op."""
    return -0.3 * lines(slack) + lines(gained) - 0.5 * lines(more) + 0.5 * lines(fit)


def test_the_score_tells_slack_gained_and_idle_time() -> None:
    """a (2 s) feeds b (3 s) on d0, 0 to 5; c takes 1 s there, 5 to 6, and might run on d1 at any
    time: 5 s of slack more than here, 5 s idle beyond its own; an average op takes 2 s."""
    graph = plain_graph(3, [(0, 1)], 1)
    compute_s = np.array([[2.0, np.inf], [3.0, np.inf], [1.0, 1.0]])
    chain = annealed(make_problem(graph, unit_cluster(2), compute_s), [0, 0, 0], 2)
    assert chain.scorer.best_score[0] == pytest.approx(score(0.0, 2.5, 0.0, 2.5))
    assert chain.evaluations == 2  # the schedule, and the move
    assert chain.best().value_s == 5.0


def cut_in_the_middle() -> Problem:
    """x reads 4 bytes of a and 1 byte of b; a runs on d0, b on d1, x anywhere."""
    graph = plain_graph(3, [(0, 2), (1, 2)], [4, 1, 1])
    compute_s = np.array([[1.0, np.inf], [np.inf, 1.0], [1.0, 1.0]])
    return make_problem(graph, unit_cluster(2), compute_s)


def test_the_score_tells_what_is_sent_more() -> None:
    """x sits beside b, 5 to 6 s: it waits 4 s for a, and would wait 1 s for b. An average op takes
    1 s; where x goes it may start after 2 s and end 3 s later at no loss."""
    chain = annealed(cut_in_the_middle(), [0, 1, 1], 2)
    assert chain.scorer.best_score[0] == pytest.approx(score(0.0, 3.0, -3.0, 3.0))
    assert chain.best().value_s == 3.0


def one_in_sixty() -> Problem:
    """60 ops in a chain, at home on d0; one of them is fast on d1."""
    compute_s = np.tile([1.0, 1.5], (60, 1))
    compute_s[37] = [30.0, 1.0]
    graph = plain_graph(60, [(i, i + 1) for i in range(59)], 0)
    return make_problem(graph, unit_cluster(2), compute_s)


def test_the_move_of_highest_score_is_simulated() -> None:
    """Of 400 moves drawn, one by one, some are of the op that gains: the first evaluation is."""
    chain = annealed(one_in_sixty(), [0] * 60, 2, draws=400)
    assert chain.evaluations == 2
    assert chain.best().value_s == 60.0


def test_a_rejected_move_is_not_simulated_again_before_another_is_accepted() -> None:
    """x is best where it is: there is one move, and it is tried once."""
    assert annealed(cut_in_the_middle(), [0, 1, 0], 50, draws=4).evaluations == 2
    assert annealed(cut_in_the_middle(), [0, 1, 0], 50, draws=1).evaluations == 50


def test_scored_moves_do_better_than_moves_as_drawn() -> None:
    """Twenty random problems, as many evaluations: the mean is lower by 2% and more."""
    ratios = []
    for seed in range(20):
        problem = with_memory(random_problem(seed + 50, num_ops=120, num_devices=4), 1 << 40)
        begun = score_all(problem, [Assignment(problem.allowed.argmax(axis=1))])[0]
        reached = []
        for way in (contextlib.nullcontext, moves_as_drawn):
            with way():
                found = improve(problem, [begun], Search(seconds=None, evaluations=300), FOREVER)
            reached.append(found.value_s)
        ratios.append(reached[0] / reached[1])
    assert np.exp(np.mean(np.log(ratios))) < 0.98, ratios


def test_windows_choose_moves_inside_them() -> None:
    """Windows of a chain in which one op in ten belongs elsewhere."""
    n = 600
    compute_s = np.tile([1.0, 3.0], (n, 1))
    compute_s[::10] = [5.0, 1.0]
    problem = make_problem(
        plain_graph(n, [(i, i + 1) for i in range(n - 1)], 0), unit_cluster(2), compute_s
    )
    begun = score_all(problem, [Assignment(np.zeros(n, np.int64))])[0]
    reached = []
    for way in (contextlib.nullcontext, moves_as_drawn):
        with way():
            search = WindowSearch(problem, begun, 0)
        for _ in range(4):
            search.step(FOREVER)
        reached.append(search.best().value_s)
    assert reached[0] < reached[1] < begun.value_s


def test_a_search_ends_where_nothing_moves() -> None:
    """On one device there is no move; rounds that evaluate nothing must not go on."""
    problem = with_memory(random_problem(5, num_ops=10, num_devices=1), 1 << 40)
    found = local_search(problem, Search(seed=0, seconds=None, evaluations=50))
    assert found.evaluations <= 50
    assert found.assignment is not None


def test_logarithms_by_lines() -> None:
    """Both signs, powers of two and between."""
    for z in (0.0, 1.0, 3.0, 5.0, -7.0, -0.5):
        assert rows.log2_lines.py_func(z) == pytest.approx(lines(z))
