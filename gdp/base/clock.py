"""Budgets of wall-clock time, and seconds by phase."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

MEASURE_SECONDS = 10.0
"""Default budget of a measured run: all contenders and rounds, warming up included."""
_waiting: list[str] = []
_waited: dict[str, float] = {}
_waited_cpu: dict[str, float] = {}


@contextmanager
def waiting_for(phase: str) -> Iterator[None]:
    """Count the seconds of the block for a phase, unless an outer block counts them already."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    _waiting.append(phase)
    try:
        yield
    finally:
        _waiting.pop()
        if not _waiting:
            _waited[phase] = waited_s(phase) + time.perf_counter() - began_s
            _waited_cpu[phase] = waited_cpu_s(phase) + time.process_time() - began_cpu_s


def waited_s(phase: str) -> float:
    """Seconds that this process has waited for a phase so far."""
    return _waited.get(phase, 0.0)


def waited_cpu_s(phase: str) -> float:
    """CPU seconds of all threads of this process in a phase so far."""
    return _waited_cpu.get(phase, 0.0)


class Phases:
    """Wall-clock seconds by phase. Compilation is subtracted from the phase in which it happened,
    so that the phases add up to the whole."""

    def __init__(self, since_s: float | None = None) -> None:
        """Start now, or at `since_s` of `time.perf_counter`."""
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter() if since_s is None else since_s
        self._compiled_s = waited_s(COMPILE)

    def ended(self, phase: str, parts: Mapping[str, float] = MappingProxyType({})) -> None:
        """Count the seconds since the last phase ended for `phase`, but for those that `parts` of
        it took by phases of their own."""
        now_s, compiled_s = time.perf_counter(), waited_s(COMPILE)
        compiling_s = compiled_s - self._compiled_s
        inner = {name: s for name, s in parts.items() if name != COMPILE}
        rest_s = now_s - self._since_s - compiling_s - sum(inner.values())
        for name, s in (*inner.items(), (phase, rest_s), (COMPILE, compiling_s)):
            if s > 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + s
        self._since_s, self._compiled_s = now_s, compiled_s


COMPILE = "compile"
"""The phase in which kernels are compiled or read from the cache, and the policy is warmed up."""


class Clock:
    """A wall-clock budget that starts when it is made. Compilation time is not counted."""

    is_counted = False

    def __init__(self, seconds: float | None) -> None:
        self.started_s = time.perf_counter()
        self.seconds = seconds
        self._compiled_s = waited_s(COMPILE)

    def elapsed_s(self) -> float:
        """Seconds since the start, without compilation."""
        return time.perf_counter() - self.started_s - (waited_s(COMPILE) - self._compiled_s)

    def remaining_s(self) -> float:
        """Seconds left, below 0 when it is over; inf without a budget."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed_s()

    def left_s(self, share: float = 1.0) -> float | None:
        """A share of the remaining seconds, never below 0; None without a budget."""
        left_s = self.remaining_s()
        return None if math.isinf(left_s) else max(0.0, share * left_s)

    def part(self, share: float) -> "Clock":
        """A new clock for a share of the remaining seconds, started now."""
        return type(self)(self.left_s(share))

    def at_most(self, seconds: float) -> "Clock":
        """A new clock for all of the remaining seconds, or these if they are fewer."""
        return type(self)(min(seconds, max(0.0, self.remaining_s())))

    def charge(self, seconds: float) -> None:
        """Count work that an idle core does in so many seconds; time passes by itself here."""

    def limit_s(self, share: float = 1.0) -> float | None:
        """`left_s`, for solvers that look at the time themselves: None where work is counted."""
        return self.left_s(share)

    def is_over(self) -> bool:
        """True once the budget is spent."""
        return self.remaining_s() <= 0


class WorkClock(Clock):
    """A budget of counted work, in seconds of an idle core: time changes nothing, only `charge`.

    What is charged is derived from sizes and counts alone (entries of a matrix, nodes of a search
    tree, simulated ops), so that a search ends at the same place on every machine. A part charges
    the whole as well.

    >>> clock = WorkClock(10.0)
    >>> clock.part(0.5).charge(2.0)
    >>> clock.remaining_s()
    8.0
    """

    is_counted = True

    def __init__(self, seconds: float | None, whole: "WorkClock | None" = None) -> None:
        super().__init__(seconds)
        self._charged_s = 0.0
        self._whole = whole

    def elapsed_s(self) -> float:
        """Work charged so far."""
        return self._charged_s

    def charge(self, seconds: float) -> None:
        """Count work that an idle core does in so many seconds."""
        self._charged_s += seconds
        if self._whole is not None:
            self._whole.charge(seconds)

    def part(self, share: float) -> "Clock":
        """A new budget for a share of the remaining work."""
        return WorkClock(self.left_s(share), self)

    def at_most(self, seconds: float) -> "Clock":
        """A new budget for all of the remaining work, or this if it is less."""
        return WorkClock(min(seconds, max(0.0, self.remaining_s())), self)

    def limit_s(self, share: float = 1.0) -> float | None:
        """None: no solver may look at the time."""
        return None
