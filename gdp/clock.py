"""Budgets of wall-clock time, and what it went into."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

MEASURE_SECONDS = 10.0
"""Of a measured run, all contenders and rounds and warming up included, unless asked otherwise."""
_waiting: list[str] = []
_waited: dict[str, float] = {}


@contextmanager
def waiting_for(phase: str) -> Iterator[None]:
    """Seconds within count for the phase, unless one is counted already."""
    began_s = time.perf_counter()
    _waiting.append(phase)
    try:
        yield
    finally:
        _waiting.pop()
        if not _waiting:
            _waited[phase] = waited_s(phase) + time.perf_counter() - began_s


def waited_s(phase: str) -> float:
    """Seconds that this process has waited for a phase so far."""
    return _waited.get(phase, 0.0)


class Phases:
    """Wall-clock seconds by phase. They add up: what is counted as `COMPILE` is taken out of the
    phase in which it was waited for."""

    def __init__(self, since_s: float | None = None) -> None:
        """They begin now, or at a time of `time.perf_counter`."""
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter() if since_s is None else since_s
        self._compiled_s = waited_s(COMPILE)

    def ended(self, phase: str) -> None:
        """What was waited since the end of the last phase was this one."""
        now_s, compiled_s = time.perf_counter(), waited_s(COMPILE)
        compiling_s = compiled_s - self._compiled_s
        for name, s in ((phase, now_s - self._since_s - compiling_s), (COMPILE, compiling_s)):
            if s > 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + s
        self._since_s, self._compiled_s = now_s, compiled_s


COMPILE = "compile"
"""The phase in which kernels are compiled or read from the cache, and the policy is warmed up."""


class Clock:
    """A wall-clock budget that starts when it is made. What compiles within takes nothing of it."""

    def __init__(self, seconds: float | None) -> None:
        self.started_s = time.perf_counter()
        self.seconds = seconds
        self._compiled_s = waited_s(COMPILE)

    def elapsed_s(self) -> float:
        """Seconds since it was made, without those in which kernels were compiled."""
        return time.perf_counter() - self.started_s - (waited_s(COMPILE) - self._compiled_s)

    def remaining_s(self) -> float:
        """Seconds left, below 0 when it is over; inf without a budget."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed_s()

    def left_s(self, share: float = 1.0) -> float | None:
        """A budget out of what is left, never below 0; None without a budget."""
        left_s = self.remaining_s()
        return None if math.isinf(left_s) else max(0.0, share * left_s)

    def part(self, share: float) -> "Clock":
        """A clock of the same kind for a share of what is left, started now."""
        return type(self)(self.left_s(share))

    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.remaining_s() <= 0
