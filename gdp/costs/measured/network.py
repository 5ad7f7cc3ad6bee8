"""The kernel network: seconds of a kernel as its roofline times a learned factor of at least one.

    seconds = roofline * (1 + exp(network(kernel, device)))

Three layers read the kernel. What is known of the device scales each of their units: gates of GDP's
superposition (Zhou et al. 2020, section 3.3), which there condition a shared policy on the graph.
They see the device's descriptor. What it does not say is a short vector, the weights of as many
learned modes, functions of the kernel: fitted in training for a device that was measured, zero for
one of which only the descriptor is known. Inference is NumPy; training is `pretrain.costs`.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, data_path
from gdp.cluster.table import presets
from gdp.costs.measured.kernels import CLASSES, DeviceDescriptor, Kernels, features

NAME = "kernels"
"""Folder of the shipped network in `checkpoints/`."""
VECTOR = 8
"""Length of the vector of a device."""
LAYERS = ("1", "2", "3")
_AT_ONCE = 8192  # kernels
_MOST_EXACT = 20_000  # kernels up to which each is asked about
_STEP = 1 / 32  # standard deviations of an input, which are one where kernels are more


class Inputs(NamedTuple):
    """Kernels as the network reads them. Axes: K kernels, D devices, F and G inputs, V modes."""

    shown: Float[np.ndarray, "K F"]
    floor: Float[np.ndarray, "K"]  # log seconds of the roofline
    device: Int[np.ndarray, "K"]  # of the D
    told: Float[np.ndarray, "D G"]  # descriptors
    vectors: Float[np.ndarray, "D V"]  # or in whole (`factors`)

    def some(self, kernels: slice | Int[np.ndarray, "U"]) -> "Inputs":
        """The inputs of a part of the kernels."""
        return self._replace(
            shown=self.shown[kernels], floor=self.floor[kernels], device=self.device[kernels]
        )


@dataclass(frozen=True, eq=False)
class KernelNetwork:
    """Weights, and the vectors of the devices that were measured."""

    weights: Mapping[str, np.ndarray]
    vectors: Mapping[str, Float[np.ndarray, "V"]]  # by kind of device

    def log_seconds(
        self,
        kernels: Kernels,
        silicon: Sequence[DeviceDescriptor],
        vectors: Float[np.ndarray, "D V"],
        device: Int[np.ndarray, "K"],
    ) -> Float[np.ndarray, "K"]:
        """Log seconds of kernels, each on one of the devices."""
        shown, floor = features(kernels, silicon, device)
        told = np.array([s.descriptor() for s in silicon])
        inputs = Inputs(shown, floor, device, told, vectors)
        if len(device) <= _MOST_EXACT:
            return self._in_parts(inputs)
        first, which = _alike(shown / self.weights["shown_scale"], device)
        logs = self._in_parts(inputs.some(first))
        return floor + (logs - floor[first])[which]

    def _in_parts(self, inputs: Inputs) -> Float[np.ndarray, "K"]:
        """`forward` of so many kernels at once that their hidden units stay in a cache."""
        logs = np.empty(len(inputs.device))
        for first in range(0, len(logs), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            logs[part] = forward(self.weights, inputs.some(part))
        return logs


def _alike(
    scaled: Float[np.ndarray, "K F"], device: Int[np.ndarray, "K"]
) -> tuple[Int[np.ndarray, "U"], Int[np.ndarray, "K"]]:
    """(kernels, one for all whose inputs round to the same steps; its number for each kernel).

    The factor above the roofline is smooth in the inputs, so that kernels of a step differ by their
    rooflines. Rows are told apart by a sum of products with random numbers modulo 2^64.
    """
    steps = np.round(scaled / _STEP).astype(np.int64)
    steps = np.column_stack([steps, device])
    factors = np.random.default_rng(0).integers(1 << 62, size=steps.shape[1])
    return np.unique((steps * factors).sum(axis=1), return_index=True, return_inverse=True)[1:]


def forward(weights: Mapping[str, np.ndarray], inputs: Inputs) -> Float[np.ndarray, "K"]:
    """Log seconds of kernels."""
    whole = inputs.vectors.shape[1] > VECTOR
    above, slopes = factors(weights, inputs, whole)
    own = (slopes * inputs.vectors[inputs.device]).sum(axis=1)
    return inputs.floor + np.logaddexp(0.0, above + own)


def factors(
    weights: Mapping[str, np.ndarray], inputs: Inputs, whole: bool
) -> tuple[Float[np.ndarray, "K"], Float[np.ndarray, "K W"]]:
    """(log of the factor above the roofline, less one, without a vector; its slopes by the entries
    of a vector): the `VECTOR` modes, in whole also the classes and the units of the last layer."""
    shown, _, device, told, _ = inputs
    told = (told - weights["told_mean"]) / weights["told_scale"]
    hidden = (shown - weights["shown_mean"]) / weights["shown_scale"]
    for i in LAYERS:
        gate = 1.0 + np.tanh(told @ weights["gate" + i] + weights["open" + i])
        hidden = _silu(hidden @ weights["kernel" + i] + weights["bias" + i])
        hidden *= gate[device]
    above = hidden @ weights["kernel4"] + (told @ weights["gate4"])[device] + weights["bias4"]
    modes = hidden @ weights["modes"]
    slopes = np.column_stack([modes, shown[:, CLASSES], hidden]) if whole else modes
    return above[:, 0], slopes


def _silu(x: np.ndarray) -> np.ndarray:
    below = np.exp(-x)
    below += 1.0
    return np.divide(x, below, out=below)


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
