"""The unit of time changes no answer, and a clock ends one between decodes."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.clock import Clock
from gdp.learn.instances import Instance, make, random_graph
from gdp.methods.base import Search
from gdp.policy.method import place_with_policy
from gdp.policy.policy import default_checkpoint, load_policy
from gdp.policy.propose import propose
from gdp.policy.repair import TIGHTER, fitting_greedy
from gdp.policy.view.unit import in_own_unit
from gdp.problem.problem import Problem

INSTANCES = (
    Instance("layered-60-1", 2),
    Instance("layered-60-1", 2, memory=1.4),
    Instance("series-80-2", 5, "throughput"),
)


def in_other_unit(problem: Problem, factor: float) -> Problem:
    """The same problem with every time multiplied."""
    old = problem.cluster
    devices = tuple(replace(x, dispatch_s=x.dispatch_s * factor) for x in old.devices)
    cluster = replace(
        old, devices=devices, link_bytes_per_s=old.link_bytes_per_s / factor,
        link_latency_s=old.link_latency_s * factor,
    )  # fmt: skip
    return replace(problem, cluster=cluster, compute_s=problem.compute_s * factor)


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda x: x.key)
def test_the_unit_of_time_changes_no_answer(instance: Instance) -> None:
    """Milliseconds for seconds and back: the same devices and priorities."""
    problem = make(instance, random_graph)
    wanted = place_with_policy(problem, None, Search(seconds=None))
    assert wanted.assignment is not None
    for factor in (1e-3, 1e3):
        found = place_with_policy(in_other_unit(problem, factor), None, Search(seconds=None))
        assert found.assignment is not None
        np.testing.assert_array_equal(found.assignment.device, wanted.assignment.device)
        if wanted.assignment.rank is not None:
            np.testing.assert_array_equal(found.assignment.rank, wanted.assignment.rank)
        assert found.evaluations == wanted.evaluations


def test_a_problem_in_its_own_unit_is_the_same_but_for_its_last_digits() -> None:
    problem = make(INSTANCES[0], random_graph)
    own, unit_s = in_own_unit(problem)
    np.testing.assert_allclose(own.compute_s * unit_s, problem.compute_s, rtol=1e-8)
    there, here = own.cluster, problem.cluster
    np.testing.assert_allclose(there.link_latency_s * unit_s, here.link_latency_s, rtol=1e-8)
    off = ~np.eye(problem.num_devices, dtype=bool)
    np.testing.assert_allclose(
        there.link_bytes_per_s[off] / unit_s, here.link_bytes_per_s[off], rtol=1e-8
    )
    for device, old in zip(there.devices, here.devices, strict=True):
        assert device.dispatch_s * unit_s == pytest.approx(old.dispatch_s, rel=1e-8)


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
    from gdp.methods import priorities

    values = priorities.values

    def counting(*arguments):
        nonlocal counted
        counted += len(arguments[1])
        return values(*arguments)

    monkeypatch.setattr(priorities, "values", counting)
    found = propose(policy, problem, 17, 0)
    assert found.evaluations == counted


def test_tightened_limits_count_every_try() -> None:
    """A greedy placement that never fits was simulated under its own limits and all others."""
    problem, policy = make(INSTANCES[1], random_graph), load_policy(default_checkpoint())
    devices = tuple(replace(x, memory_bytes=1) for x in problem.cluster.devices)
    none = replace(problem, cluster=replace(problem.cluster, devices=devices))
    _, _, spent = fitting_greedy(none, policy.view(none), policy.head(none))
    assert spent == 5 * (1 + len(TIGHTER))
