"""Periods and pipeline memory against the slow reference."""

import pytest
from reference_simulator import overflow_bytes, period
from reference_simulator import pipeline_peaks as wanted_peaks
from tiny import random_devices, random_problem, without_queues

from gdp.sim.latency import periods
from gdp.sim.memory import pipeline_peaks

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_periods_and_memory_equal_the_reference_to_the_bit(num_devices: int, free: bool) -> None:
    for seed in range(40):
        problem = random_problem(
            seed, objective="throughput", num_devices=num_devices, runs=seed % 2 == 1, varied=True
        )
        problem = without_queues(problem, seed) if free else problem
        devices = random_devices(problem, seed, count=3)
        found_s, found_bytes = periods(problem, devices)
        for b, device in enumerate(devices):
            assert found_s[b] == period(problem, device.tolist())
            peaks = wanted_peaks(problem, device.tolist())
            assert pipeline_peaks(problem, device).tolist() == peaks
            assert found_bytes[b] == overflow_bytes(problem, peaks)
