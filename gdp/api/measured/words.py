"""Lessons of measured passes in words of physics."""

import math
from collections.abc import Sequence

import numpy as np

from gdp.base.units import format_seconds
from gdp.corrections.process import Lesson

NOTHING = 0.05
"""Share of the seconds of a pass below which a difference is not told."""
_READING = ("bandwidth", "processor bandwidth")


def words_of(lessons: Sequence[Lesson]) -> tuple[str, ...]:
    """Sentences on prefill and decode; of decode also what explains it: seconds that each step
    takes more, or a smaller share of the bandwidth."""
    found = []
    for prefill, name in ((True, "prefill"), (False, "decode")):
        own = [x for x in lessons if x.asked.prefill == prefill]
        if not own:
            continue
        factor = math.exp(
            float(np.average([x.residual for x in own], weights=[x.shown for x in own]))
        )
        if abs(factor - 1) < NOTHING:
            found.append(f"{name} passes take what was predicted ({factor:.2f} times)")
            continue
        found.append(f"{name} passes take {factor:.2f} times what was predicted")
        if not prefill:
            found += _decode(own)
    return tuple(found)


def _decode(lessons: Sequence[Lesson]) -> list[str]:
    """The better of two explanations of decode steps, by least squares on the logs; of one alone
    both."""
    predicted = np.array([x.asked.seconds for x in lessons])
    measured = predicted * np.exp([x.residual for x in lessons])
    read = np.array([sum(x.asked.parts_s.get(c, 0.0) for c in _READING) for x in lessons])
    more_s = float(np.median(measured - predicted))
    reads = float(np.median((measured - predicted + read) / np.maximum(read, 1e-9)))
    host = f"the host adds {format_seconds(abs(more_s))} a step" if more_s > 0 else (
        f"each step takes {format_seconds(abs(more_s))} less, as of a quicker host"
    )  # fmt: skip
    bandwidth = f"weights and caches are read at {1 / reads:.2f} of the predicted rate" if (
        reads > 0
    ) else ""  # fmt: skip
    if len(lessons) == 1 or not bandwidth:
        return [" or ".join(filter(None, (host, bandwidth))) + ", which one run cannot tell apart"]
    with_host = np.log(measured / np.maximum(predicted + more_s, 1e-9))
    with_reads = np.log(measured / np.maximum(predicted + read * (reads - 1), 1e-9))
    return [host if (with_host**2).sum() <= (with_reads**2).sum() else bandwidth]
