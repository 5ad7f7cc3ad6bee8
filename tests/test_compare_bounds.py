"""What compare and its table say of the proven bound."""

import logging

import pytest

import gdp
from gdp import Result
from gdp.base.clock import COMPILE, waiting_for
from gdp.base.units import format_seconds
from gdp.cli.text import compare_text, result_text
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.methods.base import Answer
from gdp.methods.heuristics.simple import single
from gdp.problem.problem import Problem


def test_all_methods_are_measured_against_the_best_bound_of_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["in", "a", "b", "c", "d", "out"]
    kinds = [INPUT, "MatMul", "MatMul", "MatMul", "MatMul", OUTPUT]
    graph = make_graph(
        "diamond", names, kinds, [(i, 4_000_000) for i in range(5)],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], flop=[0, 4e9, 4e9, 4e9, 4e9, 0],
    )  # fmt: skip
    cluster = gdp.Cluster.load("2xt4-pcie3")
    rows = gdp.compare(
        graph, cluster, names=["single", "round_robin"], costs=roofline,
        search=gdp.Search(seconds=1.0),
    )  # fmt: skip
    results = [row for row in rows.values() if isinstance(row, Result)]
    assert len({row.bound_by for row in results}) == 1
    assert all(0 < row.bound_s <= row.value_s for row in results)
    best = min(results, key=lambda row: row.value_s)
    worst = max(results, key=lambda row: row.value_s)
    assert worst.gap > best.gap
    assert not worst.proven_optimal
    text = compare_text(graph, cluster, rows)
    assert f"bound    {format_seconds(best.bound_s)}\n" in text + "\n"
    assert best.bound_by not in text
    with caplog.at_level(logging.INFO, logger="gdp"):
        assert f"proof    no placement of whole ops takes less: {best.bound_by}" in compare_text(
            graph, cluster, rows
        )
    assert f"{worst.gap:.1%}, not proven" in text
    assert text.count("not proven") == sum(not row.proven_optimal for row in results)


def test_the_phases_of_a_result_add_up_to_what_was_waited() -> None:
    graph = make_graph("two", ["a", "b"], ["X"] * 2, [(0, 1)], [(0, 1)], flop=[1e9, 1e9])
    result = gdp.place(graph, gdp.Cluster.load("2xt4-pcie3"), method="single", costs=roofline)
    assert {"costs", "search", "bound", "counts"} <= set(result.phases)
    assert result.seconds == sum(result.phases.values())
    assert all(s > 0 for s in result.phases.values())


def test_an_answer_says_what_its_evaluations_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CPU seconds of the method, without compilation: by a clock that the method alone moves."""
    now = [5.0]

    def busy(problem: Problem, search: gdp.Search) -> Answer:
        with waiting_for(COMPILE):
            now[0] += 100.0
        now[0] += 0.25
        return single(problem, search)

    graph = make_graph("two", ["a", "b"], ["X"] * 2, [(0, 1)], [(0, 1)], flop=[1e9, 1e9])
    cluster = gdp.Cluster.load("2xt4-pcie3")
    monkeypatch.setattr("time.process_time", lambda: now[0])
    monkeypatch.setattr("gdp.question.solve.methods", lambda *_: {"single": busy})
    result = gdp.place(graph, cluster, method="single", costs=roofline)
    assert result.search_cpu_s == pytest.approx(0.25)
    assert result.to_json()["search_cpu_s"] == result.search_cpu_s
    cost = f"{result.evaluations} evaluations in 0.25 CPU s"
    assert cost not in result_text(result)
    with caplog.at_level(logging.INFO, logger="gdp"):
        assert cost in result_text(result)


def test_an_unknown_name_is_found_before_any_method_runs() -> None:
    graph = make_graph("two", ["a", "b"], ["X"] * 2, [(0, 1)], [(0, 1)], flop=[1e9, 1e9])
    begun: list[str] = []
    with pytest.raises(ValueError, match="no method 'nope'; there are "):
        gdp.compare(graph, "2xt4-pcie3", names=["single", "nope"], progress=begun.append)
    assert begun == []
