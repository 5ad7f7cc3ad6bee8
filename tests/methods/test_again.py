"""Searches begun again: how often, from where, which of them counts, and what they cost."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

from gdp.clock import Clock
from gdp.methods.base import Assignment, Search
from gdp.methods.scoring import Evaluated
from gdp.methods.search import local_search as again
from gdp.methods.search.local_search import CHAINS, FAR, multi_restart
from gdp.problem.problem import Problem, make_problem

SEARCH = Search(seed=4, seconds=None, evaluations=100)
LEAST_S = 3.0  # six ops of a second each on two devices


def six_ops() -> Problem:
    """Six ops of a second each, none of which reads another, on two devices."""
    return make_problem(plain_graph(6, [], 1), unit_cluster(2), np.ones((6, 2)), "throughput")


def placed(value_s: float, overflow_bytes: int = 0, evaluations: int = 1) -> Evaluated:
    return Evaluated(Assignment(np.zeros(6, dtype=np.int64)), overflow_bytes, value_s, evaluations)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[float, int, int | None]]]:
    """What searches are to find, in turn; (start, seed, evaluations) of those that were begun."""

    def finds(*values: Evaluated) -> list[tuple[float, int, int | None]]:
        begun: list[tuple[float, int, int | None]] = []

        def improve(
            problem: Problem, starts: list[Evaluated], search: Search, clock: Clock
        ) -> Evaluated:
            assert starts[0].evaluations == 0
            begun.append((starts[0].value_s, search.seed, search.evaluations))
            return values[len(begun) - 1]

        monkeypatch.setattr(again, "improve", improve)
        return begun

    return finds


def test_one_search_is_enough_where_it_comes_near(searched: Callable) -> None:
    begun = searched(placed(FAR * LEAST_S, evaluations=80))
    best = multi_restart(six_ops(), placed(50.0, evaluations=7), SEARCH, Clock(None))
    assert begun == [(50.0, 4, 100)]
    assert (best.value_s, best.evaluations) == (FAR * LEAST_S, 87)


def test_another_begins_from_the_same_start_under_another_seed(searched: Callable) -> None:
    begun = searched(placed(20.0, evaluations=90), placed(5.0, evaluations=80))
    best = multi_restart(six_ops(), placed(50.0), SEARCH, Clock(None))
    assert [(start, count) for start, _, count in begun] == [(50.0, 100)] * 2
    assert len({seed for _, seed, _ in begun}) == 2
    assert (best.value_s, best.evaluations) == (5.0, 171)


def test_what_does_not_fit_is_far_and_the_best_of_all_counts(searched: Callable) -> None:
    begun = searched(placed(3.0, overflow_bytes=9), placed(30.0), placed(40.0), placed(1.0))
    best = multi_restart(six_ops(), placed(3.0, overflow_bytes=99), SEARCH, Clock(None))
    assert len(begun) == CHAINS == 3
    assert (best.value_s, best.overflow_bytes) == (30.0, 0)


def test_the_start_counts_where_no_search_is_better(searched: Callable) -> None:
    searched(placed(30.0), placed(31.0), placed(32.0))
    assert multi_restart(six_ops(), placed(20.0), SEARCH, Clock(None)).value_s == 20.0


def test_none_is_begun_once_the_clock_is_over(
    searched: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = searched(placed(30.0), placed(5.0))
    monkeypatch.setattr(Clock, "is_over", lambda self: True)
    assert multi_restart(six_ops(), placed(50.0), SEARCH, Clock(1.0)).value_s == 30.0
    assert len(begun) == 1
