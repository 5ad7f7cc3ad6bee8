"""What is derived from a problem is kept in it, and goes with it."""

import gc
import pickle
import weakref

from tiny import fork_join

from gdp.methods.base import Answer, Search
from gdp.methods.portfolio import auto
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem
from gdp.sim.latency import arrays
from gdp.sim.score import score


def test_a_derived_function_runs_once_per_problem_and_arguments() -> None:
    calls: list[int] = []

    @cached_on_problem
    def times(problem: Problem, factor: int, *, plus: int = 0) -> int:
        calls.append(factor)
        return factor * problem.num_ops + plus

    one, two = fork_join(), fork_join()
    assert [times(one, 2), times(one, 2), times(one, 3), times(one, 2, plus=1)] == [8, 8, 12, 9]
    assert calls == [2, 3, 2], "equal arguments are not computed again"
    assert times(two, 2) == 8
    assert calls == [2, 3, 2, 2], "another problem has its own"


def test_what_is_derived_goes_with_the_problem() -> None:
    problem = fork_join()
    assert arrays_of(problem) is arrays_of(problem)
    assert arrays(problem) is arrays(problem)
    gone = weakref.ref(problem)
    del problem
    gc.collect()
    assert gone() is None


def test_a_pickled_problem_carries_no_derived_data() -> None:
    problem = fork_join()
    score(problem, problem.group * 0)  # arrays, workspaces
    assert problem._cache
    again = pickle.loads(pickle.dumps(problem))
    assert not again._cache
    assert score(again, again.group * 0).latency_s == score(problem, problem.group * 0).latency_s


def test_the_portfolio_passes_on_what_earlier_methods_answered() -> None:
    seen: list[set[str]] = []

    def spy(problem: Problem, search: Search) -> Answer:
        seen.append(set(search.prior_answers))
        return search.prior_answers["heft"]

    problem = fork_join()
    answer = auto(problem, Search(seconds=None, evaluations=20), extra=[("spy", spy)])
    assert answer.assignment is not None
    assert len(seen) == 1
    assert {"single", "round_robin", "blocks", "heft", "etf"} <= seen[0]
    assert "spy" not in seen[0]
