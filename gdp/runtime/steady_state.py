"""A full pipeline in steady state: what every device runs while several samples are under way."""

import math
from dataclasses import dataclass

import numpy as np

from gdp.runtime.cycle import MOST_UNROLLED, turn_schedule
from gdp.runtime.plan import ExecutionPlan, Prediction, make_plan

PERIODS = 3
"""Shown at least; and one turn of the replicas."""
MOST_BARS = 600


@dataclass(frozen=True)
class Bar:
    """One segment of one sample on one device."""

    device: int
    start_s: float  # from the left edge of the picture, below 0 where it began before
    seconds: float
    sample: int  # counted from the oldest that is shown


@dataclass(frozen=True)
class SteadyState:
    """Some periods of a full pipeline; transfers, which devices do not wait for, are left out."""

    period_s: float
    span_s: float
    bars: tuple[Bar, ...]
    in_flight: int  # samples that are under way at once, at most, by the cycle
    left_out: int  # shorter bars than those that are kept


def steady_state(prediction: Prediction) -> SteadyState | None:
    """The cyclic schedule of a placement's segments, once the pipeline is full.

    Each device repeats its segments without a gap (`gdp.runtime.cycle`), at the period that the
    simulator predicts, which is the cycle's own unless a link takes longer. None where the
    placement takes no time, or where replicas take turns after too many segments.
    """
    plan = make_plan(prediction, "throughput")
    stages = np.flatnonzero(_does_work(prediction, plan)).tolist()
    seconds = [plan.segment_s[s] for s in stages]
    workers = [plan.devices_of(int(plan.segment_device[s])) for s in stages]
    turns = math.lcm(*(len(own) for own in workers))
    if not stages or not 0 < plan.period_s < math.inf or turns * len(stages) > MOST_UNROLLED:
        return None
    number = {s: k for k, s in enumerate(stages)}
    segment = _segment_of(prediction, plan)
    source, reader = (segment[ends].tolist() for ends in prediction.problem.graph.edges)
    reads: list[set[int]] = [set() for _ in stages]
    for i, j in zip(source, reader, strict=True):
        if i != j and i in number and j in number:
            reads[number[j]].add(number[i])
    cycle = turn_schedule(workers, seconds, [sorted(own) for own in reads], plan.period_s)
    period_s = cycle.period_s
    span_s = period_s * math.ceil(PERIODS / turns) * turns
    latest_s = max(cycle.due(0, k) + s for k, s in enumerate(seconds))
    # The first sample that starts when the pipeline is full, at the begin of a turn.
    first = math.ceil(latest_s / period_s / turns + 1) * turns
    bars = []
    for sample in range(first + round(span_s / period_s)):
        for k, own in enumerate(workers):
            start_s = cycle.due(sample, k) - first * period_s
            if start_s < span_s - 1e-9 * period_s and start_s + seconds[k] > 1e-9 * period_s:
                bars.append(Bar(own[sample % len(own)], start_s, seconds[k], sample))
    oldest = min(bar.sample for bar in bars)
    bars.sort(key=lambda bar: -bar.seconds)
    kept = [Bar(b.device, b.start_s, b.seconds, b.sample - oldest) for b in bars[:MOST_BARS]]
    kept.sort(key=lambda bar: (bar.device, bar.start_s))
    under_way = math.ceil(latest_s / period_s - 1e-9)
    return SteadyState(period_s, span_s, tuple(kept), under_way, len(bars) - len(kept))


def _segment_of(prediction: Prediction, plan: ExecutionPlan) -> np.ndarray:
    """Segment of each fused op."""
    segment = np.zeros(prediction.problem.num_ops, np.int64)
    segment[prediction.group_of] = plan.segment
    return segment


def _does_work(prediction: Prediction, plan: ExecutionPlan) -> np.ndarray:
    """True for segments of which some op is computed."""
    segment = _segment_of(prediction, plan)
    works = np.zeros(len(plan.segment_device), bool)
    works[segment[~prediction.problem.graph.is_io]] = True
    return works & (np.array(plan.segment_s) > 0)
