"""All that `place` does is in a phase. The clock of these tests counts the calls of Python
functions, so that nothing depends on how fast the machine is."""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdp
from gdp.api.answer import answer
from gdp.api.ask import require_answerable
from gdp.base import clock
from gdp.base.clock import Phases
from gdp.costs.adapt import AdaptedCosts, Piece, Run, Share, adapt
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.methods.base import Answer, Search
from gdp.methods.heuristics.simple import single
from gdp.methods.table import METHODS
from gdp.problem.problem import Problem
from gdp.question import prepare, solve
from gdp.question.question import Question

ONCE = gdp.Search(seconds=None, evaluations=30)
UNCOUNTED = 500
"""Calls between entering `place` and its first phase, and behind its last one."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    count = 0

    def called(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event == "call"

    def counting() -> int:
        """Calls so far; they are counted from the first call of this on."""
        sys.setprofile(called)
        return count

    monkeypatch.setattr(
        clock, "time", SimpleNamespace(perf_counter=lambda: float(count), process_time=lambda: 0.0)
    )
    yield counting
    sys.setprofile(None)


def layers(count: int = 8) -> OpGraph:
    """A row of blocks with weights and module paths."""
    names = [f"op{i}" for i in range(count)]
    return make_graph(
        "layers", names, ["MatMul"] * count, [(i, 1000) for i in range(count)],
        [(i, i + 1) for i in range(count - 1)], flop=[1e9] * count, weight_bytes=[1 << 20] * count,
        scope=[f"layers.{i}" for i in range(count)],
    )  # fmt: skip


def learned() -> AdaptedCosts:
    share = Share("MatMul", 8, "MatMul", 1e-3)
    pieces = tuple(Piece("core0", "cpu-core", (share,), 2e-3, False) for _ in range(4))
    return AdaptedCosts(roofline, adapt([Run("m", pieces)]))


@pytest.mark.parametrize(
    ("target", "cluster", "adapted"),
    [
        (None, "2xcpu-core", False),
        (None, "2xcpu-core", True),
        ("accelerate", "cpu+2xt4", False),
        ("vllm", "cpu+2xt4", False),
    ],
)
def test_everything_is_in_a_phase(
    calls: Callable[[], int], target: str | None, cluster: str, adapted: bool
) -> None:
    graph, machine = layers(), gdp.Cluster.load(cluster)
    how: dict[str, Any] = {"costs": learned() if adapted else roofline, "search": ONCE}
    if target != "vllm":
        how["method"] = "single"
    answer(Question(graph, machine, target=target, **how))  # imports
    before = calls()
    result = answer(Question(graph, machine, target=target, **how))
    total = calls() - before
    assert total > 4 * UNCOUNTED
    assert total - UNCOUNTED <= result.seconds <= total
    assert result.seconds == sum(result.phases.values())
    assert not adapted or result.phases["deviation"] > UNCOUNTED
    assert result.phases["pieces" if target is None else "planning"] > UNCOUNTED


def test_seconds_of_parts_stay_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s the inner call searched for 6 s and looked for a bound for 1 s: 3 s are left."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(
        clock, "time", SimpleNamespace(perf_counter=lambda: now.s, process_time=lambda: 0.0)
    )
    phases = Phases()
    now.s = 10.0
    phases.ended("planning", {"search": 6.0, "bound": 1.0, clock.COMPILE: 50.0})
    assert phases.seconds == {"search": 6.0, "bound": 1.0, "planning": 3.0}


def test_costs_are_drawn_without_preparing_the_problem_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draws equal problems that are prepared with the drawn costs, to the last bit."""
    graph, cluster, costs = layers(), gdp.Cluster.load("2xcpu-core"), learned()
    question = Question(graph, cluster, costs=costs)
    problem = prepare.prepare_problem(question, replicas=True)
    others = [AdaptedCosts(roofline, costs.adaptation.sampled(seed)) for seed in range(3)]
    again = [
        prepare.prepare_problem(Question(graph, cluster, costs=other), replicas=True)
        for other in others
    ]
    fused: list[object] = []
    monkeypatch.setattr(prepare, "fuse", lambda *args, **_: fused.append(args))
    drawn = list(prepare.drawn_problems(question, problem, range(3)))
    assert not fused
    assert len(drawn) == 3
    for one, other in zip(drawn, again, strict=True):
        assert (one.compute_s == other.compute_s).all()
        assert one.cluster.devices == other.cluster.devices
        assert (one.cluster.link_latency_s == other.cluster.link_latency_s).all()
    assert len(np.unique([problem.compute_s.sum() for problem in drawn])) == 3


def test_a_problem_is_prepared_once_where_costs_are_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return prepare.prepare_problem(*args, **kwargs)

    monkeypatch.setattr("gdp.question.solve.problem_of", counted)
    result = solve.solve(
        Question(
            layers(), gdp.Cluster.load("2xcpu-core"), method="single", costs=learned(), search=ONCE
        )
    )
    assert len(made) == 1
    assert result.deviation_s is not None
    assert result.deviation_s > 0


def test_seconds_are_kept_for_what_follows_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 s a search of 8 ops has no more than 2.6, where each op takes 0.2 s to simplify and
    bound, and 0.1 s to count and name."""
    given: list[float] = []

    def noted(problem: Problem, search: Search) -> Answer:
        assert search.clock is not None
        given.append(search.clock.remaining_s())
        return single(problem, search)

    monkeypatch.setattr(solve, "CHECK_OP_S", 0.2)
    monkeypatch.setattr(solve, "RESULT_OP_S", 0.1)
    monkeypatch.setitem(METHODS, "single", noted)
    gdp.place(layers(), "2xt4-pcie4", method="single", search=gdp.Search(seconds=5.0))
    assert given
    assert given[-1] <= 2.6


@pytest.mark.parametrize("load", [1.0, 3.0])
def test_what_follows_the_search_has_more_seconds_where_other_programs_hold_the_cores(
    monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    """8 ops of 0.05 s after the search are 0.4 s of an idle core, 1.2 s where costs took three
    times their CPU seconds."""
    given: list[float] = []

    def noted(problem: Problem, search: Search) -> Answer:
        assert search.clock is not None
        given.append(search.clock.remaining_s())
        return single(problem, search)

    monkeypatch.setattr(solve, "CHECK_OP_S", 0.05)
    monkeypatch.setattr(solve, "RESULT_OP_S", 0.0)
    monkeypatch.setattr(solve, "_load", lambda wall_s, cpu_s: load)
    monkeypatch.setitem(METHODS, "single", noted)
    gdp.place(layers(), "2xt4-pcie4", method="single", search=gdp.Search(seconds=1.0))
    assert given
    assert given[-1] <= max(0.0, 1.0 - 0.4 * load)


def test_seconds_that_no_answer_keeps_are_refused_with_the_least() -> None:
    """100,000 ops take 1.5 s of an idle core at least; with a count nothing is refused."""
    graph = layers(100_000)
    with pytest.raises(gdp.ArgumentError, match=r"1.2 s are too few for 100,000 ops.* about 1.5 s"):
        gdp.place(graph, "2xt4-pcie4", search=gdp.Search(seconds=1.2))
    require_answerable(
        Question(graph, gdp.Cluster.load("2xt4-pcie4"), search=gdp.Search(evaluations=1))
    )


def test_load_is_wall_clock_over_cpu_seconds_and_never_below_one() -> None:
    assert solve._load(3.0, 1.5) == 2.0
    assert solve._load(1.0, 4.0) == 1.0  # libraries compute on several cores
    assert solve._load(1.0, 0.0) == 1.0
