"""Costs learned from profiles, of single kernels (`KernelNetworks`) or of whole functions that a
compiler fuses too freely to time kernels (`gdp.costs.work_rates`).

Both are a roofline with learned rates. Seconds of a kernel are a sum over its arithmetic, reads,
writes and launch, each at a rate that small networks compute from its type, shapes and surroundings
alone. So a larger batch is never predicted to be faster, and far larger sizes extrapolate as
physics has it. Inference is NumPy; fitting is in `gdp.costs.fit`. Kernel types that were never
measured cost what the roofline says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import Cluster, Device, is_cpu_kind
from gdp.costs.base import can_run, roofline
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
from gdp.costs.work_rates import WorkRates
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph

PROCESSOR = "xla-cpu"
"""XLA's CPU devices are one processor, whatever their number: two that compute at once take twice
as long as one. They are marked so (`Device.processor`), and the simulator adds them up."""
CACHE_BYTES = (1 << 18, 1 << 23)
"""Cache sizes; traffic beyond each has a rate of its own."""

OF_ARITHMETIC_AND_TRAFFIC = np.array(
    [(1, 0), (0, 1), (0, 1), (0, 1), (1, 0), (0, 1), (0, 1), (0.25, 0.25), (0, 0)]
)
"""Share of arithmetic and of traffic in each of the terms of `log_terms`: the root of the roofline
is half of it in the log, of both arithmetic and traffic."""


@dataclass(frozen=True)
class Ensemble:
    """Networks as arrays. Axes: M members (leading in `layers`), O other inputs, V types."""

    types: tuple[str, ...]  # V
    other_mean: Float[np.ndarray, "O"]
    other_scale: Float[np.ndarray, "O"]
    layers: Mapping[str, np.ndarray]


def log_terms(size: Float[np.ndarray, "K S"]) -> Float[np.ndarray, "K J"]:
    """Log seconds of each term of the sum at the reference rates; all rise with the sizes.

    Arithmetic, reads, writes, weights, rows, traffic beyond each cache, the root of the roofline, a
    launch.
    """
    base, flop, read, written, weights, rows = size.T
    total = np.exp(read) + np.exp(written) + np.exp(weights)
    beyond = [np.log(np.maximum(total - limit, 1.0)) for limit in CACHE_BYTES]
    per_byte = -np.log(BYTES_PER_S)
    return np.column_stack(
        [
            flop - np.log(FLOP_PER_S), read + per_byte, written + per_byte, weights + per_byte,
            rows + np.log(1e-9), *(b + per_byte for b in beyond),
            0.5 * (base + np.log(KERNEL_S)), np.full(len(base), np.log(KERNEL_S)),
        ]
    )  # fmt: skip


def encode(
    ensemble: Ensemble, features: KernelFeatures
) -> tuple[Float[np.ndarray, "K J"], Float[np.ndarray, "K I"], Int[np.ndarray, "K"]]:
    """(terms, other inputs with types as indicators, index of the lead type or -1 if unseen)."""
    index = {name: i for i, name in enumerate(ensemble.types)}
    v = len(ensemble.types)
    lead = np.array([index.get(t, -1) for t in features.lead_type], dtype=np.int64)
    hot = np.zeros((len(lead), 2 * v))
    known = np.flatnonzero(lead >= 0)
    hot[known, lead[known]] = 1.0
    for k, types in enumerate(features.member_types):
        for name in types:
            if name in index:
                hot[k, v + index[name]] = 1.0
    # Far outside of the measured range, shapes say nothing reliable; sizes still do.
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
        hidden = hidden @ layers["b" + i] + layers["c" + i][:, None]
        hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0.0)))  # ELU
    rates = hidden @ layers["b3"] + layers["c3"][:, None]
    logs = terms + rates
    top = logs.max(axis=2, keepdims=True)
    return (top + np.log(np.exp(logs - top).sum(axis=2, keepdims=True)))[..., 0]


def predict(
    ensemble: Ensemble, features: KernelFeatures, arithmetic: float = 1.0, traffic: float = 1.0
) -> Float[np.ndarray, "K"]:
    """Log seconds of each kernel; one of an unseen type gets its roofline.

    `arithmetic` and `traffic` are a device's FLOP/s and bandwidth over those of the measured one.
    """
    terms, other, lead = encode(ensemble, features)
    if len(lead) == 0:
        return np.zeros(0)
    speeds = np.log([arithmetic, traffic])
    members = forward(ensemble.layers, terms - OF_ARITHMETIC_AND_TRAFFIC @ speeds, other)
    # The median: one member that extrapolates wildly must not drag the others along.
    roof = features.size[:, 0] - np.log(min(arithmetic, traffic))
    return np.where(lead >= 0, np.median(members, axis=0), roof)


@dataclass(frozen=True)
class KernelNetworks:
    """Seconds of the kernels that a runtime makes of a graph, by its fusions and an ensemble."""

    fusions: FusionTable
    ensemble: Ensemble
    scale: float = 1.0  # of the whole
    arithmetic: float = 1.0  # FLOP/s of the device over those of the measured one
    traffic: float = 1.0  # the same of bytes per second
    transfer: tuple[float, ...] = ()  # coefficients of `calibrate.refit`, on another device

    def covers(self, graph: OpGraph) -> bool:
        """False where no op type of a graph was measured: it comes from another framework."""
        types = {t for t, _ in graph.kinds[0]} - {INPUT, OUTPUT}
        return not types or not types.isdisjoint(self.ensemble.types)

    def groups(self, graph: OpGraph) -> Int[np.ndarray, "N"]:
        """Kernel id of every op, as the runtime fuses."""
        return kernel_groups(graph, self.fusions)

    def seconds(self, features: KernelFeatures) -> Float[np.ndarray, "K"]:
        """Seconds of every kernel."""
        # Weights that are numbers can still make times that are none.
        with np.errstate(over="ignore", invalid="ignore"):
            logs = predict(self.ensemble, features, self.arithmetic, self.traffic)
            seconds = np.exp(logs) * self.scale
            if self.transfer:
                design = transfer_design(features, seconds)
                seconds = seconds * np.exp(design @ np.array(self.transfer))
        if not np.isfinite(seconds).all():
            raise ProfileError("a time of the learned costs overflows; calibrate again")
        return seconds

    def op_seconds(self, graph: OpGraph) -> Float[np.ndarray, "N"]:
        """Seconds of every op: all of a kernel's at its costliest op."""
        features = kernel_features(graph, self.groups(graph))
        total = np.zeros(graph.num_ops)
        total[features.lead] = self.seconds(features)
        return total


@dataclass(frozen=True)
class Calibration:
    """A learned cost model of one device with one runtime."""

    device: DeviceRecord
    runtime: str
    level: str
    versions: Mapping[str, str]
    date: str
    predictor: KernelNetworks | WorkRates
    segment_s: float | None = None  # one more piece of a cut model, beyond its kernels
    handover_s: float | None = None  # a copy between two devices of one processor
    handover_bytes_per_s: float | None = None
    mean_error: float | None = None  # of whole models that were held out, a share of their time
    # Of `gdp.costs.default`: the processor that was measured, and FLOP/s and bytes per second of
    # the one that the costs are scaled to.
    measured_on: str = ""
    speeds: tuple[float, float] | None = None

    @property
    def of_processor(self) -> bool:
        """True for rates of a whole processor, all of whose devices are one."""
        return isinstance(self.predictor, WorkRates) and is_cpu_kind(self.device.kind)

    @property
    def networks(self) -> KernelNetworks:
        """The learned kernels; raises `ProfileError` where it has rates of whole functions."""
        if isinstance(self.predictor, WorkRates):
            raise ProfileError(
                f"costs of {self.runtime} are rates of whole functions, which are fitted anew: "
                "calibrate without --base"
            )
        return self.predictor

    def label(self) -> str:
        """Line of text that names the calibration."""
        runtime = f"{self.runtime} {self.versions.get(self.runtime, '')}".strip()
        if self.speeds is not None:
            return (
                f"scaled by FLOP/s and bandwidth from {self.measured_on} ({runtime}, {self.date})"
            )
        return f"calibrated on {self.device.model or self.device.kind} ({runtime}, {self.date})"

    def matches(self, device: Device, *, any_model: bool = False) -> bool:
        """True for a device of this kind, and of this model where both say which.

        An accelerator of the same name matches under any kind; a processor does not, as only the
        kind tells one core from all of them. Rates of a processor match all of its devices.
        """
        if self.of_processor:
            return device.is_cpu
        if self.speeds not in (None, (device.speed("float32"), device.bytes_per_s)):
            return False
        if device.kind != self.device.kind:
            cpu = device.is_cpu or is_cpu_kind(self.device.kind)
            return bool(device.model) and device.model == self.device.model and not cpu
        return any_model or same_vectors(device.model, self.device.model)


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
    gives all of a kernel's seconds to its costliest op.
    """

    calibrations: tuple[Calibration, ...]
    any_model: bool = False  # a device of the kind matches, whatever its processor is called
    reads_unfused: bool = True

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        seconds = roofline(graph, cluster)
        for calibration in self.calibrations:
            chosen = [d for d, x in enumerate(cluster.devices) if self.of(x) is calibration]
            if chosen:
                seconds[:, chosen] = calibration.predictor.op_seconds(graph)[:, None]
        seconds[graph.is_io] = 0.0
        return np.where(can_run(graph, cluster), seconds, np.inf)

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster with measured dispatch times on devices that pay for segments, and copies
        between the devices of a processor that was measured as a whole."""
        devices = list(cluster.devices)
        latency_s, rate = cluster.link_latency_s.copy(), cluster.link_bytes_per_s.copy()
        for d, device in enumerate(cluster.devices):
            calibration = self.of(device)
            if calibration is None:
                continue
            if calibration.of_processor:
                device = replace(device, dispatch_per="segment", processor=PROCESSOR)
                same = [e for e, x in enumerate(cluster.devices) if e != d and x.is_cpu]
                if calibration.handover_s is not None:
                    latency_s[d, same] = calibration.handover_s
                if calibration.handover_bytes_per_s is not None:
                    rate[d, same] = calibration.handover_bytes_per_s
            if calibration.speeds is not None:
                # Its kernels have their launches, as those that were measured.
                device = replace(device, dispatch_per="segment")
            if calibration.segment_s is not None and device.dispatch_per == "segment":
                device = replace(device, dispatch_s=calibration.segment_s)
            devices[d] = device
        return replace(
            cluster, devices=tuple(devices), link_latency_s=latency_s, link_bytes_per_s=rate
        )

    def of(self, device: Device) -> Calibration | None:
        """The first calibration that matches a device."""
        matching = (c for c in self.calibrations if c.matches(device, any_model=self.any_model))
        return next(matching, None)
