"""Rows of the tables: intervals by hand, and that rows in the file are not run again."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import fork_join, plain_graph, unit_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.baselines.expert import layers
from benchmarks.published.baselines.rows import (
    Run,
    by_method,
    lines_of,
    run_case,
)
from benchmarks.published.cases import Case, Row, cases_of, kept, tables_of
from benchmarks.published.summary import ratios_text, values_text
from benchmarks.tables import interval
from gdp.base.tasks import Engine
from gdp.methods.base import Answer, Search
from gdp.methods.table import METHODS
from gdp.problem.problem import Problem, make_problem


def test_the_interval_is_student_s() -> None:
    """1, 2, 3: deviation 1, t(0.975, 2) = 4.3027; half the width is 4.3027 / sqrt(3)."""
    assert interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert interval(np.array([5.0])) == 0.0


def case(method: str, seed: int = 0) -> Case:
    return Case("m", "c", method, 9, seed)


def row(method: str, seed: int, value_s: float | None, spent: int = 9, cpu_s: float = 0.0) -> Row:
    return case(method, seed)._asdict() | Run(value_s, spent, cpu_s)._asdict()


def test_a_row_is_the_mean_of_its_seeds() -> None:
    """1, 2 and 3 s: mean 2 s, half an interval 4.3027 / sqrt(3) s; none where one has no value."""
    found = [row("a", seed, 1.0 + seed, 4 + seed, 0.5) for seed in range(3)]
    found += [row("b", 0, 1.0, 4, 0.5), row("b", 1, None, 6, 1.5)]
    ((first, second),) = tables_of(found)
    assert (first["value_s"], first["best_s"], first["evaluations_spent"]) == (2.0, 1.0, 5.0)
    assert first["interval_s"] == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert first["values_s"] == [1.0, 2.0, 3.0]
    assert second["value_s"] is None
    assert (second["evaluations_spent"], second["cpu_s"]) == (5.0, 1.0)


def test_the_first_seed_of_all_comes_before_the_second_of_any() -> None:
    rows = {"fixed": (None, False), "drawn": (None, True), "other": (None, True)}
    found = cases_of([("m", "c"), ("n", "c")], lambda model, cluster: rows, 9, 2, ("other",))
    assert [(one.model, one.method, one.seed) for one in found] == [
        ("m", "fixed", 0), ("m", "drawn", 0), ("m", "bound", 0),
        ("n", "fixed", 0), ("n", "drawn", 0), ("n", "bound", 0),
        ("m", "drawn", 1), ("n", "drawn", 1),
    ]  # fmt: skip


CALLS: list[Case] = []


def worked(asked: Case) -> Row:
    CALLS.append(asked)
    return Run(7.0 + asked.seed, asked.evaluations, 0.0)._asdict()


def test_cases_in_the_file_are_not_run_again(tmp_path: Path) -> None:
    CALLS.clear()
    cases = [case("fixed"), case("gdp auto"), case("gdp auto", 1)]
    path = tmp_path / "rows.jsonl"
    first = kept(cases, worked, path)
    assert cases == CALLS
    (fixed, auto), = tables_of(first)  # fmt: skip
    assert [fixed["value_s"], auto["value_s"]] == [7.0, 7.5]
    assert "| fixed | 1 | 7000.0000 |  | -6.7% | 9 | 0.0 |" in lines_of([fixed, auto])
    # The run ends while it writes the last line: that case is run again, and it alone.
    path.write_text(path.read_text()[:-20])
    assert kept(cases, worked, path) == first
    assert CALLS[3:] == cases[2:]
    assert kept(cases, worked, path) == first
    assert kept([*cases, case("other")], worked, path, None) == first  # only what is there
    assert len(CALLS) == 4


@pytest.mark.slow
def test_two_processes_make_the_same_rows(tmp_path: Path) -> None:
    cases = [case("gdp auto", seed) for seed in range(3)]
    assert kept(cases, worked, tmp_path / "rows.jsonl", Engine(processes=2)) == kept(cases, worked)


def test_runs_do_not_see_what_earlier_ones_derived() -> None:
    """A method that keeps something in the problem finds nothing of the run before."""
    problem, met = fork_join(), []

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        met.append((dict(problem._cache), evaluations, seed))
        problem._cache[("mine",)] = seed
        return Run(1.0, 1, 0.0)

    for seed in range(2):
        run_case(case("a", seed), problem, {"a": (run, True)})
    assert met == [({}, 9, 0), ({}, 9, 1)]
    bound = run_case(case("bound"), problem, {})
    assert 0 < bound["value_s"] <= 6.0


def test_the_summary_is_a_geometric_mean_over_the_problems_that_have_a_row() -> None:
    """2 and 8 times auto's: 4 times in the mean; what does not fit on one is of the other alone."""
    found = []
    for model, hsdag_s, etf_s in (("m", 2.0, None), ("n", 8.0, 3.0)):
        for method, value_s in (("HSDAG", hsdag_s), ("ETF", etf_s), ("gdp auto", 1.0)):
            found.append(row(method, 0, value_s) | {"model": model, "ops": 5, "fused": 4})
    text = ratios_text(tables_of(found))
    assert "| HSDAG | 2 | 1 | +300.0% | +100.0% | +700.0% | 9 | 0.0 |" in text
    assert "| ETF | 1 | 1 | +200.0% | +200.0% | +200.0% | 9 | 0.0 |" in text
    values = values_text(tables_of(found)).splitlines()
    assert values[0] == "|  | m on c | n on c |"
    assert {"| ops | 5 | 5 |", "| HSDAG | 2000 | 8000 |", "| gdp auto | 1000 | 1000 |"} <= {*values}


def test_methods_are_judged_by_the_simulator() -> None:
    """The best single device of fork_join takes 7 s; the share of the budget is rounded down."""
    seen = []

    def method(problem: Problem, search: Search) -> Answer:
        seen.append((search.seed, search.evaluations, search.seconds))
        return METHODS["single"](problem, search)

    assert by_method(method, 0.01)(fork_join(), 250, 4).value_s == 7.0
    assert seen == [(4, 2, None)]


def test_layers_are_known_by_module_paths() -> None:
    """Segments and time steps of a layer are one layer, stacks are not; backward ops too."""
    scopes = {
        "encoder/forward": 0, "encoder/backward": 0, "encoder/lstm1": 1, "decoder/step0/layer0": 0,
        "jvp(decoder/step1)/layer1": 1, "transpose(jvp(encoder/lstm1))": 1, "softmax": 1,
    }  # fmt: skip
    graph = plain_graph(len(scopes), [(i, i + 1) for i in range(6)], 0, scope=list(scopes))
    problem = make_problem(graph, unit_cluster(2), np.ones((7, 2)))
    assert layers(problem).tolist() == list(scopes.values())
    stacked = ["stack0_layer0", "stack0_layer1", "stack1_layer0", "segment1_layer2"]
    graph = plain_graph(4, [(0, 1), (1, 2), (2, 3)], 0, scope=stacked)
    assert layers(make_problem(graph, unit_cluster(2), np.ones((4, 2)))).tolist() == [0, 1, 2, 3]
