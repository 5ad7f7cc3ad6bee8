"""Repair of placements that overflow memory: tightened limits first, then single moves.

The decoder's running estimate of memory is not the simulator's peak. Where they differ the
simulator decides, and the decoder tries again under limits lowered by the missing bytes.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.methods.base import Assignment
from gdp.methods.heuristics.list_schedule import lowered, missing_bytes
from gdp.methods.priorities import RULES, evaluate_rules, rank_under, rules_of, timing
from gdp.policy.decode import DecodeProblem, decode
from gdp.policy.evaluate import best_row, evaluate
from gdp.policy.model.config import Head
from gdp.problem.problem import Problem

TIGHTER = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of all limits that are tried next."""
ROUNDS = 7  # of limits lowered by what was missing, device by device
MOVES = 400  # rounds of single moves, at most
TRIES = 24  # moves in each
OPS_SIMULATED = 40_000_000
"""Most ops simulated by all moves: some seconds on any graph."""


def fitting_greedy(
    problem: Problem, view: DecodeProblem, head: Head, clock: Clock | None = None
) -> tuple[DecodeProblem, Int[np.ndarray, "N"], int]:
    """(the view, its limits lowered as far as needed; the greedy placement under them; simulations
    it took).

    First each limit is lowered by what its own device missed, then all by the same share. Where
    nothing will do until the clock is over, the view as it is and the placement that overflows.
    """
    clock, rules = clock or Clock(None), len(rules_of(problem))

    def greedy(limit: Float[np.ndarray, "D"]) -> tuple[DecodeProblem, Int[np.ndarray, "N"]]:
        under = view._replace(memory_bytes=limit)
        return under, decode(under, head, samples=1, seed=0, greedy_first=True).device[0]

    first = greedy(view.memory_bytes)
    if not view.mask_memory:
        return *first, 0
    capacity = view.memory_bytes.astype(float)
    (under, device), limit, missing, spent = first, capacity, np.zeros_like(capacity), 0
    for attempt in range(ROUNDS):
        if attempt:
            limit = lowered(limit, missing, capacity, attempt - 1)
            under, device = greedy(limit)
        rated = evaluate_rules(problem, device[None])
        spent += rules
        if rated.overflow[0] == 0:
            return under, device, spent
        if clock.is_over():
            return *first, spent
        rank = rank_under(problem, device, RULES[int(rated.rule[0])])
        missing = missing_bytes(problem, Assignment(device, rank))
        spent += 1
    for share in TIGHTER:
        if clock.is_over():
            break
        under, device = greedy(capacity * share)
        spent += rules
        if evaluate(problem, device[None])[1][0] == 0:
            return under, device, spent
    return *first, spent


def move_until_fits(
    problem: Problem, device: Int[np.ndarray, "N"], *, seed: int, clock: Clock | None = None
) -> tuple[Int[np.ndarray, "N"], int]:
    """(the placement with groups moved until memory fits, no move helps or time is over; how many
    placements were simulated).

    Each round moves one group, or a run of neighbouring groups in decode order, off a device, and
    keeps the move that lowers the overflow most. Runs get shorter as moves stop to help.
    """
    rng, clock = np.random.default_rng(seed), clock or Clock(None)
    device = device.copy()
    seconds, overflow = evaluate(problem, device[None])
    rules = len(rules_of(problem))
    best, spent, stuck = (int(overflow[0]), float(seconds[0])), rules, 0
    longest = max(1, problem.num_groups // (2 * problem.num_devices))
    for _ in range(min(MOVES, OPS_SIMULATED // (TRIES * rules * problem.num_ops))):
        if best[0] == 0 or stuck > 12 or clock.is_over():
            break
        moved = np.stack([_move(problem, device, longest, rng) for _ in range(TRIES)])
        seconds, overflow = evaluate(problem, moved)
        spent += TRIES * rules
        row = best_row(seconds, overflow)
        if (int(overflow[row]), float(seconds[row])) < best:
            device, best, stuck = moved[row], (int(overflow[row]), float(seconds[row])), 0
        else:
            stuck += 1
            longest = max(1, longest // 2)
    return device, spent


def _move(
    problem: Problem, device: Int[np.ndarray, "N"], longest: int, rng: np.random.Generator
) -> Int[np.ndarray, "N"]:
    """A copy in which the groups of a run of ops on one device move to another."""
    order = timing(problem).order
    first = int(rng.integers(problem.num_ops))
    home = device[order[first]]
    length = 1 + int(rng.integers(longest))
    run = order[first : first + length]
    groups = np.unique(problem.group[run[device[run] == home]])
    to = int(rng.integers(problem.num_devices))
    groups = groups[problem.group_allowed[groups, to]]
    return np.where(np.isin(problem.group, groups), to, device)
