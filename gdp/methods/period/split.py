"""A start for many devices: halve them, and each half again, the program deciding every split.

Devices of one part stand for a single device with their memory and speed together, so that every
split is a program over two of them. How a part is divided later is not known yet, so what comes
out is a start, not a bound.

Axes: G groups, P parts, D devices.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import NO_CHANNEL, Cluster
from gdp.methods.base import Assignment
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import round_to_ticks

Parts = list[list[int]]
_ROOM = 0.92  # of the memory of several devices: tensors that they all read are there several times


def halves(parts: Parts) -> tuple[Parts, int] | None:
    """(parts with the largest of them halved, which one that was); None where all are single.

    The first half takes the place of the part, the second comes last.

    >>> halves([[0, 1, 2], [3]])
    ([[0, 1], [3], [2]], 0)
    """
    which = max(range(len(parts)), key=lambda k: len(parts[k]))
    part = parts[which]
    if len(part) == 1:
        return None
    middle = (len(part) + 1) // 2
    return [*parts[:which], part[:middle], *parts[which + 1 :], part[middle:]], which


def merged(problem: Problem, parts: Parts) -> Problem:
    """The problem in which each part is one device."""
    old, p = problem.cluster, len(parts)
    devices = tuple(
        replace(
            old.devices[part[0]],
            memory_bytes=max(1, int(old.memory_bytes[part].sum() * (_ROOM if part[1:] else 1.0))),
        )
        for part in parts
    )
    bandwidth, latency = np.full((p, p), np.inf), np.zeros((p, p))
    channel = np.arange(p * p).reshape(p, p)
    for i, here in enumerate(parts):
        for j, there in enumerate(parts):
            if i != j:
                between = np.ix_(here, there)
                bandwidth[i, j] = old.link_bytes_per_s[between].max()
                latency[i, j] = old.link_latency_s[between].min()
                if not np.any(old.queues[between]):
                    channel[i, j] = NO_CHANNEL
    host = next(i for i, part in enumerate(parts) if old.host in part)
    cluster = Cluster(old.name, devices, bandwidth, latency, channel, host)
    allowed = np.stack([problem.allowed[:, part].any(axis=1) for part in parts], axis=1)
    return make_problem(
        problem.graph,
        cluster,
        round_to_ticks(_seconds_together(problem, parts), problem.unit),
        problem.objective,
        allowed=allowed,
        together=problem.group,
        unit=problem.unit,
    )


def _seconds_together(problem: Problem, parts: Parts) -> Float[np.ndarray, "N P"]:
    """Seconds of each op where its work is spread over a part; inf where no device may run it."""
    seconds = np.where(problem.allowed, problem.compute_s, np.inf)
    with np.errstate(divide="ignore"):
        return np.stack([1.0 / (1.0 / seconds[:, part]).sum(axis=1) for part in parts], axis=1)


def choices(small: Problem, home: Int[np.ndarray, "G"], which: int) -> Bool[np.ndarray, "G P"]:
    """Where groups may go in a split: those of the part that was halved into either half."""
    may = np.zeros((small.num_groups, small.num_devices), dtype=bool)
    may[np.arange(small.num_groups), home] = True
    inside = home == which
    may[inside, which] = True
    may[inside, -1] = True
    may &= small.group_allowed
    may[~may.any(axis=1)] = small.group_allowed[~may.any(axis=1)]  # barred there: anywhere else
    return may


def start_of(small: Problem, may: Bool[np.ndarray, "G P"]) -> Assignment:
    """Any placement that the choices leave."""
    return Assignment(may.argmax(axis=1)[small.group].astype(np.int64))


def home_of(problem: Problem, assignment: Assignment) -> Int[np.ndarray, "G"]:
    """The device, or the part of them, of each group."""
    a = arrays_of(problem)
    return assignment.device[a.group_op[a.group_start[:-1]]]
