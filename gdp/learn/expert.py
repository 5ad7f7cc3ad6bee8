"""Expert iteration: what a search makes of the policy's best sample is what it learns next.

The search starts where the policy is, so its results stay within reach, and they rise with it
(Anthony et al. 2017, arXiv 1705.08439). Axes: N ops.
"""

import numpy as np
from jaxtyping import Int

from gdp.methods.base import Search
from gdp.methods.search.local_search import local_search
from gdp.methods.timing import timing
from gdp.policy.evaluate import assignment, judge
from gdp.problem.problem import Problem
from gdp.problem.symmetry import canonical


def improved(
    problem: Problem, devices: list[Int[np.ndarray, "N"]], evaluations: int, seed: int
) -> Int[np.ndarray, "N"]:
    """The best of some placements, annealed for so many evaluations; never worse than any of them.

    Judged as the policy's own placements are, and devices that are alike named as it names them.
    """
    cost_s, _ = judge(problem, np.stack(devices))
    start = assignment(problem, devices[int(np.argmin(cost_s))])
    search = Search(seed=seed, seconds=None, evaluations=evaluations, start=start)
    answer = local_search(problem, search)
    rows = [*devices] if answer.assignment is None else [*devices, answer.assignment.device]
    named = np.stack([canonical(problem, row, timing(problem).order) for row in rows])
    return named[int(np.argmin(judge(problem, named)[0]))]
