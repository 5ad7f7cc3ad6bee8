"""Times contenders in interleaved rounds: what disturbs the machine disturbs all of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdp.runtime.ort.pipeline import Pipeline, Trace

_LEAST_SAMPLES = 4  # of one measurement, beyond those that fill the pipeline


@dataclass(frozen=True)
class Contender:
    """Pipelines that run side by side, each on samples of its own."""

    pipelines: tuple[Pipeline, ...]

    @property
    def fill(self) -> int:
        """Samples before a pipeline counts as full."""
        slots = max(pipeline.num_slots for pipeline in self.pipelines)
        return 1 if slots == 1 else slots + 1

    def run(self, seconds: float) -> tuple[Trace, ...]:
        """What happens in so many seconds, and in `_LEAST_SAMPLES` of a full pipeline at least."""
        until_s = time.perf_counter() + seconds
        for pipeline in self.pipelines:
            pipeline.start(self.fill + _LEAST_SAMPLES, until_s)
        return tuple(pipeline.wait() for pipeline in self.pipelines)


@dataclass(frozen=True)
class Measured:
    """One contender's rounds. Medians resist disturbance, bests show what the machine can do."""

    round_latency_s: tuple[float, ...]  # medians over the samples of each round
    round_throughput_per_s: tuple[float, ...]
    stage_s: tuple[float, ...]  # of each stage of the first pipeline, median over all runs

    @property
    def latency_s(self) -> float:
        return float(np.median(self.round_latency_s))

    @property
    def throughput_per_s(self) -> float:
        return float(np.median(self.round_throughput_per_s))

    @property
    def best_latency_s(self) -> float:
        return min(self.round_latency_s)

    @property
    def best_throughput_per_s(self) -> float:
        return max(self.round_throughput_per_s)


def measure(
    contenders: Mapping[str, Contender], *, rounds: int, seconds: float
) -> dict[str, Measured]:
    """Every contender's latency and throughput; `seconds` is the wall clock of all rounds."""
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"rounds and seconds must be positive, got {rounds} and {seconds}")
    share_s = seconds / (rounds * len(contenders))
    for contender in contenders.values():
        contender.run(0.0)  # first runs allocate, and touch the weights for the first time
    traces: dict[str, list[tuple[Trace, ...]]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        # Another order every round: what follows a contender finds other caches than what leads it.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            traces[name].append(contenders[name].run(share_s))
    return {
        name: Measured(
            tuple(_latency_s(run) for run in runs),
            tuple(_rate_per_s(run, contenders[name].fill) for run in runs),
            _stage_s(runs),
        )
        for name, runs in traces.items()
    }


def _latency_s(traces: Sequence[Trace]) -> float:
    return float(np.median([trace.latency_s for trace in traces]))


def _rate_per_s(traces: Sequence[Trace], fill: int) -> float:
    # The slower of two replicas must not be timed while it has the machine to itself.
    until_s = min(max(trace.start_s) for trace in traces)
    return sum(trace.rate_per_s(fill, until_s) for trace in traces)


def _stage_s(runs: Sequence[tuple[Trace, ...]]) -> tuple[float, ...]:
    stages = len(runs[0][0].stage_s)
    return tuple(
        float(np.median([s for traces in runs for s in traces[0].stage_s[i]]))
        for i in range(stages)
    )
