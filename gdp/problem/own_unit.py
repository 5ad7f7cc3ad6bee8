"""A problem in a unit of its own, so that answers are the same whatever unit its seconds are in.

Methods break ties as sums happen to be rounded, and solvers have tolerances that are no shares.
Where the longest op takes 1, and every time has the same 37 binary digits in any unit of the user's
(but for times that happen to lie between two of these numbers), they do the same in all of them.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.problem.problem import Problem, derived

_DIGITS = 37
"""Of 53: what is cut off, a part in 10**11, is below the slack of all bounds; what remains of the
others' rounding falls between two of these numbers once in thousands of times."""


class OwnUnit(NamedTuple):
    """The same problem, with times in units of `unit_s` seconds."""

    problem: Problem
    unit_s: float


@derived
def in_own_unit(problem: Problem) -> OwnUnit:
    """The problem with its longest op as the unit of time; link rates are per unit, too."""
    cluster = problem.cluster
    unit_s = float(np.max(problem.compute_s, initial=0.0, where=np.isfinite(problem.compute_s)))
    unit_s = unit_s if unit_s > 0 else 1.0
    dispatch = _rounded(np.array([device.dispatch_s for device in cluster.devices]) / unit_s)
    devices = tuple(
        replace(device, dispatch_s=dispatch_s)
        for device, dispatch_s in zip(cluster.devices, dispatch.tolist(), strict=True)
    )
    # A rate is a reciprocal: rounded as the seconds of a byte it is the same in every unit.
    per_byte = _rounded(1.0 / (cluster.link_bytes_per_s * unit_s))
    with np.errstate(divide="ignore"):
        rate = 1.0 / per_byte
    scaled = replace(
        cluster, devices=devices, link_bytes_per_s=rate,
        link_latency_s=_rounded(cluster.link_latency_s / unit_s),
    )  # fmt: skip
    tensor_s = None if problem.tensor_s is None else _rounded(problem.tensor_s / unit_s)
    compute_s = _rounded(problem.compute_s / unit_s)
    return OwnUnit(replace(problem, cluster=scaled, compute_s=compute_s, tensor_s=tensor_s), unit_s)


def _rounded(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, _DIGITS)), exponent - _DIGITS)
