"""Memory over time: worked by hand once, and its peak that of the kernels on random problems."""

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster

from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.problem.problem import make_problem
from gdp.sim.latency import simulate
from gdp.sim.memory import held_over_time


def test_copies_come_and_go_as_the_rules_say() -> None:
    """in -> a -> b on d1 -> out: in 1 byte, a 2 bytes, b 4 bytes, one second a byte and an op.

    d0 holds `in` during a (0 to 1), a's tensor from 0 until it has arrived on d1 (3), and b's
    tensor from when it is sent (4) to the end; d1 holds a's tensor from 1 until b ends (4), b's
    from 3 until it has arrived (8), and weights of 3 bytes throughout.
    """
    graph = plain_graph(
        4, [(0, 1), (1, 2), (2, 3)], [1, 2, 4, 0], op_types=[INPUT, "Op", "Op", OUTPUT],
        weight_bytes=[0, 0, 3, 0],
    )  # fmt: skip
    compute_s = np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    problem = make_problem(graph, unit_cluster(), compute_s)
    device = np.array([0, 0, 1, 0])
    d0, d1 = held_over_time(problem, simulate(problem, device), device)
    assert list(zip(d0.time_s, d0.held_bytes, strict=True)) == [
        (0.0, 3), (1.0, 2), (3.0, 0), (4.0, 4)
    ]  # fmt: skip
    assert list(zip(d1.time_s, d1.held_bytes, strict=True)) == [
        (0.0, 3), (1.0, 5), (3.0, 9), (4.0, 7), (8.0, 3)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_its_peak_is_the_simulators(seed: int) -> None:
    problem = random_problem(seed, runs=seed % 2 == 1)
    rng = np.random.default_rng(seed)
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    device = np.array([rng.choice(row) for row in choices])[problem.group]
    schedule = simulate(problem, device)
    found = held_over_time(problem, schedule, device)
    assert [int(held.held_bytes.max()) for held in found] == schedule.peak_bytes.tolist()
    for held in found:
        assert (np.diff(held.time_s) > 0).all()
        assert held.time_s[0] == 0.0
        assert held.time_s[-1] <= max(schedule.latency_s, 0.0)


def test_a_run_that_never_ends_holds_its_weights() -> None:
    graph = plain_graph(1, [], weight_bytes=[5])
    problem = make_problem(graph, unit_cluster(), np.array([[1.0, np.inf]]))
    d0, d1 = held_over_time(problem, simulate(problem, np.array([1])), np.array([1]))
    assert (d0.held_bytes.tolist(), d1.held_bytes.tolist()) == ([0], [5])
