"""Log of measured over predicted seconds of a pass, with its spread: a Gaussian process.

Two passes are alike as far as their features and those of their stacks are (a squared exponential
kernel; half as much across prefill and decode). What all runs of one model on one stack have of
their own beyond that is one more term, which the runs of public stacks do not share with a user's.
A user's measured passes are further observations: exact, in milliseconds; one of them moves a
prediction a little, many decide it, and far from all that was measured the prediction stays as it
is. Its inputs and constants are those of `pretrain.corrections`, which holds it against a network
with superposition gates.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, data_path
from gdp.corrections.features import WIDEST, EngineStack, Pass

NAME = "corrections"
"""Folder of the shipped process in `checkpoints/`."""


class Constants(NamedTuple):
    """Variances and lengths of the kernel."""

    length: float = 3.0  # in standard deviations of features
    of_pass: float = 0.6  # weight of the features of a pass beside those of a stack
    alike: float = 0.3  # variance that like passes share
    phase: float = 0.05  # variance that all passes of a phase share
    own: float = 0.15  # variance that one model on one stack has of its own
    across: float = 0.3  # share that prefill and decode have in common
    prefill: float = 0.3  # of these variances, of prefill: TTFT hangs on more than its passes
    noise: float = 0.15  # of a measured pass
    repeated: float = 0.01  # of a measured pass of the user's own stack
    floor: float = 0.01  # of any prediction


CONSTANTS = Constants()
"""Constants of the shipped process."""


class Lesson(NamedTuple):
    """A pass that was measured."""

    asked: Pass
    residual: float  # log of measured over predicted seconds
    shown: float = 1.0  # how far the measured times tell of this pass, at most 1


class Residual(NamedTuple):
    """A predicted residual: its mean, and the standard deviation that intervals are made of."""

    mean: float
    deviation: float


class Points(NamedTuple):
    """Passes of public runs. Axes: P passes, F and G features."""

    shown: Float[np.ndarray, "P F"]
    told: Float[np.ndarray, "P G"]
    residual: Float[np.ndarray, "P"]
    weight: Float[np.ndarray, "P"]  # how far measured times show it
    group: Int[np.ndarray, "P"]  # model and stack


LEAST_WEIGHT = 0.05
MOST = 2.0
"""Log residual beyond which a pass counts as this far off: another scheduler, or a queue."""


class _Places(NamedTuple):
    """Passes where the kernel measures distances."""

    at: Float[np.ndarray, "N E"]
    prefill: Int[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class CorrectionProcess:
    """A Gaussian process over measured passes of public runs."""

    points: Points
    constants: Constants = CONSTANTS

    @functools.cached_property
    def scales(self) -> Mapping[str, np.ndarray]:
        """Means and scales of the features."""
        return scales_of(self.points.shown, self.points.told)

    def _places(self, shown: np.ndarray, told: np.ndarray) -> _Places:
        x, e = standardised(self.scales, shown, told)
        weight = self.constants.of_pass
        at = np.concatenate([weight * x, e], axis=1) / self.constants.length
        return _Places(at, (shown[:, 0] > 0.5).astype(int))

    def _kernel(self, a: _Places, b: _Places) -> Float[np.ndarray, "N M"]:
        c = self.constants
        apart = (a.at**2).sum(1)[:, None] + (b.at**2).sum(1) - 2 * a.at @ b.at.T
        same = np.equal.outer(a.prefill, b.prefill)
        alike = c.alike * np.exp(-0.5 * np.maximum(apart, 0.0))
        trusted = (np.where(x.prefill, math.sqrt(c.prefill), 1.0) for x in (a, b))
        return (alike * np.where(same, 1.0, c.across) + c.phase * same) * np.multiply.outer(
            *trusted
        )

    def _own(self, a: _Places, b: _Places) -> Float[np.ndarray, "N M"]:
        """Covariance that two passes have because they are of one model on one stack."""
        return self.constants.own * np.equal.outer(a.prefill, b.prefill)

    @functools.cached_property
    def _known(self) -> tuple[_Places, np.ndarray, np.ndarray]:
        """(places of the points, inverse of their covariance, that times their residuals)."""
        p, c = self.points, self.constants
        places = self._places(p.shown, p.told)
        covered = self._kernel(places, places)
        covered += self._own(places, places) * np.equal.outer(p.group, p.group)
        covered += np.diag(c.noise / np.maximum(p.weight, LEAST_WEIGHT))
        inverse = np.linalg.inv(covered)
        return places, inverse, inverse @ p.residual

    def residuals(
        self, stack: EngineStack, passes: Sequence[Pass], lessons: Sequence[Lesson] = ()
    ) -> list[Residual]:
        """Residuals of passes on a stack.

        Args:
            stack: That executes them.
            passes: As they are predicted.
            lessons: Measured passes of this stack.
        """
        c, (points, inverse, scaled) = self.constants, self._known
        asked = self._places(*_features(stack, passes))
        near = self._kernel(asked, points)
        mean = near @ scaled
        covered = self._kernel(asked, asked) - near @ inverse @ near.T + self._own(asked, asked)
        if lessons:
            seen = self._places(*_features(stack, [lesson.asked for lesson in lessons]))
            shown = np.array([lesson.shown for lesson in lessons])
            wanted = np.clip([lesson.residual for lesson in lessons], -MOST, MOST)
            of_points = self._kernel(seen, points)
            known = self._kernel(seen, seen) - of_points @ inverse @ of_points.T
            known += self._own(seen, seen)
            known += np.diag(c.repeated / np.maximum(shown, LEAST_WEIGHT))
            shared = self._kernel(asked, seen) - near @ inverse @ of_points.T
            shared += self._own(asked, seen)
            gain = np.linalg.solve(known, shared.T).T
            mean = mean + gain @ (wanted - of_points @ scaled)
            covered = covered - gain @ shared.T
        deviation = np.sqrt(np.maximum(np.diag(covered), 0.0) + c.floor)
        return [Residual(*row) for row in zip(mean.tolist(), deviation.tolist(), strict=True)]


def _features(stack: EngineStack, passes: Sequence[Pass]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([one.features() for one in passes]),
        np.array([stack.features(one.bits) for one in passes]),
    )


LEAST_SCALE = 0.2


def scales_of(
    shown: Float[np.ndarray, "N F"], told: Float[np.ndarray, "N G"]
) -> dict[str, np.ndarray]:
    """Means and standard deviations of features."""
    found = dict[str, np.ndarray]()
    for name, rows in (("shown", shown), ("told", told)):
        found[f"{name}_mean"] = rows.mean(axis=0)
        found[f"{name}_scale"] = np.maximum(rows.std(axis=0), LEAST_SCALE)
    return found


def standardised(
    scales: Mapping[str, np.ndarray], shown: np.ndarray, told: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Features in standard deviations from their means."""
    x, e = (
        np.clip((rows - scales[f"{name}_mean"]) / scales[f"{name}_scale"], -WIDEST, WIDEST)
        for name, rows in (("shown", shown), ("told", told))
    )
    return x, e


class CorrectionMeta(msgspec.Struct, frozen=True):
    """Keys of `meta.json` beside those of every checkpoint."""

    shapes: dict[str, tuple[int, ...]]  # of every array
    constants: dict[str, float]
    # Half widths of 90% intervals over predicted deviations, of passes of stacks that were left out
    # (split conformal): (prefill, decode) by number of measured runs, the last for all more.
    quantiles: list[tuple[float, float]]
    far: float  # factor within which 90% of predictions of left-out stacks lie
    stacks: dict[str, int]  # measured passes by key of a stack
    known: list[tuple[str, str, float, float]]  # engine, backend, log bandwidth and FLOP/s of cards
    formats: dict[str, tuple[int, ...]]  # classes of formats that were measured, by engine
    source: str  # of the measurements
    date: str


def load_corrections(path: str) -> tuple[CorrectionProcess, CorrectionMeta]:
    """A process and what is known of it; raises `CheckpointError`."""
    kind = Kind("meta.json of corrections", checkpoint.CheckpointError)
    meta = convert(checkpoint.read_meta(path), kind, CorrectionMeta, f"{path}/meta.json")
    arrays = checkpoint.load_arrays(path, meta.shapes)
    return CorrectionProcess(Points(**arrays), Constants(**meta.constants)), meta


@functools.cache
def shipped_corrections() -> tuple[CorrectionProcess, CorrectionMeta] | None:
    """The process that travels with gdp; None where it does not."""
    folder = data_path("checkpoints", NAME)
    return load_corrections(str(folder)) if (folder / "meta.json").is_file() else None
