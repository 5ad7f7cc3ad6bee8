"""How far down a value can go, decided target by target.

Whether anything lies below a low target is decided fast, since little fits below it. The first
target is the value itself, for problems that are decided at once; then the middle of what is open,
and the value again when that is near the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.clock import Clock
from gdp.methods.period.solution import LoadSolution

BETTER = 1.0 - 1e-6
"""Of a known value: what is not smaller than this share of it is no improvement."""
CLOSE = 1.0 - 5e-6
"""Of a value: a bound above this share of it proves it optimal; solvers round."""
_TARGET_SHARE = 0.4  # of the seconds left, to decide a target below the value
_NEAR_GAP = 0.008  # from here on the value itself is tried for all of the time left
_SMALLEST_GAP = 0.002  # targets closer than this to the bound are not worth a run of their own


@dataclass(frozen=True, eq=False)
class Known:
    """What is known so far."""

    best: Any  # whatever has the value; None: nothing does
    value_s: float  # inf where nothing that fits is known
    bound_s: float
    by: str
    open_s: float = np.inf  # the least target that could not be decided in time
    is_complete: bool = False

    def raised(self, bound_s: float, by: str) -> "Known":
        """With a higher bound; complete where nothing is below the value itself."""
        complete = self.is_complete or bound_s >= self.value_s * BETTER
        if bound_s <= self.bound_s:
            return replace(self, is_complete=complete)
        return replace(self, bound_s=min(bound_s, self.value_s), by=by, is_complete=complete)

    def after(self, solution: LoadSolution, target_s: float, by: str) -> "Known":
        """With what a solver said of everything below a target."""
        known = self
        if solution.is_complete or solution.bound_s > known.bound_s:
            known = known.raised(solution.bound_s, by)
        if not solution.is_complete:
            return replace(known, open_s=min(known.open_s, target_s))
        if solution.device is not None or not np.isfinite(target_s):
            return replace(known, is_complete=True)
        return known


Below = Callable[[Known, float, float | None], Known]
"""What is known after looking for something below a target for some seconds."""


def close_gap(known: Known, below: Below, clock: Clock, first_share: float) -> Known:
    """What is known when the gap is closed or time is over.

    The first target gets a share of the seconds. Without a limit, one run decides.
    """
    if not np.isfinite(known.value_s):
        return below(known, np.inf, clock.seconds)
    known = _try_target(known, below, clock, first_share)
    while not known.is_complete and clock.seconds is not None and not clock.is_over():
        known = _try_target(known, below, clock, first_share)
    return known


def _try_target(known: Known, below: Below, clock: Clock, first_share: float) -> Known:
    """More knowledge, by one target between bound and value."""
    limit_s = known.value_s * BETTER
    if known.bound_s >= known.value_s * CLOSE:
        return replace(known, is_complete=True)
    left_s = clock.remaining_s()
    if np.isinf(left_s):
        return below(known, limit_s, None)
    if np.isinf(known.open_s):
        return below(known, limit_s, first_share * left_s)
    upto_s = min(known.value_s, known.open_s)
    gap = 1.0 - known.bound_s / upto_s
    if gap <= (_NEAR_GAP if known.open_s >= limit_s else _SMALLEST_GAP):
        return below(known, limit_s, left_s)
    middle_s = 0.5 * (known.bound_s + upto_s)
    return below(known, middle_s, _TARGET_SHARE * left_s)
