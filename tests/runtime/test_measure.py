"""The measuring loop, with contenders that only pretend to run."""

import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from gdp.errors import MeasurementError
from gdp.runtime.jax.measure import Issued
from gdp.runtime.measure import COMPLETIONS, PER_SLOT, SECONDS, Quota, measure
from gdp.runtime.statistics import Trace


@dataclass
class Fake:
    """Samples that take a given time in each round, on one worker that is always busy."""

    name: str
    step_s: list[float]  # of each run in turn, the first of which warms up
    slots: int = 1
    busy_s: float | None = None  # what the worker claims; the truth by default
    ran: list[str] = field(default_factory=list)
    quotas: list[Quota] = field(default_factory=list)

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        step_s = self.step_s[len(self.quotas) % len(self.step_s)]
        self.quotas.append(quota)
        self.ran.append(self.name)
        finish: list[float] = []
        entered = self.slots
        while len(finish) < entered:
            finish.append(step_s * (len(finish) + 1))
            full_s = finish[self.slots - 1] if len(finish) >= self.slots else np.inf
            entered += quota.wants(entered, self.slots, finish[-1], finish[-1] - full_s)
        start = [0.0] * self.slots + finish[: entered - self.slots]
        busy_s = step_s if self.busy_s is None else self.busy_s
        return (
            Trace(tuple(start), tuple(finish), (tuple((f - busy_s, f) for f in finish),), (0,)),
        )


def test_contenders_take_turns_in_another_order_every_round() -> None:
    ran: list[str] = []
    slow, fast = Fake("slow", [0.2], ran=ran), Fake("fast", [0.1], ran=ran)
    found = measure({"slow": slow, "fast": fast}, rounds=3, seconds=1000.0)
    assert ran == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert found["slow"].latency_s == pytest.approx(0.2)
    assert found["fast"].throughput_per_s == pytest.approx(10.0)
    assert found["fast"].stage_s == pytest.approx((0.1,))
    assert len(found["fast"].round_latency_s) == 3
    assert not found["fast"].throughput.is_noisy


@pytest.mark.parametrize(("step_s", "slots"), [(0.1, 1), (0.001, 1), (0.1, 4), (0.1, 40)])
def test_every_round_counts_enough(step_s: float, slots: int) -> None:
    """At least 100 completions, five for each sample in flight, and two seconds."""
    found = measure({"one": Fake("one", [step_s], slots)}, rounds=2, seconds=1e6)["one"]
    assert found.completions >= 2 * max(COMPLETIONS, PER_SLOT * slots)
    assert found.seconds >= 2 * (SECONDS - 2 * step_s)
    assert not found.is_capped


def test_the_cap_ends_a_round_and_is_said() -> None:
    """Ten seconds for two rounds of one contender: five for each, 50 completions of 0.1 s."""
    fake = Fake("one", [0.1])
    found = measure({"one": fake}, rounds=1, seconds=5.0)["one"]
    assert 45 <= found.completions <= 50
    assert found.is_capped
    assert fake.quotas[-1].cap_s == 5.0


def test_a_model_slower_than_the_cap_still_shows_a_steady_rate() -> None:
    found = measure({"one": Fake("one", [30.0], slots=3)}, rounds=1, seconds=1.0)["one"]
    assert found.completions == 10
    assert found.is_capped
    assert found.throughput_per_s == pytest.approx(1 / 30.0)


def test_the_median_round_is_reported_with_the_spread_of_all() -> None:
    """Rounds of 10, 10.2, 9.8, 10.1 and 25 samples/s after one that warms up."""
    rates = [1.0, 10.0, 10.2, 9.8, 10.1, 25.0]
    found = measure({"one": Fake("one", [1 / r for r in rates])}, rounds=5, seconds=1e6)["one"]
    assert found.throughput_per_s == pytest.approx(10.1)
    assert found.latency_s == pytest.approx(1 / 10.1)
    assert found.throughput.is_noisy
    assert found.throughput.low < 10.1 < found.throughput.high


def test_a_contender_that_contradicts_itself_ends_the_measurement() -> None:
    fakes = {"good": Fake("good", [0.1]), "placed": Fake("placed", [0.005], 2, busy_s=0.086)}
    with pytest.raises(MeasurementError, match="placed: 200 samples/s"):
        measure(fakes, rounds=1, seconds=100.0)


def test_rounds_and_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive, got 0"):
        measure({}, rounds=0, seconds=1.0)


class Device:
    """JAX's part: runs what it is given, one sample after the other, on a clock of its own."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s, self.ends_s = 0.0, step_s, 0.0

    def issue(self) -> float:
        self.ends_s = max(self.ends_s, self.now_s) + self.step_s
        return self.ends_s

    def wait(self, ends_s: float) -> None:
        self.now_s = max(self.now_s, ends_s)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_jax_programs_are_measured_by_the_same_loop(slots: int) -> None:
    device = Device(0.25)
    issued = Issued((device.issue,), slots, lambda: device.now_s, device.wait)
    (trace,) = issued.run(Quota(100, 2.0, 1e6))
    assert len(trace.finish_s) >= 100 + 2 * slots
    starts, finishes = np.sort(trace.start_s), np.sort(trace.finish_s)
    assert (starts[slots:] >= finishes[:-slots]).all()
    found = measure({"jax": issued}, rounds=2, seconds=1e6)["jax"]
    assert found.throughput_per_s == pytest.approx(4.0)
    assert found.latency_s == pytest.approx(0.25 * slots)


def test_measuring_jax_programs_imports_no_onnx() -> None:
    code = (
        "import sys, gdp.runtime.jax.measure as m; print([n for n in sys.modules if 'onnx' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
