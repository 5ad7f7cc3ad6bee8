"""Placements that need no search: one device, and round-robin.

The contiguous blocks of the human-expert rule are in `gdp.methods.heuristics.blocks`.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import (
    best_of,
    best_priority_rule,
    expand,
    group_held_bytes,
    group_seconds,
    missing_text,
    nearest_allowed,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem


def single(problem: Problem, search: Search) -> Answer:
    """Everything on the one device where it is fastest and fits; ops that may not run there,
    elsewhere.

    Ops that are pinned to or only supported by other devices go to the fastest of those.
    O(D) simulations.
    """
    del search  # D simulations: nothing to cut short
    best = best_priority_rule(problem, best_of(problem, single_assignments(problem)))
    if best.overflow_bytes > 0:
        return Answer(
            None,
            reason=f"no single device holds the model: {missing_text(problem, best.assignment)}",
            evaluations=best.evaluations,
            closest=best.assignment,
        )
    return Answer(best.assignment, evaluations=best.evaluations)


def single_assignments(problem: Problem) -> Iterator[Assignment]:
    """For each device, everything on it as far as allowed."""
    for d in range(problem.num_devices):
        wanted = np.full(problem.num_groups, d)
        yield Assignment(expand(problem, nearest_allowed(problem, wanted)))


def round_robin(problem: Problem, search: Search) -> Answer:
    """Ops (groups that must share a device) assigned round-robin, in topological order.

    A device that a group may not use, or that its weights would overfill, is passed over. A
    baseline that ignores both work and traffic. O(N + G D).
    """
    dealt = Assignment(expand(problem, _deal(problem)))
    return repair_and_select(problem, search, [dealt], "round_robin")


def _deal(problem: Problem) -> Int[np.ndarray, "G"]:
    """A device for every group: the next one round-robin that is allowed and has memory."""
    a = arrays_of(problem)
    num_devices = problem.num_devices
    seconds = group_seconds(problem)
    sizes, cache_home = group_held_bytes(problem).T.tolist(), a.held_on[-1].tolist()
    allowed = problem.group_allowed.tolist()
    free, shared, pool = a.memory_bytes.copy(), a.pool_bytes.copy(), a.pool.tolist()

    def held(g: int, d: int) -> list[tuple[int, int]]:
        """(device, bytes) of the weights and caches of group g if it is on device d."""
        if cache_home[d] == d or not sizes[g][-1]:
            return [(d, sum(sizes[g]))]
        return [(d, sizes[g][0]), (cache_home[d], sizes[g][-1])]

    def left(g: int, d: int) -> int:
        """Bytes of room that group g on device d leaves, where that is least."""
        room = {at: min(free[at], shared[pool[at]]) if pool[at] >= 0 else free[at]
                for at, _ in held(g, d)}  # fmt: skip
        return min(int(room[at]) - size for at, size in held(g, d))

    device = np.empty(problem.num_groups, dtype=np.int64)
    turn = 0
    for g in range(problem.num_groups):
        may = [d for k in range(num_devices) if allowed[g][d := (turn + k) % num_devices]]
        over = {d: left(g, d) for d in may}
        chosen = next((d for d in may if over[d] >= 0), max(may, key=over.__getitem__))
        device[g] = chosen
        for at, size in held(g, chosen):
            free[at] -= size
            if pool[at] >= 0:
                shared[pool[at]] -= size
        # Inputs and outputs sit on the host and take no turn.
        if len(may) > 1 or seconds[g, may[0]] > 0:
            turn = (chosen + 1) % num_devices
    return device
