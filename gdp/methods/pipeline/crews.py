"""Which devices a stage of a pipeline may have: one, or several alike that take samples in turn.

Tarnawski et al., NeurIPS 2020, arXiv 2006.16423, extend the program over down-sets to replicated
stages, as PipeDream does (Narayanan et al. 2019, doi 10.1145/3341301.3359646): a stage takes r
devices of a class, and each of them serves every r-th sample, so that it is busy for 1 / r of what
one device would be. `gdp.sim.replicas` says what exactly is counted.

Axes: D devices, C classes of devices, K crews.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, is_host, same
from gdp.sim.host_load import is_cpu

_EVERY_SIZE = 24  # devices up to which teams of every size are looked at


class Crew(NamedTuple):
    """Devices for one stage."""

    counts: tuple[int, ...]  # devices of each class
    like: int  # the class whose costs it has

    @property
    def size(self) -> int:
        """How many devices take samples in turn."""
        return sum(self.counts)


def device_classes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Devices that may be exchanged for one another: same times, memory, rules and links."""
    return tuple(tuple(found) for found in classes_of(_alike(problem) & same(is_host(problem))))


def link_prices(problem: Problem, d: int) -> tuple[float, float, float, float]:
    """The cheapest (latency, seconds per byte) out of a device and into it."""
    if problem.tensor_s is not None or problem.num_devices == 1:
        return (0.0, 0.0, 0.0, 0.0)
    others = np.arange(problem.num_devices) != d
    latency, speed = problem.cluster.link_latency_s, problem.cluster.link_bytes_per_s
    return (
        float(latency[d, others].min()),
        float((1.0 / speed[d, others]).min()),
        float(latency[others, d].min()),
        float((1.0 / speed[others, d]).min()),
    )


def single_crews(classes: Sequence[Sequence[int]]) -> tuple[Crew, ...]:
    """One device of each class, in their order."""
    ones = np.eye(len(classes), dtype=int)
    return tuple(Crew(tuple(row), c) for c, row in enumerate(ones.tolist()))


def find_crews(
    problem: Problem, classes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Crew, ...], bool]:
    """(every crew, single devices first; whether teams of all sizes are among them).

    The host is a class of its own where the graph has inputs or outputs, as these stay there; it
    serves in teams of devices that are like it otherwise. Of many devices only teams of 2, 4, 8,
    ... and of the whole class are looked at, so that the ways through the teams repeat soon.
    """
    alike = _alike(problem)
    host = None if _binds_ops_to_host(problem) else problem.cluster.host
    every = problem.num_devices <= _EVERY_SIZE
    crews = list(single_crews(classes))
    for c, devices in enumerate(classes):
        kin = [k for k, own in enumerate(classes) if k != c and own == (host,)]
        kin = [k for k in kin if alike[devices[0], classes[k][0]]]
        for size in range(2, len(devices) + len(kin) + 1):
            if every or size.bit_count() == 1 or size >= len(devices):
                if size <= len(devices):
                    crews.append(_crew(len(classes), c, {c: size}))
                for k in kin:
                    crews.append(_crew(len(classes), c, {c: size - 1, k: 1}))
    return tuple(crews), every


def fitting(crews: Sequence[Crew], classes: Sequence[Sequence[int]]) -> tuple[Crew, ...]:
    """The crews that these devices can form; single devices stay, first and in order."""
    have = np.array([len(devices) for devices in classes])
    return tuple(
        crew for k, crew in enumerate(crews) if k < len(classes) or (crew.counts <= have).all()
    )


def largest(crews: Sequence[Crew], num_classes: int) -> Int[np.ndarray, "C"]:
    """The most devices that may share a stage with one of each class."""
    found = np.ones(num_classes, dtype=np.int64)
    for crew in crews:
        members = np.array(crew.counts) > 0
        found[members] = np.maximum(found[members], crew.size)
    return found


def _crew(num_classes: int, like: int, counts: dict[int, int]) -> Crew:
    return Crew(tuple(counts.get(c, 0) for c in range(num_classes)), like)


def _alike(problem: Problem) -> np.ndarray:
    """Which devices agree in all that a stage sees, inputs and outputs of the graph aside."""
    devices = problem.cluster.devices
    works = ~problem.graph.is_io
    return same(
        problem.compute_s[works],
        problem.allowed[works],
        problem.cluster.memory_bytes,
        np.array([device.dispatch_s for device in devices]),
        np.array([device.dispatch_per == "op" for device in devices]),
        is_cpu(problem),
        np.array([link_prices(problem, d) for d in range(len(devices))]).T,
        problem.cluster.queues.sum(axis=1),
        problem.cluster.queues.sum(axis=0),
    )


def _binds_ops_to_host(problem: Problem) -> bool:
    """Whether some op that works must be where an input or output of the graph is."""
    group, io = problem.group, problem.graph.is_io
    return bool(np.isin(group[~io], group[io]).any())
