"""With a budget in evaluations no clock enters an answer, however fast or slow time passes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import random_problem, tight_latency

import gdp
from gdp.base import clock
from gdp.base.clock import WorkClock
from gdp.methods.base import SEEDS, Search
from gdp.methods.exact.method import exact
from gdp.methods.fix_and_optimise import latency as latency_program
from gdp.methods.fix_and_optimise import period as period_program
from gdp.methods.fix_and_optimise.latency import solve_s
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.sim.score import score_of

COUNTED = [  # exact has a test of its own
    pytest.param(name, marks=pytest.mark.slow) if name == "auto" else name
    for name in sorted(set(solve.methods()) - {"exact", "hsdag"})
]


def passing(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Let every look at the clock take so many seconds."""
    now_s = [0.0]

    def perf_counter() -> float:
        now_s[0] += step_s
        return now_s[0]

    looks = SimpleNamespace(perf_counter=perf_counter, process_time=perf_counter)
    monkeypatch.setattr(clock, "time", looks)


def short_of_memory(objective: str) -> Problem:
    """Three devices that hold little more than what is needed: the programs in rounds apply."""
    problem = tight_latency(1, 3, 1.2)
    return replace(problem, objective=objective, replicas=objective == "throughput")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("name", COUNTED)
def test_the_answer_is_the_same_whatever_time_passes(
    name: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with no seconds at all, and where each look at the clock takes an hour."""
    method, answers = solve.methods()[name], []
    for seconds, step_s in ((None, 0.0), (0.0, 1e-9), (1e9, 3600.0), (5.0, 3600.0)):
        passing(monkeypatch, step_s)
        problem = short_of_memory(objective)  # anew: nothing is known of it
        answers.append(method(problem, Search(seed=4, seconds=seconds, evaluations=120)))
    first = answers[0]
    for answer in answers[1:]:
        assert (answer.assignment is None) == (first.assignment is None)
        assert answer.evaluations == first.evaluations
        assert answer.bound_s == first.bound_s
        if answer.assignment is not None and first.assignment is not None:
            assert (answer.assignment.device == first.assignment.device).all()
            value_s = score_of(problem, first.assignment).value_s
            assert score_of(problem, answer.assignment).value_s == value_s


def test_placement_bound_and_simplification_are_the_same_whatever_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for seconds, step_s in ((None, 0.0), (0.1, 3600.0), (50.0, 1e-6)):
        passing(monkeypatch, step_s)
        search = Search(seed=1, seconds=seconds, evaluations=60)
        results.append(gdp.place("onnx:light_squeezenet", "2xt4-pcie4", search=search))
    for result in results[1:]:
        assert result.value_s == results[0].value_s
        assert (result.bound_s, result.bound_by) == (results[0].bound_s, results[0].bound_by)
        assert (result.placement.device == results[0].placement.device).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [period_program.period_fit, latency_program.latency_fit], ids=["period", "latency"]
)
def test_programs_end_with_their_counted_work(method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less work, fewer programs solved; without any, none."""
    objective = "throughput" if method is period_program.period_fit else "latency"
    solved = []
    for work_s in (1e6, 1e-9):
        problem = short_of_memory(objective)
        whole = WorkClock(work_s)
        method(problem, Search(seed=2, clock=whole))
        solved.append(whole.elapsed_s())
    assert solved[0] > solved[1] > 0.0


def test_a_part_charges_the_whole() -> None:
    whole = WorkClock(10.0)
    half = whole.part(0.5)
    half.charge(4.0)
    assert (half.remaining_s(), whole.remaining_s()) == (1.0, 6.0)
    assert half.limit_s() is None
    half.charge(1.0)
    assert half.is_over()
    assert not whole.is_over()
    assert whole.at_most(2.0).remaining_s() == 2.0
    assert whole.at_most(99.0).remaining_s() == 5.0


def test_programs_take_longer_with_entries_and_nodes() -> None:
    assert solve_s(40_000, 0) == pytest.approx(1.0)
    assert solve_s(80_000, 100) > solve_s(80_000, 0) > solve_s(40_000, 0)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_exact_heeds_no_seconds_beside_evaluations(objective: str) -> None:
    problem = random_problem(4, objective=objective, num_ops=6, num_devices=2, varied=True)
    answers = [
        exact(problem, Search(seed=1, seconds=seconds, evaluations=20)) for seconds in (None, 1e-9)
    ]
    assert answers[0].assignment is not None
    assert [a.assignment is not None and a.assignment.device.tolist() for a in answers] == [
        answers[0].assignment.device.tolist()
    ] * 2
    assert answers[0].bound_s == answers[1].bound_s
    assert answers[0].notes == answers[1].notes


@pytest.mark.parametrize("name", ["local_search", "exact", "auto", "policy", "critical_path"])
@pytest.mark.parametrize("seed", [1 << 58, SEEDS - 1])
def test_any_seed_is_a_seed(name: str, seed: int) -> None:
    problem = random_problem(4, num_ops=6, num_devices=2, varied=True)
    answer = solve.methods()[name](problem, Search(seed=seed, seconds=None, evaluations=30))
    assert answer.assignment is not None
