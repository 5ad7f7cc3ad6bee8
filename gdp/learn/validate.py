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


class Outcome(NamedTuple):
    """One instance: costs over the best known, `MISFIT` where nothing fits."""

    instance: Instance
    num_ops: int
    greedy: float
    best: float
    fits: bool  # the greedy placement


TIGHT, LARGE = 1.7, 1000
"""Memory over the fair share up to which an instance is tight; ops from which it is large."""


def outcomes(
    policy: Policy,
    problems: Problems,
    labels: LabelStore,
    instances: list[Instance],
    *,
    samples: int = 16,
    seed: int = 0,
) -> list[Outcome]:
    """Greedy decode and the best of some samples, no repair and no search."""
    made = []
    for instance in instances:
        problem = problems.get(instance)
        label = labels.get(instance, problem)
        if label is None:
            continue
        found = propose(policy, problem, samples + 1, seed)
        cost_s = np.minimum(found.value_s, MISFIT * label.value_s)
        ratio, fits = cost_s / label.value_s, bool(found.overflow[0] == 0)
        made.append(Outcome(instance, problem.num_ops, float(ratio[0]), float(ratio.min()), fits))
    return made


def quality_of(found: list[Outcome]) -> Quality:
    """Means over instances; not a number where there are none."""
    if not found:
        return Quality(float("nan"), float("nan"), float("nan"))
    _, _, greedy, best, fits = zip(*found, strict=True)
    return Quality(
        float(np.exp(np.mean(np.log(greedy)))),
        float(np.exp(np.mean(np.log(best)))),
        float(np.mean(fits)),
    )


def by_regime(found: list[Outcome]) -> dict[str, float]:
    """Greedy and best of the tight, the large and the other instances, where there are any."""
    parts: dict[str, list[Outcome]] = {}
    for one in found:
        tight = 0.0 < one.instance.memory <= TIGHT
        name = "tight" if tight else "large" if one.num_ops >= LARGE else "ample"
        parts.setdefault(name, []).append(one)
    return {
        f"{name}_{field}": value
        for name, part in sorted(parts.items())
        for field, value in quality_of(part)._asdict().items()
        if field != "feasible"
    }
