"""The correction network: log of measured over predicted seconds of a pass, with its spread.

Two layers read the pass. The stack that executes it scales each of their units: gates of GDP's
superposition (Zhou et al. 2020, section 3.3), which there condition a shared policy on the graph.
They see what is known of the stack, and a short vector of its own, which also weights as many
modes: zero before anything was measured there, then fitted to its runs and to nothing else of the
network. The vector has a standard normal prior, so that one run moves it a little and many decide
(maximum a posteriori, with Laplace's covariance).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.corrections.features import Pass
from gdp.corrections.process import Lesson, Residual, standardised

StackFeatures = Callable[[Pass], Float[np.ndarray, "G"]]
"""Features of a stack under a pass."""
VECTOR = 4
"""Length of the vector of a stack."""
HEAVY = 4.0
"""Degrees of freedom of the Student t distribution of residuals: outliers pull little."""
SMALLEST, LARGEST = -3.5, 1.0
"""Limits of the log of a spread."""
_STEPS, _DAMPING = 20, 0.7
_SHIFT = 1e-4  # of the vector, for slopes


class Vector(NamedTuple):
    """The vector of a stack: its mean and covariance."""

    mean: Float[np.ndarray, "V"]
    covariance: Float[np.ndarray, "V V"]


UNKNOWN = Vector(np.zeros(VECTOR), np.eye(VECTOR))
"""Of a stack that was never measured."""


class _Inputs(NamedTuple):
    """Standardised passes. Axes: N passes, F and G features."""

    shown: Float[np.ndarray, "N F"]
    told: Float[np.ndarray, "N G"]


@dataclass(frozen=True, eq=False)
class CorrectionNetwork:
    """Weights of the network."""

    weights: Mapping[str, np.ndarray]

    def _inputs(self, stack: StackFeatures, passes: Sequence[Pass]) -> _Inputs:
        shown = np.array([one.features() for one in passes])
        told = np.array([stack(one) for one in passes])
        return _Inputs(*standardised(self.weights, shown, told))

    def _forward(
        self, inputs: _Inputs, vector: Float[np.ndarray, "V"]
    ) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        """(mean, log spread) of each pass."""
        own, weights = np.broadcast_to(vector, (len(inputs.told), VECTOR)), self.weights
        known, hidden = np.concatenate([inputs.told, own], axis=1), inputs.shown
        for i in ("1", "2"):
            gate = 1.0 + np.tanh(known @ weights["gate" + i] + weights["open" + i])
            before = hidden @ weights["kernel" + i] + weights["bias" + i]
            hidden = before / (1.0 + np.exp(-before)) * gate
        out = hidden @ weights["kernel3"] + weights["bias3"]
        mean = out[:, 0] + hidden @ weights["modes"] @ vector
        return mean, np.clip(out[:, 1], SMALLEST, LARGEST)

    def _slopes(self, inputs: _Inputs, vector: Float[np.ndarray, "V"]) -> Float[np.ndarray, "N V"]:
        """Derivatives of the means in the vector."""
        sides = [
            [self._forward(inputs, vector + sign * move)[0] for sign in (1, -1)]
            for move in _SHIFT * np.eye(VECTOR)
        ]
        return np.column_stack([(above - below) / (2 * _SHIFT) for above, below in sides])

    def vector(self, stack: StackFeatures, lessons: Sequence[Lesson]) -> Vector:
        """The vector of a stack by its measured passes."""
        if not lessons:
            return UNKNOWN
        inputs = self._inputs(stack, [lesson.asked for lesson in lessons])
        wanted = np.array([lesson.residual for lesson in lessons])
        seen = np.array([lesson.shown for lesson in lessons])
        mean = np.zeros(VECTOR)
        slopes, weight = np.zeros((len(lessons), VECTOR)), seen
        for _ in range(_STEPS):
            found, spread = self._forward(inputs, mean)
            variance, off = np.exp(2 * spread), wanted - found
            slopes = self._slopes(inputs, mean)
            # Weights of Student's t as an iteration of least squares.
            weight = seen * (HEAVY + 1) / (HEAVY + off**2 / variance) / variance
            curved = np.eye(VECTOR) + slopes.T @ (weight[:, None] * slopes)
            mean = mean + _DAMPING * np.linalg.solve(curved, slopes.T @ (weight * off) - mean)
        return Vector(mean, np.linalg.inv(np.eye(VECTOR) + slopes.T @ (weight[:, None] * slopes)))

    def residuals(
        self, stack: StackFeatures, passes: Sequence[Pass], vector: Vector = UNKNOWN
    ) -> list[Residual]:
        """Residuals of passes on a stack, whose vector may be known."""
        inputs = self._inputs(stack, passes)
        mean, spread = self._forward(inputs, vector.mean)
        slopes = self._slopes(inputs, vector.mean)
        doubt = ((slopes @ vector.covariance) * slopes).sum(axis=1)
        deviation = np.sqrt(np.exp(2 * spread) + doubt)
        return [Residual(*row) for row in zip(mean.tolist(), deviation.tolist(), strict=True)]
