"""Programs that are started sample by sample, of libraries that do not tell what devices do."""

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from gdp.runtime.cycle import Cycle, cyclic_schedule
from gdp.runtime.measure import Measuring, Quota, measure
from gdp.runtime.plan import ExecutionPlan, Prediction, uncut_s
from gdp.runtime.report import DEFAULT, PLACED, SINGLE, Row, foretold, measured_fields, row
from gdp.runtime.statistics import Trace

SEGMENT_RUNS = 11
"""Runs of which a segment's seconds are the median."""


@dataclass(frozen=True)
class Issued:
    """Ways to start one sample, taken in turn, and how many samples may be on their way at once.

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


def measured_rows(contenders: Mapping[str, Issued], measuring: Measuring) -> dict[str, Row]:
    """Every contender's throughput with all its slots full, and its latency one sample at a time.

    Raises `MeasurementError` when a measured rate is impossible.
    """
    alone = {
        f"{name}, one sample": replace(contender, issues=contender.issues[:1], slots=1)
        for name, contender in contenders.items()
    }
    times = measure({**contenders, **alone}, measuring)
    return {name: row(times[f"{name}, one sample"], times[name]) for name in contenders}


@runtime_checkable
class CutPiece(Protocol):
    """One segment of a cut program, or what brings arguments to their devices."""

    @property
    def segment(self) -> int:
        """Of the plan; negative where there is none."""
        ...

    @property
    def device(self) -> int:
        """Index into the cluster's devices."""
        ...

    @property
    def reads(self) -> Sequence[Any]:
        """Values, some of which other pieces make."""
        ...

    @property
    def makes(self) -> Sequence[Any]:
        """Values that no other piece makes."""
        ...


def beside_baselines(
    objective: str,
    plan: ExecutionPlan,
    rows: Mapping[str, Row],
    predict: Prediction,
    single: int,
    measuring: Measuring,
) -> dict[str, Any]:
    """Fields of a report: the placement, the device that is the single one with its prediction, and
    the runtime's default."""
    alone = foretold(rows[SINGLE], uncut_s(predict, objective, single))
    return measured_fields(
        objective, (plan.latency_s, plan.period_s), rows[PLACED],
        {SINGLE: alone, DEFAULT: rows[DEFAULT]}, measuring,
    )  # fmt: skip


def pieces_cycle(pieces: Sequence[CutPiece], plan: ExecutionPlan) -> Cycle:
    """A cycle of the pieces, for the samples that keep every device busy."""
    maker = {value: k for k, piece in enumerate(pieces) for value in piece.makes}
    return cyclic_schedule(
        [piece.device for piece in pieces],
        [plan.segment_s[p.segment] if p.segment >= 0 else 0.0 for p in pieces],
        [sorted({maker[v] for v in p.reads if v in maker}) for p in pieces],
    )


def versions(*names: str) -> dict[str, str]:
    """Of installed distributions."""
    from importlib.metadata import version

    return {name: version(name) for name in names}
