"""Placements that need no search: one device, and dealing ops out in turn.

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
    group_seconds,
    group_weight_bytes,
    missing_text,
    nearest_allowed,
    unsupported,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem


def single(problem: Problem, search: Search) -> Answer:
    """Everything on the one device where it runs best and fits; what may not run there, elsewhere.

    Ops that are pinned to or only supported by other devices go to the fastest of those.
    O(D) simulations.
    """
    if (refusal := unsupported(problem, "single")) is not None:
        return refusal
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
    """Everything on each device in turn, as far as it may be there."""
    for d in range(problem.num_devices):
        wanted = np.full(problem.num_groups, d)
        yield Assignment(expand(problem, nearest_allowed(problem, wanted)))


def round_robin(problem: Problem, search: Search) -> Answer:
    """Ops (groups that must share a device) dealt out to the devices in turn, in topological order.

    A device that a group may not use, or that its weights would overfill, is passed over. A
    baseline that ignores both work and traffic. O(N + G D).
    """
    if (refusal := unsupported(problem, "round_robin")) is not None:
        return refusal
    dealt = Assignment(expand(problem, _deal(problem)))
    return repair_and_select(problem, search, [dealt], "round_robin")


def _deal(problem: Problem) -> Int[np.ndarray, "G"]:
    """A device for every group: the next one in turn that is allowed and has room."""
    a = arrays_of(problem)
    num_devices = problem.num_devices
    seconds = group_seconds(problem)
    heavy = group_weight_bytes(problem)
    allowed = problem.group_allowed.tolist()
    free, shared, pool = a.memory_bytes.copy(), a.pool_bytes.copy(), a.pool.tolist()
    device = np.empty(problem.num_groups, dtype=np.int64)
    turn = 0
    for g in range(problem.num_groups):
        weight = int(heavy[g])
        order = [(turn + k) % num_devices for k in range(num_devices)]
        may = [d for d in order if allowed[g][d]]
        room = {d: min(free[d], shared[pool[d]]) if pool[d] >= 0 else free[d] for d in may}
        chosen = next((d for d in may if room[d] >= weight), max(may, key=room.__getitem__))
        device[g] = chosen
        free[chosen] -= weight
        if pool[chosen] >= 0:
            shared[pool[chosen]] -= weight
        # Inputs and outputs sit on the host and take no turn.
        if len(may) > 1 or seconds[g, may[0]] > 0:
            turn = (chosen + 1) % num_devices
    return device
