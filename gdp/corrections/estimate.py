"""Corrected seconds of passes by the runs of a stack, with 90% intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gdp.corrections.features import EngineStack, Pass, family_of, format_class
from gdp.corrections.process import (
    CorrectionMeta,
    CorrectionProcess,
    Lesson,
    shipped_corrections,
)
from gdp.corrections.records import RunRecord, runs_of

NEAR = 0.8
"""Log of bandwidth and of FLOP/s by which a card may differ from the nearest that was measured."""


class Range(NamedTuple):
    """A factor of predicted seconds, and the ends of its 90% interval."""

    factor: float
    low: float
    high: float

    def of(self, seconds: float) -> tuple[float, float]:
        """The interval of seconds that were predicted with the factor."""
        return seconds * self.low / self.factor, seconds * self.high / self.factor


class Correction(NamedTuple):
    """Factors of the passes of an answer, and what they rest on."""

    prefill: Range
    decode: Range
    runs: int  # of the stack, that were learned from
    stack: str  # key
    far: float = 0.0  # factor of doubt where nothing near was measured; 0: near

    @property
    def text(self) -> str:
        """Evidence behind the intervals, in words."""
        if self.runs:
            return f"{self.runs} measured run{'s' if self.runs > 1 else ''} of this stack"
        if self.far:
            return f"no measurement near this; within a factor of {self.far:.1f}"
        return "no run of this stack yet (gdp learn); as wide as predictions of others were off"


def correction_of(stack: EngineStack, passes: tuple[Pass, Pass], costs: str) -> Correction | None:
    """The correction of a prefill pass and a decode step; None where none ships.

    Args:
        stack: That executes them.
        passes: Prefill and decode.
        costs: Label of the costs that they were predicted by.
    """
    found = shipped_corrections()
    if found is None:
        return None
    process, meta = found
    runs = runs_of(stack, costs)
    stack = runs[-1].stack if runs else stack
    return corrected_by(process, meta, stack, passes, runs)


def corrected_by(
    process: CorrectionProcess,
    meta: CorrectionMeta,
    stack: EngineStack,
    passes: tuple[Pass, Pass],
    runs: Sequence[RunRecord],
) -> Correction:
    """The correction of passes on a stack with so many measured runs."""
    near = bool(runs) or is_near(meta, stack, passes[1].bits)
    far = 0.0 if near else meta.far[family_of(stack.engine)]
    rows = process.residuals(passes, lessons_of(runs))
    ranges = []
    for phase, (row, asked) in enumerate(zip(rows, passes, strict=True)):
        shown = sum(any(x.asked.prefill == asked.prefill for x in run.passes) for run in runs)
        quantiles = meta.quantiles[family_of(stack.engine)]
        half = quantiles[min(shown, len(quantiles) - 1)][phase] * row.deviation
        half = max(half, math.log(far)) if far else half
        ranges.append(Range(*(math.exp(row.mean + side * half) for side in (0, -1, 1))))
    return Correction(ranges[0], ranges[1], len(runs), stack.key, far)


def is_near(meta: CorrectionMeta, stack: EngineStack, bits: float) -> bool:
    """True where an engine with such a format was measured on a card about as fast."""
    rates = math.log(stack.bytes_per_s), math.log(stack.flop_per_s)
    return format_class(bits) in meta.formats.get(stack.engine, ()) and any(
        (engine, backend) == (stack.engine, stack.backend)
        and all(abs(a - b) <= NEAR for a, b in zip(rates, own, strict=True))
        for engine, backend, *own in meta.known
    )


def lessons_of(runs: Sequence[RunRecord]) -> list[Lesson]:
    """All measured passes of runs."""
    return [one for run in runs for one in run.passes]
