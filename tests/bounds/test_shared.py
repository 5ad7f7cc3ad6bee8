"""Bounds and proofs of misfit where devices share memories and processors, with replicas."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tiny import all_devices, brute_force_s, random_problem, sharing

from gdp.bounds.best import all_bounds
from gdp.cluster.types import UNLIMITED_BYTES
from gdp.methods.scoring import proven_misfit
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem
from gdp.sim.score import may_replicate, score, values

TOLERANCE = 1e-9
SEEDS = 16


def shared_problem(seed: int, objective: str) -> Problem:
    """A small random problem on devices of which some share a memory or a processor."""
    problem = random_problem(seed, objective=objective, num_ops=5, num_devices=3, varied=True)
    rng, devices = np.random.default_rng(seed), list(problem.cluster.devices)
    for _ in range(20):
        devices = sharing(rng, [replace(d, memory_pool="", processor="") for d in devices])
        if any(d.memory_pool or d.processor for d in devices):
            break
    cluster = replace(problem.cluster, devices=tuple(devices))
    return replace(problem, cluster=cluster, replicas=objective == "throughput")


def best_replicated_s(problem: Problem) -> float:
    """The least period of all placements with some team, of those that fit; inf without any."""
    best_s, io = np.inf, problem.graph.is_io
    rows = np.unique(all_devices(problem), axis=0)
    for size in (2, 3):
        for team in itertools.combinations(range(3), size):
            teams: Teams = (team,)
            for device in rows:
                led = ~io & (device == team[0])
                if np.isin(device[~io], team[1:]).any() or not led.any():
                    continue
                if problem.allowed[np.ix_(np.flatnonzero(led), team)].all():
                    found = score(problem, device, None, teams)
                    best_s = min(best_s, found.value_s if found.feasible else np.inf)
    return best_s


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_no_bound_is_above_the_best_of_all_placements(objective: str) -> None:
    binding = 0
    for seed in range(SEEDS):
        problem = shared_problem(seed, objective)
        best_s = brute_force_s(problem)
        if may_replicate(problem) and seed < 8:
            best_s = min(best_s, best_replicated_s(problem))
        for bound in all_bounds(problem, 1.0):
            assert bound.value_s <= best_s * (1 + TOLERANCE), (seed, bound.argument)
        if proven_misfit(problem) is not None:
            assert np.isinf(best_s), seed
        alone = [replace(d, memory_pool="", processor="") for d in problem.cluster.devices]
        apart = replace(problem, cluster=replace(problem.cluster, devices=tuple(alone)))
        binding += best_s > brute_force_s(apart)
    assert binding >= 3


def test_a_processor_does_the_work_of_all_of_its_devices() -> None:
    """Ample memory, devices of one processor: the bound is all work, which one of them does."""
    for seed in range(6):
        problem = random_problem(
            seed, objective="throughput", num_ops=6, num_devices=3, varied=True
        )
        devices = tuple(
            replace(d, processor="socket", memory_bytes=UNLIMITED_BYTES, dispatch_s=0.0)
            for d in problem.cluster.devices
        )
        compute_s = np.where(problem.graph.is_io[:, None], problem.compute_s, 1.0 + seed)
        cluster = replace(problem.cluster, devices=devices)
        problem = replace(problem, cluster=cluster, compute_s=compute_s, replicas=True)
        assert not may_replicate(problem)
        everywhere, _ = values(problem, np.full((1, 6), problem.cluster.host))
        bound = max(bound.value_s for bound in all_bounds(problem, 1.0))
        assert bound == pytest.approx(everywhere[0], rel=1e-8)
