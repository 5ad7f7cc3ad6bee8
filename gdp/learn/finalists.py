"""The last word among measured placements: the best few are measured again, in turns.

The lowest of many noisy measurements is low by luck too; what was chosen by it is measured anew.
"""

from collections.abc import Callable, Sequence

import numpy as np

from gdp.methods.base import Assignment

FINALISTS = 4
TURNS = 5  # at most
SHARE = 0.2  # of the measured runs, at most


def turns_of(evaluations: int) -> int:
    """How often each finalist is measured again out of so many measured runs; maybe never."""
    return min(TURNS, int(SHARE * evaluations) // FINALISTS)


def confirm(
    finalists: Sequence[Assignment], reward: Callable[[Assignment], float], turns: int
) -> tuple[int, float]:
    """(which is best, its seconds) by the medians over `turns` new measurements of each."""
    # In turns: what disturbs the machine for a while disturbs all of them.
    seconds = np.array([[reward(found) for found in finalists] for _ in range(turns)])
    middle = np.median(seconds, axis=0)
    best = int(np.argmin(middle))
    return best, float(middle[best])
