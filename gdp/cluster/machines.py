"""Machines of a cluster: which processor each device belongs to."""

from gdp.cluster.types import Cluster

_FAR = 0.5
"""A device is on another machine if the host's processor reaches it at less than this share of the
rate of another processor: sockets of one machine differ by less."""


def machine_of(cluster: Cluster, device: int) -> int:
    """The processor of a device's machine: the host, or one that reaches it much faster; a device
    with a processor of its own, in one memory, is a machine by itself."""
    if cluster.devices[device].is_unified or cluster.devices[device].is_cpu:
        return device
    here, rate = cluster.host, cluster.link_bytes_per_s[:, device]
    cpus = [d for d, other in enumerate(cluster.devices) if other.is_cpu]
    nearest = max(cpus, key=lambda d: float(rate[d]), default=here)
    return nearest if device != here and rate[here] < _FAR * rate[nearest] else here
