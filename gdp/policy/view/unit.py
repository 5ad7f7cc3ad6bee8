"""A problem in its own unit of time, so that the unit it was stated in decides nothing.

Seconds that are multiplied by a factor round differently, and ties then fall differently: an answer
in milliseconds would be another than in seconds.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.cluster.types import MAX_DELAY_S
from gdp.methods.timing import timing
from gdp.problem.problem import Problem, derived

KEPT_BITS = 30
"""Of every number of seconds: far above errors of rounding, far below what costs know."""


class Unitless(NamedTuple):
    """The problem with its times in units of the mean op that does work, and that unit."""

    problem: Problem
    unit_s: float


@derived
def in_own_unit(problem: Problem) -> Unitless:
    """The same graph, devices and links; times differ by a factor and their last digits."""
    unit_s = max(timing(problem).scale_s, 1e-300)
    old = problem.cluster
    waits = _kept(np.array([device.dispatch_s for device in old.devices]) / unit_s)
    waits = np.minimum(waits, MAX_DELAY_S)
    devices = tuple(
        replace(device, dispatch_s=wait)
        for device, wait in zip(old.devices, waits.tolist(), strict=True)
    )
    cluster = replace(
        old,
        devices=devices,
        link_bytes_per_s=_kept(old.link_bytes_per_s * unit_s),
        link_latency_s=_kept(old.link_latency_s / unit_s),
    )
    tensor = None if problem.tensor_s is None else _kept(problem.tensor_s / unit_s)
    seconds = _kept(problem.compute_s / unit_s)
    return Unitless(replace(problem, cluster=cluster, compute_s=seconds, tensor_s=tensor), unit_s)


def _kept(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The values to `KEPT_BITS` significant bits.

    >>> _kept(np.array([3.0, np.inf, 1.0 + 2.0**-50]))
    array([ 3., inf,  1.])
    """
    part, power = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(part, KEPT_BITS)), power - KEPT_BITS)
