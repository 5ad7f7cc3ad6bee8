"""Searches begun again: how often, from where, which of them counts, and what they cost."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

from gdp.base.clock import Clock
from gdp.methods.annealing.annealer import AnnealConfig
from gdp.methods.base import Assignment, Search
from gdp.methods.scoring import Evaluated, best_of
from gdp.methods.search import chains
from gdp.methods.search.chains import (
    CHAINS,
    RESTART_FACTOR,
    ChainLimits,
    align_device_names,
    anneal_from_hot_starts,
    best_ends,
    crossover,
    multi_restart,
)
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

        monkeypatch.setattr(chains, "improve", improve)
        return begun

    return finds


def test_one_search_is_enough_where_it_comes_near(searched: Callable) -> None:
    begun = searched(placed(RESTART_FACTOR * LEAST_S, evaluations=80))
    best = multi_restart(six_ops(), placed(50.0, evaluations=7), SEARCH, Clock(None))
    assert begun == [(50.0, 4, 100)]
    assert (best.value_s, best.evaluations) == (RESTART_FACTOR * LEAST_S, 87)


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


def pair_of(*devices: list[int], compute_s: np.ndarray | None = None) -> tuple[Problem, list]:
    """Six ops in a row on three devices, and placements of them."""
    given = np.ones((6, 3)) if compute_s is None else compute_s
    graph = plain_graph(6, [(i, i + 1) for i in range(5)], 1)
    problem = make_problem(graph, unit_cluster(3), given, "throughput")
    return problem, [best_of(problem, [Assignment(np.array(device))]) for device in devices]


def test_devices_of_a_kind_are_renamed_to_agree_with_another_placement() -> None:
    problem, (one, other) = pair_of([0, 0, 1, 1, 2, 2], [2, 2, 2, 0, 0, 1])
    names = align_device_names(problem, other.assignment.device, one.assignment.device)
    assert names.tolist() == [0, 0, 0, 1, 1, 2]


def test_devices_that_pay_each_op_differently_keep_their_names() -> None:
    problem, (one, other) = pair_of([0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0])
    devices = list(problem.cluster.devices)
    devices[2] = replace(devices[2], dispatch_s=1.0, dispatch_per="op")
    problem = replace(problem, cluster=replace(problem.cluster, devices=tuple(devices)))
    names = align_device_names(problem, other.assignment.device, one.assignment.device)
    assert names.tolist() == [2, 2, 1, 1, 0, 0]


def test_unlike_devices_keep_their_names() -> None:
    unlike = np.ones((6, 3))
    unlike[:, 2] = 5.0
    problem, (one, other) = pair_of([0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0], compute_s=unlike)
    names = align_device_names(problem, other.assignment.device, one.assignment.device)
    assert names.tolist() == [2, 2, 1, 1, 0, 0]
    swapped = np.array([1, 1, 0, 0, 2, 2])
    assert align_device_names(problem, swapped, one.assignment.device).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_a_child_has_every_op_where_one_of_its_parents_has_it() -> None:
    problem, parents = pair_of([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2])
    one, other = (parent.assignment.device for parent in parents)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        child = crossover(problem, parents, rng)
        assert child.evaluations == 1
        device = child.assignment.device
        assert any(
            ((device == mother) | (device == align_device_names(problem, father, mother))).all()
            for mother, father in ((one, other), (other, one))
        )
        seen.add(tuple(device.tolist()))
    assert len(seen) == 8


def test_chains_after_the_fresh_ones_begin_from_children_and_cooler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, (first,) = pair_of([0, 0, 0, 1, 1, 1])
    begun: list[tuple[float, float]] = []
    plain = chains.anneal

    def anneal(chain, steps: int, config: AnnealConfig, clock: Clock, evaluations: int) -> bool:
        begun.append((chain.start.value_s, config.hot))
        return plain(chain, 50, config, clock, 50)

    bred: list[int] = []

    def crossover(
        problem: Problem, parents: list[Evaluated], rng: np.random.Generator
    ) -> Evaluated:
        bred.append(len(parents))
        assert parents == sorted(parents)
        return parents[-1]

    monkeypatch.setattr(chains, "anneal", anneal)
    monkeypatch.setattr(chains, "crossover", crossover)
    monkeypatch.setattr(chains, "best_ends", lambda ends: sorted(ends)[:2])
    best = anneal_from_hot_starts(problem, first, 1, Clock(None), ChainLimits(15, 99))
    assert best.evaluations > first.evaluations + 15
    assert len(begun) == 15
    assert len(bred) == 3
    assert max(hot for _, hot in begun[12:]) < 0.2 * min(hot for _, hot in begun[:12])


def test_parents_are_the_best_ends_no_two_of_one_value() -> None:
    ends = [placed(value_s) for value_s in (5.0, 3.0, 9.0, 3.0, 4.0, 8.0, 7.0, 6.0, 10.0)]
    best = best_ends(ends)
    assert [end.value_s for end in best] == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert best[0] is ends[1]
