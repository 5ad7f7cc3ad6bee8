"""Power of devices: watts while one waits, and joules that its work adds.

An op of F FLOP and B bytes of memory traffic that takes t seconds on a device adds

    min((limit - idle) t, (watts - idle) (BUSY t + FLOP F / peak + BYTES B / bandwidth))

joules to idle t: FLOP (watts - idle) / peak joules a FLOP, by the peak of its format, BYTES
(watts - idle) / bandwidth joules a byte, and the clocks and schedulers that run whatever an op
does. `watts` is the power limit of the product, `limit` that or a lower one that a user sets. The
shares are fitted on measured kernels and servers: `python -m pretrain.costs.power` prints them.

Axes: N ops, D devices.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from gdp.base.errors import ArgumentError
from gdp.cluster.table import presets
from gdp.cluster.types import Cluster, Device
from gdp.graph.op_graph import OpGraph

IDLE = 0.2
"""Share of its watts that a device draws with a model loaded and nothing computed, where no
figure of it is known: between 0.18 and 0.27 of V100, H100, A4000 and P40 (`devices.toml`)."""
BUSY, FLOP, BYTES = 0.3, 1.3, 0.6
"""Shares of watts - idle."""


def watts_of(device: Device) -> float:
    """Power limit of the product in watts, of the device itself or of its kind's preset; 0.0 if
    unknown."""
    preset = presets().get(device.kind)
    return device.watts or (preset.watts if preset else 0.0)


def idle_watts_of(device: Device) -> float:
    """Watts with a model loaded and nothing computed, at most its limit."""
    preset, watts = presets().get(device.kind), watts_of(device)
    known = device.idle_watts or (preset.idle_watts if preset and not device.watts else 0.0)
    return min(known or IDLE * watts, limit_of(device))


def limit_of(device: Device) -> float:
    """Watts that it draws at most."""
    return min(device.power_limit or np.inf, watts_of(device))


class Power(NamedTuple):
    """Watts of the devices that compute the ops placed on each device; 0 where unknown."""

    watts: Float[np.ndarray, "D"]  # power limits of the products
    idle: Float[np.ndarray, "D"]  # with a model loaded and nothing computed
    limit: Float[np.ndarray, "D"]  # that they draw at most

    @classmethod
    def of(cls, cluster: Cluster) -> "Power":
        """Of the devices of a cluster."""
        homes = [cluster.devices[d] for d in cluster.runs_on]
        return cls(*(np.array(list(map(f, homes))) for f in (watts_of, idle_watts_of, limit_of)))


def joules_above_idle(
    graph: OpGraph, cluster: Cluster, seconds: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "N D"]:
    """Joules that each op adds on each device to those of its waiting; 0 where watts are unknown,
    inf where the op cannot run.

    Args:
        graph: Its FLOP and bytes are of one run of an op.
        cluster: The devices.
        seconds: Of all runs of an op in one sample.
    """
    flop_s, byte_s = work_seconds(graph, cluster)
    power = Power.of(cluster)
    runs = np.isfinite(seconds)
    busy_s = np.where(runs, seconds, 0.0)
    # No op works faster than the device can, whatever its seconds are said to be.
    work_s = BUSY * busy_s + FLOP * np.minimum(flop_s, busy_s) + BYTES * np.minimum(byte_s, busy_s)
    joules = (power.watts - power.idle) * work_s
    joules = np.minimum(joules, (power.limit - power.idle) * busy_s)
    return np.where(runs, np.where(graph.is_io[:, None], 0.0, joules), np.inf)


def work_seconds(
    graph: OpGraph, cluster: Cluster
) -> tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N D"]]:
    """(seconds of the FLOP of all runs at the peak of their format, of their bytes at the bandwidth
    of the memory), of each op on each device."""
    homes = [cluster.devices[d] for d in cluster.runs_on]
    dtypes, which = np.unique([x.dtype for x in graph.detail], return_inverse=True)
    peak = np.array([[device.speed(str(dtype)) for device in homes] for dtype in dtypes])[which]
    rate = np.array([device.bytes_per_s for device in homes])
    flop = (graph.flop * graph.repeats)[:, None]
    moved = (graph.memory_traffic_bytes * graph.repeats)[:, None]
    return flop / peak, moved / rate


def require_power(cluster: Cluster, devices: Bool[np.ndarray, "D"] | None = None) -> None:
    """Raise `ArgumentError` where the watts of one of some devices are unknown; by default of those
    that compute."""
    mine = cluster.computes if devices is None else devices
    for d in np.flatnonzero(mine & (Power.of(cluster).watts == 0)).tolist():
        device = cluster.devices[d]
        raise ArgumentError(
            f"no watts are known of device {device.name!r} ({device.kind}): give `watts` of it in "
            "a cluster file, such as watts = 65"
        )
