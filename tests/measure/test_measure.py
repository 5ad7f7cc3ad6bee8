"""The measuring loop, with contenders that only pretend to run."""

import math
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from gdp.base.errors import MeasurementError
from gdp.measure.measuring import PRECISION, SLICE_S, Measuring, Quota, measure, span_s
from gdp.measure.statistics import MIN_BLOCKS, PER_SLOT, Trace
from gdp.targets.jax.run import AsyncExecution


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
    found = measure({"slow": slow, "fast": fast}, Measuring(1000.0))
    assert ran[:8] == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert found["slow"].latency_s == pytest.approx(0.2)
    assert found["fast"].throughput_per_s == pytest.approx(10.0)
    assert found["fast"].stage_s == pytest.approx((0.1,))
    assert len(found["fast"].block_latency_s) == found["fast"].rounds == MIN_BLOCKS
    assert not found["fast"].throughput.is_noisy


class Uneven(Fake):
    """A stage that a fast and a slow worker serve in turn, each as long as a step at most."""

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        (trace,) = super().run(quota)
        turns = tuple(i % 2 for i in range(len(trace.finish_s)))
        runs = tuple(
            (f - (0.05, 0.1)[turn], f) for f, turn in zip(trace.finish_s, turns, strict=True)
        )
        return (Trace(trace.start_s, trace.finish_s, (runs,), (0,), (2,), (turns,)),)


def test_those_who_serve_a_stage_in_turn_are_timed_apart() -> None:
    found = measure({"one": Uneven("one", [0.1], 2)}, Measuring(1000.0))["one"]
    assert found.member_s == (pytest.approx((0.05, 0.1)),)
    alone = measure({"one": Fake("one", [0.1])}, Measuring(1000.0))["one"]
    assert alone.member_s == ()


@pytest.mark.parametrize(("step_s", "slots"), [(0.1, 1), (0.001, 1), (0.1, 4), (0.1, 40)])
def test_every_round_counts_enough(step_s: float, slots: int) -> None:
    """At least six completions for each sample in flight, and a tenth of a second."""
    found = measure({"one": Fake("one", [step_s], slots)}, Measuring(1e6))["one"]
    assert found.completions >= MIN_BLOCKS * PER_SLOT * slots
    assert found.seconds >= MIN_BLOCKS * (SLICE_S - 2 * step_s)
    assert not found.is_capped


def test_measuring_ends_as_soon_as_rates_are_known_to_three_percent() -> None:
    """Rounds of 10 samples/s give or take 1%: six of them are enough, of 1000 s."""
    steady = Fake("steady", [0.1, 0.101, 0.1, 0.099])
    found = measure({"steady": steady}, Measuring(1000.0))["steady"]
    assert found.rounds == MIN_BLOCKS
    assert found.throughput.width < PRECISION
    assert not found.is_capped


def test_measuring_goes_on_while_one_contender_is_not_known_and_ends_in_time() -> None:
    """Rounds of 10 and 13 samples/s in turn are never known to 3%: all rounds that end within the
    seconds, warming up included, are run, and no more."""
    fakes = {"steady": Fake("steady", [0.1]), "shaky": Fake("shaky", [0.1, 0.077])}
    spent: list[float] = []
    run = Fake.run

    def timed(fake: Fake, quota: Quota) -> tuple[Trace, ...]:
        traces = run(fake, quota)
        spent.append(span_s(traces))
        return traces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fake, "run", timed)
        found = measure(fakes, Measuring(20.0))
    assert found["shaky"].is_capped
    assert not found["steady"].is_capped
    assert found["shaky"].rounds == found["steady"].rounds > MIN_BLOCKS
    assert 20.0 - 2 * max(spent) < sum(spent) <= 20.0


def test_the_cap_ends_a_round_and_is_said() -> None:
    """A second for two contenders: half of it for each, of 0.1 s a sample."""
    fakes = {name: Fake(name, [0.1]) for name in ("one", "two")}
    found = measure(fakes, Measuring(1.0))
    assert fakes["one"].quotas[-1].cap_s == 0.5
    assert found["one"].rounds == 1
    assert found["one"].completions == PER_SLOT


def test_a_model_slower_than_the_cap_still_shows_a_steady_rate() -> None:
    found = measure({"one": Fake("one", [30.0], slots=3)}, Measuring(1.0))["one"]
    assert found.completions == 3 * PER_SLOT
    assert len(found.block_throughput_per_s) == MIN_BLOCKS
    assert found.throughput_per_s == pytest.approx(1 / 30.0)


def test_the_median_round_is_reported_with_the_spread_of_all() -> None:
    """Of 10, 10.2, 9.8, 10.1, 25 and 10.15 samples/s after one that warms up: the burst of 25 is in
    the interval, which so is wide, and not in the value."""
    rates = [1.0, 10.0, 10.2, 9.8, 10.1, 25.0, 10.15]
    found = measure({"one": Fake("one", [1 / r for r in rates])}, Measuring(5.0))["one"]
    assert found.rounds == 6
    assert found.throughput_per_s == pytest.approx(10.125)
    assert found.latency_s == pytest.approx((1 / 10.1 + 1 / 10.15) / 2)
    assert found.throughput.is_noisy
    assert (found.throughput.low, found.throughput.high) == pytest.approx((9.8, 25.0))


def test_a_contender_that_contradicts_itself_ends_the_measurement() -> None:
    fakes = {"good": Fake("good", [0.1]), "placed": Fake("placed", [0.005], 2, busy_s=0.086)}
    with pytest.raises(MeasurementError, match="placed: 200 samples/s"):
        measure(fakes, Measuring(100.0))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="--measure-seconds must be positive and finite, got"):
        Measuring(seconds)


def test_every_stage_and_round_is_told_with_the_time_that_is_left() -> None:
    said: list[tuple[str, float | None]] = []
    measuring = Measuring(5.0, progress=lambda *told: said.append(told))
    measure({"a": Fake("a", [0.1, 0.077]), "b": Fake("b", [0.1])}, measuring)
    assert said[0] == ("measuring 2 ways to run it in turn, at most 5 s", None)
    assert said[1][0] == "measuring 2 ways to run it, round 1, at most 3 s left"
    shares = [share for _, share in said[1:] if share is not None]
    assert len(shares) == len(said) - 1 > 1
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1


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
    issued = AsyncExecution((device.issue,), slots, device.wait, lambda: device.now_s)
    (trace,) = issued.run(Quota(100, 2.0, 1e6))
    assert len(trace.finish_s) >= 100 + 2 * slots
    starts, finishes = np.sort(trace.start_s), np.sort(trace.finish_s)
    assert (starts[slots:] >= finishes[:-slots]).all()
    found = measure({"jax": issued}, Measuring(1e6))["jax"]
    assert found.throughput_per_s == pytest.approx(4.0)
    assert found.latency_s == pytest.approx(0.25 * slots)


def test_measuring_jax_programs_imports_no_onnx() -> None:
    code = (
        "import sys, gdp.measure.async_execution; "
        "print([name for name in sys.modules if name.startswith('onnx')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
