"""Proposals: a clock ends them between decodes, and every simulation is counted."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.base.clock import Clock
from gdp.learn.instances import Instance, make, random_graph
from gdp.methods.heuristics.list_schedule import missing_bytes
from gdp.policy.policy import default_checkpoint, load_policy
from gdp.policy.propose import ROUNDS, TIGHTER, fitting_greedy, propose
from gdp.sim.objectives import OBJECTIVES

INSTANCES = (
    Instance("layered-60-1", 2),
    Instance("layered-60-1", 2, memory=1.4),
)


def test_a_clock_that_is_over_leaves_the_greedy_placement() -> None:
    problem, policy = make(INSTANCES[0], random_graph), load_policy(default_checkpoint())
    late = propose(policy, problem, 17, 0, Clock(0.0))
    assert len(late.device) == 1
    whole = propose(policy, problem, 17, 0)
    assert len(whole.device) == 17
    np.testing.assert_array_equal(late.device[0], whole.device[0])


def test_every_simulation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What proposing reports is what came to the simulator, but for the advice itself."""
    problem, policy = make(INSTANCES[1], random_graph), load_policy(default_checkpoint())
    propose(policy, problem, 1, 0)  # the advice is asked once
    counted = 0
    row = OBJECTIVES[problem.objective]

    def counting(*arguments):
        nonlocal counted
        counted += len(arguments[1])
        return row.values(*arguments)

    def missing(*arguments):
        nonlocal counted
        counted += 1
        return missing_bytes(*arguments)

    monkeypatch.setitem(OBJECTIVES, problem.objective, replace(row, values=counting))
    monkeypatch.setattr("gdp.policy.propose.missing_bytes", missing)
    found = propose(policy, problem, 17, 0)
    assert found.evaluations == counted


def test_tightened_limits_count_every_try() -> None:
    """A greedy placement that never fits was simulated under its own limits and all others."""
    problem, policy = make(INSTANCES[1], random_graph), load_policy(default_checkpoint())
    devices = tuple(replace(x, memory_bytes=1) for x in problem.cluster.devices)
    none = replace(problem, cluster=replace(problem.cluster, devices=devices))
    _, _, spent = fitting_greedy(none, policy.view(none), policy.head(none))
    assert spent == ROUNDS * (5 + 1) + 5 * len(TIGHTER)
