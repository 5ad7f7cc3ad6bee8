"""List schedules under memory limits that are lowered by what the schedule before missed.

A plan counts memory as it places ops; what a run needs shows when it is simulated, with other
overlaps and, in a pipeline, with buffers. The difference becomes a reserve on that device.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.base import Assignment
from gdp.methods.ranks import as_rank
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import memory_binds, peaks

ROUNDS = 12
_LEAST = 0.02  # of its memory is left to a device
_MORE = 0.1  # of what is missing is reserved beyond it, times the round


class Plan(Protocol):
    """What a list scheduler makes."""

    @property
    def device(self) -> Int[np.ndarray, "N"]:
        """Where each op runs."""
        ...

    @property
    def start_s(self) -> Float[np.ndarray, "N"]:
        """When each op is planned to start."""
        ...


def reserved_assignments(problem: Problem, make: Callable[[Arrays], Plan]) -> Iterator[Assignment]:
    """Plans under lower and lower limits, up to the first that fits; none where memory is ample."""
    if not memory_binds(problem):
        return
    a = arrays_of(problem)
    capacity = a.memory_bytes.astype(float)
    limit = capacity.copy()
    for attempt in range(ROUNDS):
        plan = make(a._replace(memory_bytes=limit.astype(np.int64)))
        made = Assignment(plan.device, as_rank(plan.start_s))
        yield made
        missing = missing_bytes(problem, made)
        if not missing.any():
            return
        limit = lowered(limit, missing, capacity, attempt)


def missing_bytes(problem: Problem, made: Assignment) -> Float[np.ndarray, "D"]:
    """Bytes by which each device's memory is exceeded."""
    peak_bytes = peaks(problem, made.device, made.rank)
    return np.maximum(peak_bytes - problem.cluster.memory_bytes, 0.0)


def lowered(
    limit: Float[np.ndarray, "D"],
    missing: Float[np.ndarray, "D"],
    capacity: Float[np.ndarray, "D"],
    attempt: int,
) -> Float[np.ndarray, "D"]:
    """Limits to plan under after a plan that missed so many bytes; later attempts reserve more."""
    return np.maximum(limit - missing * (1.0 + _MORE * attempt), _LEAST * capacity)
