"""Periods and pipeline memory against the slow reference."""

import functools

import numpy as np
import pytest
from reference_simulator import overflow_bytes, period
from reference_simulator import pipeline_peaks as wanted_peaks
from tiny import random_devices, random_problem, without_queues

from gdp.problem.problem import Problem
from gdp.sim.latency import periods
from gdp.sim.memory import pipeline_peaks

pytestmark = pytest.mark.usefixtures("both_ways")


@functools.cache
def cases(num_devices: int, free: bool) -> list[tuple[Problem, np.ndarray, list]]:
    """Problems, placements, and the reference's period and peaks of each, for both simulators."""
    made = []
    for seed in range(40):
        problem = random_problem(
            seed, objective="throughput", num_devices=num_devices, runs=seed % 2 == 1, varied=True
        )
        problem = without_queues(problem, seed) if free else problem
        devices = random_devices(problem, seed, count=3)
        wanted = [(period(problem, x), wanted_peaks(problem, x)) for x in devices.tolist()]
        made.append((problem, devices, wanted))
    return made


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_periods_and_memory_equal_the_reference_to_the_bit(num_devices: int, free: bool) -> None:
    for problem, devices, wanted in cases(num_devices, free):
        found_s, found_bytes = periods(problem, devices)
        for b, (seconds, peaks) in enumerate(wanted):
            assert found_s[b] == seconds
            assert pipeline_peaks(problem, devices[b]).tolist() == peaks
            assert found_bytes[b] == overflow_bytes(problem, peaks)
