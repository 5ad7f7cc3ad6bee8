"""Log of measured over predicted seconds of a pass, with its spread: a Gaussian process.

Two passes of one stack are alike as far as their features are (a squared exponential kernel; a part
of it across prefill and decode), and share a constant of the stack. A user's measured passes are
its observations: exact, in milliseconds. One of them moves predictions of passes like it, more
decide, and what is unlike all that was measured stays as it was predicted. Nothing is taken over
from other stacks: on public runs that did harm where nothing was measured, and gained no more than
a point where something was (`pretrain.corrections.table`, which also tells of a network with
superposition gates). They make the scales of the features, and the widths of intervals.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, data_path
from gdp.corrections.features import WIDEST, Pass

NAME = "corrections"
"""Folder of the shipped process in `checkpoints/`."""


class Constants(NamedTuple):
    """Variances and lengths of the kernel."""

    length: float = 3.0  # in standard deviations of features
    alike: float = 0.3  # variance that like passes share
    across: float = 0.3  # share of it that prefill and decode have in common
    own: float = 0.05  # variance that all passes of a phase on one stack share
    noise: float = 0.03  # of a measured pass
    floor: float = 0.01  # of any prediction


CONSTANTS = Constants()
"""Constants of the shipped process."""


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pass that was measured."""

    asked: Pass
    residual: Annotated[float, msgspec.Meta(ge=-5, le=5)]  # log of measured over predicted seconds
    # How far the measured times tell of this pass.
    shown: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class Residual(NamedTuple):
    """A predicted residual: its mean, and the standard deviation that intervals are made of."""

    mean: float
    deviation: float


class Places(NamedTuple):
    """Passes where the kernel measures distances. Axes: N passes, E features."""

    at: Float[np.ndarray, "N E"]
    prefill: Int[np.ndarray, "N"]


LEAST_WEIGHT = 0.02
MOST = 2.0
"""Log residual beyond which a pass counts as this far off: another scheduler, or a queue."""


@dataclass(frozen=True, eq=False)
class CorrectionProcess:
    """A Gaussian process over the measured passes of a stack.

    Attributes:
        scales: Means and standard deviations of features, as `scales_of` has them.
        constants: Of the kernel.
    """

    scales: Mapping[str, np.ndarray]
    constants: Constants = CONSTANTS

    def residuals(self, passes: Sequence[Pass], lessons: Sequence[Lesson] = ()) -> list[Residual]:
        """Residuals of passes.

        Args:
            passes: As they are predicted.
            lessons: Measured passes of the stack that executes them.
        """
        asked = self._places(passes)
        mean, covered = np.zeros(len(passes)), self._kernel(asked, asked)
        if lessons:
            seen = self._places([lesson.asked for lesson in lessons])
            shown = np.array([lesson.shown for lesson in lessons])
            wanted = np.clip([lesson.residual for lesson in lessons], -MOST, MOST)
            known, shared = self._kernel(seen, seen), self._kernel(asked, seen)
            known += np.diag(self.constants.noise / np.maximum(shown, LEAST_WEIGHT))
            gain = np.linalg.solve(known, shared.T).T
            mean = gain @ wanted
            covered = covered - gain @ shared.T
        deviation = np.sqrt(np.maximum(np.diag(covered), 0.0) + self.constants.floor)
        return [Residual(*row) for row in zip(mean.tolist(), deviation.tolist(), strict=True)]

    def _places(self, passes: Sequence[Pass]) -> Places:
        return places_of(self.scales, self.constants, *features_of(passes))

    def _kernel(self, a: Places, b: Places) -> Float[np.ndarray, "N M"]:
        own = self.constants.own * np.equal.outer(a.prefill, b.prefill)
        return kernel(self.constants, a, b) + own


def kernel(constants: Constants, a: Places, b: Places) -> Float[np.ndarray, "N M"]:
    """Covariance of passes by their distances, without what a stack has of its own."""
    apart = (a.at**2).sum(1)[:, None] + (b.at**2).sum(1) - 2 * a.at @ b.at.T
    same = np.equal.outer(a.prefill, b.prefill)
    alike = constants.alike * np.exp(-0.5 * np.maximum(apart, 0.0))
    return alike * np.where(same, 1.0, constants.across)


def places_of(
    scales: Mapping[str, np.ndarray], constants: Constants,
    shown: Float[np.ndarray, "N F"], others: Float[np.ndarray, "N G"],
) -> Places:  # fmt: skip
    """Features of passes, and of their formats (contenders add those of stacks), as places."""
    x, e = standardised(scales, shown, others)
    at = np.concatenate([x, e], axis=1) / constants.length
    return Places(at, (shown[:, 0] > 0.5).astype(int))


def features_of(
    passes: Sequence[Pass],
) -> tuple[Float[np.ndarray, "N F"], Float[np.ndarray, "N G"]]:
    """Features of passes, and of the formats of their weights."""
    return (
        np.array([one.features() for one in passes]),
        np.array([one.format_features() for one in passes]),
    )


LEAST_SCALE = 0.2


def scales_of(
    shown: Float[np.ndarray, "N F"], others: Float[np.ndarray, "N G"]
) -> dict[str, np.ndarray]:
    """Means and standard deviations of two kinds of features."""
    found = dict[str, np.ndarray]()
    for name, rows in (("shown", shown), ("others", others)):
        found[f"{name}_mean"] = rows.mean(axis=0)
        found[f"{name}_scale"] = np.maximum(rows.std(axis=0), LEAST_SCALE)
    return found


def standardised(
    scales: Mapping[str, np.ndarray], shown: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Features in standard deviations from their means."""
    x, e = (
        np.clip((rows - scales[f"{name}_mean"]) / scales[f"{name}_scale"], -WIDEST, WIDEST)
        for name, rows in (("shown", shown), ("others", others))
    )
    return x, e


class CorrectionMeta(msgspec.Struct, frozen=True):
    """Keys of `meta.json` beside those of every checkpoint."""

    shapes: dict[str, tuple[int, ...]]  # of every array
    constants: dict[str, float]
    # Half widths of 90% intervals over predicted deviations, of passes of stacks that were left out
    # (split conformal), by family: (prefill, decode) by number of measured runs, the last for more.
    quantiles: dict[str, list[tuple[float, float]]]
    far: dict[str, float]  # factor within which 90% of uncorrected passes of a family lie
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
    return CorrectionProcess(arrays, Constants(**meta.constants)), meta


@functools.cache
def shipped_corrections() -> tuple[CorrectionProcess, CorrectionMeta] | None:
    """The process that travels with gdp; None where it does not."""
    folder = data_path("checkpoints", NAME)
    return load_corrections(str(folder)) if (folder / "meta.json").is_file() else None
