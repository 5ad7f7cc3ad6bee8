"""Clusters by name: `2xcpu-core`, `4xa100-nvlink`, `cpu+2xt4-pcie3`."""

import re
from dataclasses import replace

from gdp.cluster.table import Preset as Preset
from gdp.cluster.table import device_names as device_names
from gdp.cluster.table import presets as presets
from gdp.cluster.types import MAX_DEVICES, Cluster, Device, Link, is_cpu_kind, make_cluster
from gdp.errors import ClusterError
from gdp.units import parse_bytes

# One direction of 16 lanes: 985, 1969 and 3938 MB/s per lane after 128b/130b coding
# (PCI-SIG base specifications 3.0, 4.0 and 5.0).
PCIE_BYTES_PER_S = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63.0e9}
PCIE_LATENCY_S = 10e-6
NVLINK_LATENCY_S = 5e-6
# One direction of one link, of which GPUs bond several (NVLink 2 to 4: NVIDIA V100, A100 and H100
# datasheets, 50 GB/s per link both ways).
NVLINK_BYTES_PER_S = 25e9
# Paths of `nvidia-smi topo -m` that are no NVLink start from PCIe 4 x16; what host bridges and the
# interconnect between sockets take off is an assumption, to be overridden in a TOML file.
PATHS = {
    "PIX": (31.5e9, 8e-6),
    "PXB": (28e9, 9e-6),
    "PHB": (25e9, 10e-6),
    "NODE": (22e9, 11e-6),
    "SYS": (16e9, 13e-6),
}
# Cores of one machine hand over a pointer: what it costs is waking the reader, and that the data
# lie in the other core's cache. Measured between two ONNX Runtime sessions (`gdp profile`).
CORE_BYTES_PER_S = 2e10
CORE_LATENCY_S = 45e-6


def link_family(cluster: Cluster, src: int, dst: int) -> str:
    """Family of a link between two accelerators whose numbers are gdp's own: "nvlink" or "pcie".

    "" for links whose bandwidth or latency somebody else gave, for those of unknown devices and of
    processors. Presets and detection know no more of a link than its datasheet.
    """
    ends = cluster.devices[src], cluster.devices[dst]
    if src == dst or any(device.is_cpu for device in ends):
        return ""
    speed = float(cluster.link_bytes_per_s[src, dst])
    numbers = (speed, float(cluster.link_latency_s[src, dst]))
    if numbers in _PCIE_NUMBERS:
        return "pcie"
    known = [presets().get(device.kind) for device in ends]
    most = min((preset.nvlink_bytes_per_s or 0.0) if preset else 0.0 for preset in known)
    whole = speed in (most, NVLINK_BYTES_PER_S * round(speed / NVLINK_BYTES_PER_S))
    return "nvlink" if whole and speed <= most and numbers[1] == NVLINK_LATENCY_S else ""


_PCIE_NUMBERS = frozenset(
    (*((speed, PCIE_LATENCY_S) for speed in PCIE_BYTES_PER_S.values()), *PATHS.values())
)
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

    LINK is pcie3 (the default), pcie4, pcie5 or nvlink, and joins accelerators; anything that
    involves a CPU goes over PCIe, and cores of one CPU share memory. Over PCIe a device has one
    lane out, which its transfers share. Raises `ClusterError` when the spec is malformed.
    """
    head, link = spec, "pcie3"
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
    links = [
        _link(spec, (devices[i], chosen[i]), (devices[j], chosen[j]), link)
        for i in range(len(devices))
        for j in range(len(devices))
        if i != j
    ]
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


def _link(spec: str, src: tuple[Device, str], dst: tuple[Device, str], link: str) -> Link:
    (a, preset_a), (b, preset_b) = src, dst
    if preset_a == preset_b == "cpu-core":
        return Link(a.name, b.name, CORE_BYTES_PER_S, CORE_LATENCY_S, one_way=True)
    to_cpu = a.is_cpu or b.is_cpu
    if link == "nvlink" and not to_cpu:
        speeds = [presets()[p].nvlink_bytes_per_s for p in (preset_a, preset_b)]
        if None in speeds:
            raise ClusterError(
                f"cluster {spec!r}: {a.kind} or {b.kind} has no NVLink; use pcie3 to pcie5"
            )
        slower = min(s for s in speeds if s is not None)
        return Link(a.name, b.name, slower, NVLINK_LATENCY_S, channel=f"{a.name} out", one_way=True)
    bandwidth = PCIE_BYTES_PER_S["pcie4" if link == "nvlink" else link]
    return Link(a.name, b.name, bandwidth, PCIE_LATENCY_S, channel=f"{a.name} out", one_way=True)
