"""Measurement of contenders: one loop and one statistic for every runtime.

Contenders take turns in rounds, so that what disturbs the machine disturbs all of them. In every
round a contender's pipeline fills, and what completes from then until the last sample has entered
counts. What is reported is the median of the rounds, never the best, with a confidence interval
that bursts of other work on the machine do not blow up (`gdp.measure.statistics.estimate`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from gdp.base.clock import MEASURE_SECONDS
from gdp.base.errors import ArgumentError
from gdp.measure.statistics import (
    MIN_BLOCKS,
    PER_SLOT,
    Count,
    Estimate,
    Trace,
    check_physics,
    count,
    estimate,
)

SLICE_S = 0.1
"""Seconds of a contender in one round, at least: so short that there are many rounds, of which a
burst of other work disturbs few."""
PRECISION = 0.03
"""Measuring ends where the 95% interval of every rate is narrower than this share of its value."""

Progress = Callable[[str, float | None], None]
"""Called with the current step and, where it is known, the share of it that is done."""


@dataclass(frozen=True)
class Measuring:
    """Settings of measuring a placement and its baselines."""

    seconds: float = MEASURE_SECONDS  # at most; one round of slow models may take longer
    seed: int = 0  # of inputs, and of weights that a model lacks
    precision: float = PRECISION  # width of the 95% intervals at which measuring ends
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ArgumentError(
                f"--measure-seconds must be positive and finite, got {self.seconds:g}"
            )

    def say(self, stage: str, fraction: float | None = None) -> None:
        """Report the progress to the listener, if any."""
        if self.progress is not None:
            self.progress(stage, fraction)


@dataclass(frozen=True)
class Quota:
    """End of one round of a contender: after a number of completions and seconds of the full
    pipeline, or at the cap."""

    completions: int
    seconds: float
    cap_s: float
    per_slot: int = PER_SLOT  # samples let in whatever the cap

    def wants(self, entered: int, slots: int, since_start_s: float, since_full_s: float) -> bool:
        """True if another sample is let in.

        `slots` samples fill a pipeline, and as many are in it when the last one has entered;
        neither count. `per_slot` times as many are let in whatever the cap: the slowest model too
        must show that samples leave a pipeline as fast as they enter it.
        """
        if entered < self.per_slot * slots:
            return True
        if since_start_s >= self.cap_s:
            return False
        return entered < self.completions + 2 * slots or since_full_s < self.seconds


def one_at_a_time(quota: Quota, sample_s: Callable[[], float]) -> tuple[Trace, ...]:
    """Samples back to back until the quota is met, by the seconds that each returns."""
    start_s, finish_s, now_s = list[float](), list[float](), 0.0
    while quota.wants(len(finish_s), 1, now_s, now_s - (finish_s[0] if finish_s else 0.0)):
        start_s.append(now_s)
        now_s += sample_s()
        finish_s.append(now_s)
    return (Trace(tuple(start_s), tuple(finish_s)),)


WARM_UP = Quota(0, 0.0, 0.0, per_slot=1)
"""A sample in every slot. First runs allocate and compile, and touch the weights for the first
time."""


@runtime_checkable
class Contender(Protocol):
    """Something that runs samples, in one pipeline or in several side by side."""

    @property
    def slots(self) -> int:
        """Samples in flight, in all pipelines together."""
        ...

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """Run samples until the quota is met; one trace for each pipeline."""
        ...


@dataclass(frozen=True)
class Measured:
    """One contender over all rounds: medians of blocks, with 95% intervals. A block is a round, or
    a part of one where there are few rounds."""

    latency: Estimate  # seconds of a sample
    throughput: Estimate  # samples per second
    block_latency_s: tuple[float, ...]  # medians over the samples of each block
    block_throughput_per_s: tuple[float, ...]
    rounds: int
    completions: int  # counted in all rounds
    seconds: float  # in which they were counted
    is_capped: bool  # the cap was over before the rate was known to the wanted precision
    stage_s: tuple[float, ...]  # of each stage of the first pipeline, median over all runs
    # The same of each of those who serve a stage in turn; empty where one does, or none is told.
    member_s: tuple[tuple[float, ...], ...] = ()

    @property
    def latency_s(self) -> float:
        """From the entry of a sample to its finish, median over the blocks."""
        return self.latency.value

    @property
    def throughput_per_s(self) -> float:
        """Samples per second of full pipelines, median over the blocks."""
        return self.throughput.value


def measure(contenders: Mapping[str, Contender], measuring: Measuring) -> dict[str, Measured]:
    """Every contender's latency and throughput.

    In a round each contender runs for at least `SLICE_S` and `PER_SLOT` completions for every
    sample in flight. Rounds end when every rate is known to `measuring.precision`, after
    `MIN_BLOCKS` of them at the earliest, or when the next would end after `measuring.seconds`.
    Raises `MeasurementError` for a rate that the busy times of its own trace forbid.
    """
    if not contenders:
        return {}
    runs = {name: Runs(contender) for name, contender in contenders.items()}
    # Of one way both samples alone and full pipelines may be measured: "NAME" and "NAME, HOW".
    count = len({name.partition(",")[0] for name in runs})
    ways = f"{count} way{'s' if count > 1 else ''} to run it"
    measuring.say(f"measuring {ways} in turn, at most {measuring.seconds:g} s")
    spent_s = sum(span_s(contender.run(WARM_UP)) for contender in contenders.values())
    cap_s = measuring.seconds / len(contenders)
    names = list(contenders)
    while True:
        rounds, began_s = len(runs[names[0]].counts), spent_s
        # Another order every round: a follower finds other caches than the leader.
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            spent_s += runs[name].add(name, cap_s)
        left_s = measuring.seconds - spent_s
        message = f"measuring {ways}, round {rounds + 1}, at most {max(left_s, 0.0):.0f} s left"
        measuring.say(message, min(spent_s / measuring.seconds, 1.0))
        summaries = {name: own.summary(measuring.precision) for name, own in runs.items()}
        is_precise = rounds + 1 >= MIN_BLOCKS and not any(s.is_capped for s in summaries.values())
        if is_precise or left_s < spent_s - began_s:
            return summaries


def span_s(traces: Sequence[Trace]) -> float:
    """Seconds from the first sample's entry to the last one's finish, of pipelines side by side."""
    return max(max(t.finish_s) for t in traces) - min(min(t.start_s) for t in traces)


class Runs:
    """The rounds of one contender so far."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.traces: list[tuple[Trace, ...]] = []
        self.counts: list[Count] = []

    def add(self, name: str, cap_s: float) -> float:
        """Run another round; returns the seconds that it took."""
        slots = self.contender.slots
        traces = self.contender.run(Quota(PER_SLOT * slots, SLICE_S, cap_s))
        counted = count(traces, slots // len(traces))
        check_physics(name, traces, counted, slots // len(traces))
        self.traces.append(traces)
        self.counts.append(counted)
        return span_s(traces)

    def summary(self, precision: float) -> Measured:
        """Medians and intervals. A round is a block; fewer than `MIN_BLOCKS` are split."""
        per_round = -(-MIN_BLOCKS // len(self.counts))
        latencies, rates = [], []
        for traces, counted in zip(self.traces, self.counts, strict=True):
            parts = [
                np.array_split(trace.latencies_s[c.first + 1 : c.last + 1], per_round)
                for trace, c in zip(traces, counted.of_trace, strict=True)
            ]
            latencies += [float(np.median(np.concatenate(own))) for own in zip(*parts, strict=True)]
            rates += counted.batch_rates(per_round)
        throughput = estimate(rates)
        return Measured(
            latency=estimate(latencies),
            throughput=throughput,
            block_latency_s=tuple(latencies),
            block_throughput_per_s=tuple(rates),
            rounds=len(self.counts),
            completions=sum(counted.completions for counted in self.counts),
            seconds=sum(counted.seconds for counted in self.counts),
            is_capped=not throughput.width < precision,
            stage_s=tuple(
                float(np.median([s for traces in self.traces for s in traces[0].stage_s[i]]))
                for i in range(len(self.traces[0][0].stage_runs))
            ),
            member_s=_member_s(self.traces),
        )


def _member_s(rounds: Sequence[tuple[Trace, ...]]) -> tuple[tuple[float, ...], ...]:
    """Median seconds of each stage on each of its replicas."""
    first = rounds[0][0]
    members = []
    for i, turns in enumerate(first.turns):
        own = [
            [s for traces in rounds
             for s, turn in zip(traces[0].stage_s[i], traces[0].run_turns[i], strict=True)
             if turn == member]
            for member in range(turns)
        ]  # fmt: skip
        members.append(tuple(float(np.median(s)) for s in own) if turns > 1 and all(own) else ())
    return tuple(members)
