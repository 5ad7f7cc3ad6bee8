"""Costs learned from profiles: seconds of a kernel from its type, sizes, shapes and surroundings.

A roofline with learned rates: seconds are a sum over a kernel's arithmetic, reads, writes and
launch, each at a rate that small networks compute from its type, shapes and surroundings alone. So
a larger batch is never predicted to be faster, and far larger sizes extrapolate as physics has it.
Inference is NumPy; fitting is in `gdp.costs.fit`. Kernel types that were never measured cost what
the roofline says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import Cluster, Device, is_cpu_kind
from gdp.costs.base import can_run
from gdp.costs.features import (
    BYTES_PER_S,
    FLOP_PER_S,
    KERNEL_S,
    KernelFeatures,
    kernel_features,
    transfer_design,
)
from gdp.costs.kernels import FusionTable, kernel_groups
from gdp.costs.profile import DeviceRecord, ProfileError
from gdp.costs.roofline import roofline
from gdp.graph.op_graph import OpGraph

SEGMENTED, SEGMENT_OPS = "jax", 12
"""Runtime whose compiler fuses too freely to time kernels; ops of the segments timed instead."""
CACHE_BYTES = (1 << 18, 1 << 23)
"""Cache sizes; traffic beyond each has a rate of its own."""


@dataclass(frozen=True)
class Ensemble:
    """Networks as arrays. Axes: M members (leading in `layers`), O other inputs, V types."""

    types: tuple[str, ...]  # V
    other_mean: Float[np.ndarray, "O"]
    other_scale: Float[np.ndarray, "O"]
    layers: Mapping[str, np.ndarray]

    @property
    def type_index(self) -> dict[str, int]:
        """Index of each measured op type."""
        return {name: i for i, name in enumerate(self.types)}


def log_terms(size: Float[np.ndarray, "K S"]) -> Float[np.ndarray, "K J"]:
    """Log seconds of each term of the sum at the reference rates; all rise with the sizes.

    Arithmetic, reads, writes, weights, rows, traffic beyond each cache, the root of the roofline, a
    launch.
    """
    base, flop, read, made, weights, rows = size.T
    total = np.exp(read) + np.exp(made) + np.exp(weights)
    beyond = [np.log(np.maximum(total - limit, 1.0)) for limit in CACHE_BYTES]
    per_byte = -np.log(BYTES_PER_S)
    return np.column_stack(
        [
            flop - np.log(FLOP_PER_S), read + per_byte, made + per_byte, weights + per_byte,
            rows + np.log(1e-9), *(b + per_byte for b in beyond),
            0.5 * (base + np.log(KERNEL_S)), np.full(len(base), np.log(KERNEL_S)),
        ]
    )  # fmt: skip


def encode(
    ensemble: Ensemble, features: KernelFeatures
) -> tuple[Float[np.ndarray, "K J"], Float[np.ndarray, "K I"], Int[np.ndarray, "K"]]:
    """(terms, other inputs with types as indicators, index of the lead type or -1 if unseen)."""
    index = ensemble.type_index
    v = len(ensemble.types)
    lead = np.array([index.get(t, -1) for t in features.lead_type], dtype=np.int64)
    hot = np.zeros((len(lead), 2 * v))
    known = np.flatnonzero(lead >= 0)
    hot[known, lead[known]] = 1.0
    for k, types in enumerate(features.member_types):
        for name in types:
            if name in index:
                hot[k, v + index[name]] = 1.0
    # Far outside of what was measured, shapes say nothing reliable; sizes still do.
    other = np.clip((features.other - ensemble.other_mean) / ensemble.other_scale, -4.0, 4.0)
    return log_terms(features.size), np.concatenate([other, hot], axis=1), lead


def forward(
    layers: Mapping[str, np.ndarray],
    terms: Float[np.ndarray, "K J"],
    other: Float[np.ndarray, "K I"],
) -> Float[np.ndarray, "M K"]:
    """Log seconds by every member: log of the sum over terms of exp(term + log rate)."""
    plain = layers["b1"].shape[1] - layers["embed"].shape[2]
    embedded = other @ layers["embed"]
    shown = np.broadcast_to(other[:, :plain], (*embedded.shape[:2], plain))
    hidden = np.concatenate([shown, embedded], axis=2)
    for i in ("1", "2"):
        hidden = _elu(hidden @ layers["b" + i] + layers["c" + i][:, None])
    rates = hidden @ layers["b3"] + layers["c3"][:, None]
    made = terms + rates
    top = made.max(axis=2, keepdims=True)
    return (top + np.log(np.exp(made - top).sum(axis=2, keepdims=True)))[..., 0]


def _elu(z: np.ndarray) -> np.ndarray:
    return np.where(z > 0, z, np.expm1(np.minimum(z, 0.0)))


def predict(ensemble: Ensemble, features: KernelFeatures) -> Float[np.ndarray, "K"]:
    """Log seconds of each kernel; one of an unseen type gets its roofline."""
    terms, other, lead = encode(ensemble, features)
    if len(lead) == 0:
        return np.zeros(0)
    members = forward(ensemble.layers, terms, other)
    # The median: one member that extrapolates wildly must not drag the others along.
    return np.where(lead >= 0, np.median(members, axis=0), features.size[:, 0])


@dataclass(frozen=True)
class Calibration:
    """A learned cost model of one device with one runtime."""

    device: DeviceRecord
    runtime: str
    level: str
    versions: Mapping[str, str]
    date: str
    fusions: FusionTable
    ensemble: Ensemble
    scale: float = 1.0  # of the whole
    transfer: tuple[float, ...] = ()  # coefficients of `calibrate.refit`, on another device
    segment_s: float | None = None  # one more piece of a cut model, beyond its kernels
    mean_error: float | None = None  # of whole models that were held out, a share of their time

    def label(self) -> str:
        """Line of text that names the calibration."""
        runtime = f"{self.runtime} {self.versions.get(self.runtime, '')}".strip()
        return f"calibrated on {self.device.model or self.device.kind} ({runtime}, {self.date})"

    def matches(self, device: Device) -> bool:
        """True for a device of this kind, and of this model where both say which.

        An accelerator of the same name matches under any kind; a processor does not, as only the
        kind tells one core from all of them.
        """
        if device.kind != self.device.kind:
            cpu = device.is_cpu or is_cpu_kind(self.device.kind)
            return bool(device.model) and device.model == self.device.model and not cpu
        return same_vectors(device.model, self.device.model)


def same_vectors(one: str, other: str) -> bool:
    """True where two processors, by name, have the same vector extension or one is unknown."""
    return not one or not other or _vector(one) == _vector(other)


def _vector(model: str) -> str:
    """The vector extension in a processor's name, by which runtimes choose kernels."""
    words = model.lower().split()
    return next((w for w in reversed(words) if w.startswith(("avx", "sve", "neon"))), "")


@dataclass(frozen=True)
class LearnedCosts:
    """A cost model: calibrated where a device matches, the roofline elsewhere.

    Call it with the graph as imported, not with a fused one: it knows what the runtime fuses, and
    gives all of a kernel's seconds to its costliest op. With `apart`, ops of different ids are
    compiled separately: nothing fuses across the cut, and tensors cross it in their plain layout.
    """

    calibrations: tuple[Calibration, ...]
    any_model: bool = False  # a device of the kind matches, whatever its processor is called
    reads_unfused: bool = True

    def __call__(
        self, graph: OpGraph, cluster: Cluster, apart: Int[np.ndarray, "N"] | None = None
    ) -> Float[np.ndarray, "N D"]:
        seconds = roofline(graph, cluster)
        for calibration in self.calibrations:
            chosen = [d for d, x in enumerate(cluster.devices) if self.of(x) is calibration]
            if chosen:
                seconds[:, chosen] = op_seconds(calibration, graph, apart)[:, None]
        seconds[graph.is_io] = 0.0
        return np.where(can_run(graph, cluster), seconds, np.inf)

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster with measured dispatch times on devices that pay for segments."""
        devices = []
        for device in cluster.devices:
            calibration = self.of(device)
            measured_s = None if calibration is None else calibration.segment_s
            if measured_s is not None and device.dispatch_per == "segment":
                device = replace(device, dispatch_s=measured_s)
            devices.append(device)
        return replace(cluster, devices=tuple(devices))

    def of(self, device: Device) -> Calibration | None:
        """The first calibration that matches a device."""
        for calibration in self.calibrations:
            same_kind = calibration.device.kind == device.kind
            if calibration.matches(device) or (self.any_model and same_kind):
                return calibration
        return None


def kernel_seconds(calibration: Calibration, features: KernelFeatures) -> Float[np.ndarray, "K"]:
    """Seconds of every kernel."""
    # Weights that are numbers can still make times that are none.
    with np.errstate(over="ignore", invalid="ignore"):
        seconds = np.exp(predict(calibration.ensemble, features)) * calibration.scale
        if calibration.transfer:
            design = transfer_design(features, seconds)
            seconds = seconds * np.exp(design @ np.array(calibration.transfer))
    if not np.isfinite(seconds).all():
        raise ProfileError(f"costs {calibration.label()}: a time overflows; calibrate again")
    return seconds


def kernels_of(
    calibration: Calibration, graph: OpGraph, apart: Int[np.ndarray, "N"] | None = None
) -> Int[np.ndarray, "N"]:
    """Kernel id of every op: as the runtime fuses, or runs of ops as the profile was cut."""
    if calibration.runtime != SEGMENTED:
        return kernel_groups(graph, calibration.fusions, apart)
    ids = np.full(graph.num_ops, -1, dtype=np.int64)
    working = np.flatnonzero(~graph.is_io)
    ids[working] = np.arange(len(working)) // SEGMENT_OPS
    return ids


def op_seconds(
    calibration: Calibration, graph: OpGraph, apart: Int[np.ndarray, "N"] | None = None
) -> Float[np.ndarray, "N"]:
    """Seconds of every op: all of a kernel's at its costliest op; those of a segment by work."""
    kernel = kernels_of(calibration, graph, apart)
    features = kernel_features(graph, kernel, apart)
    seconds, total = kernel_seconds(calibration, features), np.zeros(graph.num_ops)
    if calibration.runtime != SEGMENTED:
        total[features.lead] = seconds
        return total
    inside = np.flatnonzero(kernel >= 0)
    work = graph.flop[inside] / FLOP_PER_S + graph.memory_traffic_bytes[inside] / BYTES_PER_S
    work = work + 1e-12
    share = work / np.bincount(kernel[inside], work)[kernel[inside]]
    total[inside] = seconds[kernel[inside]] * share
    return total
