"""Links that follow from the devices: the connector of a card, the NVLink of a board, the network
between machines; and the line of an answer that names the links it was planned on."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gdp.cluster.table import Preset, presets
from gdp.cluster.types import Cluster, Device

# One direction of 16 lanes: 985, 1969 and 3938 MB/s per lane after 128b/130b coding
# (PCI-SIG base specifications 3.0, 4.0 and 5.0).
PCIE_BYTES_PER_S = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63.0e9}
# Of one lane: 250 and 500 MB/s (PCI-SIG base specifications 1.0 and 2.0), a sixteenth of those; the
# sixth generation doubles again, less what its flits carry.
_LANE_BYTES_PER_S = {
    1: 0.25e9, 2: 0.5e9, 6: 7.563e9,
    **{g: PCIE_BYTES_PER_S[f"pcie{g}"] / 16 for g in (3, 4, 5)},
}  # fmt: skip
PCIE_LATENCY_S = 10e-6
NVLINK_LATENCY_S = 5e-6
NETWORK_LATENCY_S = 50e-6
"""Of a send between machines, assumed: RDMA takes a few microseconds, TCP a hundred."""
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
FABRICS = {"nvidia": "NVLink", "amd": "Infinity Fabric", "intel": "RoCE", "google": "ICI"}
"""Links between accelerators by their maker, all of which "-nvlink" means."""


def pcie_bytes_per_s(generation: int, lanes: int = 16) -> float:
    """Raw bandwidth of a PCIe link, one direction; generations from 1 to 6."""
    return _LANE_BYTES_PER_S[min(max(generation, 1), 6)] * lanes


class LinkKind(NamedTuple):
    """A kind of link, one direction."""

    name: str
    bytes_per_s: float
    latency_s: float
    mesh: bool = False  # each pair has its own, so that transfers to different devices overlap


def link_kind(a: Preset, b: Preset, host_pcie: int = 0, suffix: str = "") -> LinkKind | None:
    """The link between two devices of presets.

    Cards reach the processor, and each other, by the connector of the narrower one at the lower
    generation of card and host. Two accelerators of one kind whose NVLink is on their board have
    that. A suffix `pcie3` to `pcie5` sets the generation alone, `nvlink` takes bridges, too.

    Args:
        a: One end.
        b: The other.
        host_pcie: Generation of the processor's slots; 0: not known.
        suffix: `pcie3`, `pcie4`, `pcie5`, `nvlink` or "".

    Returns:
        The link; None where `nvlink` is wanted of accelerators without one.
    """
    if a.maker and b.maker and suffix in ("", "nvlink"):
        own = [x.nvlink_bytes_per_s for x in (a, b) if x.nvlink_bytes_per_s]
        if suffix and len(own) < 2:
            return None
        if suffix or (a.kind == b.kind and own and not a.bridged):
            return LinkKind(FABRICS[a.maker], min(own), NVLINK_LATENCY_S, a.mesh)
    cards = [x for x in (a, b) if x.maker] or [a, b]
    ways = [_way_out(x, host_pcie, suffix) for x in cards]
    return min(ways, key=lambda way: way.bytes_per_s)


def _way_out(card: Preset, host_pcie: int, suffix: str) -> LinkKind:
    """Link from a device to its host, or to the next machine where it has its own processor."""
    if not suffix.startswith("pcie"):
        if card.host_bytes_per_s:
            return LinkKind("NVLink-C2C", card.host_bytes_per_s, NVLINK_LATENCY_S)
        if card.network_bytes_per_s:
            return LinkKind("network", card.network_bytes_per_s, NETWORK_LATENCY_S)
    known = [g for g in (card.pcie, host_pcie) if g]
    generation = int(suffix[4]) if suffix.startswith("pcie") else min(known, default=3)
    return _pcie(generation, card.lanes)


def _pcie(generation: int, lanes: int) -> LinkKind:
    name = f"PCIe {generation}.0 x{lanes}"
    return LinkKind(name, pcie_bytes_per_s(generation, lanes), PCIE_LATENCY_S)


def host_generation(entries: Sequence[Preset]) -> int:
    """PCIe generation of the slots of a cluster's processors, the lowest known; 0: none is."""
    return min((x.pcie for x in entries if not x.maker and x.pcie), default=0)


_PCIE_NUMBERS: Mapping[tuple[float, float], LinkKind] = {
    (kind.bytes_per_s, kind.latency_s): kind
    for kind in (
        _pcie(generation, lanes) for lanes in (1, 2, 4, 8, 16) for generation in range(3, 7)
    )
}
_PATH_NUMBERS = frozenset(PATHS.values())
_ASSUMED_LATENCIES_S = frozenset(
    {PCIE_LATENCY_S, NVLINK_LATENCY_S, *(latency_s for _, latency_s in PATHS.values())}
)


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
    if numbers in _PCIE_NUMBERS or numbers in _PATH_NUMBERS:
        return "pcie"
    known = [presets().get(device.kind) for device in ends]
    most = min((preset.nvlink_bytes_per_s or 0.0) if preset else 0.0 for preset in known)
    whole = speed in (most, NVLINK_BYTES_PER_S * round(speed / NVLINK_BYTES_PER_S))
    return "nvlink" if whole and speed <= most and numbers[1] == NVLINK_LATENCY_S else ""


def has_own_latency(cluster: Cluster, src: int, dst: int) -> bool:
    """True for a latency that somebody gave or measured; presets, detection and the defaults of
    files have gdp's own numbers."""
    return float(cluster.link_latency_s[src, dst]) not in _ASSUMED_LATENCIES_S


def concurrent_rings(cluster: Cluster, devices: Sequence[int]) -> int:
    """Rings that a collective runs concurrently: in a mesh, where each pair has its own link, one
    for each other device; else one."""
    known = [presets().get(cluster.devices[d].kind) for d in devices]
    pairs = [(i, j) for i in devices for j in devices if i != j]
    meshed = all(preset is not None and preset.mesh for preset in known)
    if meshed and all(link_family(cluster, i, j) == "nvlink" for i, j in pairs):
        return max(1, len(devices) - 1)
    return 1


def _kind_of(cluster: Cluster, src: int, dst: int, host: int) -> tuple[LinkKind, bool]:
    """The link between two devices identified by its numbers, and True if these follow from the
    presets of its ends and the host's PCIe generation."""
    numbers = (float(cluster.link_bytes_per_s[src, dst]), float(cluster.link_latency_s[src, dst]))
    a, b = (presets().get(cluster.devices[d].kind) for d in (src, dst))
    if a is not None and b is not None:
        for suffix in ("", "nvlink", *PCIE_BYTES_PER_S):
            kind = link_kind(a, b, host, suffix)
            if kind is not None and kind[1:3] == numbers:
                return kind, not suffix
    if numbers in _PCIE_NUMBERS:
        return _PCIE_NUMBERS[numbers], False
    name = "NVLink" if link_family(cluster, src, dst) == "nvlink" else ""
    return LinkKind(name, *numbers), False


def links_line(cluster: Cluster) -> str:
    """The links of a cluster's accelerators by kind, such as "PCIe 4.0 x16 (31.5 GB/s) between cpu
    and rtx3090, rtx3060 (from the cards' datasheets)"; "" for a cluster without any.

    Links among accelerators are named where they are of other kinds than those to processors.
    """
    gpus = np.flatnonzero(~cluster.is_cpu & ~cluster.streams).tolist()  # links of others are theirs
    cpus = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    known = [presets()[d.kind] for d in cluster.devices if d.kind in presets()]
    host, kinds = host_generation(known), dict[object, tuple[LinkKind, bool]]()
    groups: dict[tuple[str, str], dict[str, Device]] = {}
    from_presets = True

    def add(src: int, dst: int, hub: str, members: Sequence[int]) -> None:
        nonlocal from_presets
        ends = (cluster.devices[src].kind, cluster.devices[dst].kind)
        key = (ends, cluster.link_bytes_per_s[src, dst], cluster.link_latency_s[src, dst])
        if key not in kinds:
            kinds[key] = _kind_of(cluster, src, dst, host)
        kind, follows = kinds[key]
        rate = f"{kind.bytes_per_s / 1e9:.4g} GB/s"
        text = f"{kind.name} ({rate})" if kind.name else rate
        if hub or not any(text == other for other, of in groups if of):
            from_presets &= follows
            named = {cluster.device_names[d]: cluster.devices[d] for d in members}
            groups.setdefault((text, hub), {}).update(named)

    for d in gpus if cpus else ():
        hub = max(cpus, key=lambda cpu: float(cluster.link_bytes_per_s[cpu, d]))
        add(hub, d, cluster.device_names[hub], [d])
    for i, j in itertools.combinations(gpus, 2):
        add(i, j, "", [i, j])
    lines = [
        f"{text} between {f'{hub} and ' if hub else ''}{_names(list(members.values()))}"
        for (text, hub), members in groups.items()
    ]
    return "; ".join(lines) + (" (from the cards' datasheets)" if lines and from_presets else "")


def _names(devices: Sequence[Device]) -> str:
    """Names of devices, of more than three of a kind their number."""
    kinds = [device.kind for device in devices]
    named = [
        f"{kinds.count(d.kind)} {d.kind}" if kinds.count(d.kind) > 3 else d.name for d in devices
    ]
    return ", ".join(dict.fromkeys(named))
