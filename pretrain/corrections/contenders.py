"""Corrections that the network has to beat, each fitted to the same passes.

Each is called with the samples and those that are learned from, and gives a function of a row and
of measured passes of its stack: residuals of prefill and decode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gdp.corrections.network import UNKNOWN, Lesson, Residual
from pretrain.corrections.rows import Row
from pretrain.corrections.train import Samples, standardised, trained

Predict = Callable[[Row, Sequence[Lesson]], list[Residual]]
Fit = Callable[[Samples, np.ndarray], Predict]
RIDGE = 30.0
"""Penalty, on standardised features."""
OWN = 0.5
"""Runs of a stack that weigh as much as the others' fit, of the ridge."""
SEEDS = 3
"""Networks whose mean is taken."""


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


class _Scales(NamedTuple):
    of: Mapping[str, np.ndarray]

    def rows(self, shown: np.ndarray, told: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Standardised features."""
        return tuple(
            np.clip((rows - self.of[f"{n}_mean"]) / self.of[f"{n}_scale"], -4, 4)
            for n, rows in (("shown", shown), ("told", told))
        )  # type: ignore[return-value]


def _asked(row: Row) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([p.features() for p in row.passes]),
        np.array([row.stack.features(p.bits) for p in row.passes]),
    )


def ridge(samples: Samples, train: np.ndarray) -> Predict:
    """A linear function of the same features, with those of the stack by phase, too; runs of a
    stack move its constants."""
    _, _, scales = standardised(samples, train)

    def design(shown: np.ndarray, told: np.ndarray) -> np.ndarray:
        x, e = _Scales(scales).rows(shown, told)
        prefill = shown[:, :1]
        return np.concatenate([x, e, prefill * e, prefill, np.ones_like(prefill)], axis=1)

    rows, weight = design(samples.shown, samples.told), samples.weight * train
    penalty = RIDGE * np.eye(rows.shape[1])
    own = np.linalg.solve((rows * weight[:, None]).T @ rows + penalty,
                          (rows * weight[:, None]).T @ samples.residual)  # fmt: skip
    spread = _spread((samples.residual - rows @ own)[train])

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        found = design(*_asked(row)) @ own
        if lessons:
            told = np.array([row.stack.features(x.asked.bits) for x in lessons])
            before = design(np.array([x.asked.features() for x in lessons]), told) @ own
            off = [
                x._replace(residual=x.residual - b) for x, b in zip(lessons, before, strict=True)
            ]
            found = found + [_mean(off, p, OWN) for p in (True, False)]
        return [Residual(float(x), spread) for x in found]

    return predict


def gaussian_process(samples: Samples, train: np.ndarray) -> Predict:
    """A Gaussian process over the same features; runs of a stack are further observations."""
    _, _, scales = standardised(samples, train)
    kept = np.flatnonzero(train)
    if len(kept) > 1200:
        kept = np.random.default_rng(0).choice(kept, 1200, replace=False)

    def place(shown: np.ndarray, told: np.ndarray) -> np.ndarray:
        x, e = _Scales(scales).rows(shown, told)
        return np.concatenate([0.6 * x, e], axis=1) / 4.0

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        apart = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        return 0.3 * np.exp(-0.5 * np.maximum(apart, 0.0)) + 0.05

    at = place(samples.shown[kept], samples.told[kept])
    noise = np.diag(0.05 / np.maximum(samples.weight[kept], 0.05))
    inverse = np.linalg.inv(kernel(at, at) + noise)
    scaled = inverse @ samples.residual[kept]

    def posterior(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return kernel(x, y) - kernel(x, at) @ inverse @ kernel(at, y)

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        x = place(*_asked(row))
        mean, own = kernel(x, at) @ scaled, posterior(x, x)
        if lessons:
            told = np.array([row.stack.features(y.asked.bits) for y in lessons])
            near = place(np.array([y.asked.features() for y in lessons]), told)
            # What a stack has of its own lies on top, for each phase.
            same = 0.1 * np.equal.outer(near[:, 0], near[:, 0])
            shared = 0.1 * np.equal.outer(x[:, 0], near[:, 0])
            covered = posterior(near, near) + same + 0.01 * np.eye(len(near))
            gain = np.linalg.solve(covered, (posterior(x, near) + shared).T).T
            wanted = np.array([y.residual for y in lessons])
            mean = mean + gain @ (wanted - kernel(near, at) @ scaled)
            own = own + 0.1 * np.eye(len(x)) - gain @ (posterior(near, x) + shared.T)
        deviation = np.sqrt(np.maximum(np.diag(own), 0.0) + 0.02)
        return [Residual(float(m), float(s)) for m, s in zip(mean, deviation, strict=True)]

    return predict


def network(samples: Samples, train: np.ndarray, **options: bool) -> Predict:
    """The network; a vector of its own for each stack with runs, unless there are no gates."""
    nets = [trained(samples, train, seed, **options)[0] for seed in range(SEEDS)]

    def predict(row: Row, lessons: Sequence[Lesson]) -> list[Residual]:
        vectors = [n.vector(row.stack, lessons) if lessons else UNKNOWN for n in nets]
        rows = [n.residuals(row.stack, row.passes, v) for n, v in zip(nets, vectors, strict=True)]
        return [
            Residual(float(np.mean([r[i].mean for r in rows])),
                     float(np.sqrt(np.mean([r[i].deviation**2 for r in rows])
                                   + np.var([r[i].mean for r in rows]))))
            for i in (0, 1)
        ]  # fmt: skip

    return predict


CONTENDERS: Mapping[str, Fit] = {
    "no correction": no_correction,
    "one factor per stack": one_factor,
    "ridge": ridge,
    "Gaussian process": gaussian_process,
    "network": network,
    "network, gates as drawn": lambda s, t: network(s, t, gates_learn=False),
    "network without gates": lambda s, t: network(s, t, gated=False),
}
