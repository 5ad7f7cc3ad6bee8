"""The table of device presets, and what it tells of a device's kind."""

import functools

import msgspec

from gdp.base.errors import ClusterError
from gdp.base.files.reading import Kind, data_path, read_toml
from gdp.cluster.types import Device

BFLOAT16_CAPABILITY = 8.0
"""NVIDIA's first compute capability with arithmetic in bfloat16 (CUDA C++ Programming Guide, table
of arithmetic throughput)."""


class Preset(msgspec.Struct, forbid_unknown_fields=True):
    """A device of `data/clusters/devices.toml`, which explains the fields."""

    kind: str
    memory: str
    memory_bytes: str
    flop_per_s: dict[str, float]
    bytes_per_s: float
    dispatch_s: float
    source: str
    dispatch_per: str = "op"
    maker: str = ""  # "nvidia", "amd", "intel", "apple" or "google"; "" for processors
    family: str = ""  # architecture whose kernels are alike, such as "Ampere" or "RDNA"
    compute_capability: float = 0.0  # of NVIDIA's GPUs
    pcie: int = 0  # generation of its slot, of a processor that of its slots; 0: none or not known
    lanes: int = 16
    host_bytes_per_s: float = 0.0  # link to the processor where that is not PCIe
    nvlink_bytes_per_s: float | None = None  # NVLink, Infinity Fabric, RoCE or ICI, one direction
    bridged: bool = False  # that link is a bridge, bought separately
    mesh: bool = False  # each pair has its own link of that rate, without a switch
    network_bytes_per_s: float = 0.0  # between machines of a device with its own processor
    unified: bool | None = None
    units: float = 0.0  # multiprocessors or compute units; 0 where it is not known
    clock_hz: float = 0.0
    cache_bytes: float = 0.0  # of the last level
    watts: float = 0.0  # power limit of the board or chip (TDP); 0 where it is not known
    idle_watts: float = 0.0
    power_source: str = ""  # of both, where `source` does not state them
    product: str = ""  # in the name that drivers give it, where that is not the preset's


@functools.cache
def presets() -> dict[str, Preset]:
    """Every device preset by its name."""
    path = data_path("clusters", "devices.toml")
    raw = read_toml(path, Kind("file of device presets", ClusterError), dict)
    return msgspec.convert(raw, dict[str, Preset])


def device_names() -> list[str]:
    """The device presets that exist."""
    return sorted(presets())


def compute_capability(device: Device) -> float:
    """NVIDIA compute capability, such as 8.6, of the device itself or of its kind's preset; 0.0 for
    other makers and if unknown."""
    preset = presets().get(device.kind)
    return device.compute_capability or (preset.compute_capability if preset else 0.0)


def has_bfloat16(device: Device) -> bool:
    """True if the device computes bfloat16 itself: NVIDIA's GPUs by their compute capability, as
    older ones emulate it; others by their rates, of which float16 stands without it where they do
    not."""
    if capability := compute_capability(device):
        return capability >= BFLOAT16_CAPABILITY
    rates = device.flop_per_s
    return "bfloat16" in rates or "float16" not in rates
