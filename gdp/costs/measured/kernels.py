"""Kernels of an accelerator as numbers: their class, sizes and work; descriptors of devices.

Every class is a batch of products, or reads as one:

| class | b | m | n | k |
| --- | --- | --- | --- | --- |
| product, batched product | batch | rows | columns | inner size |
| convolution | groups | positions of all images | channels out | taps x channels in |
| prompt, token attention | sequences x heads of keys | queries of each | keys seen | head |
| experts | experts that work | tokens of each | inner width | hidden width |
| normalisation, softmax, elementwise | 1 | rows | row length | tensors read |

The roofline (`floor_s`) is what no kernel is faster than: its arithmetic at the peak of its type,
its traffic at the bandwidth of the memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.presets import presets
from gdp.cluster.types import Device

KINDS = (
    "product", "batched product", "convolution", "prompt attention", "token attention", "experts",
    "normalisation", "softmax", "elementwise",
)  # fmt: skip
ENGINES = ("torch", "vllm", "sglang", "trtllm")
ARITHMETIC = ("float32", "float16", "float8", "float4")
"""Types of arithmetic; bfloat16 counts as float16, int8 as float8."""
ENTERS_BYTES = 4.0, 2.0, 1.0, 0.5
"""Bytes of an element that enters arithmetic of a type."""
NUMBERS = ("not told", "weights alone", "floats", "integers")
"""Numbers that a kernel multiplies whose weights have 8 or 4 bits: unknown; 16 bits, as
activations are never cast; or such floats or integers, to which activations are cast, too."""
TILE = 128
"""Rows and columns of the usual block of a product, which one unit of a device computes."""
_CACHE_BYTES, _CLOCK_HZ = 3.2e7, 1.9e9
_FLOP_PER_CLOCK = 256.0
"""Of a unit in float32, two for each of 128 lanes, as most GPUs since 2016 have."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """K kernels; the meaning of b, m, n, k by class stands above."""

    kind: Int[np.ndarray, "K"]  # index into KINDS
    engine: Int[np.ndarray, "K"]  # index into ENGINES
    arithmetic: Int[np.ndarray, "K"]  # index into ARITHMETIC
    stored_bits: Float[np.ndarray, "K"]  # of an element of the weights, or of the cache
    block_scaled: Float[np.ndarray, "K"]  # 1 where blocks of a weight have scales of their own
    b: Float[np.ndarray, "K"]
    m: Float[np.ndarray, "K"]
    n: Float[np.ndarray, "K"]
    k: Float[np.ndarray, "K"]
    flop: Float[np.ndarray, "K"]
    held_bytes: Float[np.ndarray, "K"]  # weights or cache read
    moved_bytes: Float[np.ndarray, "K"]  # activations read and written
    numbers: Int[np.ndarray, "K"]  # index into NUMBERS

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, which: np.ndarray) -> "Kernels":
        """The kernels at these indices, or where a mask is true."""
        return type(self)(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def distinct(self) -> tuple[Int[np.ndarray, "U"], Int[np.ndarray, "K"]]:
        """(where each kernel that differs from all before it stands, its number for each)."""
        columns = [np.asarray(getattr(self, f.name), dtype=np.float64) for f in fields(self)]
        rows = np.ascontiguousarray(np.column_stack(columns))
        # Rows as bytes: sorting column by column takes longer.
        whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
        _, first, which = np.unique(whole, return_index=True, return_inverse=True)
        return first, which

    @classmethod
    def concatenate(cls, parts: Sequence["Kernels"]) -> "Kernels":
        """All kernels of the parts in a row."""
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )

    @property
    def total_bytes(self) -> Float[np.ndarray, "K"]:
        """All that is read and written."""
        return self.held_bytes + self.moved_bytes


@dataclass(frozen=True)
class DeviceDescriptor:
    """Input features of a device: its peak rates, and the hardware of its preset."""

    flop_per_s: tuple[float, float, float, float]  # by ARITHMETIC; of a type it lacks, what it uses
    bytes_per_s: float
    units: float  # multiprocessors, compute units, cores of a TPU
    cache_bytes: float  # of the last level
    clock_hz: float

    def descriptor(self) -> Float[np.ndarray, "F"]:
        """Its numbers as the network reads them, logs around those of an A100."""
        peaks = np.array(self.flop_per_s)
        return np.log(
            [
                peaks[0] / 2e13, peaks[1] / 3e14, peaks[2] / peaks[1], peaks[3] / peaks[2],
                self.bytes_per_s / 2e12, peaks[1] / self.bytes_per_s / 150, self.units / 108,
                self.cache_bytes / 4e7, self.clock_hz / 1.4e9,
                peaks[1] / self.units / self.clock_hz / 2048,
            ]
        )  # fmt: skip


def descriptor_of(device: Device) -> DeviceDescriptor:
    """Hardware descriptor of a device; fields that no preset of its kind has are estimated from its
    peak rates.

    A type that the device lacks is computed as the next wider one.
    """
    preset = presets().get(device.kind)
    speed = device.flop_per_s
    single = device.speed("float32")
    half = max(speed.get("bfloat16", 0.0), speed.get("float16", 0.0)) or single
    eight = max(speed.get("float8", 0.0), speed.get("int8", 0.0) if half > single else 0.0) or half
    four = speed.get("float4", eight)
    clock = (preset.clock_hz if preset else 0.0) or _CLOCK_HZ
    units = (preset.units if preset else 0.0) or max(1.0, single / clock / _FLOP_PER_CLOCK)
    cache = (preset.cache_bytes if preset else 0.0) or _CACHE_BYTES
    return DeviceDescriptor((single, half, eight, four), device.bytes_per_s, units, cache, clock)


def floor_s(
    kernels: Kernels, flop_per_s: Float[np.ndarray, "K"], bytes_per_s: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "K"]:
    """Roofline seconds (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785)."""
    return np.maximum(kernels.flop / flop_per_s, kernels.total_bytes / bytes_per_s)


def features(
    kernels: Kernels, silicon: Sequence[DeviceDescriptor], device: Int[np.ndarray, "K"]
) -> tuple[Float[np.ndarray, "K F"], Float[np.ndarray, "K"]]:
    """(inputs of the network, log of the roofline seconds) of kernels on their devices.

    Args:
        kernels: The kernels.
        silicon: The devices.
        device: Index of each kernel's device.
    """
    peaks = np.array([s.flop_per_s for s in silicon])[device, kernels.arithmetic]
    rate = np.array([s.bytes_per_s for s in silicon])[device]
    units = np.array([s.units for s in silicon])[device]
    cache = np.array([s.cache_bytes for s in silicon])[device]
    flop_s = np.maximum(kernels.flop / peaks, 1e-12)
    bytes_s = np.maximum(kernels.total_bytes / rate, 1e-12)
    floor = np.maximum(flop_s, bytes_s)
    rows, columns = np.ceil(kernels.m / TILE), np.ceil(kernels.n / TILE)
    # Attention walks over its keys within a block; other classes have blocks of columns.
    walks = np.isin(kernels.kind, [KINDS.index("prompt attention"), KINDS.index("token attention")])
    blocks = kernels.b * rows * np.where(walks, 1.0, columns)
    small = kernels.b * np.ceil(kernels.m / 64) * np.where(walks, 1.0, np.ceil(kernels.n / 64))
    numbers = [
        np.log(floor / 1e-5), np.log(floor + 3e-6) + 11.0, np.clip(np.log(flop_s / bytes_s), -6, 6),
        np.log2(kernels.b) / 4, np.log2(kernels.m) / 6, np.log2(kernels.n) / 6,
        np.log2(kernels.k) / 6, np.log(blocks / units) / 2, _wave(blocks, units),
        np.log(small / units) / 2, _wave(small, units), _fill(kernels.m, 16), _fill(kernels.m, 64),
        _fill(kernels.m, TILE), _fill(kernels.n, TILE), _fill(kernels.n, 256),
        _fill(kernels.k, 64), np.minimum(kernels.m, 128) / 64,
        np.clip(np.log((kernels.held_bytes + 1) / cache), -8, 4) / 2,
        np.clip(np.log((kernels.total_bytes + 1) / cache), -8, 4) / 2,
        np.log2(kernels.stored_bits / 16), kernels.block_scaled,
    ]  # fmt: skip
    shown = np.column_stack([
        *numbers, np.eye(len(KINDS))[kernels.kind], np.eye(len(ENGINES))[kernels.engine],
        np.eye(len(ARITHMETIC))[kernels.arithmetic],
    ])  # fmt: skip
    return shown, np.log(floor)


CLASSES = slice(22, 22 + len(KINDS))
"""Columns of the inputs that are 1 for kernels of a class."""


def _fill(size: np.ndarray, block: int) -> np.ndarray:
    """Mean utilisation of blocks of a size: 1 where it divides."""
    return size / (np.ceil(size / block) * block)


def _wave(blocks: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Mean utilisation of the units while they compute blocks in waves."""
    return blocks / (np.ceil(blocks / units) * units)
