"""Which JAX device each device of a cluster stands for."""

from typing import Any

from gdp.cluster import Cluster
from gdp.errors import ClusterError

MORE_CPU_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count"


def jax_devices(cluster: Cluster) -> tuple[Any, ...]:
    """Devices of kind `cpu...` are JAX's CPU devices in order, all others its accelerators.

    Raises `ClusterError` where JAX has fewer of them than the cluster.
    """
    found = {True: _cpus(), False: _accelerators()}
    taken = {True: 0, False: 0}
    devices = []
    for device in cluster.devices:
        is_cpu = device.is_cpu
        if taken[is_cpu] == len(found[is_cpu]):
            raise _too_few(cluster, is_cpu, len(found[is_cpu]))
        devices.append(found[is_cpu][taken[is_cpu]])
        taken[is_cpu] += 1
    return tuple(devices)


def _too_few(cluster: Cluster, is_cpu: bool, have: int) -> ClusterError:
    wanted = sum(d.is_cpu == is_cpu for d in cluster.devices)
    if is_cpu:
        return ClusterError(
            f"cluster {cluster.name!r} has {wanted} CPU devices, JAX has {have} here; split "
            f"the CPU with {MORE_CPU_DEVICES}={wanted}, or name a cluster with fewer"
        )
    return ClusterError(
        f"cluster {cluster.name!r} has {wanted} accelerators, JAX sees {have} here; install JAX "
        f"for them, or name a cluster that fits"
    )


def _cpus() -> list[Any]:
    import jax

    try:
        return list(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return []


def _accelerators() -> list[Any]:
    import jax

    return [device for device in jax.local_devices() if device.platform != "cpu"]


def block_until_ready(tree: Any) -> None:
    """Waits until all arrays have been computed."""
    import jax

    jax.block_until_ready(tree)
