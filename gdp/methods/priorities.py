"""Priorities beside devices: a placement is run under each of a few rules, and the best counts.

Which of two ready ops a device takes first decides as much as a good move of an op, and no one rule
is best everywhere: the longest path to the end suits forward passes, program order pipelines of
micro-batches, first come first served what is bound by links. All are computed in O(E) per
placement. Axes: K placements, N ops, R rules.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.ranks import as_rank, links, priority, timing
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of

Rule = Literal["upward", "placed", "arrival", "program", "critical"]

RULES: tuple[Rule, ...] = ("upward", "placed", "arrival", "program", "critical")
"""upward: longest path to the end with mean costs (HEFT's rank, Topcuoglu et al. 2002). placed: the
same with the costs and transfers of the placement. arrival: first ready, first served. program: the
graph's own order. critical: longest path through the op, with the costs of the placement."""


def rules_of(problem: Problem) -> tuple[Rule, ...]:
    """The rules that can make a difference: only a latency depends on priorities."""
    return RULES if objective_of(problem).ordered else RULES[:1]


def ranks(
    problem: Problem, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...]
) -> Int[np.ndarray, "R K N"]:
    """The rank of every op under each rule; equal ranks mean first ready, first served."""
    count, n = devices.shape
    rank_rows = np.zeros((len(rules), count, n), dtype=np.int64)
    up_s, down_s = np.zeros((count, n)), np.zeros((count, n))
    if "placed" in rules or "critical" in rules:
        from gdp.methods.path_kernels import path_seconds

        times, rows = timing(problem), np.ascontiguousarray(devices)
        path_seconds(
            arrays_of(problem), times.order, times.cost_s, *links(problem), rows, up_s, down_s
        )
    for row, rule in enumerate(rules):
        if rule == "upward":
            rank_rows[row] = priority(problem)
        elif rule == "program":
            rank_rows[row] = np.arange(n)
        elif rule == "placed":
            rank_rows[row] = [as_rank(key) for key in -up_s]
        elif rule == "critical":
            rank_rows[row] = [as_rank(key) for key in -(up_s + down_s)]
    return rank_rows


def rank_under(
    problem: Problem, device: Int[np.ndarray, "N"], rule: Rule
) -> Int[np.ndarray, "N"] | None:
    """The ranks of one placement under a rule, as an `Assignment` takes them."""
    if rule == "arrival":
        return None
    return ranks(problem, device[None], (rule,))[0, 0]


class BestRules(NamedTuple):
    """Evaluation of placements, each under the best of the rules tried."""

    seconds: Float[np.ndarray, "K"]  # of the objective
    overflow: Int[np.ndarray, "K"]  # bytes over device memory
    rule: Int[np.ndarray, "K"]  # index into RULES
    evaluations: int  # runs of the simulator


def evaluate_rules(
    problem: Problem, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...] | None = None
) -> BestRules:
    """Simulate placements under each rule: the least overflow counts, then the least seconds.

    Without `rules`, under all that can make a difference for the objective.
    """
    count, n = devices.shape
    rules = rules_of(problem) if rules is None else rules
    evaluate = objective_of(problem).values
    if objective_of(problem).ordered:
        rows = ranks(problem, devices, rules).reshape(len(rules) * count, n)
        seconds, overflow = evaluate(problem, np.tile(devices, (len(rules), 1)), rows)
    else:
        seconds, overflow = evaluate(problem, devices)
    seconds, overflow = seconds.reshape(-1, count), overflow.reshape(-1, count)
    best = np.lexsort((seconds, overflow), axis=0)[0]
    column = np.arange(count)
    index = np.array([RULES.index(rule) for rule in rules])
    return BestRules(seconds[best, column], overflow[best, column], index[best], seconds.size)
