"""Corrections that the network has to beat, each fitted to the same passes.

Each is called with the samples and those that are learned from, and gives a function of a row and
of measured passes of its stack: residuals of prefill and decode.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from gdp.corrections.features import Pass
from gdp.corrections.process import (
    CONSTANTS,
    LEAST_WEIGHT,
    MOST,
    CorrectionProcess,
    Lesson,
    Residual,
    kernel,
    places_of,
    scales_of,
    standardised,
)
from pretrain.corrections.network import UNKNOWN
from pretrain.corrections.rows import Row
from pretrain.corrections.train import Samples, points_of, trained

Predict = Callable[[Row, Sequence[Lesson]], list[Residual]]
Fit = Callable[[Samples, np.ndarray], Predict]
RIDGE = 30.0
"""Penalty, on standardised features."""
OWN = 0.5
"""Runs of a stack that weigh as much as the others' fit, of the ridge."""
SEEDS = 3
"""Networks whose mean is taken."""
POINTS = 600
"""Most passes that the process keeps."""


def no_correction(samples: Samples, train: np.ndarray) -> Predict:
    """Predictions as they are."""
    spread = [_spread(samples.residual[train & (samples.prefill == p)]) for p in (1, 0)]
    return lambda row, lessons: [Residual(0.0, s) for s in spread]


def one_factor(samples: Samples, train: np.ndarray) -> Predict:
    """A factor for each phase of a stack, the mean of its runs; without runs none."""
    spread = [_spread(samples.residual[train & (samples.prefill == p)]) for p in (1, 0)]

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        return [Residual(_mean(lessons, p), s) for p, s in zip((True, False), spread, strict=True)]

    return predict


def _mean(lessons: Sequence[Lesson], prefill: bool, count: float = 0.0) -> float:
    """Mean residual of one phase, shrunk as if `count` runs had shown none."""
    own = [(x.residual, x.shown) for x in lessons if x.asked.prefill == prefill]
    total = sum(w for _, w in own) + count
    return sum(r * w for r, w in own) / total if total else 0.0


def _spread(residual: np.ndarray) -> float:
    return max(0.03, 1.48 * float(np.median(np.abs(residual)))) if len(residual) else 0.3


def _features(row: Row, passes: Sequence[Pass]) -> tuple[np.ndarray, np.ndarray]:
    """Features of passes on the stack of a row, and of that stack."""
    return (
        np.array([one.features() for one in passes]),
        np.array([row.stack_features(one) for one in passes]),
    )


def ridge(samples: Samples, train: np.ndarray) -> Predict:
    """A linear function of the same features, with those of the stack by phase, too; runs of a
    stack move its constants."""
    scales = scales_of(samples.shown[train], samples.told[train])

    def design(shown: np.ndarray, told: np.ndarray) -> np.ndarray:
        x, e = standardised(scales, shown, told)
        prefill = shown[:, :1]
        return np.concatenate([x, e, prefill * e, prefill, np.ones_like(prefill)], axis=1)

    rows, weight = design(samples.shown, samples.told), samples.weight * train
    penalty = RIDGE * np.eye(rows.shape[1])
    own = np.linalg.solve((rows * weight[:, None]).T @ rows + penalty,
                          (rows * weight[:, None]).T @ samples.residual)  # fmt: skip
    spread = _spread((samples.residual - rows @ own)[train])

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        found = design(*_features(row, row.passes)) @ own
        if lessons:
            before = design(*_features(row, [x.asked for x in lessons])) @ own
            off = [
                msgspec.structs.replace(x, residual=x.residual - b)
                for x, b in zip(lessons, before.tolist(), strict=True)
            ]
            found = found + [_mean(off, p, OWN) for p in (True, False)]
        return [Residual(float(x), spread) for x in found]

    return predict


def own_runs(samples: Samples, train: np.ndarray) -> Predict:
    """The process that ships: runs of the stack alone."""
    process = CorrectionProcess(scales_of(samples.shown[train], samples.formats[train]))
    return lambda row, lessons: process.residuals(row.passes, lessons)


def all_runs(samples: Samples, train: np.ndarray) -> Predict:
    """The same process over public runs, too, which share what like passes do with a user's."""
    known = points_of(samples, chosen(samples, train))
    scales, c = scales_of(known.shown, known.told), CONSTANTS
    points = places_of(scales, c, known.shown, known.told)
    covered = kernel(c, points, points)
    same = np.equal.outer(points.prefill, points.prefill)
    covered += c.own * same * np.equal.outer(known.group, known.group)
    covered += np.diag(c.noise / np.maximum(known.weight, LEAST_WEIGHT))
    inverse = np.linalg.inv(covered)
    scaled = inverse @ known.residual

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        asked = places_of(scales, c, *_features(row, row.passes))
        near = kernel(c, asked, points)
        mean = near @ scaled
        own = c.own * np.equal.outer(asked.prefill, asked.prefill)
        left = kernel(c, asked, asked) - near @ inverse @ near.T + own
        if lessons:
            passes = [lesson.asked for lesson in lessons]
            seen = places_of(scales, c, *_features(row, passes))
            beside = kernel(c, seen, points)
            shown = np.array([lesson.shown for lesson in lessons])
            of_seen = kernel(c, seen, seen) - beside @ inverse @ beside.T
            of_seen += c.own * np.equal.outer(seen.prefill, seen.prefill)
            of_seen += np.diag(c.noise / np.maximum(shown, LEAST_WEIGHT))
            shared = kernel(c, asked, seen) - near @ inverse @ beside.T
            shared += c.own * np.equal.outer(asked.prefill, seen.prefill)
            gain = np.linalg.solve(of_seen, shared.T).T
            wanted = np.clip([lesson.residual for lesson in lessons], -MOST, MOST)
            mean = mean + gain @ (wanted - beside @ scaled)
            left = left - gain @ shared.T
        deviation = np.sqrt(np.maximum(np.diag(left), 0.0) + c.floor)
        return [Residual(*x) for x in zip(mean.tolist(), deviation.tolist(), strict=True)]

    return predict


def chosen(samples: Samples, train: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Marks of so many passes at most of those that are learned from, an equal number of each
    group: covariances take their number to the third."""
    rng, marked = np.random.default_rng(0), np.zeros(len(train), dtype=bool)
    groups = [rng.permutation(np.flatnonzero(train & (samples.group == g)))
              for g in np.unique(samples.group[train])]  # fmt: skip
    for place in range(max(map(len, groups))):
        layer = [own[place] for own in groups if place < len(own)]
        if marked.sum() + len(layer) > most:
            break
        marked[layer] = True
    return marked


def network(samples: Samples, train: np.ndarray, **options: bool) -> Predict:
    """The network; a vector of its own for each stack with runs, unless there are no gates."""
    nets = [trained(samples, train, seed, **options)[0] for seed in range(SEEDS)]

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        vectors = [n.vector(row.stack_features, lessons) if lessons else UNKNOWN for n in nets]
        rows = [
            n.residuals(row.stack_features, row.passes, v)
            for n, v in zip(nets, vectors, strict=True)
        ]
        return [
            Residual(float(np.mean([r[i].mean for r in rows])),
                     float(np.sqrt(np.mean([r[i].deviation**2 for r in rows])
                                   + np.var([r[i].mean for r in rows]))))
            for i in (0, 1)
        ]  # fmt: skip

    return predict


OWN_RUNS = "process of own runs"
CONTENDERS: Mapping[str, Fit] = {
    "no correction": no_correction,
    "one factor per stack": one_factor,
    "ridge": ridge,
    OWN_RUNS: own_runs,
    "process over public runs": all_runs,
    "network": network,
    "network, gates as drawn": lambda s, t: network(s, t, gates_learn=False),
    "network without gates": lambda s, t: network(s, t, gated=False),
}
