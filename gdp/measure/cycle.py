"""Cyclic schedules: the order in which workers run the stages of several samples, and what every
device runs of a full pipeline in steady state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.measure.plan import make_plan
from gdp.sim.prediction import Prediction

MAX_IN_FLIGHT = 16
MOST_UNROLLED = 5000
"""Longest replica cycle, in stages, for which an explicit schedule is built."""
PERIODS = 3
"""Periods that a picture of a full pipeline shows at least; and one turn of the replicas."""
MOST_BARS = 600


@dataclass(frozen=True)
class Cycle:
    """A schedule that repeats: sample i starts stage k at i * period_s + due_s[k].

    Where workers take samples in turn, it repeats after several: due_s holds the stages of each of
    them, one sample after the other, from the start of the first.
    """

    period_s: float  # of a sample
    due_s: tuple[float, ...]
    in_flight: int  # samples that it takes
    samples: int = 1  # after which it repeats

    def due(self, sample: int, stage: int) -> float:
        """Due time of a stage of a sample; a worker runs the ready stage that is due first."""
        turn, place = divmod(sample, self.samples)
        stages = len(self.due_s) // self.samples
        return turn * self.samples * self.period_s + self.due_s[place * stages + stage]


def turn_schedule(
    workers: Sequence[Sequence[int]], seconds: Sequence[float], sources: Sequence[Sequence[int]],
    least_s: float = 0.0,
) -> Cycle:  # fmt: skip
    """A cycle in which the workers of each stage take samples round-robin.

    `cyclic_schedule` of the stages of all samples until the turns repeat, as independent stages of
    one sample. If these are too many, the oldest sample goes first. `least_s` is the shortest
    period that links allow.

    >>> turn_schedule([(0, 1)], [2.0], [[]])
    Cycle(period_s=1.0, due_s=(0.0, 0.0), in_flight=4, samples=2)
    """
    stages, samples = len(seconds), math.lcm(*(len(own) for own in workers))
    if samples == 1:
        return cyclic_schedule([own[0] for own in workers], seconds, sources, least_s)
    every = sorted({w for own in workers for w in own})
    if samples * stages > MOST_UNROLLED:
        return Cycle(1.0, (0.0,) * stages, _most_in_flight(2 * len(every), len(every)))
    unrolled = cyclic_schedule(
        [every.index(own[i % len(own)]) for i in range(samples) for own in workers],
        [s for _ in range(samples) for s in seconds],
        [[i * stages + j for j in reads] for i in range(samples) for reads in sources],
        samples * least_s,
    )
    period_s, due = unrolled.period_s / samples, unrolled.due_s
    spans_s = []
    for first in range(0, len(due), stages):
        own = due[first : first + stages]
        spans_s.append(max(d + s for d, s in zip(own, seconds, strict=True)) - min(own))
    overlap = 1 if period_s == 0 else math.ceil(max(spans_s) / period_s - 1e-9)
    return Cycle(period_s, due, _most_in_flight(overlap + len(every), len(every)), samples)


def _most_in_flight(samples: int, workers: int) -> int:
    """Samples in flight up to the limit, but at least as many as there are workers."""
    return min(samples, max(MAX_IN_FLIGHT, workers))


def cyclic_schedule(
    worker: Sequence[int], seconds: Sequence[float], sources: Sequence[Sequence[int]],
    least_s: float = 0.0,
) -> Cycle:  # fmt: skip
    """A cycle in which each worker runs each of its stages once, one after the other.

    The busiest worker's load is the period, or `least_s` where links allow no shorter one. Every
    worker repeats its stages in topological order without a gap, which fixes their places in the
    cycle; a stage starts at its place in the first cycle in which what it reads is there. So every
    worker that is full stays full, which no rule that looks at ages alone achieves where samples
    come back to a worker: with the oldest first a ten-piece placement of ResNet-50 ends at 0.86 of
    the rate of its busiest worker, however exact its costs are. Modulo scheduling with one
    iteration a period: Rau 1994, doi 10.1145/192724.192731; Hanen and Munier 1995. Stages are in
    topological order; `sources` are the stages that each reads from. One more sample than the cycle
    takes, for each worker, is let in: real runs vary.

    >>> cyclic_schedule([0, 1, 0], [2.0, 3.0, 1.0], [[], [0], [1]])
    Cycle(period_s=3.0, due_s=(0.0, 3.0, 8.0), in_flight=5)
    """
    load_s = [0.0] * (max(worker) + 1)
    place_s = []
    for w, s in zip(worker, seconds, strict=True):
        place_s.append(load_s[w])
        load_s[w] += s
    period_s = max(*load_s, least_s)
    due_s: list[float] = []
    for k, reads in enumerate(sources):
        ready_s = max((due_s[j] + seconds[j] for j in reads), default=0.0)
        cycles = 0 if period_s == 0 else math.ceil((ready_s - place_s[k]) / period_s - 1e-9)
        due_s.append(place_s[k] + max(cycles, 0) * period_s)
    last_s = max(d + s for d, s in zip(due_s, seconds, strict=True))
    cycles = 1 if period_s == 0 else math.ceil(last_s / period_s - 1e-9)
    workers = len(set(worker))
    spare = workers if workers > 1 else 0
    return Cycle(period_s, tuple(due_s), min(cycles + spare, MAX_IN_FLIGHT))


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

    Each device repeats its segments without a gap (`gdp.measure.cycle`), at the period that the
    simulator predicts, which is the cycle's own unless a link takes longer. None where the
    placement takes no time, or where replicas take turns after too many segments.
    """
    plan = make_plan(prediction, "throughput")
    graph, segment = prediction.problem.graph, np.zeros(prediction.problem.num_ops, np.int64)
    segment[prediction.problem.origin.group_of] = plan.segment
    works = np.zeros(len(plan.segment_device), bool)
    works[segment[~graph.is_io]] = True
    stages = np.flatnonzero(works & (np.array(plan.segment_s) > 0)).tolist()
    seconds = [plan.segment_s[s] for s in stages]
    workers = [plan.devices_of(int(plan.segment_device[s])) for s in stages]
    turns = math.lcm(*(len(own) for own in workers))
    if not stages or not 0 < plan.period_s < math.inf or turns * len(stages) > MOST_UNROLLED:
        return None
    number = {s: k for k, s in enumerate(stages)}
    source, reader = (segment[ends].tolist() for ends in graph.edges)
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
