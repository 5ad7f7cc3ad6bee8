"""Runs cut and uncut JAX programs for measuring, several samples on their way at once."""

import collections
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.runtime.jax.devices import block_until_ready
from gdp.runtime.measure import Quota
from gdp.runtime.statistics import Trace


@dataclass(frozen=True)
class Issued:
    """Ways to start one sample, taken in turn, and how many samples may be on their way at once.

    JAX does not tell what its devices do when, so its traces hold samples without stages.
    """

    issues: tuple[Callable[[], Any], ...]
    slots: int
    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[Any], None] = block_until_ready

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


def piece_seconds(
    functions: Sequence[Callable[..., Any]], arguments: Sequence[Sequence[Any]], rounds: int
) -> list[float]:
    """Every piece alone, with its arguments on its device: medians."""
    found = np.empty((rounds, len(functions)))
    for i in range(rounds):
        for j, (function, arrays) in enumerate(zip(functions, arguments, strict=True)):
            start_s = time.perf_counter()
            block_until_ready(function(*arrays))
            found[i, j] = time.perf_counter() - start_s
    return [float(s) for s in np.median(found, axis=0)]
