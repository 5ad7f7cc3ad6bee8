"""Searches side by side: the same answer for the same seed, budget and number of chains."""

import threading
import time

import numpy as np
import pytest
from tiny import all_devices, plain_graph, random_problem, unit_cluster

from gdp.base.clock import Clock, WorkClock
from gdp.base.files.reading import shipped
from gdp.learn.instances import Instance, load_problems, make
from gdp.methods.annealing.annealer import side_by_side
from gdp.methods.base import Assignment, Search
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of, score_all
from gdp.methods.search import windows
from gdp.methods.search.local_search import SearchConfig, improve, local_search, simple_assignments
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score, values

FOREVER = Clock(None)


def begun(problem: Problem) -> Evaluated:
    device = problem.group_allowed.argmax(axis=1)[problem.group]
    return score_all(problem, [Assignment(device)])[0]


def searched(problem: Problem, chains: int, evaluations: int, config: SearchConfig) -> Evaluated:
    search = Search(seed=3, seconds=None, evaluations=evaluations, chains=chains)
    return improve(problem, [begun(problem)], search, FOREVER, config)


@pytest.mark.parametrize("chains", [2, 3])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_chains_are_repeatable_and_share_their_evaluations(objective: str, chains: int) -> None:
    problem = random_problem(4, objective=objective, num_ops=60)
    found = [searched(problem, chains, 900, SearchConfig()) for _ in range(3)]
    for other in found[1:]:
        assert other.key == found[0].key
        assert (other.assignment.device == found[0].assignment.device).all()
    assert all(850 <= scored.evaluations <= 900 for scored in found)
    assert found[0].key <= begun(problem).key


@pytest.mark.slow
def test_chains_in_windows_are_repeatable_and_exchange_the_best() -> None:
    edges = [(i, i + k) for i in range(300) for k in (3, 7) if i + k < 300]
    problem = make_problem(plain_graph(300, edges, 0), unit_cluster(3), np.ones((300, 3)))
    config = SearchConfig(windows_above=100)
    found = [searched(problem, 2, 600, config) for _ in range(2)]
    assert found[0].value_s == found[1].value_s < begun(problem).value_s
    assert (found[0].assignment.device == found[1].assignment.device).all()
    assert found[0].evaluations == found[1].evaluations <= 600


def test_two_chains_reach_the_optimum() -> None:
    problem = random_problem(1, num_ops=9, num_devices=2)
    value_s, overflow = values(problem, all_devices(problem))
    found = searched(problem, 2, 8000, SearchConfig())
    assert found.value_s <= value_s[overflow == 0].min() * (1 + 1e-12)


def test_an_error_in_one_ends_the_others() -> None:
    ended = threading.Event()

    def waits(clock: Clock) -> None:
        while not clock.is_over():
            time.sleep(0.001)
        ended.set()

    def fails(clock: Clock) -> None:
        raise KeyError(clock)

    with pytest.raises(KeyError):
        side_by_side([fails, waits], FOREVER)
    assert ended.is_set()


def test_a_clock_has_a_chain_a_core_and_counted_work_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, most in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr("gdp.methods.base.num_cores", lambda cores=cores: cores)
        assert Search(seconds=5.0).num_chains == most
        assert Search(seconds=None, clock=Clock(5.0)).num_chains == most
        for counted in (
            Search(seconds=5.0, evaluations=100),
            Search(seconds=None),
            Search(clock=WorkClock(5.0)),
            Search(clock=FOREVER),
        ):
            assert counted.num_chains == 1
        assert Search(seconds=5.0, chains=7).num_chains == 7
        assert Search(evaluations=100, chains=2).num_chains == 2


@pytest.mark.parametrize("chains", [None, 3])
def test_windows_have_no_more_searches_than_are_asked_for(
    chains: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock = [], Clock(1e6)

    class Counted(windows.WindowSearch):
        def __init__(self, problem: Problem, start: Evaluated, seed: int) -> None:
            made.append(seed)
            super().__init__(problem, start, seed)
            clock.seconds = 0.0  # over once all are made

    monkeypatch.setattr("gdp.methods.base.num_cores", lambda: 4)
    monkeypatch.setattr(windows, "WindowSearch", Counted)
    edges = [(i, i + k) for i in range(60) for k in (3, 7) if i + k < 60]
    problem = make_problem(plain_graph(60, edges, 0), unit_cluster(3), np.ones((60, 3)))
    search = Search(clock=clock, chains=chains)
    improve(problem, [begun(problem)], search, clock, SearchConfig(windows_above=20))
    assert len(made) == (chains or 1)


def test_no_chain_is_no_search() -> None:
    with pytest.raises(ValueError, match="chains must be at least 1, got 0"):
        Search(chains=0)


def test_a_pipeline_with_little_memory_is_searched_from_outside_its_limits_too() -> None:
    """Two branches in an eighth more than the least memory that is known to do.

    From what repair makes of a simple placement no step leads to what annealing reaches when it
    comes from outside, at half the period.
    """
    graphs = load_problems(shipped("data/corpus"), random_graphs=0, min_ops=30, max_ops=100)
    instance = Instance("multi_modal-layers2-forward", 255899305, "throughput", 1.12)
    problem = make(instance, graphs.graph)
    overfull = best_of(problem, simple_assignments(problem))
    fixed = repair(problem, overfull, FOREVER, 0)
    assert overfull.overflow_bytes > 0 == fixed.overflow_bytes
    asked = Search(seconds=None, evaluations=30_000)
    found = improve(problem, [fixed], asked, FOREVER)
    alone = local_search(problem, asked).assignment
    assert alone is not None
    assert found.overflow_bytes == 0
    assert found.value_s < 0.6 * fixed.value_s
    assert found.value_s <= 1.001 * score(problem, alone.device, alone.rank).value_s
