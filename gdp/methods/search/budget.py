"""Budget of a search, and what is left of it.

The user gives seconds and evaluations (`Search`). A `Clock` counts the seconds, `Budget` both; what
each phase may take of the seconds is written in `gdp.methods.shares`. Evaluations go to the search,
but for those that `SearchConfig.coarse_share` gives to a coarser graph.
"""

from dataclasses import dataclass

from gdp.base.clock import Clock
from gdp.methods.base import Search
from gdp.methods.scoring import Evaluated

PROGRAM_WORK_S = {"period_fit": 8.0, "latency_fit": 12.0}
"""Counted work of a program in rounds where evaluations end the search."""


@dataclass(frozen=True)
class SearchConfig:
    """Shares of the budget and sizes from which graphs are searched otherwise."""

    coarse_above: int = 3000  # ops; where steps simulate, larger graphs are searched coarsely first
    windows_above: int = 3000  # ops; schedules of larger graphs are searched window by window
    coarse_ratio: int = 4  # ops of a graph to those of the coarse one that is searched before it
    coarse_ops: int = 1000  # groups that are moved and simulated as one, at least
    coarse_share: float = 0.6  # of a graph's budget, for the coarser one
    drop: float = 0.02  # a chain this much worse than the best ends after its first round
    max_evaluations: int = 200_000  # where neither seconds nor evaluations end the search


class Budget:
    """Rest of both budgets, and the best placement for whoever is interrupted."""

    def __init__(self, clock: Clock, search: Search, config: SearchConfig, used: int) -> None:
        self.clock = clock
        self.used = used
        self.limit = search.evaluations
        if self.limit is None and clock.seconds is None:
            self.limit = config.max_evaluations
        self.progress = search.progress
        self.chains = search.num_chains
        self.chains_asked = search.chains or 1  # of searches to which cores alone bring nothing
        self.best: Evaluated | None = None

    def left(self) -> int | None:
        """Evaluations left; None: as many as the clock allows."""
        return None if self.limit is None else max(0, self.limit - self.used)

    def is_over(self) -> bool:
        """True if either budget is spent."""
        return self.clock.is_over() or self.left() == 0

    def report(self, best: Evaluated) -> None:
        """Keep the best placement and report it to the listener."""
        self.best = best
        if self.progress is None:
            return
        by_clock = 0.0
        if self.clock.seconds is not None:
            by_clock = self.clock.elapsed_s() / max(self.clock.seconds, 1e-9)
        by_count = 0.0 if not self.limit else self.used / self.limit
        self.progress(min(1.0, max(by_clock, by_count)), best.value_s)
