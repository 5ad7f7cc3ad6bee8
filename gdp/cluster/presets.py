"""Clusters by name: `2xcpu-core`, `4xa100-nvlink`, `cpu+2xt4-pcie3`."""

import re
from collections.abc import Sequence
from dataclasses import replace

from gdp.base.errors import ClusterError
from gdp.base.units import parse_bytes
from gdp.cluster.links import PCIE_BYTES_PER_S, host_generation, link_kind
from gdp.cluster.links import link_family as link_family
from gdp.cluster.table import Preset as Preset
from gdp.cluster.table import device_names as device_names
from gdp.cluster.table import presets as presets
from gdp.cluster.types import (
    CORE_KIND,
    MAX_DEVICES,
    Cluster,
    Device,
    Link,
    is_cpu_kind,
    make_cluster,
)

# Cores of one machine hand over a pointer: what it costs is waking the reader, and that the data
# lie in the other core's cache. Measured between two ONNX Runtime sessions (`gdp profile`).
CORE_BYTES_PER_S = 2e10
CORE_LATENCY_S = 45e-6


# Words behind a product's that make another product of it.
_VARIANTS = r"(?![0-9a-z])(?![ -]*(?:ti|super|d|max-q|xtx?|gre|nano|nx)\b)"
_LAPTOP = re.compile(r"\b(?:laptop|mobile|max-q design)\b")
_MARKS = re.compile(r"\((?:r|tm)\)|\+")
_CAPACITY = re.compile(r"-\d+$")


def preset_of_model(model: str, size_bytes: int = 0) -> str | None:
    """The accelerator preset of a driver's name for a device; of several sizes of one product the
    nearest to its memory, else to the size in its name, else the one of the plain name. None for
    other products; those of laptops are other products than the cards of the same number.

    >>> preset_of_model("NVIDIA A100-SXM4-40GB", 40 << 30), preset_of_model("NVIDIA L40S")
    ('a100-40', 'l40s')
    """
    text = _MARKS.sub("", model.lower())
    of_laptop = _LAPTOP.search(text) is not None
    named: dict[str, list[str]] = {}
    for name, entry in presets().items():
        # A number behind a dash is a size only where the name without it is a preset, too: the
        # 6000 of rtx-pro-6000 and the 170 of flex-170 tell products apart.
        plain = _CAPACITY.sub("", name)
        product = entry.product or (plain if plain in presets() else name)
        words = re.findall(r"[a-z]+|[0-9]+", product)
        pattern = r"(?<![a-z0-9])" + r"[ -]*".join(words) + _VARIANTS
        if of_laptop != (_LAPTOP.search(product) is not None) or is_cpu_kind(entry.kind):
            continue
        if re.search(pattern, text):
            named.setdefault(product, []).append(name)
    if not named:
        return None
    sizes = named[max(named, key=len)]
    if not size_bytes and (size := re.search(r"([0-9]+) ?gb", text)):
        size_bytes = int(size[1]) << 30
    if not size_bytes:
        return min(sizes, key=len)
    return min(sizes, key=lambda p: abs(parse_bytes(presets()[p].memory_bytes) - size_bytes))


def device_preset(preset: str, name: str | None = None) -> Device:
    """A device with datasheet numbers and the default reserve; raises `ClusterError` when there is
    no such preset."""
    from gdp.cluster.reserve import reserved

    entry = presets().get(preset)
    if entry is None:
        raise ClusterError(f"no device preset {preset!r}; there are {', '.join(device_names())}")
    device = Device(
        name=preset if name is None else name,
        kind=entry.kind,
        flop_per_s=entry.flop_per_s,
        bytes_per_s=entry.bytes_per_s,
        memory_bytes=parse_bytes(entry.memory_bytes),
        dispatch_s=entry.dispatch_s,
        dispatch_per=entry.dispatch_per,
        unified=entry.unified,
        compute_capability=entry.compute_capability,
    )
    return reserved(device)


def cluster_preset(spec: str) -> Cluster:
    """A cluster from `[COUNTx]DEVICE[+[COUNTx]DEVICE...][-LINK]`.

    Links follow from the devices (`gdp.cluster.links.link_kind`) unless LINK says otherwise: pcie3,
    pcie4 or pcie5 of all links, nvlink of those between accelerators. Cores of one CPU share
    memory. Of a device's transfers one leaves at a time, but for meshes. Raises `ClusterError` when
    the spec is malformed.
    """
    head, link = spec, ""
    for word in (*PCIE_BYTES_PER_S, "nvlink"):
        if spec.endswith(f"-{word}"):
            head, link = spec[: -len(word) - 1], word
    parts = [_part(spec, part) for part in head.split("+")]
    if sum(count for count, _ in parts) > MAX_DEVICES:
        raise ClusterError(f"cluster {spec!r}: too many devices, at most {MAX_DEVICES}")
    devices: list[Device] = []
    chosen: list[str] = []
    for count, preset in parts:
        first = sum(p == preset for p in chosen)
        total = first + sum(c for c, p in parts if p == preset)
        base = device_preset(preset)
        stem = "core" if preset == "cpu-core" else preset
        for i in range(first, first + count):
            alone = total == 1 and preset != "cpu-core"
            number = f"{stem}{i}" if preset == "cpu-core" else f"{stem}:{i}"
            devices.append(replace(base, name=stem if alone else number))
            chosen.append(preset)
    if any(d.is_unified for d in devices) and any(d.is_cpu for d in devices):
        alone = next(d.kind for d in devices if d.is_unified)
        raise ClusterError(
            f"cluster {spec!r}: {alone} shares the memory of its own processor; leave the cpu out"
        )
    links = preset_links(devices, chosen, link, f"cluster {spec!r}")
    return make_cluster(spec, devices, links)


def _part(spec: str, part: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:([1-9][0-9]*)x)?([a-z][a-z0-9-]*)", part)
    if match is None or match[2] not in presets():
        raise ClusterError(
            f"no cluster file or preset {spec!r}: write a path, or [COUNTx]DEVICE[+...][-LINK] "
            f"such as 2xcpu-core or cpu+2xt4-pcie4; devices are {', '.join(device_names())}"
        )
    # Text of many digits is too much before it is a number.
    count = int(match[1] or 1) if len(match[1] or "") < 10 else MAX_DEVICES + 1
    return count, match[2]


def preset_links(
    devices: Sequence[Device], names: Sequence[str], suffix: str = "", where: str = "cluster"
) -> list[Link]:
    """The links among devices of named presets; raises `ClusterError` where `suffix` is nvlink and
    an accelerator has none."""
    entries = [presets()[name] for name in names]
    host, links = host_generation(entries), list[Link]()
    kinds = {
        (a.kind, b.kind): link_kind(a, b, host, suffix)
        for a in {x.kind: x for x in entries}.values()
        for b in {x.kind: x for x in entries}.values()
    }
    for a, first in zip(devices, entries, strict=True):
        for b, second in zip(devices, entries, strict=True):
            if a is b:
                continue
            if first.kind == second.kind == CORE_KIND:
                links.append(Link(a.name, b.name, CORE_BYTES_PER_S, CORE_LATENCY_S, one_way=True))
                continue
            kind = kinds[first.kind, second.kind]
            if kind is None:
                raise ClusterError(
                    f"{where}: {a.kind} or {b.kind} has no NVLink; use pcie3 to pcie5"
                )
            channel = f"{a.name} to {b.name}" if kind.mesh else f"{a.name} out"
            links.append(
                Link(a.name, b.name, kind.bytes_per_s, kind.latency_s, channel, one_way=True)
            )
    return links


def kind_of(platform: str, model: str) -> str:
    """Kind of a device that a framework reports: that of the preset whose name is in the device's.

    >>> kind_of("gpu", "NVIDIA A100-SXM4-80GB"), kind_of("cpu", "cpu"), kind_of("gpu", "Unheard of")
    ('a100', 'cpu', 'gpu')
    """
    if platform == "cpu":
        return "cpu"
    preset = preset_of_model(model)
    return platform if preset is None else device_preset(preset).kind
