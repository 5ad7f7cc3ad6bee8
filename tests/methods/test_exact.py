"""`exact` says what it proved, for every objective and size, and how it goes on without CP-SAT."""

import re
import sys

import numpy as np
import pytest
from host_memory import load_problem
from tiny import fork_join, plain_graph, unit_cluster

import gdp
from gdp.base.errors import MissingExtraError
from gdp.base.version import install_command
from gdp.methods.base import Search
from gdp.methods.exact import method
from gdp.methods.exact.method import exact, least_latency
from gdp.methods.host_memory import load as host_load
from gdp.methods.host_memory.program import LEAST_LOAD
from gdp.problem.problem import make_problem

SEARCH = Search(seconds=None, evaluations=100)


@pytest.mark.parametrize(("objective", "best_s"), [("latency", 6.0), ("throughput", 4.0)])
def test_fork_join_is_solved_and_said_to_be(objective: str, best_s: float) -> None:
    from gdp.sim.score import values

    problem = fork_join(objective)
    answer = exact(problem, SEARCH)
    assert answer.assignment is not None
    value_s, over = values(problem, answer.assignment.device[None], answer.assignment.rank)
    assert (value_s[0], over[0]) == (best_s, 0)
    assert answer.proven_optimal
    assert answer.bound_s == pytest.approx(best_s, rel=1e-5)
    assert answer.notes[0].startswith("optimal, proven by")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_what_is_too_large_gets_a_heuristic_and_a_bound(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method, "MOST_VARIABLES", 3)
    monkeypatch.setattr(method, "MOST_INTERVALS", 3)
    graph = plain_graph(12, [(i, j) for j in range(12) for i in range(j) if (i + j) % 3 == 1])
    compute_s = np.random.default_rng(0).uniform(1.0, 2.0, (12, 2))
    problem = make_problem(graph, unit_cluster(2), compute_s, objective)
    answer = exact(problem, SEARCH)
    assert answer.assignment is not None
    assert answer.bound_s > 0
    assert "too many for a solver" in answer.notes[0]


@pytest.mark.parametrize("objective", ["max_load", "block_latency"])
def test_objectives_of_host_memory_are_solved(objective: str) -> None:
    problem = load_problem(np.random.default_rng(1), 6, 2, 1, objective=objective)
    answer = exact(problem, SEARCH)
    assert answer.proven_optimal
    assert answer.notes[0].startswith("optimal, proven by")


def test_what_fits_nowhere_is_proven_so() -> None:
    graph = plain_graph(3, [(0, 1), (1, 2)], weight_bytes=[4] * 3)
    for objective in ("latency", "throughput"):
        problem = make_problem(graph, unit_cluster(2, memory_bytes=5), np.ones((3, 2)), objective)
        answer = exact(problem, SEARCH)
        assert answer.assignment is None
        assert "no placement can fit" in answer.reason or "proven" in answer.reason


def test_max_load_that_fits_nowhere_is_refuted_by_the_solver() -> None:
    """Three weights of 4 bytes on two devices of 7: 12 of 14 bytes, but no two share a device."""
    from gdp.cluster.types import Device, make_cluster

    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0, 7) for i in range(2)]
    graph = plain_graph(3, [(0, 1), (1, 2)], weight_bytes=[4] * 3)
    problem = make_problem(
        graph, make_cluster("two", devices), np.ones((3, 2)), "max_load", sent_s=np.ones(3)
    )
    answer = LEAST_LOAD.solve(problem, SEARCH)
    assert answer.assignment is None
    assert answer.reason == "no placement fits the devices' memories (proven)"
    assert host_load.values(problem, np.array([[0, 1, 1]]))[1][0] == 1


def test_without_cp_sat_the_extra_is_named_and_exact_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("exact"))):
        least_latency(fork_join("latency"), SEARCH)
    answer = exact(fork_join("latency"), SEARCH)
    assert answer.assignment is not None
    assert install_command("exact") in answer.notes[0]


def test_place_reports_the_proof() -> None:
    graph = plain_graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)], flop=[1.0, 2.0, 3.0, 1.0])
    result = gdp.place(graph, unit_cluster(2), method="exact", search=SEARCH)
    assert result.proven_optimal
    assert result.gap < 1e-5
    assert result.notes[0].startswith("optimal, proven by")
