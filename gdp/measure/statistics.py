"""Statistics of a run of samples: steady rate, confidence intervals, physical limits."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gdp.base.errors import MeasurementError

PER_SLOT = 6
"""Completions for every sample in flight, at least: they come in bursts of as many, and a block
holds one such burst."""
MIN_BLOCKS = 6
"""Blocks of an interval: of fewer, not even the range covers the median with 95% probability."""
CONFIDENCE = 0.95
TOO_WIDE = 0.05
"""An interval wider than this share of its value says that the machine is too noisy."""
_CLOCK = 1e-3  # how far sums of times may exceed what they are part of: clocks round


@dataclass(frozen=True)
class Trace:
    """Events of one run, samples in order of completion."""

    start_s: tuple[float, ...]  # when each sample entered
    finish_s: tuple[float, ...]  # when its last output was there
    # Of each stage, when each of its runs began and ended; empty where a runtime does not tell.
    stage_runs: tuple[tuple[tuple[float, float], ...], ...] = ()
    worker: tuple[int, ...] = ()  # of each stage; the first of those that serve it in turn
    turns: tuple[int, ...] = ()  # how many workers serve each stage in turn; empty: one each
    run_turns: tuple[tuple[int, ...], ...] = ()  # of each run of a stage, who of them ran it

    @functools.cached_property
    def latencies_s(self) -> Float[np.ndarray, "S"]:
        """Seconds from input to all outputs."""
        return np.subtract(self.finish_s, self.start_s)

    @property
    def latency_s(self) -> float:
        """The median sample's."""
        return float(np.median(self.latencies_s))

    @property
    def stage_s(self) -> tuple[tuple[float, ...], ...]:
        """Of each stage, the seconds of each of its runs."""
        return tuple(tuple(end - begin for begin, end in runs) for runs in self.stage_runs)


@dataclass(frozen=True)
class CompletionWindow:
    """The completions of one trace that count: positions, and the times of all of them."""

    first: int  # starts the clock; -1 where the entry of the first sample does
    last: int
    finish_s: Float[np.ndarray, "K"]  # from the start of the clock to the last

    @property
    def samples(self) -> int:
        """Completed after the clock was started."""
        return self.last - self.first

    @property
    def seconds(self) -> float:
        """From the first counted finish to the last."""
        return float(self.finish_s[-1] - self.finish_s[0])


@dataclass(frozen=True)
class Count:
    """Counted completions of one round: a window for each pipeline that ran side by side."""

    of_trace: tuple[CompletionWindow, ...]

    @property
    def completions(self) -> int:
        """Samples counted, of all pipelines."""
        return sum(span.samples for span in self.of_trace)

    @property
    def seconds(self) -> float:
        """Of the longest span: pipelines run side by side."""
        return max(span.seconds for span in self.of_trace)

    @property
    def rate_per_s(self) -> float:
        """Samples per second, of all pipelines together."""
        return sum(span.samples / span.seconds for span in self.of_trace)

    def batch_rates(self, batches: int) -> list[float]:
        """Rates of `count` consecutive batches of completions."""
        steps = [batch_means(np.diff(span.finish_s), batches) for span in self.of_trace]
        return [sum(1.0 / s for s in own) for own in zip(*steps, strict=False)]


def count(traces: Sequence[Trace], slots: int) -> Count:
    """The completions of full pipelines: after the first `slots` samples of every trace, and until
    the last sample of any has entered, because then a pipeline runs dry, and the slower of two must
    not be timed while it has the machine to itself. Where that leaves fewer than `PER_SLOT` for
    every slot, the end of a burst could be all that is seen: then all samples count, with the time
    in which the pipeline fills and runs dry. Such a rate is too low rather than too high.
    """
    begin_s = max(trace.finish_s[min(slots, len(trace.finish_s)) - 1] for trace in traces)
    until_s = min(max(trace.start_s) for trace in traces)
    spans = []
    for trace in traces:
        finish_s = np.array(trace.finish_s)
        first = int(np.searchsorted(finish_s, begin_s))
        last = int(np.searchsorted(finish_s, until_s, side="right")) - 1
        if last - first < PER_SLOT * slots:
            return Count(_whole(traces))
        spans.append(CompletionWindow(first, last, finish_s[first : last + 1]))
    return Count(tuple(spans))


def _whole(traces: Sequence[Trace]) -> tuple[CompletionWindow, ...]:
    """All samples, from the first that entered any of the pipelines to the last of them all."""
    begin_s = min(min(trace.start_s) for trace in traces)
    end_s = max(trace.finish_s[-1] for trace in traces)
    return tuple(
        CompletionWindow(-1, len(t.finish_s) - 1, np.array([begin_s, *t.finish_s[:-1], end_s]))
        for t in traces
    )


@dataclass(frozen=True)
class Estimate:
    """A measured value with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Of the interval, as a share of the value."""
        return (self.high - self.low) / self.value

    @property
    def is_noisy(self) -> bool:
        """True if the machine was too noisy to tell small differences."""
        return not self.width <= TOO_WIDE


def batch_means(values: Float[np.ndarray, "K"], batches: int) -> list[float]:
    """Means of `count` consecutive batches of equal length up to one; fewer if there are too few
    values.

    >>> batch_means(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    [2.0, 6.0]
    """
    return [float(part.mean()) for part in np.array_split(values, min(batches, len(values)))]


def estimate(blocks: Sequence[float]) -> Estimate:
    """The median of the blocks, with a distribution-free interval from their order statistics.

    (x(k), x(n + 1 - k)) of n sorted blocks, with the largest k for which
    P(k <= B <= n - k) >= 0.95, B binomial of n and 1/2

    It covers the median of the distribution that blocks come from, whatever its shape, where blocks
    are independent: David and Nagaraja 2003, Order Statistics, 7.1. So a burst of other work
    widens it only where it disturbs more than k - 1 blocks, its ends are values that were
    measured (positive, as those are), and the median lies within. Samples in a row depend on each
    other, means of many in a row hardly do (batch means, Law and Kelton 2000, 9.5.3): a block is a
    stretch of samples. Raises `ValueError` for fewer than `MIN_BLOCKS`.

    >>> estimate([10.0, 10.1, 9.9, 10.2, 9.8, 10.0, 10.1, 9.9, 31.0])
    Estimate(value=10.0, low=9.9, high=10.2)
    """
    n = len(blocks)
    if n < MIN_BLOCKS:
        raise ValueError(f"an interval needs at least {MIN_BLOCKS} blocks, got {n}")
    ordered, k = np.sort(blocks), _depth(n)
    return Estimate(float(np.median(ordered)), float(ordered[k - 1]), float(ordered[n - k]))


@functools.cache
def _depth(n: int) -> int:
    """The largest k for which the k-th smallest and k-th largest of n blocks enclose the median
    with 95% probability: both tails hold at most 0.025 of the binomial distribution."""
    k, tail = 0, 0.5**n
    while tail <= (1 - CONFIDENCE) / 2:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return k


def check_physics(name: str, traces: Sequence[Trace], counted: Count, slots: int) -> None:
    """Raise `MeasurementError` where more samples were counted than their own trace allows.

    A worker completes at most 1 / (its mean busy seconds per sample). Of n samples that complete
    in a window, at most `slots` had left a worker before it began, and one run may have begun
    before: (n - slots) * busy <= window + longest run. Where all samples count, none had
    left. Where a runtime does not tell what its workers do, the same holds of the slots: `slots` of
    them hold a sample from start to finish. Workers that take samples in turn count together.
    """
    for trace, span in zip(traces, counted.of_trace, strict=True):
        whole = span.samples - (slots if span.first >= 0 else 0)
        seconds = span.seconds
        for worker in sorted(set(trace.worker)):
            mine = [k for k, w in enumerate(trace.worker) if w == worker]
            own = [trace.stage_runs[k] for k in mine]
            many = trace.turns[mine[0]] if trace.turns else 1
            busy_s = sum(_mean_s(runs, span) for runs in own)
            longest_s = max(end - begin for runs in own for begin, end in runs)
            if whole * busy_s > many * (seconds + longest_s) * (1 + _CLOCK):
                who = f"worker {worker}" + (f" with {many - 1} more in turn" if many > 1 else "")
                raise _forbidden(name, who, span, busy_s, many)
        held_s = trace.latencies_s[span.first + 1 : span.last + 1]
        inside = np.array(trace.start_s)[span.first + 1 : span.last + 1] >= span.finish_s[0]
        if held_s[inside].sum() > slots * seconds * (1 + _CLOCK):
            raise _forbidden(name, f"{slots} slots", span, float(held_s[inside].mean()), slots)


def _mean_s(runs: Sequence[tuple[float, float]], span: CompletionWindow) -> float:
    """Mean seconds of the runs that ended while the span was counted."""
    times = np.array(runs)
    ended = (times[:, 1] > span.finish_s[0]) & (times[:, 1] <= span.finish_s[-1])
    seconds = times[:, 1] - times[:, 0]
    return float(seconds[ended].mean() if ended.any() else seconds.mean())


def _forbidden(
    name: str, who: str, span: CompletionWindow, busy_s: float, many: int
) -> MeasurementError:
    rate = span.samples / span.seconds
    return MeasurementError(
        f"{name}: {rate:.4g} samples/s were counted, but {who} busy for {busy_s * 1e3:.4g} ms a "
        f"sample cannot complete more than {many / busy_s:.4g}; please report this"
    )
