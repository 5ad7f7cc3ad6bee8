"""Priorities beside devices: a placement is run under each of a few rules, and the best counts.

Which of two ready ops a device takes first decides as much as a good move of an op, and no one rule
is best everywhere: the longest path to the end suits forward passes, program order pipelines of
micro-batches, first come first served what is bound by links. All are computed in O(E) per
placement. Axes: K placements, N ops, R rules.
"""

from typing import Literal

import numpy as np
from jaxtyping import Int

from gdp.methods.ranks import as_rank
from gdp.policy.timing import links, priority, timing
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
    found = np.zeros((len(rules), count, n), dtype=np.int64)
    up_s, down_s = np.zeros((count, n)), np.zeros((count, n))
    if "placed" in rules or "critical" in rules:
        from gdp.policy.path_kernels import path_seconds

        times, rows = timing(problem), np.ascontiguousarray(devices)
        path_seconds(
            arrays_of(problem), times.order, times.cost_s, *links(problem), rows, up_s, down_s
        )
    for row, rule in enumerate(rules):
        if rule == "upward":
            found[row] = priority(problem)
        elif rule == "program":
            found[row] = np.arange(n)
        elif rule == "placed":
            found[row] = [as_rank(key) for key in -up_s]
        elif rule == "critical":
            found[row] = [as_rank(key) for key in -(up_s + down_s)]
    return found


def rank_under(
    problem: Problem, device: Int[np.ndarray, "N"], rule: Rule
) -> Int[np.ndarray, "N"] | None:
    """The ranks of one placement under a rule, as an `Assignment` takes them."""
    if rule == "arrival":
        return None
    return ranks(problem, device[None], (rule,))[0, 0]
