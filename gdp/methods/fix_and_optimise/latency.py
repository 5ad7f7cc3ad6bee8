"""The latency program in rounds: solve a region, simulate under all rules, repair, search on.

Chains of annealing that begin hot come first (`gdp.methods.search.chains`): the rounds look around
the best placement, so that it matters in which pocket of the memory limits that lies.

The program (`gdp.bounds.path_program`) knows memory, paths, work and transfers, but not the order
in which ops and transfers queue. So each round frees a region of the best placement (all groups of
two devices, or a window of the graph on all devices), solves it for something better than the best
simulated so far and far enough from all prior solutions, and hands the solution to the simulator,
under all rules of priority, to repair where it overflows, and to a short local search.

Axes: N ops, G groups, D devices, K groups in a row, L of them.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.clock import Clock
from gdp.bounds.budget import WorkBudget
from gdp.bounds.linear_program import (
    UNIT,
    LinearProgram,
    Solution,
    dual_value_s,
    dual_weights,
)
from gdp.bounds.path_program import build_paths, path_program_size, rows_bind, timing_graph
from gdp.methods.base import Answer, Assignment, Search, inner_seed
from gdp.methods.fix_and_optimise.rounds import (
    free_region,
    group_devices,
    solve_in_rounds,
    solve_round,
    solve_s,
    target_s,
)
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, expand
from gdp.methods.search.budget import SearchConfig
from gdp.methods.search.chains import ChainLimits, anneal_from_hot_starts
from gdp.methods.search.local_search import improve
from gdp.methods.shares import LATENCY_HOT_SHARE
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of

_HOT_CHAINS = ChainLimits(60, 24)
_ROUNDS = 16
_GAP = 3e-2  # relative; left open by a round
_NODES = 20  # of a round's search tree
_MOST_ENTRIES = 100_000  # of the matrix
_PAIR, _WINDOW = (100, 0.5), (40, 0.125)  # groups, or the share of them if that is more
_APART = 0.05  # of the free groups: so many have another device than in anything tried before
_SPANS_S = 1.0  # budget for the spans
_POLISHED_OPS = 400_000  # simulated in the local search after each round
_POLISH = (200, 4000)  # its simulations, at least and at most


def applies(problem: Problem) -> bool:
    """True for an ordered run whose memory binds, if chains may simulate the whole graph."""
    goal = objective_of(problem)
    return (
        goal.ordered
        and not goal.pipelined
        and problem.num_devices > 1
        and problem.num_ops <= SearchConfig().windows_above
        and rows_bind(problem)
    )


def latency_fit(problem: Problem, search: Search) -> Answer:
    """The best placement of chains and rounds, from `search.start` or prior answers on.

    Of a program that is too large no round is solved: chains have all of the seconds.
    """
    return solve_in_rounds(
        problem, search, "latency", lambda best, clock: _improved(problem, best, search.seed, clock)
    )


def _improved(problem: Problem, first: Evaluated, seed: int, clock: Clock) -> Evaluated:
    """The best of a placement and of all chains and rounds, none where nothing can be better."""
    if first.overflow_bytes > 0:
        first = repair(problem, first, clock, seed)
    if not 0.0 < first.value_s < np.inf:
        return first
    if path_program_size(problem) > _MOST_ENTRIES:
        return anneal_from_hot_starts(problem, first, seed, clock, _HOT_CHAINS)
    # Only seconds may end the work of the spans early, not a count.
    clock.charge(_SPANS_S)
    spans = WorkBudget(_SPANS_S, np.inf if clock.is_counted else None)
    timing = timing_graph(problem, spans)
    program = build_paths(problem, first.value_s / UNIT, timing)
    seconds = clock.limit_s()
    solved = dual_weights(program, seconds and max(0.2, seconds))
    clock.charge(solve_s(program.size, 0))
    least_s = 0.0 if solved is None else dual_value_s(program, solved[0])
    if first.overflow_bytes == 0 and least_s >= target_s(first):
        return first
    best = anneal_from_hot_starts(problem, first, seed, clock.part(LATENCY_HOT_SHARE), _HOT_CHAINS)
    if best.overflow_bytes == 0 and least_s >= target_s(best):
        return best
    return _by_regions(problem, program, best, seed, clock)


def _by_regions(
    problem: Problem, program: LinearProgram, best: Evaluated, seed: int, clock: Clock
) -> Evaluated:
    """The best of a placement and the solutions of all rounds."""
    count, rng = best.evaluations, np.random.default_rng(seed)
    tried: list[Int[np.ndarray, "G"]] = []
    for k in range(_ROUNDS):
        if clock.is_over():
            break
        free = region(problem, best, rng, k)
        solved = _solved(program, free, tried, best, clock)
        if solved.values is None:
            if solved.is_infeasible and free.sum() == problem.group_allowed.sum() and not tried:
                break  # nothing is better
            continue
        tried.append(solved.values[: free.size].reshape(free.shape).argmax(axis=1))
        own = inner_seed(seed, k, _ROUNDS)
        polished = _polished(problem, expand(problem, tried[-1]), own, clock)
        count += polished.evaluations
        best = min(best, polished)
    return replace(best, evaluations=count)


def region(
    problem: Problem, best: Evaluated, rng: np.random.Generator, k: int
) -> Bool[np.ndarray, "G D"]:
    """Free devices in round k: two devices for their groups, or all devices for a window.

    A window is a limited number of groups in a row, in the order of their first ops. While nothing
    fits, all groups are free.
    """
    if best.overflow_bytes > 0:
        return problem.group_allowed
    a = arrays_of(problem)
    home = group_devices(problem, best.assignment.device)
    order = np.argsort(a.group_op[a.group_start[:-1]], kind="stable")
    if k % 2 == 0:
        devices = rng.choice(problem.num_devices, 2, replace=False)
        order, (least, share) = order[np.isin(home[order], devices)], _PAIR
    else:
        devices, (least, share) = np.arange(problem.num_devices), _WINDOW
    length = max(least, int(share * problem.num_groups))
    first = int(rng.integers(max(1, len(order) - length + 1)))
    return free_region(problem, home, order[first : first + length], devices)


def _solved(
    program: LinearProgram,
    free: Bool[np.ndarray, "G D"],
    tried: list[Int[np.ndarray, "G"]],
    best: Evaluated,
    clock: Clock,
) -> Solution:
    """HiGHS's answer for a region, better than the best and different from all prior solutions."""
    from scipy.sparse import csr_array, vstack

    groups, devices = free.shape
    if tried:
        apart = max(2, int(_APART * (free.sum(axis=1) > 1).sum()))
        column = (np.arange(groups) * devices + np.array(tried)).reshape(-1)
        start = np.arange(0, len(column) + 1, groups)
        shape = (len(tried), len(program.high))
        rows = csr_array((np.ones(len(column)), column, start), shape=shape)
        limit = np.full(len(tried), float(groups - apart))
        program = program._replace(a=vstack([program.a, rows]), b=np.append(program.b, limit))
    return solve_round(program, free, target_s(best) / program.unit_s, clock, _GAP, _NODES)


def _polished(problem: Problem, device: Int[np.ndarray, "N"], seed: int, clock: Clock) -> Evaluated:
    """A placement under the rules, repaired and searched on for a few simulations."""
    count = int(np.clip(_POLISHED_OPS // problem.num_ops, *_POLISH))
    placed = best_priority_rule(problem, best_of(problem, [Assignment(device)]))
    if placed.overflow_bytes > 0:
        placed = repair(problem, placed, clock, seed, count)
        if placed.overflow_bytes > 0:
            return placed
    search = Search(seed=seed, seconds=None, evaluations=count)
    best = improve(problem, [replace(placed, evaluations=0)], search, clock)
    return replace(best, evaluations=best.evaluations + placed.evaluations)
