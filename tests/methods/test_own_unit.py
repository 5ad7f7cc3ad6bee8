"""Seconds, milliseconds or ticks: the placement is the same."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import random_problem

import gdp
from gdp import api
from gdp.cluster.types import Cluster
from gdp.errors import GdpError
from gdp.problem.own_unit import in_own_unit
from gdp.sim.score import score

FACTORS = (2.0**-30, 1e-3)
SLOW = ("auto", "exact", "guided", "mip")
QUICK = gdp.Search(seed=3, seconds=None, evaluations=60)


def in_unit(cluster: Cluster, factor: float) -> Cluster:
    """The same machine where a second is so many units."""
    devices = tuple(replace(d, dispatch_s=d.dispatch_s * factor) for d in cluster.devices)
    return replace(
        cluster, devices=devices, link_bytes_per_s=cluster.link_bytes_per_s / factor,
        link_latency_s=cluster.link_latency_s * factor,
    )  # fmt: skip


def placed(method: str, objective: str, seed: int, factor: float) -> gdp.Result | None:
    """What a method answers in some unit; None where it says that nothing fits."""
    problem = random_problem(seed, objective=objective, num_ops=6)

    def costs(graph: gdp.OpGraph, cluster: Cluster) -> np.ndarray:
        rng = np.random.default_rng(seed)  # few distinct times, which add up to ties
        return factor * rng.choice([0.1, 0.2, 0.3, 1.0], size=(graph.num_ops, cluster.num_devices))

    try:
        return gdp.place(
            problem.graph, in_unit(problem.cluster, factor), objective=objective, method=method,
            costs=costs, search=QUICK,
        )  # fmt: skip
    except GdpError:
        return None


@pytest.mark.parametrize("method", sorted(set(api.methods()) - {"hsdag"}))
def test_answers_are_the_same_in_any_unit_of_time(method: str) -> None:
    answered = 0
    for objective, seed in (("latency", 1), ("throughput", 2)):
        first = placed(method, objective, seed, 1.0)
        for factor in FACTORS[1:] if method in SLOW else FACTORS:
            other = placed(method, objective, seed, factor)
            assert (first is None) == (other is None)
            if first is None or other is None:
                continue
            answered += 1
            assert other.placement.device.tolist() == first.placement.device.tolist()
            assert other.placement.teams == first.placement.teams
            assert other.value_s == pytest.approx(first.value_s * factor, rel=1e-12)
            assert other.bound_s == pytest.approx(first.bound_s * factor, rel=1e-9)
            assert len(other.notes) == len(first.notes)
    assert answered


def test_a_problem_in_its_own_unit_is_the_same_problem() -> None:
    for seed in range(5):
        problem = random_problem(seed)
        own = in_own_unit(problem)
        assert own.problem.compute_s[np.isfinite(own.problem.compute_s)].max() == 1
        device = problem.allowed.argmax(axis=1)[np.unique(problem.group, return_index=True)[1]]
        device = device[problem.group]
        before, after = (score(p, device, None) for p in (problem, own.problem))
        assert after.value_s * own.unit_s == pytest.approx(before.value_s, rel=1e-9)
        assert (after.peak_bytes == before.peak_bytes).all()


def test_what_is_said_and_told_is_in_seconds() -> None:
    """Ops of 4 s each: no value is below that, whatever the unit inside."""
    problem = random_problem(1, num_ops=6)
    told: list[float] = []
    search = replace(QUICK, progress=lambda share, value_s: told.append(value_s))
    result = gdp.place(
        problem.graph, problem.cluster, method="auto", search=search,
        costs=lambda graph, cluster: np.full((graph.num_ops, cluster.num_devices), 4.0),
    )  # fmt: skip
    fitting = [row.value_s for row in result.candidates if row.feasible and row.value_s]
    assert min(told) >= result.bound_s >= 4.0
    assert min(fitting) == pytest.approx(result.value_s, rel=0.5)
    assert result.curve[-1][1] == min(told)
