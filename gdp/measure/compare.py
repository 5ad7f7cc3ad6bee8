"""Comparison of tensors that a cut model computed with those of the uncut one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

RELATIVE_TOLERANCE = 1e-4
"""Of the largest magnitude in a tensor: other fusions add up in another order. Types of fewer
digits are allowed two of their rounding errors."""
QUANTISED_TOLERANCE = 1 / 128
"""Of the largest magnitude, for results of quantised values: one step of 8 bits."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Repeatable:
    """Values of a model that are not repeatable exactly, by name."""

    random_ops: tuple[str, ...] = ()  # "RandomNormal 'noise'"
    random: frozenset[str] = frozenset()  # drawn, or computed from drawn values
    # Behind a quantiser; how far a rounding step moves the value, 0 where only its type tells.
    step: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Differences of tensors from the reference."""

    equal: bool  # every tensor within the tolerance
    max_abs_diff: float
    max_relative_diff: float  # of the largest magnitude in the tensor
    worst: str  # the tensor of the largest relative difference
    tensors: int

    def report_fields(self) -> dict[str, Any]:
        """Fields of `gdp.measure.report.RunReport`."""
        return {
            "outputs_equal": self.equal, "max_abs_diff": self.max_abs_diff,
            "max_relative_diff": self.max_relative_diff, "compared_tensors": self.tensors,
        }  # fmt: skip


@dataclass(frozen=True)
class OutputCheck(Comparison):
    """Comparison of a cut model with the uncut one; `equal` covers all compared tensors."""

    outputs_equal: bool | None  # None: every output is random
    inner_equal: bool  # the tensors between pieces
    random_ops: tuple[str, ...]  # what they reach cannot be compared

    def report_fields(self) -> dict[str, Any]:
        """Fields of `gdp.measure.report.RunReport`."""
        return super().report_fields() | {
            "outputs_equal": self.outputs_equal, "inner_equal": self.inner_equal,
            "worst_tensor": self.worst, "random_ops": self.random_ops,
        }  # fmt: skip


def judge(
    pairs: Sequence[tuple[Arrays, Arrays]], outputs: Sequence[str], repeatable: Repeatable
) -> OutputCheck:
    """Compare each sample's tensors of the uncut model with those of the pieces.

    Outputs may differ as their type allows, tensors between pieces also by a step of the quantisers
    before them.
    """
    parts: dict[bool, list[Comparison]] = {True: [], False: []}
    for expected, computed in pairs:
        for is_output, kept in parts.items():
            wanted = {
                name: array
                for name, array in expected.items()
                if (name in outputs) == is_output and name not in repeatable.random
            }
            if wanted:
                kept.append(compare(wanted, computed, repeatable, is_output=is_output))
    of_outputs, of_inner = (merge_comparisons(kept) if kept else None for kept in parts.values())
    both = merge_comparisons([*parts[True], *parts[False]] or [_NOTHING])
    return OutputCheck(
        **vars(both),
        outputs_equal=None if of_outputs is None else of_outputs.equal,
        inner_equal=of_inner is None or of_inner.equal,
        random_ops=repeatable.random_ops if repeatable.random else (),
    )


def compare(
    expected: Arrays,
    computed: Arrays,
    repeatable: Repeatable = Repeatable(),  # frozen, and empty
    *,
    is_output: bool = True,
) -> Comparison:
    """The largest differences over the tensors of `expected`."""
    equal, worst, max_abs, max_relative = True, "", 0.0, 0.0
    for name, array in expected.items():
        allowed = _allowed(array, repeatable.step.get(name), is_output=is_output)
        difference, relative = _difference(array, computed[name], allowed)
        equal &= difference <= allowed
        max_abs = max(max_abs, difference)
        if relative > max_relative or not worst:
            worst, max_relative = name, relative
    return Comparison(equal, max_abs, max_relative, worst, len(expected))


_NOTHING = Comparison(equal=True, max_abs_diff=0.0, max_relative_diff=0.0, worst="", tensors=0)


def merge_comparisons(parts: Sequence[Comparison]) -> Comparison:
    """The worst of several comparisons."""
    worst = max(parts, key=lambda part: part.max_relative_diff)
    return Comparison(
        all(part.equal for part in parts),
        max(part.max_abs_diff for part in parts),
        worst.max_relative_diff,
        worst.worst,
        sum(part.tensors for part in parts),
    )


def _allowed(expected: np.ndarray, step: float | None, *, is_output: bool) -> float:
    """The difference that a tensor may have; `step` is None where no quantiser comes before it."""
    dtype = expected.dtype
    if _is_integer(dtype) and (step is None or (is_output and dtype.itemsize > 1)):
        return 0.0  # integers and booleans are equal or wrong
    if _is_integer(dtype) and dtype.itemsize == 1:
        return 1.0
    share = RELATIVE_TOLERANCE
    if not _is_integer(dtype):
        share = max(share, 2 * float(ml_dtypes.finfo(dtype).eps))
    if step is not None and not is_output:
        share = max(share, QUANTISED_TOLERANCE)
    inner_step = 0.0 if is_output or step is None else step * (1 + RELATIVE_TOLERANCE)
    return max(share * _magnitude(expected), inner_step)


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "biu" or dtype.name in ("int4", "uint4", "int2", "uint2")


def _magnitude(array: np.ndarray) -> float:
    wide = array.astype(_wide(array))
    finite = np.isfinite(wide)
    return float(np.abs(wide[finite]).max()) if finite.any() else 0.0


def _wide(array: np.ndarray) -> type:
    return np.complex128 if np.iscomplexobj(array) else np.float64


def _difference(expected: np.ndarray, computed: np.ndarray, allowed: float) -> tuple[float, float]:
    """The largest absolute difference, and its share of the largest magnitude; infinite for
    integers that differ more than they may."""
    if expected.shape != computed.shape or expected.dtype != computed.dtype:
        return np.inf, np.inf
    if expected.size == 0:
        return 0.0, 0.0
    a, b = expected.astype(_wide(expected)), computed.astype(_wide(computed))
    finite = np.isfinite(a)
    # Infinities and NaNs must be the same ones in the same places.
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf, np.inf
    difference = float(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)).max())
    if difference == 0.0:
        return 0.0, 0.0
    if _is_integer(expected.dtype) and difference > allowed:
        return difference, np.inf
    scale = _magnitude(expected)
    return difference, difference / scale if scale else np.inf
