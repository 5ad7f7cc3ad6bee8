"""Machines of a cluster: which processor each device belongs to."""

import functools
from collections.abc import Sequence

import numpy as np

from gdp.cluster.types import Cluster

_FAR = 0.5
"""A device is on another machine if the host's processor reaches it at less than this share of the
rate of another processor: sockets of one machine differ by less."""


def machine_of(cluster: Cluster, device: int) -> int:
    """The processor of a device's machine: the host, or one that reaches it much faster; a device
    that shares one memory with its own processor is a separate machine."""
    if cluster.devices[device].is_unified or cluster.devices[device].is_cpu:
        return device
    here, rate = cluster.host, cluster.link_bytes_per_s[:, device]
    cpus = [d for d, other in enumerate(cluster.devices) if other.is_cpu]
    nearest = max(cpus, key=lambda d: float(rate[d]), default=here)
    return nearest if device != here and rate[here] < _FAR * rate[nearest] else here


@functools.lru_cache(maxsize=64)
def machines(cluster: Cluster) -> tuple[int, ...]:
    """Machine of each device, as `machine_of`; processors and cores without accelerators of their
    own belong to the host's."""
    near = [machine_of(cluster, d) for d in range(cluster.num_devices)]
    own = {m for m, device in zip(near, cluster.devices, strict=True) if not device.is_cpu}
    return tuple(m if m in own else cluster.host for m in near)


def numbers_on_machine(cluster: Cluster) -> tuple[int | None, ...]:
    """Number of each device among the accelerators of its machine, in order, as drivers there
    count; None for processors."""
    at, seen = machines(cluster), dict[int, int]()
    numbers: list[int | None] = []
    for machine, device in zip(at, cluster.devices, strict=True):
        numbers.append(None if device.is_cpu else seen.get(machine, 0))
        seen[machine] = seen.get(machine, 0) + (not device.is_cpu)
    return tuple(numbers)


def in_order_of_machines(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """True where devices of one machine follow each other, as launchers number ranks."""
    at = [machines(cluster)[d] for d in ranks]
    return at == sorted(at, key=list(dict.fromkeys(at)).index)


def several_machines(cluster: Cluster) -> bool:
    """True where the devices are on more than one machine."""
    return len(set(machines(cluster))) > 1


def on_hosts_machine(cluster: Cluster) -> Cluster:
    """The cluster in which the devices of other machines than the host's compute nothing."""
    at = np.array(machines(cluster))
    return cluster.idling(at != at[cluster.host]) if several_machines(cluster) else cluster
