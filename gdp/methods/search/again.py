"""A search that is begun again where it ended far from anything possible.

Where memory is short, annealing enters the limits somewhere and cannot always leave that corner: of
the chains from one start some end several times slower than the others.
"""

from dataclasses import replace

from gdp.bounds.work import shared_work_s
from gdp.clock import Clock
from gdp.methods.base import Search
from gdp.methods.scoring import Scored, group_seconds
from gdp.methods.search.local_search import improve
from gdp.problem.problem import Problem

FAR = 2.0
"""Times what the devices take for the work alone: beyond that the search is begun again."""
CHAINS = 3
"""Searches, at most."""
_STRIDE = 7919
"""Between the seeds of two chains."""


def improve_again(problem: Problem, first: Scored, search: Search, clock: Clock) -> Scored:
    """The best of up to `CHAINS` searches from one placement, each with all of the evaluations.

    Another is begun while the best takes over `FAR` times as long as all work, shared out at will,
    and the clock is not over. For objectives whose value is a period or a load.
    """
    least_s = shared_work_s(group_seconds(problem))[0]
    best, spent = first, 0
    for k in range(CHAINS):
        chain = replace(search, seed=search.seed + k * _STRIDE)
        found = improve(problem, [replace(first, evaluations=0)], chain, clock)
        spent += found.evaluations
        best = min(best, found, key=lambda scored: scored.key)
        if clock.is_over() or (best.overflow_bytes == 0 and best.value_s <= FAR * least_s):
            break
    return replace(best, evaluations=first.evaluations + spent)
