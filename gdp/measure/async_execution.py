"""Asynchronous execution sample by sample, by libraries that do not report stages."""

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gdp.measure.cycle import Cycle, cyclic_schedule
from gdp.measure.measuring import Measuring, Quota, measure
from gdp.measure.plan import ExecutionPlan
from gdp.measure.report import Row, row
from gdp.measure.statistics import Trace

SEGMENT_RUNS = 11
"""Runs of which a segment's seconds are the median."""


@dataclass(frozen=True)
class AsyncExecution:
    """Functions that each enqueue one sample, called round-robin, and the number of samples in
    flight.

    Traces hold samples without stages.
    """

    issues: tuple[Callable[[], Any], ...]
    slots: int
    wait: Callable[[Any], None]  # until what was issued has been computed
    clock: Callable[[], float] = time.perf_counter

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """Samples are let in, each when the oldest has ended, until the quota is met."""
        waiting: collections.deque[tuple[float, Any]] = collections.deque()
        start_s: list[float] = []
        finish_s: list[float] = []
        began_s, full_s, now_s = self.clock(), math.inf, self.clock()
        while True:
            entered = len(finish_s) + len(waiting)
            more = quota.wants(entered, self.slots, now_s - began_s, now_s - full_s)
            if not more and not waiting:
                return (Trace(tuple(start_s), tuple(finish_s)),)
            if more and len(waiting) < self.slots:
                waiting.append((self.clock(), self.issues[entered % len(self.issues)]()))
                continue
            entry_s, results = waiting.popleft()
            self.wait(results)
            now_s = self.clock()
            start_s.append(entry_s)
            finish_s.append(now_s)
            if len(finish_s) == self.slots:
                full_s = now_s


def measured_rows(contenders: Mapping[str, AsyncExecution], measuring: Measuring) -> dict[str, Row]:
    """Every contender's throughput with all its slots full, and its latency one sample at a time.

    Raises `MeasurementError` when a measured rate is impossible.
    """
    alone = {
        f"{name}, one sample": replace(contender, issues=contender.issues[:1], slots=1)
        for name, contender in contenders.items()
    }
    times = measure({**contenders, **alone}, measuring)
    return {name: row(times[f"{name}, one sample"], times[name]) for name in contenders}


@dataclass(frozen=True, eq=False)
class ProgramSegment:
    """One segment of a cut program as a function."""

    segment: int  # of the plan; negative for views that are results
    device: int  # index into the cluster's devices
    ops: int
    call: Callable[..., Sequence[Any]]  # from the values that it reads to those that it makes
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]  # values that no other segment makes


def pieces_cycle(pieces: Sequence[ProgramSegment], plan: ExecutionPlan) -> Cycle:
    """Cyclic schedule of the segments, with samples in flight that keep every device busy."""
    maker = {value: k for k, piece in enumerate(pieces) for value in piece.makes}
    return cyclic_schedule(
        [piece.device for piece in pieces],
        [plan.segment_s[p.segment] if p.segment >= 0 else 0.0 for p in pieces],
        [sorted({maker[v] for v in p.reads if v in maker}) for p in pieces],
    )


def versions(*names: str) -> dict[str, str]:
    """Versions of installed distributions."""
    from importlib.metadata import version

    return {name: version(name) for name in names}
