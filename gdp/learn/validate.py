"""How good a policy is on problems it does not learn from: ratios to the best known values."""

from typing import NamedTuple

import numpy as np

from gdp.learn.instances import Instance
from gdp.learn.labels import LabelStore
from gdp.learn.problems import Problems
from gdp.policy.policy import Policy
from gdp.policy.propose import propose

MISFIT = 5.0
"""What does not fit counts as so many times the best known, and so does what is slower still."""


class Quality(NamedTuple):
    """Geometric means over instances of cost / best known."""

    greedy: float
    best: float  # of the greedy placement and the samples
    feasible: float  # share of greedy placements that fit in memory


def validate(
    policy: Policy,
    problems: Problems,
    labels: LabelStore,
    instances: list[Instance],
    *,
    samples: int = 16,
    seed: int = 0,
) -> Quality:
    """Greedy decode and the best of some samples, no repair and no search."""
    greedy, best, fits = [], [], []
    for instance in instances:
        problem = problems.get(instance)
        label = labels.get(instance, problem)
        if label is None:
            continue
        found = propose(policy, problem, samples + 1, seed)
        cost_s = np.minimum(found.value_s, MISFIT * label.value_s)
        greedy.append(np.log(cost_s[0] / label.value_s))
        best.append(np.log(cost_s.min() / label.value_s))
        fits.append(bool(found.overflow[0] == 0))
    if not greedy:
        return Quality(float("nan"), float("nan"), float("nan"))
    return Quality(
        float(np.exp(np.mean(greedy))), float(np.exp(np.mean(best))), float(np.mean(fits))
    )
