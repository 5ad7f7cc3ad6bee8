"""A wall-clock budget."""

import math
import time


class Clock:
    """A wall-clock budget that starts when it is made."""

    def __init__(self, seconds: float | None) -> None:
        self.started_s = time.perf_counter()
        self.seconds = seconds

    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self.started_s

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
