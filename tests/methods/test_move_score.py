"""Moves chosen by a score: features by hand, the best is simulated, none is tried again in vain."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster, with_memory

from gdp.clock import Clock
from gdp.methods.annealing import move_score_kernels as rows
from gdp.methods.annealing.annealer import AnnealConfig, LatencyAnnealer, anneal
from gdp.methods.annealing.move_score import (
    MoveScoring,
    score_by_hand,
    shipped_scoring,
    using,
    without_scores,
)
from gdp.methods.base import Assignment, Search
from gdp.methods.scoring import score_all
from gdp.methods.search.local_search import improve, local_search
from gdp.methods.search.windows import WindowSearch
from gdp.problem.problem import Problem, make_problem

FOREVER = Clock(None)
SINGLE = AnnealConfig(hot=1e-12, cold=1e-12, shares=(1.0, 0, 0, 0, 0, 0, 0, 0))


def scored(draws: int = 2, **weights: float) -> MoveScoring:
    """A score with these weights of features by name, every move scored."""
    hand = score_by_hand()
    weight = np.zeros_like(hand.weight)
    for name, value in weights.items():
        weight[:, rows.FEATURES.index(name)] = value
    return replace(hand, weight=weight, draws=draws, unscored=0.0)


def annealed(
    problem: Problem, start: list[int], steps: int, chosen: MoveScoring, config: AnnealConfig
) -> LatencyAnnealer:
    begun = score_all(problem, [Assignment(np.array(start), np.arange(problem.num_ops))])[0]
    with using(replace(chosen, log_rows=steps)):
        chain = LatencyAnnealer(problem, begun, 1)
    anneal(chain, steps, config, FOREVER, None)
    return chain


def chain_and_one(memory_bytes: int | None = None) -> Problem:
    """a (2 s) feeds b (3 s); c takes 1 s and alone may leave d0; a tensor takes as many seconds to
    send as it has bytes, 1; c holds 5 bytes of weights."""
    graph = plain_graph(3, [(0, 1)], 1, weight_bytes=[0, 0, 5])
    compute_s = np.array([[2.0, np.inf], [3.0, np.inf], [1.0, 1.0]])
    fields = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    return make_problem(graph, unit_cluster(2, **fields), compute_s)


def lines(z: float) -> float:
    """Logarithm of 1 + |z| to base 2 by lines between powers of two, as a table has it."""
    powers = 2.0 ** np.arange(12)
    return float(np.sign(z) * np.interp(1.0 + abs(z), powers, np.arange(12)))


def test_features_of_a_move_are_those_of_the_schedule() -> None:
    """a 0 to 2, b 2 to 5, c 5 to 6 on d0. c might run on d1 at any time: 5 s of slack, 5 s idle
    beyond its own; an average op takes 2 s."""
    chain = annealed(chain_and_one(), [0, 0, 0], 2, scored(), SINGLE)
    assert chain.scorer.number[rows.LOGGED] == 1
    x = dict(zip(rows.FEATURES, chain.scorer.log_x[0], strict=True))
    wanted = {
        "constant": 1.0, "groups": 1.0, "ops": 1.0, "compute": lines(0.5),
        "compute_to": lines(0.5), "compute_more": 0.0, "least_slack": 0.0, "slack": 0.0,
        "least_slack_to": lines(2.5), "slack_to": lines(2.5), "least_slack_gained": lines(2.5),
        "critical": 1.0, "receive": 0.0, "transfer_more": 0.0, "wait": lines(2.5), "gap": 0.0,
        "fit": lines(2.5), "least_fit": lines(2.5), "ready_earlier": lines(2.5),
        "wanted_later": 0.0, "begins": 5 / 6, "ends": 1.0, "load": 1.0, "load_to": 0.0,
        "idle": 0.0, "idle_to": lines(0.5), "idle_to_spare": 0.0, "degree": 0.0,
        "latency": lines(3.0), "devices": 2.0, "bytes": 0.0, "room": 0.0,
    }  # fmt: skip
    assert {name: x[name] for name in wanted} == pytest.approx(wanted)
    assert chain.scorer.log_outcome[0, rows.OUT_RISE] == pytest.approx(-1 / 6)
    assert chain.best().value_s == 5.0


def test_features_tell_bytes_and_room_where_memory_is_short() -> None:
    """All on d0: weights of 5, a and b while b runs, and then c: 7 bytes at most, of 7."""
    chain = annealed(chain_and_one(7), [0, 0, 0], 2, scored(), SINGLE)
    x = dict(zip(rows.FEATURES, chain.scorer.log_x[0], strict=True))
    assert x["bytes"] == pytest.approx(lines(6.0))  # the unit is a byte, as devices are so small
    assert x["room_to"] == pytest.approx(lines(7.0 - 6.0))
    assert x["room"] < x["peak_room_to"] == pytest.approx(lines(7.0))


def cut_in_the_middle() -> Problem:
    """x reads 4 bytes of a and 1 byte of b; a runs on d0, b on d1, x anywhere."""
    graph = plain_graph(3, [(0, 2), (1, 2)], [4, 1, 1])
    compute_s = np.array([[1.0, np.inf], [np.inf, 1.0], [1.0, 1.0]])
    return make_problem(graph, unit_cluster(2), compute_s)


def test_transfers_before_and_after_a_move() -> None:
    """x sits beside b: 4 s from a to wait for, and 1 s from b where it goes."""
    chain = annealed(cut_in_the_middle(), [0, 1, 1], 2, scored(), SINGLE)
    x = dict(zip(rows.FEATURES, chain.scorer.log_x[0], strict=True))
    assert x["receive"] == pytest.approx(lines(4.0))
    assert x["receive_to"] == pytest.approx(lines(1.0))
    assert x["transfer_more"] == pytest.approx(lines(-3.0))
    assert x["near"] == x["near_to"] == 0.5
    assert x["critical_cuts"] == 1.0
    assert x["queued"] == pytest.approx(lines(4.0 * 4 / 6))  # the link is busy 4 s of 6
    assert chain.best().value_s == 3.0


def one_in_sixty() -> Problem:
    """60 ops in a chain, at home on d0; one of them is fast on d1."""
    compute_s = np.tile([1.0, 1.5], (60, 1))
    compute_s[37] = [30.0, 1.0]
    graph = plain_graph(60, [(i, i + 1) for i in range(59)], 0)
    return make_problem(graph, unit_cluster(2), compute_s)


def test_the_move_of_highest_score_is_simulated() -> None:
    """Of 400 moves drawn, one by one, some are of the op that gains: the first evaluation is."""
    chosen = scored(draws=400, compute_more=-1.0)
    chain = annealed(one_in_sixty(), [0] * 60, 2, chosen, SINGLE)
    assert chain.evaluations == 2  # the schedule, and the move
    assert chain.best().value_s == 60.0
    worst = annealed(one_in_sixty(), [0] * 60, 2, scored(draws=400, compute_more=1.0), SINGLE)
    assert worst.best().value_s == 89.0


def test_a_rejected_move_is_not_simulated_again_before_another_is_accepted() -> None:
    """x is best where it is: there is one move, and it is tried once."""
    chain = annealed(cut_in_the_middle(), [0, 1, 0], 50, scored(draws=4), SINGLE)
    assert chain.evaluations == 2
    assert annealed(cut_in_the_middle(), [0, 1, 0], 50, without_scores(), SINGLE).evaluations == 50


def test_shipped_weights_do_better_than_no_scores() -> None:
    """Ten random problems, as many evaluations: the mean is lower by 2% and more."""
    ratios = []
    for seed in range(10):
        problem = random_problem(seed + 50, num_ops=120, num_devices=4)
        begun = score_all(problem, [Assignment(problem.allowed.argmax(axis=1))])[0]
        reached = []
        for way in (shipped_scoring(), without_scores()):
            with using(way):
                found = improve(problem, [begun], Search(seconds=None, evaluations=300), FOREVER)
            reached.append(found.value_s)
        ratios.append(reached[0] / reached[1])
    assert np.exp(np.mean(np.log(ratios))) < 0.98, ratios


def test_windows_choose_moves_inside_them() -> None:
    """Windows of a chain in which one op in ten belongs elsewhere; every move logged is scored."""
    n = 600
    compute_s = np.tile([1.0, 3.0], (n, 1))
    compute_s[::10] = [5.0, 1.0]
    problem = make_problem(
        plain_graph(n, [(i, i + 1) for i in range(n - 1)], 0), unit_cluster(2), compute_s
    )
    begun = score_all(problem, [Assignment(np.zeros(n, np.int64))])[0]
    reached = {}
    for name, way in {
        "scored": scored(draws=8, compute_more=-1.0),
        "drawn": without_scores(),
    }.items():
        with using(way):
            search = WindowSearch(problem, begun, 0)
        for _ in range(4):
            search.step(FOREVER)
        reached[name] = search.best().value_s
    assert reached["scored"] < reached["drawn"] < begun.value_s


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="draws and renew must be at least 1, got 0 and 16"):
        replace(score_by_hand(), draws=0)
    with pytest.raises(ValueError, match=r"unscored must lie in \[0, 1\]"):
        replace(score_by_hand(), unscored=1.5)


def test_a_search_ends_where_nothing_moves() -> None:
    """On one device there is no move; rounds that evaluate nothing must not go on."""
    problem = with_memory(random_problem(5, num_ops=10, num_devices=1), 1 << 40)
    found = local_search(problem, Search(seed=0, seconds=None, evaluations=50))
    assert found.evaluations <= 50
    assert found.assignment is not None
