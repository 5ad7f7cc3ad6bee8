"""Seconds of collectives among accelerators, and of sending a tensor from one to another.

Where a kind of link was measured, a curve of four numbers for each operation, library and number
of devices:

    seconds(bytes) = latency + bytes / rate + extra * bytes / (bytes + knee)

The last term is what small messages are spared: protocols of fewer bytes at a time. Curves between
two numbers of devices are interpolated in the logarithm of the number. Elsewhere, a ring:

    seconds(bytes) = start + steps * step + share * bytes * pace / efficiency

With D devices an all-reduce takes 2 (D - 1) steps, in which each device sends 2 (D - 1) / D of the
bytes, others half of that (Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521).
`pace` is seconds a byte on the slowest channel of the cluster, at which links that share one queue.
For links of which gdp knows no more than a datasheet (presets, detection) start, step and
efficiency are typical of measured links; numbers that somebody gave are used as they
are: latency of the link a step, efficiency 1.

No answer is faster than the bytes that every device has to send at the bandwidth of the cluster's
links. Curves are fitted by `pretrain.costs.collectives`, and ship in `checkpoints/collectives`.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

from gdp.base import checkpoint
from gdp.base.errors import ArgumentError
from gdp.base.files.reading import Kind, convert, data_path
from gdp.cluster.links import concurrent_rings, link_family
from gdp.cluster.types import NO_CHANNEL, Cluster
from gdp.costs.measured.kernels import ENGINES

NAME = "collectives"
"""Folder of the shipped curves in `checkpoints/`."""
LIBRARY = ENGINES[0]
"""Engine whose collectives are those of the maker's library (NCCL, oneCCL), and which other engines
use where they have none of their own."""


class Operation(NamedTuple):
    """An operation as a ring of D devices computes it."""

    steps: Callable[[int], int]  # messages that follow each other
    share: Callable[[int], float]  # of the bytes, sent by each device


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(lambda d: 2 * (d - 1), lambda d: 2 * (d - 1) / d),
    "all_gather": Operation(lambda d: d - 1, lambda d: (d - 1) / d),
    "reduce_scatter": Operation(lambda d: d - 1, lambda d: (d - 1) / d),
    "all_to_all": Operation(lambda d: d - 1, lambda d: (d - 1) / d),
    "send": Operation(lambda d: 1, lambda d: 1.0),
}
"""By name. The bytes of an operation are those of the whole tensor: which is reduced, which is made
(all_gather), which enters (reduce_scatter), which one device has for all (all_to_all)."""


class Curve(NamedTuple):
    """Seconds of one operation by its bytes; all numbers are at least zero."""

    latency_s: float
    bytes_per_s: float
    extra_s: float
    knee_bytes: float

    def seconds(self, size: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
        """Seconds for so many bytes, increasing in them."""
        more = self.extra_s * size / (size + self.knee_bytes)
        return self.latency_s + size / self.bytes_per_s + more


class Typical(msgspec.Struct, frozen=True):
    """Rings over links that were not measured."""

    start_s: float
    step_s: float
    efficiency: dict[str, tuple[tuple[int, float], ...]]  # of numbers of devices, by family
    sends: dict[str, float]  # efficiency of one device that sends to another, by family

    def share_of_peak(self, family: str, operation: str, devices: int) -> float:
        """Share of the datasheet's bandwidth, interpolated in the logarithm of the number."""
        if operation == "send":
            return self.sends[family]
        counts, shares = zip(*self.efficiency[family], strict=True)
        return float(np.interp(math.log(devices), np.log(counts), shares))

    def ring_s(
        self, op: Operation, devices: int, whole_s: Float[np.ndarray, "S"]
    ) -> Float[np.ndarray, "S"]:
        """Seconds of a ring where the whole tensor would take so many over one link."""
        return self.start_s + op.steps(devices) * self.step_s + op.share(devices) * whole_s


class MeasuredLink(msgspec.Struct, frozen=True):
    """A kind of link that was measured: a generation of NVLink, or PCIe in the hosts of a card."""

    family: str  # "nvlink" or "pcie"
    bytes_per_s: float  # of the datasheet, one way
    devices: tuple[str, ...]  # presets in which it was measured

    def joins(self, kind: str, bytes_per_s: float) -> bool:
        """True if a link of this family and bandwidth at a kind of device is one of these.

        Hosts differ more than generations of PCIe do, so there the card decides.
        """
        return kind in self.devices if self.family == "pcie" else bytes_per_s == self.bytes_per_s


class CollectivesMeta(msgspec.Struct, frozen=True):
    """Keys of `meta.json` beside those of every checkpoint."""

    links: dict[str, MeasuredLink]
    curves: tuple[tuple[str, str, str, int], ...]  # link, operation, engine, devices of each row
    typical: Typical
    errors: dict[str, tuple[float, float]]  # mean and worst of each operation, on sizes held out
    source: str
    licence: str
    date: str


@dataclass(frozen=True, eq=False)
class Collectives:
    """Measured curves, and what is typical elsewhere."""

    meta: CollectivesMeta
    curves: Mapping[tuple[str, str, str], Mapping[int, Curve]]  # by link, operation, engine

    def link_of(self, cluster: Cluster, devices: Sequence[int]) -> str | None:
        """The measured kind of all links among the devices; None if they are of no such kind."""
        names = {self._kind(cluster, i, j) for i in devices for j in devices if i != j}
        return names.pop() if len(names) == 1 else None

    def _kind(self, cluster: Cluster, src: int, dst: int) -> str | None:
        family, speed = link_family(cluster, src, dst), float(cluster.link_bytes_per_s[src, dst])
        for name, link in self.meta.links.items():
            ends = (cluster.devices[i].kind for i in (src, dst))
            if link.family == family and all(link.joins(kind, speed) for kind in ends):
                return name
        return None

    def send_share(self, cluster: Cluster, src: int, dst: int) -> float:
        """Share of a link's bandwidth that large sends reach; 1 where it was not measured."""
        family = link_family(cluster, src, dst)
        if not family:
            return 1.0
        curves = self.curves_of(self._kind(cluster, src, dst), "send", LIBRARY)
        if not curves:
            return self.meta.typical.sends[family]
        return min(1.0, curves[2].bytes_per_s / float(cluster.link_bytes_per_s[src, dst]))

    def curves_of(self, link: str | None, operation: str, engine: str) -> Mapping[int, Curve]:
        """Curves by number of devices; those of the library where the engine has none, or none."""
        known = (self.curves.get((link or "", operation, name)) for name in (engine, LIBRARY))
        return next((curves for curves in known if curves), {})

    def seconds(
        self, cluster: Cluster, devices: Sequence[int], operation: str,
        size: Float[np.ndarray, "S"], engine: str,
    ) -> Float[np.ndarray, "S"]:  # fmt: skip
        """See `collective_s`."""
        count, op = len(devices), OPERATIONS[operation]
        pace = pace_s(cluster, devices, operation)
        curves = self.curves_of(self.link_of(cluster, devices), operation, engine)
        if not curves:
            found = self._ring_s(cluster, devices, operation, size * pace)
        elif count <= max(curves):
            found = _between(curves, count, size)
        else:
            # More devices than were measured take as much longer as rings do.
            longest = max(curves)
            more = op.steps(count) - op.steps(longest), op.share(count) - op.share(longest)
            found = curves[longest].seconds(size) + more[0] * self.meta.typical.step_s
            found = found + more[1] * size * pace
        return np.maximum(found, min(1.0, op.share(count)) * size * pace)

    def _ring_s(
        self, cluster: Cluster, devices: Sequence[int], operation: str,
        whole_s: Float[np.ndarray, "S"],
    ) -> Float[np.ndarray, "S"]:  # fmt: skip
        pairs = [(i, j) for i in devices for j in devices if i != j]
        families = {link_family(cluster, i, j) for i, j in pairs}
        op, count, typical = OPERATIONS[operation], len(devices), self.meta.typical
        if "" in families:
            latency_s = max(float(cluster.link_latency_s[pair]) for pair in pairs)
            return op.steps(count) * latency_s + op.share(count) * whole_s
        least = min(typical.share_of_peak(family, operation, count) for family in families)
        return typical.ring_s(op, count, whole_s / least)


def _between(
    curves: Mapping[int, Curve], count: int, size: Float[np.ndarray, "S"]
) -> Float[np.ndarray, "S"]:
    """Seconds of a number of devices, interpolated between the nearest that were measured."""
    below = max((c for c in curves if c <= count), default=min(curves))
    above = min(c for c in curves if c >= count)
    first = curves[below].seconds(size)
    if below >= above:
        return first
    share = math.log(count / below) / math.log(above / below)
    return first + share * (curves[above].seconds(size) - first)


def pace_s(cluster: Cluster, devices: Sequence[int], operation: str) -> float:
    """Seconds a byte that each device sends takes, on the channel that is busy longest.

    Of a ring each device sends to the next, in the order given, in a mesh over rings that run
    concurrently; of an all-to-all to all others, at once where their links have channels of their
    own.
    """
    d, rings = len(devices), 1
    if operation == "all_to_all":
        pairs = [(i, j) for i in devices for j in devices if i != j]
    elif operation == "send":
        pairs = [(devices[0], devices[1])]
    else:
        pairs = [(devices[k], devices[(k + 1) % d]) for k in range(d)]
        rings = concurrent_rings(cluster, devices)
    part = 1.0 / (d - 1) if operation == "all_to_all" else 1.0
    busy: dict[object, float] = {}
    for pair in pairs:
        channel = int(cluster.channel[pair])
        key = pair if channel == NO_CHANNEL else channel
        busy[key] = busy.get(key, 0.0) + part / float(cluster.link_bytes_per_s[pair])
    return max(busy.values()) / rings


def collective_s(
    cluster: Cluster,
    devices: Sequence[int],
    operation: str,
    size_bytes: float | np.ndarray,
    engine: str = LIBRARY,
) -> np.ndarray:
    """Seconds of an operation that devices start together.

    Args:
        cluster: The cluster as it was named: what a cost model gets, not the cluster of a problem,
            whose links `with_measured_sends` has slowed down.
        devices: Indices of the devices that take part, each once. Of "send" the one that sends and
            the one that receives; rings go in this order.
        operation: A key of `OPERATIONS`.
        size_bytes: Bytes of the whole tensor (see `OPERATIONS`), at least 0, of any shape.
        engine: One of `ENGINES`: all-reduces of serving engines start sooner than the library's.

    Returns:
        Seconds in the shape of `size_bytes`; 0 for one device.

    Raises:
        ArgumentError: if the operation, the engine, a device or a size does not exist.

    >>> from gdp.cluster.presets import cluster_preset
    >>> box = cluster_preset("8xh100-nvlink")
    >>> [round(float(collective_s(box, range(d), "all_reduce", 2**27)) * 1e6) for d in (2, 4, 8)]
    [460, 607, 577]
    """
    devices, size = list(devices), np.asarray(size_bytes, dtype=float)
    if operation not in OPERATIONS:
        raise ArgumentError(
            f"no collective operation {operation!r}; there are {', '.join(OPERATIONS)}"
        )
    if engine not in ENGINES:
        raise ArgumentError(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    inside = all(0 <= d < cluster.num_devices for d in devices)
    if not devices or len(set(devices)) < len(devices) or not inside:
        raise ArgumentError(
            f"devices of a collective must be different indices below {cluster.num_devices}, "
            f"got {devices}"
        )
    if operation == "send" and len(devices) != 2:
        raise ArgumentError(f"a send has two devices, got {devices}")
    if not (size >= 0).all():
        raise ArgumentError("bytes of a collective must be >= 0; a size is negative or no number")
    if len(devices) == 1:
        return np.zeros_like(size)
    flat = shipped_collectives().seconds(cluster, devices, operation, size.reshape(-1), engine)
    return flat.reshape(size.shape)


def with_measured_sends(cluster: Cluster) -> Cluster:
    """The cluster whose links between accelerators send as fast as was measured.

    The bandwidth of links that gdp knows from a datasheet is the measured one of their kind, or the
    share of the datasheet's that is typical of their family; latencies and all others stay.
    """
    known = shipped_collectives()
    speed = cluster.link_bytes_per_s.copy()
    shares: dict[object, float] = {}
    for i, j in zip(*np.nonzero(np.isfinite(speed)), strict=True):
        ends = (cluster.devices[i].kind, cluster.devices[j].kind)
        key = (*ends, speed[i, j], cluster.link_latency_s[i, j])
        if key not in shares:
            shares[key] = known.send_share(cluster, int(i), int(j))
        speed[i, j] *= shares[key]
    if all(share == 1.0 for share in shares.values()):
        return cluster
    return replace(cluster, link_bytes_per_s=speed)


def load_collectives(path: str | os.PathLike[str]) -> Collectives:
    """Curves of a checkpoint; raises `CheckpointError`."""
    kind = Kind("meta.json of curves of collectives", checkpoint.CheckpointError)
    meta = convert(checkpoint.read_meta(path), kind, CollectivesMeta, str(Path(path) / "meta.json"))
    rows = checkpoint.load_arrays(path, {"curves": (len(meta.curves), len(Curve._fields))})
    curves: dict[tuple[str, str, str], dict[int, Curve]] = {}
    for (link, operation, engine, count), row in zip(meta.curves, rows["curves"], strict=True):
        curves.setdefault((link, operation, engine), {})[count] = Curve(*map(float, row))
    return Collectives(meta, curves)


@functools.cache
def shipped_collectives() -> Collectives:
    """The curves that travel with gdp; raises `CheckpointError` where they do not."""
    return load_collectives(data_path("checkpoints", NAME))
