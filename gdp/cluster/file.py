"""Clusters as TOML files or by name of a preset, and memory overrides in Hugging Face syntax."""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gdp.base.errors import ArgumentError, ClusterError
from gdp.base.files.reading import Kind, decode_toml, read_toml
from gdp.base.files.writing import write_atomic
from gdp.base.units import parse_bytes
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import (
    UNLIMITED_BYTES,
    Cluster,
    Device,
    Link,
    devices_of_key,
    make_cluster,
)

_KIND = Kind("cluster file", ClusterError)


class DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A `[[device]]` of a cluster file. Missing fields come from `preset`, if given.

    `memory_bytes` is what the device reports, of which `reserve_bytes` are kept: by default those
    of `gdp.cluster.reserve`.
    """

    name: str
    preset: str | None = None
    kind: str | None = None
    flop_per_s: float | dict[str, float] | None = None
    bytes_per_s: float | None = None
    memory_bytes: int | str | None = None
    dispatch_s: float | None = None
    dispatch_per: str | None = None
    supported: list[str] | None = None
    model: str | None = None
    memory_pool: str | None = None
    reserve_bytes: int | str | None = None
    unified: bool | None = None
    compute_capability: float | None = None
    backend: str | None = None
    sockets: int | None = None
    copy_bytes_per_s: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    power_limit: float | None = None


class LinkEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A `[[link]]` of a cluster file; bidirectional unless `one_way`. Copies queue by default."""

    src: str
    dst: str
    bytes_per_s: float
    latency_s: float = 0.0
    channel: str | None = None
    one_way: bool = False
    contention: bool | None = None


class ClusterEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster file. `contention` is the default of links, and holds for pairs without a link.

    Such pairs have the bandwidth and latency of the defaults; where none is given, devices of
    presets the links that follow from these, others 16 GB/s and 10 us.
    """

    device: list[DeviceEntry]
    link: list[LinkEntry] = []
    name: str = ""
    host: str | int = 0
    default_bytes_per_s: float | None = None
    default_latency_s: float | None = None
    disk_bytes_per_s: float | None = None  # of the disk that weights are loaded from
    contention: bool = True


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster of a TOML file; raises `ClusterError` naming the key at fault."""
    path = Path(path)
    entry = read_toml(path, _KIND, ClusterEntry)
    try:
        return cluster_of(entry, path.stem)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def cluster_of(entry: ClusterEntry, name: str) -> Cluster:
    """The cluster of a file's content, called `name` unless the content names it."""
    devices = [_device(device) for device in entry.device]
    defaults = {
        key: value
        for key in ("default_bytes_per_s", "default_latency_s")
        if (value := getattr(entry, key)) is not None
    }
    given = [_link(link, entry.contention) for link in entry.link]
    pairs = {(x.src, x.dst) for x in given} | {(x.dst, x.src) for x in given if not x.one_way}
    assumed = [] if defaults else _preset_links(devices, entry.contention)
    return make_cluster(
        entry.name or name,
        devices,
        [*given, *(link for link in assumed if (link.src, link.dst) not in pairs)],
        **defaults,
        default_contention=entry.contention,
        host=entry.host,
        disk_bytes_per_s=entry.disk_bytes_per_s or 0.0,
    )


def _preset_links(devices: Sequence[Device], contention: bool) -> list[Link]:
    """One-way links among the devices that are of presets by their kinds."""
    from gdp.cluster.presets import preset_links, presets

    known = [device for device in devices if device.kind in presets()]
    links = preset_links(known, [device.kind for device in known])
    if contention:
        return links
    return [replace(link, channel=None, contention=False) for link in links]


def cluster_of_toml(text: str, name: str) -> Cluster:
    """The cluster of a file's text; raises `ClusterError` as `read_cluster` does."""
    return cluster_of(decode_toml(text.encode(), _KIND, ClusterEntry, name), name)


def _link(entry: LinkEntry, contention: bool) -> Link:
    """A link, which queues by default as the cluster does, or on its channel if it names one."""
    given = msgspec.structs.asdict(entry)
    if entry.contention is None:
        given["contention"] = contention or entry.channel is not None
    return Link(**given)


def _device(entry: DeviceEntry) -> Device:
    from gdp.cluster.presets import device_preset
    from gdp.cluster.reserve import reserved

    base = None if entry.preset is None else device_preset(entry.preset, entry.name)
    given = {
        key: value
        for key, value in msgspec.structs.asdict(entry).items()
        if value is not None and key != "preset"
    }
    if isinstance(given.get("flop_per_s"), float):
        given["flop_per_s"] = {"default": given["flop_per_s"]}
    for key in ("memory_bytes", "reserve_bytes"):
        if key in given:
            try:
                given[key] = parse_bytes(given[key])
            except ValueError as error:
                raise ClusterError(f"device {entry.name!r}: {key}: {error}") from None
    kept = given.pop("reserve_bytes", None)
    if "supported" in given:
        given["supported"] = frozenset(given["supported"])
    if base is not None:
        whole = replace(base, memory_bytes=base.total_bytes, reserve_bytes=0)
        return _with_known_backend(reserved(replace(whole, **given), kept))
    missing = [key for key in ("flop_per_s", "bytes_per_s") if key not in given]
    if missing:
        raise ClusterError(
            f"device {entry.name!r} lacks {' and '.join(missing)}; give them, or a preset"
        )
    given.setdefault("kind", entry.name)
    return _with_known_backend(reserved(Device(**given), kept))


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a TOML file that `read_cluster` reads back unchanged; it may be edited."""
    write_atomic(path, cluster_toml(cluster).encode())


def cluster_toml(cluster: Cluster) -> str:
    """The TOML text of a cluster."""
    host = cluster.device_names[cluster.host]
    lines = [f"name = {_toml(cluster.name)}", f"host = {_toml(host)}"]
    if cluster.disk_bytes_per_s:
        lines.append(f"disk_bytes_per_s = {_toml(float(cluster.disk_bytes_per_s))}")
    for device in cluster.devices:
        limited = device.memory_bytes < UNLIMITED_BYTES
        lines += _table("device", {
            "name": device.name, "kind": device.kind, "flop_per_s": dict(device.flop_per_s),
            "bytes_per_s": device.bytes_per_s, "dispatch_s": device.dispatch_s,
            "dispatch_per": device.dispatch_per,
            "memory_bytes": device.total_bytes if limited else None,
            "reserve_bytes": device.reserve_bytes if limited else None,
            "copy_bytes_per_s": device.copy_bytes_per_s or None,
            "memory_pool": device.memory_pool or None, "unified": device.unified,
            "compute_capability": device.compute_capability or None,
            "backend": device.backend or None,
            "sockets": device.sockets if device.sockets > 1 else None,
            "watts": device.watts or None, "idle_watts": device.idle_watts or None,
            "power_limit": device.power_limit or None,
            "model": device.model or None,
            "supported": None if device.supported is None else sorted(device.supported),
        })  # fmt: skip
    for (i, src), (j, dst) in itertools.permutations(enumerate(cluster.device_names), 2):
        queues = cluster.queues[i, j]
        lines += _table("link", {
            "src": src, "dst": dst, "bytes_per_s": float(cluster.link_bytes_per_s[i, j]),
            "latency_s": float(cluster.link_latency_s[i, j]),
            "channel": f"c{cluster.channel[i, j]}" if queues else None,
            "contention": None if queues else False, "one_way": True,
        })  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(name: str, fields: Mapping[str, Any]) -> list[str]:
    """Lines of a table without the fields that are None."""
    given = {key: value for key, value in fields.items() if value is not None}
    return ["", f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in given.items())]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(k)} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, str | list | bool):  # such JSON is TOML
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def parse_max_memory(text: str) -> dict[str, int]:
    """Limits by device from `0=20GiB,cpu=30GiB`; raises `ValueError` on malformed text.

    >>> parse_max_memory("0=20GiB,cpu=1GB")
    {'0': 21474836480, 'cpu': 1000000000}
    """
    limits: dict[str, int] = {}
    for item in text.split(","):
        key, separator, size = item.partition("=")
        if not separator or not key.strip():
            raise ArgumentError(f"max memory {item!r} must look like 0=20GiB or cpu=30GiB")
        limits[key.strip()] = parse_bytes(size)
    return limits


def with_max_memory(cluster: Cluster, limits: Mapping[Any, int | str]) -> Cluster:
    """The cluster with other memory limits, keyed as `devices_of_key` says; a limit is what a plan
    may fill, and what is left of the device its reserve. Raises `ClusterError` on an unknown key.
    """
    memory = {
        name: parse_bytes(size)
        for key, size in limits.items()
        for name in devices_of_key(cluster, key, "max memory")
    }
    # What is given by hand is a device's own, whoever it shared with.
    devices = tuple(
        replace(
            d, memory_bytes=memory[d.name], memory_pool="",
            reserve_bytes=max(0, d.total_bytes - memory[d.name]) if d.reserve_bytes else 0,
        )
        if d.name in memory
        else d
        for d in cluster.devices
    )  # fmt: skip
    return replace(cluster, devices=devices)


def parse_power_limit(text: str) -> dict[str, float]:
    """Watts by device from `0=250W,1=300W`, or of every accelerator from `250W`; raises
    `ArgumentError` on malformed text.

    >>> parse_power_limit("250W"), parse_power_limit("0=250,cpu=65W")
    ({'': 250.0}, {'0': 250.0, 'cpu': 65.0})
    """
    limits: dict[str, float] = {}
    for item in text.split(","):
        key, separator, watts = (part.strip() for part in item.rpartition("="))
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*[wW]?", watts)
        if match is None or float(match[1]) <= 0 or (separator and not key):
            raise ArgumentError(f"power limit {item!r} must look like 250W or 0=250W")
        limits[key] = float(match[1])
    return limits


def with_power_limit(cluster: Cluster, limits: Mapping[Any, float]) -> Cluster:
    """The cluster with other power limits, keyed as those of `with_max_memory`; the key "" is every
    accelerator. Raises `ClusterError` on an unknown key."""
    watts = {
        name: limit
        for key, limit in limits.items()
        for name in devices_of_key(cluster, key, "power limit")
    }
    devices = (replace(d, power_limit=watts.get(d.name, d.power_limit)) for d in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def with_backend(cluster: Cluster, backend: str | None) -> Cluster:
    """The cluster whose GPUs llama.cpp computes on by a backend; as it is without one. Raises
    `ClusterError` on an unknown name."""
    if backend is None:
        return cluster
    devices = (d if d.is_cpu else replace(d, backend=backend) for d in cluster.devices)
    return replace(cluster, devices=tuple(map(_with_known_backend, devices)))


_MAKERS = {"cuda": "nvidia", "rocm": "amd", "sycl": "intel", "metal": "apple"}
"""Maker of the GPUs of a backend of llama.cpp; Vulkan is for all."""


def _with_known_backend(device: Device) -> Device:
    """The device itself; raises `ClusterError` where its backend is for another maker's GPUs."""
    from gdp.cluster.presets import presets

    preset, maker = presets().get(device.kind), _MAKERS.get(device.backend, "")
    if preset is not None and maker and preset.maker != maker:
        raise ClusterError(
            f"device {device.name!r}: backend {device.backend!r} is for GPUs of {maker}, and "
            f"{device.kind} is none; it has vulkan"
        )
    return device


Machine = str | os.PathLike[str] | Cluster
"""Argument for a cluster of every library call."""


def load_cluster(spec: Machine | None = None) -> Cluster:
    """Load a cluster.

    Args:
        spec: TOML file, preset such as "2xcpu-core" or "4xa100-nvlink", or a cluster, which is
            returned as it is. Default: this machine.

    Raises:
        ClusterError: if there is no such file or preset, or the file is malformed.
    """
    if spec is None:
        return Cluster.local()
    if isinstance(spec, Cluster):
        return spec
    if not isinstance(spec, str | os.PathLike):
        raise ClusterError(
            "a cluster is a TOML file, a preset such as 2xcpu-core, or what gdp.Cluster.load, "
            f"gdp.Cluster.local or gdp.make_cluster return, not of type {type(spec).__name__}"
        )
    path = Path(spec)
    if path.suffix == ".toml" or path.exists():
        return read_cluster(path)
    return cluster_preset(str(spec))
