"""The kernel network that ships with gdp, and what is known of its errors."""

import functools
import os
from pathlib import Path

import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, data_path
from gdp.cluster.table import presets
from gdp.costs.measured.network import KernelNetwork

NAME = "kernels"
"""Folder of the shipped network in `checkpoints/`."""


class MeasuredDevice(msgspec.Struct, frozen=True):
    """A device that was measured."""

    kernels: int  # measured
    error: float | None  # mean absolute relative error on layers unseen; None: all were learned
    arithmetic: tuple[str, ...]  # types of its kernels, of ARITHMETIC


class NetworkMeta(msgspec.Struct, frozen=True):
    """Keys of `meta.json` beside those of every checkpoint."""

    shapes: dict[str, tuple[int, ...]]  # of every array
    devices: dict[str, MeasuredDevice]
    unseen_error: float  # mean, over devices left out whole, of their errors
    source: str  # of the measurements
    date: str


def load_network(path: str | os.PathLike[str]) -> tuple[KernelNetwork, NetworkMeta]:
    """A network and what is known of it; raises `CheckpointError`."""
    kind = Kind("meta.json of a kernel network", checkpoint.CheckpointError)
    meta = convert(checkpoint.read_meta(path), kind, NetworkMeta, str(Path(path) / "meta.json"))
    arrays = checkpoint.load_arrays(path, meta.shapes)
    parts: dict[str, dict[str, np.ndarray]] = {"weights": {}, "vectors": {}}
    for name, array in arrays.items():
        part, _, own = name.partition("/")
        parts[part][own] = array
    return KernelNetwork(parts["weights"], parts["vectors"]), meta


def error_label(meta: NetworkMeta, kind: str, arithmetic: str | None = None) -> str:
    """Measured kernels and expected error of a kind of device, for a model's type of arithmetic."""
    known = meta.devices.get(kind)
    if known is None or (arithmetic is not None and arithmetic not in known.arithmetic):
        own = "" if known is None else f", of it none in {arithmetic}"
        return (
            f"{kind}: learned from kernels of {len(meta.devices) - (known is not None)} other "
            f"accelerators{own}, expect {meta.unseen_error:.0%} off"
        )
    label = f"{kind}: learned from {known.kernels:,} measured kernels"
    return label if known.error is None else f"{label}, {known.error:.0%} off on layers unseen"


@functools.cache
def measured_families() -> frozenset[str]:
    """Families of presets of which the shipped network learned a member; the others are planned
    from their datasheets."""
    found = shipped_network()
    return frozenset(presets()[kind].family for kind in (found[1].devices if found else ()))


@functools.cache
def shipped_network() -> tuple[KernelNetwork, NetworkMeta] | None:
    """The network that travels with gdp; None where it does not."""
    folder = data_path("checkpoints", NAME)
    if not (folder / "meta.json").is_file():
        return None
    return load_network(folder)
