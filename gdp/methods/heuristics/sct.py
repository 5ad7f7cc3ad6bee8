"""SCT: a list schedule in which a device may wait for the favourite child of what it ran."""

import itertools
from collections.abc import Iterator

import numpy as np

from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.heuristics.favourites import favourite_children
from gdp.methods.heuristics.reserved import reserved_assignments
from gdp.methods.ranks import as_rank, longest_s, mean_compute_s, upward_rank
from gdp.methods.repair import settle
from gdp.methods.scoring import compile_once, unsupported
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

WAITS = (1.0, 0.25, 0.0)
"""Shares of a transfer that a device waits; with the last, a favourite child only goes first."""


def sct(problem: Problem, search: Search) -> Answer:
    """As `etf`, but a device waits for the favourite child of its last op while a transfer takes.

    Hanen and Munier 2001, doi 10.1016/S0166-218X(00)00179-7, with memory limits as Baechi's m-SCT
    (Jeon et al. 2020, doi 10.1145/3419111.3421302): where short of memory the plan is made again
    under lower limits, as in `heft`. Favourite children come from a linear program (see
    `favourite_children`). Forms as of `etf`, for three waits.
    """
    if (refusal := unsupported(problem, "sct")) is not None:
        return refusal
    compile_once("sct", sct, problem.objective)
    clock = Clock(search.seconds)
    return settle(problem, search, sct_assignments(problem), "sct", clock)


def sct_assignments(problem: Problem) -> Iterator[Assignment]:
    """The forms that `sct` chooses from."""
    from gdp.methods.heuristics.sct_kernels import sct_plan

    a = arrays_of(problem)
    level_s = longest_s(a, mean_compute_s(a), np.zeros(len(a.tensor_bytes)))
    rank = upward_rank(problem)
    child, saved_s = favourite_children(problem)
    for queues, share in itertools.product((False, True), WAITS):
        plan = sct_plan(a, level_s, child, share * saved_s, queues)
        yield Assignment(plan.device, as_rank(plan.start_s))
        yield Assignment(plan.device, rank)
    yield from reserved_assignments(
        problem, lambda less: sct_plan(less, level_s, child, saved_s, True)
    )
