"""Placements that a policy decodes for a problem: the greedy one, then samples.

The decoder's running estimate of memory is not the simulator's peak. Where they differ the
simulator decides, and the decoder tries again under limits lowered by the missing bytes.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.base.cores import num_cores
from gdp.methods.base import Assignment, inner_seed
from gdp.methods.heuristics.list_schedule import lowered, missing_bytes, pool_limits
from gdp.methods.priorities import RULES, RatedPlacements, evaluate_rules, rank_under, rules_of
from gdp.policy.decode import DecodeProblem, decode, in_threads
from gdp.policy.model.config import Head
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem

TIGHTER = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of all limits that are tried next."""
ROUNDS = 7  # of limits lowered by the missing bytes, device by device


def fitting_greedy(
    problem: Problem, view: DecodeProblem, head: Head, clock: Clock | None = None
) -> tuple[DecodeProblem, Int[np.ndarray, "N"], int]:
    """(the view, its limits lowered as far as needed; the greedy placement under them; simulations
    it took).

    First each limit is lowered by its own device's missing bytes, then all by the same share. Where
    nothing will do until the clock is over, the view as it is and the placement that overflows.
    """
    clock, rules = clock or Clock(None), len(rules_of(problem))

    def greedy(limit: Float[np.ndarray, "D"]) -> tuple[DecodeProblem, Int[np.ndarray, "N"]]:
        under = view._replace(memory_bytes=limit, pool_bytes=pool_limits(problem, limit))
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
        if evaluate_rules(problem, device[None]).overflow[0] == 0:
            return under, device, spent
    return *first, spent


TEMPERATURES = (0.3, 0.7, 1.0)
"""Temperatures of samples in turn: cool ones are better on average, warm ones more diverse."""


def propose(
    policy: Policy, problem: Problem, count: int, seed: int, clock: Clock | None = None
) -> RatedPlacements:
    """The greedy placement and `count - 1` samples, fewer where the clock is over.

    Where the greedy one overflows, all are decoded under the memory limits, tightened, under which
    it fits.
    """
    clock, view, head = clock or Clock(None), policy.view(problem), policy.head(problem)
    view, greedy, spent = fitting_greedy(problem, view, head, clock)

    def sample(k: int) -> Int[np.ndarray, "N"] | None:
        if clock.is_over():
            return None
        own, temperature = inner_seed(seed, k, 1009), TEMPERATURES[k % len(TEMPERATURES)]
        return decode(view, head, samples=1, seed=own, temperature=temperature).device[0]

    threads = num_cores() if problem.num_ops > 2000 else 1
    drawn = [greedy, *in_threads(sample, range(1, count), threads)]
    rated = evaluate_rules(problem, np.stack([device for device in drawn if device is not None]))
    return rated._replace(evaluations=rated.evaluations + spent)
