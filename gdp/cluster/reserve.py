"""Memory that plans leave alone: of a GPU for its context, the allocator and a runtime's buffers,
of a processor for the system.

A `Device` has `memory_bytes` for plans and `reserve_bytes` beside it; both together are what the
device reports. `RESERVES` has a row per kind of device and runtime, with the source of its figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gdp.base.errors import ClusterError
from gdp.base.units import parse_bytes
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, Device, devices_of_key

GIB = 1 << 30
LEAST_BYTES = GIB
"""A memory of at most this size is a limit set by hand, of which nothing is kept back."""
MOST_SHARE = 0.25
"""Of an accelerator's memory that a fixed size may take: a card of 2 GiB keeps 0.5."""


class Tier(NamedTuple):
    """A share of the memory up to a size, beyond the tiers before it."""

    up_to_bytes: float
    share: float


@dataclass(frozen=True)
class Reserve:
    """Memory that is kept: the larger of a size and the shares of the tiers."""

    devices: str  # "accelerator", "unified" (of up to 36 GiB), "large unified" or "processor"
    runtime: str  # a planning target; "" where none is named
    size_bytes: int
    tiers: tuple[Tier, ...]
    source: str

    def bytes_of(self, total_bytes: int) -> int:
        """Bytes of a device that reports `total_bytes`.

        >>> RESERVES["processor", ""].bytes_of(64 * GIB) / GIB
        5.48
        """
        if total_bytes <= LEAST_BYTES or total_bytes >= UNLIMITED_BYTES:
            return 0
        shares, below = 0.0, 0.0
        for tier in self.tiers:
            shares += tier.share * max(0.0, min(total_bytes, tier.up_to_bytes) - below)
            below = tier.up_to_bytes
        return int(max(min(self.size_bytes, MOST_SHARE * total_bytes), shares))


_ALL = float("inf")
RESERVES: Mapping[tuple[str, str], Reserve] = {
    (row.devices, row.runtime): row
    for row in (
        Reserve("accelerator", "", GIB, (),
                "the margin of llama.cpp's own fit, 1024 MiB a device (ggml-org/llama.cpp#16653), "
                "taken where nothing is known"),
        Reserve("accelerator", "llamacpp", GIB, (),
                "the margin of llama.cpp's own fit (ggml-org/llama.cpp#16653); compute buffers are "
                "tensors of the graph here, and planned"),
        Reserve("accelerator", "accelerate", GIB, (Tier(_ALL, 0.1),),
                "transformers plans with 90% of a device where it quantises "
                "(quantizer_bnb_4bit.py: adjust_max_memory); at least 1 GiB"),
        Reserve("accelerator", "pipelining", GIB, (Tier(_ALL, 0.1),),
                "PyTorch as under accelerate"),
        Reserve("accelerator", "vllm", GIB, (Tier(_ALL, 0.1),),
                "what vLLM leaves by default: gpu_memory_utilization 0.9 (0.92 in newer ones)"),
        Reserve("unified", "", GIB, (Tier(_ALL, 1 / 3),),
                "Metal's recommendedMaxWorkingSetSize is two thirds of up to 36 GiB (10922.67 MB "
                "of 16 GB: abetlen/llama-cpp-python#687, 21845.34 of 32: ollama/ollama#434)"),
        Reserve("large unified", "", 0, (Tier(_ALL, 0.25),),
                "llama.cpp prints three quarters for 64 GB and more (ggml-org/llama.cpp#1870)"),
        Reserve("processor", "", 0,
                (Tier(4 * GIB, 0.25), Tier(8 * GIB, 0.2), Tier(16 * GIB, 0.1),
                 Tier(128 * GIB, 0.06), Tier(_ALL, 0.02)),
                "the share that Google Kubernetes Engine keeps of a node for its system: 25% of "
                "the first 4 GiB, 20% of the next 4, 10% of the next 8, 6% of the next 112, 2% "
                "beyond (its page on node sizes)"),
    )
}  # fmt: skip
"""Rows by kind of device and runtime; a runtime without a row takes that of no runtime."""
LARGE_UNIFIED_BYTES = 36 * GIB
"""Beyond which Metal leaves less of unified memory to the system."""


def default_reserve(device: Device, runtime: str = "") -> int:
    """Bytes that are kept by default of a device's reported memory."""
    total = device.total_bytes
    kind = "processor" if device.is_cpu or device.is_unified else "accelerator"
    if device.is_apple:
        kind = "large unified" if total > LARGE_UNIFIED_BYTES else "unified"
    row = RESERVES.get((kind, runtime)) or RESERVES[kind, ""]
    return row.bytes_of(total)


def reserved(device: Device, reserve_bytes: int | None = None) -> Device:
    """The device with these bytes kept of its reported memory, by default those of the table."""
    total = device.total_bytes
    kept = default_reserve(device) if reserve_bytes is None else reserve_bytes
    if not 0 <= kept < total:
        raise ClusterError(
            f"device {device.name!r}: a reserve of {kept} bytes leaves nothing of {total}; "
            "keep at least 0 and less than its memory"
        )
    if total >= UNLIMITED_BYTES:
        return device
    return replace(device, memory_bytes=total - kept, reserve_bytes=kept)


def for_runtime(cluster: Cluster, runtime: str) -> Cluster:
    """The cluster with the reserves of a runtime, where they are the default ones now."""
    devices = tuple(
        reserved(d, max(d.reserve_bytes, default_reserve(d, runtime)))
        if 0 < d.reserve_bytes == default_reserve(d)
        else d
        for d in cluster.devices
    )
    return replace(cluster, devices=devices)


def parse_reserve(text: str) -> dict[str, int]:
    """Reserves by device from `0=2GiB,cpu=8GiB`, or one of every accelerator from `2GiB`; raises
    `ValueError` on malformed text.

    >>> parse_reserve("2GiB"), parse_reserve("0=1GB,cpu=0")
    ({'': 2147483648}, {'0': 1000000000, 'cpu': 0})
    """
    reserves: dict[str, int] = {}
    for item in text.split(","):
        key, separator, size = item.rpartition("=")
        if separator and not key.strip():
            raise ValueError(f"reserve {item!r} must look like 2GiB, 0=2GiB or cpu=8GiB")
        reserves[key.strip()] = parse_bytes(size)
    return reserves


def with_reserve(cluster: Cluster, reserves: Mapping[Any, int | str]) -> Cluster:
    """The cluster with other reserves, keyed as the limits of `with_max_memory`; the key "" is
    every accelerator, or every device where there is none. Raises `ClusterError` on an unknown key.
    """
    kept = {
        name: parse_bytes(size)
        for key, size in reserves.items()
        for name in devices_of_key(cluster, key, "reserve")
    }
    devices = tuple(reserved(d, kept[d.name]) if d.name in kept else d for d in cluster.devices)
    return replace(cluster, devices=devices)
