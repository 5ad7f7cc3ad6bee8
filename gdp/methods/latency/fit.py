"""The latency program where memory is tight: free a region, solve it, simulate, search, go on.

The program (`gdp.bounds.path_program`) knows memory, paths, work and transfers, but not the order
in which ops and transfers queue. So each round frees a region of the best placement (all groups of
two devices, or a stretch of the graph on all devices), solves it for something better than the best
simulated so far and far enough from all that was tried, and hands the solution to the simulator,
under all rules of priority, to repair where it overflows, and to a short local search. Large
neighbourhood search: Shaw 1998, doi 10.1007/3-540-49481-2_30.

Axes: G groups, D devices.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from gdp.bounds.effort import Effort
from gdp.bounds.linear_program import Solution, dual_weights
from gdp.bounds.path_program import (
    PathModel,
    build_paths,
    dual_value_s,
    least_whole,
    linear_arguments,
    net_of,
    path_model_size,
    rows_bind,
)
from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.period.solution import UNIT
from gdp.methods.priorities import under_rules
from gdp.methods.repair import repair
from gdp.methods.scoring import Scored, best_of, expand, missing_text
from gdp.methods.search.local_search import improve
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of

_ROUNDS = 16
_ROUND_SHARE = 0.3  # of the seconds left, for one round
_GAP = 3e-2  # relative; what a round leaves open
_NODES = 20  # of a round's search tree
_MOST_ENTRIES = 100_000  # of the matrix
_PAIR, _STRETCH = (100, 0.5), (40, 0.125)  # groups, or the share of them if that is more
_APART = 0.05  # of the free groups: so many have another device than in anything tried before
_BETTER = 1.0 - 1e-4  # of the best: what a round looks for
_SPANS_S = 1.0  # effort for the spans
_POLISHED_OPS = 400_000  # simulated in the local search after each round
_POLISH = (200, 4000)  # its simulations, at least and at most


def applies(problem: Problem) -> bool:
    """Whether the program is about this problem, and not too large for a solver."""
    goal = objective_of(problem)
    return (
        goal.ordered
        and goal.on_links
        and not goal.pipelined
        and problem.num_devices > 1
        and rows_bind(problem)
        and path_model_size(problem) <= _MOST_ENTRIES
    )


def latency_fit(problem: Problem, search: Search) -> Answer:
    """The best placement that the rounds find from `search.start` or what is known on."""
    clock = Clock(search.seconds)
    answered = [answer.assignment for answer in search.known.values()]
    starts = [search.start] if search.start is not None else [x for x in answered if x is not None]
    anywhere = Assignment(expand(problem, problem.group_allowed.argmax(axis=1)))
    best = improved(problem, best_of(problem, starts or [anywhere]), search.seed, clock)
    if best.overflow_bytes > 0:
        missing = missing_text(problem, best.assignment)
        why = f"no round of the latency program fits; the closest misses {missing}"
        return Answer(None, reason=why, evaluations=best.evaluations)
    return Answer(best.assignment, evaluations=best.evaluations)


def improved(problem: Problem, best: Scored, seed: int, clock: Clock) -> Scored:
    """The best of a placement and what the rounds make of it."""
    count, rng = best.evaluations, np.random.default_rng(seed)
    unit_s = best.value_s / UNIT
    if not 0.0 < unit_s < np.inf:
        return best
    model = build_paths(problem, unit_s, net_of(problem, Effort(_SPANS_S)))
    if best.overflow_bytes == 0 and _least_s(model, clock) >= best.value_s * _BETTER:
        return best
    tried: list[Int[np.ndarray, "G"]] = []
    for k in range(_ROUNDS):
        if clock.is_over():
            break
        free = region(problem, best, rng, k)
        solved = _solved(model, free, tried, best, clock)
        if solved.values is None:
            if solved.is_infeasible and free.sum() == problem.group_allowed.sum() and not tried:
                break  # nothing is better
            continue
        shares = solved.values[: free.size].reshape(free.shape)
        tried.append(shares.argmax(axis=1))
        found = _polished(problem, expand(problem, tried[-1]), seed * _ROUNDS + k, clock)
        count += found.evaluations
        best = min(best, found, key=lambda scored: scored.key)
    return replace(best, evaluations=count)


def _least_s(model: PathModel, clock: Clock) -> float:
    """What no placement is faster than, by the program in shares."""
    solved = dual_weights(linear_arguments(model), max(0.2, clock.remaining_s()))
    return 0.0 if solved is None else dual_value_s(model, solved[0])


def region(
    problem: Problem, best: Scored, rng: np.random.Generator, k: int
) -> Bool[np.ndarray, "G D"]:
    """Where groups may go in round k: those of two devices between them, or a stretch anywhere.

    At most so many in a row, in the order of their first ops; while nothing fits, all anywhere.
    """
    if best.overflow_bytes > 0:
        return problem.group_allowed
    a, groups = arrays_of(problem), np.arange(problem.num_groups)
    first = a.group_op[a.group_start[:-1]]
    order, home = np.argsort(first, kind="stable"), best.assignment.device[first]
    may = np.zeros(problem.group_allowed.shape, dtype=bool)
    may[groups, home] = True
    if k % 2 == 0:
        pair = rng.choice(problem.num_devices, 2, replace=False)
        length = _length(_PAIR, problem.num_groups)
        inside = _stretch(order[np.isin(home[order], pair)], length, rng)
        may[inside[:, None], pair] = True
    else:
        may[_stretch(order, _length(_STRETCH, problem.num_groups), rng)] = True
    return may & problem.group_allowed


def _length(region: tuple[int, float], groups: int) -> int:
    least, share = region
    return max(least, int(share * groups))


def _stretch(
    order: Int[np.ndarray, "K"], length: int, rng: np.random.Generator
) -> Int[np.ndarray, "L"]:
    """At most so many in a row, from anywhere."""
    first = int(rng.integers(max(1, len(order) - length + 1)))
    return order[first : first + length]


def _solved(
    model: PathModel,
    free: Bool[np.ndarray, "G D"],
    tried: list[Int[np.ndarray, "G"]],
    best: Scored,
    clock: Clock,
) -> Solution:
    """HiGHS's answer for a region, better than the best and apart from what was tried."""
    from scipy.sparse import csr_array, vstack

    groups, devices = free.shape
    if tried:
        apart = max(2, int(_APART * (free.sum(axis=1) > 1).sum()))
        column = (np.arange(groups) * devices + np.array(tried)).reshape(-1)
        start = np.arange(0, len(column) + 1, groups)
        shape = (len(tried), len(model.high))
        rows = csr_array((np.ones(len(column)), column, start), shape=shape)
        limit = np.full(len(tried), float(groups - apart))
        model = model._replace(a=vstack([model.a, rows]), b=np.append(model.b, limit))
    high = model.high.copy()
    high[: free.size] *= free.reshape(-1)
    upper = best.value_s * _BETTER / model.unit_s if best.overflow_bytes == 0 else np.inf
    seconds = None if clock.seconds is None else max(0.2, _ROUND_SHARE * clock.remaining_s())
    return least_whole(model._replace(high=high), (0.0, upper), seconds, _GAP, _NODES)


def _polished(problem: Problem, device: Int[np.ndarray, "N"], seed: int, clock: Clock) -> Scored:
    """A placement under the rules, repaired and searched on for a few simulations."""
    count = int(np.clip(_POLISHED_OPS // problem.num_ops, *_POLISH))
    placed = under_rules(problem, best_of(problem, [Assignment(device)]))
    if placed.overflow_bytes > 0:
        placed = repair(problem, placed, clock, seed, count)
        if placed.overflow_bytes > 0:
            return placed
    search = Search(seed=seed, seconds=None, evaluations=count)
    found = improve(problem, [replace(placed, evaluations=0)], search, clock)
    return replace(found, evaluations=found.evaluations + placed.evaluations)
