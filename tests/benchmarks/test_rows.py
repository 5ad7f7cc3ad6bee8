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
    interval,
    kept,
    lines_of,
    reached,
    summary,
)
from gdp.methods.base import Answer, Search
from gdp.methods.heuristics.simple import single
from gdp.problem.problem import Problem, make_problem

ABOUT = {"model": "m", "cluster": "c", "evaluations": 9, "seeds": 3}


def test_the_interval_is_student_s() -> None:
    """1, 2, 3: deviation 1, t(0.975, 2) = 4.3027; half the width is 4.3027 / sqrt(3)."""
    assert interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert interval(np.array([5.0])) == 0.0


def test_a_row_without_a_placement_has_no_mean() -> None:
    found = summary([Run(1.0, 4, 0.5), Run(None, 6, 1.5)])
    assert found["value_s"] is None
    assert (found["spent"], found["cpu_s"]) == (5.0, 1.0)


def test_rows_in_the_file_are_not_run_again(tmp_path: Path) -> None:
    calls = []

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        calls.append((evaluations, seed))
        return Run(7.0 + seed, evaluations, 0.0)

    rows = {"fixed": (run, False), "gdp auto": (run, True)}
    path = tmp_path / "rows.jsonl"
    first = list(kept(path, ABOUT, rows, fork_join()))
    assert calls == [(9, 0), (9, 0), (9, 1), (9, 2)]
    assert [row["method"] for row in first] == ["fixed", "gdp auto", "bound"]
    assert [row["value_s"] for row in first[:2]] == [7.0, 8.0]
    assert 0 < first[2]["value_s"] <= 6.0
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:2]))
    again = list(kept(path, ABOUT, rows, fork_join()))
    assert len(calls) == 4
    assert again == first
    assert "| fixed | 7000.0000 |  | -12.5% | 9 | 0.0 |" in lines_of(again)


def test_methods_are_judged_by_the_simulator() -> None:
    """The best single device of fork_join takes 7 s; the share of the budget is rounded down."""
    seen = []

    def method(problem: Problem, search: Search) -> Answer:
        seen.append((search.seed, search.evaluations, search.seconds))
        return single(problem, search)

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


def test_reached_counts_what_auto_simulates_until_then() -> None:
    """fork_join: 7 s is the first single device's; 6 s comes later; nothing takes less."""
    assert reached(fork_join(), 7.0) == 1
    later = reached(fork_join(), 6.0)
    assert later is not None
    assert later > 2
    assert reached(fork_join(), 5.9) is None
