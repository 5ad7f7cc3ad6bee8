"""Measures how fast contenders run: one loop and one statistic for every runtime.

Contenders take turns in rounds, so that what disturbs the machine disturbs all of them. In every
round a contender's pipeline fills, and what completes from then until the last sample has entered
counts. What is reported is the median of the rounds, never the best, with a confidence interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from gdp.runtime.statistics import (
    PER_SLOT,
    Count,
    Estimate,
    Trace,
    batch_means,
    check_physics,
    count,
    estimate,
)

COMPLETIONS = 100  # of one contender, at least
SECONDS = 2.0  # at least
MEASURE_SECONDS = 60.0  # of all rounds and contenders together, at most
MIN_BATCHES = 5  # of an interval; fewer rounds than that are split


@dataclass(frozen=True)
class Measuring:
    """How a placement and its baselines are measured."""

    rounds: int = 5
    seconds: float = MEASURE_SECONDS  # what the timing takes at most; loading comes on top
    seed: int = 0  # of inputs, and of weights that a model lacks


@dataclass(frozen=True)
class Quota:
    """When one round of a contender ends: after so many completions and seconds of the full
    pipeline, or when the cap is over."""

    completions: int
    seconds: float
    cap_s: float

    def wants(self, entered: int, slots: int, since_start_s: float, since_full_s: float) -> bool:
        """Whether another sample is let in.

        `slots` samples fill a pipeline, and as many are in it when the last one has entered;
        neither count. So many more are let in whatever the cap: the slowest model too must show
        that samples leave a pipeline as fast as they enter it.
        """
        if entered < 3 * slots + 1:
            return True
        if since_start_s >= self.cap_s:
            return False
        return entered < self.completions + 2 * slots or since_full_s < self.seconds


@runtime_checkable
class Contender(Protocol):
    """Something that runs samples, in one pipeline or in several side by side."""

    @property
    def slots(self) -> int:
        """Samples in flight, in all pipelines together."""
        ...

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """What happened in each pipeline until the quota was met."""
        ...


@dataclass(frozen=True)
class Measured:
    """One contender over all rounds: medians of the rounds, with 95% intervals."""

    latency: Estimate  # seconds of a sample
    throughput: Estimate  # samples per second
    round_latency_s: tuple[float, ...]  # medians over the samples of each round
    round_throughput_per_s: tuple[float, ...]
    completions: int  # counted in all rounds
    seconds: float  # in which they were counted
    is_capped: bool  # the cap was over before enough was counted
    stage_s: tuple[float, ...]  # of each stage of the first pipeline, median over all runs

    @property
    def latency_s(self) -> float:
        """From the entry of a sample to its finish, median over the rounds."""
        return self.latency.value

    @property
    def throughput_per_s(self) -> float:
        """Samples per second of full pipelines, median over the rounds."""
        return self.throughput.value


def measure(
    contenders: Mapping[str, Contender], *, rounds: int, seconds: float
) -> dict[str, Measured]:
    """Every contender's latency and throughput.

    A round counts at least `COMPLETIONS`, `PER_SLOT` times the samples in flight and `SECONDS`,
    unless its share of `seconds`, the cap of all rounds together, is over before. Raises
    `MeasurementError` for a rate that the busy times of its own trace forbid.
    """
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"rounds and seconds must be positive, got {rounds} and {seconds}")
    cap_s = seconds / (rounds * max(len(contenders), 1))
    for contender in contenders.values():
        # First runs allocate and compile, and touch the weights for the first time.
        contender.run(Quota(0, 0.0, 0.0))
    found: dict[str, list[tuple[Trace, ...]]] = {name: [] for name in contenders}
    counts: dict[str, list[Count]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        # Another order every round: what follows a contender finds other caches than what leads it.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            slots = contenders[name].slots
            traces = contenders[name].run(Quota(max(COMPLETIONS, PER_SLOT * slots), SECONDS, cap_s))
            counted = count(traces, slots // len(traces))
            check_physics(name, traces, counted, slots // len(traces))
            found[name].append(traces)
            counts[name].append(counted)
    return {name: summary(found[name], counts[name], contenders[name].slots) for name in contenders}


def summary(rounds: Sequence[tuple[Trace, ...]], counts: Sequence[Count], slots: int) -> Measured:
    """What the rounds of one contender say together."""
    per_round = -(-MIN_BATCHES // len(rounds))
    samples = [
        np.concatenate([trace.latencies_s[c.first + 1 : c.last + 1] for trace, c in
                        zip(traces, counted.of_trace, strict=True)])
        for traces, counted in zip(rounds, counts, strict=True)
    ]  # fmt: skip
    latencies = [float(np.median(own)) for own in samples]
    rates = [counted.rate_per_s for counted in counts]
    completions = sum(counted.completions for counted in counts)
    seconds = sum(counted.seconds for counted in counts)
    return Measured(
        latency=estimate(latencies, [b for own in samples for b in batch_means(own, per_round)]),
        throughput=estimate(rates, [b for own in counts for b in own.batch_rates(per_round)]),
        round_latency_s=tuple(latencies),
        round_throughput_per_s=tuple(rates),
        completions=completions,
        seconds=seconds,
        is_capped=completions < max(COMPLETIONS, PER_SLOT * slots) or seconds < SECONDS,
        stage_s=_stage_s(rounds),
    )


def _stage_s(rounds: Sequence[tuple[Trace, ...]]) -> tuple[float, ...]:
    stages = len(rounds[0][0].stage_runs)
    return tuple(
        float(np.median([s for traces in rounds for s in traces[0].stage_s[i]]))
        for i in range(stages)
    )
