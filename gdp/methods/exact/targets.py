"""Close the gap between a value and its bound, target by target.

Whether anything lies below a low target is decided fast, since little fits below it. The first
target is the value itself, for problems that are decided at once; then the middle of the open
interval, and the value again when that is near the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.base.clock import Clock
from gdp.bounds.linear_program import PlacementSolution
from gdp.methods.shares import EXACT_TARGET_SHARE

BETTER = 1.0 - 1e-6
"""Share of a known value that an improvement must stay below."""
CLOSE = 1.0 - 5e-6
"""Of a value: a bound above this share of it proves it optimal; solvers round."""
_NEAR_GAP = 0.008  # from here on the value itself is tried for all of the time left
_SMALLEST_GAP = 0.002  # targets closer than this to the bound are not worth a run of their own


@dataclass(frozen=True, eq=False)
class ProofState:
    """Best value and bound so far."""

    best: Any  # has the value; None: nothing does
    value_s: float  # inf where nothing that fits is known
    bound_s: float
    by: str
    open_s: float = np.inf  # the least target that could not be decided in time
    is_complete: bool = False

    def raised(self, bound_s: float, by: str) -> "ProofState":
        """The state with a higher bound; complete where nothing is below the value itself."""
        complete = self.is_complete or bound_s >= self.value_s * BETTER
        if bound_s <= self.bound_s:
            return replace(self, is_complete=complete)
        return replace(self, bound_s=min(bound_s, self.value_s), by=by, is_complete=complete)

    def after(self, solution: PlacementSolution, target_s: float, by: str) -> "ProofState":
        """The state after a solver's answer about everything below a target."""
        state = self
        if solution.is_complete or solution.bound_s > state.bound_s:
            state = state.raised(solution.bound_s, by)
        if not solution.is_complete:
            return replace(state, open_s=min(state.open_s, target_s))
        if solution.device is not None or not np.isfinite(target_s):
            return replace(state, is_complete=True)
        return state


Below = Callable[[ProofState, float, float | None], ProofState]
"""Search for something below a target for some seconds; the state after it."""


def close_gap(state: ProofState, below: Below, clock: Clock, first_share: float) -> ProofState:
    """Lower the value and raise the bound until they meet or time is over.

    Args:
        state: Of a good placement.
        below: Searches below a target.
        clock: Without a limit, one run decides.
        first_share: Of the seconds, for the first target.
    """
    if not np.isfinite(state.value_s):
        return below(state, np.inf, clock.seconds)
    state = _try_target(state, below, clock, first_share)
    while not state.is_complete and clock.seconds is not None and not clock.is_over():
        state = _try_target(state, below, clock, first_share)
    return state


def _try_target(state: ProofState, below: Below, clock: Clock, first_share: float) -> ProofState:
    """Try one target between bound and value."""
    limit_s = state.value_s * BETTER
    if state.bound_s >= state.value_s * CLOSE:
        return replace(state, is_complete=True)
    left_s = clock.remaining_s()
    if np.isinf(left_s):
        return below(state, limit_s, None)
    if np.isinf(state.open_s):
        return below(state, limit_s, first_share * left_s)
    upto_s = min(state.value_s, state.open_s)
    gap = 1.0 - state.bound_s / upto_s
    if gap <= (_NEAR_GAP if state.open_s >= limit_s else _SMALLEST_GAP):
        return below(state, limit_s, left_s)
    middle_s = 0.5 * (state.bound_s + upto_s)
    return below(state, middle_s, EXACT_TARGET_SHARE * left_s)
