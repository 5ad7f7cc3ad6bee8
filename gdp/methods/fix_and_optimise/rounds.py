"""Fix-and-optimise: free a region of the best placement, solve the program there, simulate, go on.

Large neighbourhood search (Shaw 1998, doi 10.1007/3-540-49481-2_30) whose neighbourhoods are
programs: of the period (`gdp.methods.fix_and_optimise.period`) and of the latency (`.latency`).

Axes: N ops, G groups, K groups of a region, D devices, E devices of a region.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.clock import Clock
from gdp.bounds.linear_program import LinearProgram, Solution, least_whole
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.scoring import Evaluated, best_of, expand, missing_text
from gdp.methods.shares import FIT_ROUND_SHARE
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

_ENTRIES_PER_S = 40_000  # of a program's root
_NODE_ROOTS = 0.014  # time of a node, in those of the root
_LEAST_S = 0.02
_BETTER = 1.0 - 1e-4  # of the best value: the target of a round


def solve_in_rounds(
    problem: Problem, search: Search, program: str, improve: Callable[[Evaluated, Clock], Evaluated]
) -> Answer:
    """Improve the best of the search's start or prior answers, or any placement.

    Args:
        problem: To be placed.
        search: Its seconds end the rounds.
        program: Name for the answer's reason.
        improve: Runs the rounds from a placement that may overflow memory.
    """
    clock = search.budget()
    answered = [answer.assignment for answer in search.prior_answers.values()]
    starts = [search.start] if search.start is not None else [x for x in answered if x is not None]
    anywhere = Assignment(expand(problem, problem.group_allowed.argmax(axis=1)))
    best = improve(best_of(problem, starts or [anywhere]), clock)
    if best.overflow_bytes > 0:
        missing = missing_text(problem, best.assignment)
        why = f"no round of the {program} program fits; the closest misses {missing}"
        return Answer(None, reason=why, evaluations=best.evaluations, closest=best.assignment)
    return Answer(best.assignment, evaluations=best.evaluations)


def solve_round(
    program: LinearProgram,
    free: Bool[np.ndarray, "G D"],
    upper: float,
    clock: Clock,
    relative_gap: float,
    nodes: int | None,
) -> Solution:
    """HiGHS's answer for a region, below an objective, within a share of the clock's seconds.

    A clock of counted work is charged with the work of such a program, by its size and the nodes
    that were searched, and limits the nodes beforehand.
    """
    high = program.high.copy()
    high[: free.size] *= free.reshape(-1)
    seconds = clock.limit_s(FIT_ROUND_SHARE)
    entries = program.size * float((free.sum(axis=1) > 1).mean())
    if nodes is not None and np.isfinite(left_s := clock.remaining_s()):
        nodes = min(nodes, max(1, int((left_s / solve_s(entries, 0) - 1.0) / _NODE_ROOTS)))
    solved = least_whole(
        program._replace(high=high), (0.0, upper), seconds and max(0.2, seconds), relative_gap,
        nodes,
    )  # fmt: skip
    clock.charge(solve_s(entries, solved.nodes))
    return solved


def solve_s(entries: float, nodes: int) -> float:
    """Seconds that an idle core takes for a program with so many entries that are not fixed.

    Fitted to programs of periods of 140 to 900 groups, which take 0.4 to 2 times as long.
    """
    return max(_LEAST_S, entries / _ENTRIES_PER_S * (1.0 + _NODE_ROOTS * nodes))


def target_s(best: Evaluated) -> float:
    """The largest value that improves on a placement; inf while it does not fit."""
    return best.value_s * _BETTER if best.overflow_bytes == 0 else np.inf


def group_devices(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "G"]:
    """The device of each group in a placement."""
    a = arrays_of(problem)
    return device[a.group_op[a.group_start[:-1]]]


def free_region(
    problem: Problem,
    home: Int[np.ndarray, "G"],
    groups: Int[np.ndarray, "K"],
    devices: Int[np.ndarray, "E"],
) -> Bool[np.ndarray, "G D"]:
    """Allowed devices if some groups may move to some devices and all others stay at home."""
    may = np.zeros(problem.group_allowed.shape, dtype=bool)
    may[np.arange(problem.num_groups), home] = True
    may[groups[:, None], devices] = True
    return may & problem.group_allowed
