"""Optima of small problems, by trying every placement. Axes: N ops, D devices."""

import itertools

import numpy as np
from jaxtyping import Int

from gdp.methods.base import Assignment
from gdp.methods.search.replica_groups import partitions
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of
from gdp.sim.score import may_replicate, score_of, values

MOST_TRIED = 200_000
"""Placements with their orders that `optimum` simulates at most."""
MOST_TEAMS_TRIED = 3000


def optimum(problem: Problem) -> float | None:
    """The least value of all placements that fit, inf where none does; None where they are too
    many to try. Orders of ops are tried where the objective heeds them, replica groups where the
    problem allows them."""
    devices = _placements(problem, MOST_TRIED)
    if devices is None:
        return None
    found = [values(problem, devices)]
    if objective_of(problem).ordered:
        orders = _orders(problem, MOST_TRIED // len(devices))
        if orders is None:
            return None
        both = np.repeat(devices, len(orders), axis=0), np.tile(orders, (len(devices), 1))
        found.append(values(problem, *both))
    least = min(float(v[over == 0].min(initial=np.inf)) for v, over in found)
    if not may_replicate(problem):
        return least
    groups = [teams for teams in partitions(range(problem.num_devices)) if teams]
    if len(groups) * len(devices) > MOST_TEAMS_TRIED:
        return None
    work = ~problem.graph.is_io
    for teams in groups:
        behind = [d for team in teams for d in team[1:]]
        for device in devices[~np.isin(devices[:, work], behind).any(axis=1)]:
            if _may_serve(problem, device, teams):
                scored = score_of(problem, Assignment(device, teams=teams))
                least = min(least, scored.value_s) if scored.feasible else least
    return least


def _placements(problem: Problem, most: int) -> Int[np.ndarray, "B N"] | None:
    """Every placement that keeps groups together and ops where they may run; None for too many."""
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    if np.prod([float(len(row)) for row in choices]) > most:
        return None
    return np.array(list(itertools.product(*choices)), dtype=np.int64)[:, problem.group]


def _orders(problem: Problem, most: int) -> Int[np.ndarray, "B N"] | None:
    """Ranks of every topological order of the ops; None for too many.

    An order in which ops start is topological and, as ranks, starts them so again: no other ranks
    make another schedule."""
    n, (src, dst) = problem.num_ops, problem.graph.edges
    before = [set(src[dst == op].tolist()) for op in range(n)]
    found: list[list[int]] = []
    stack: list[list[int]] = [[]]
    while stack:
        order = stack.pop()
        if len(order) == n:
            found.append(order)
            if len(found) > most:
                return None
            continue
        done = set(order)
        stack += [[*order, op] for op in range(n) if op not in done and before[op] <= done]
        if len(stack) > 50 * most + 1000:
            return None
    return np.argsort(np.array(found, dtype=np.int64), axis=1)


def _may_serve(problem: Problem, device: Int[np.ndarray, "N"], teams: Teams) -> bool:
    """True if every member of a group may run the ops of its first."""
    work = ~problem.graph.is_io
    return all(problem.allowed[work & (device == team[0])][:, list(team)].all() for team in teams)
