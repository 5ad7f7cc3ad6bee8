"""Costs adapted to a machine: multipliers of predicted seconds, learned from measured pieces.

A piece of a cut model, or all that crosses a link, takes

    measured = sum_k predicted_k * exp(theta . phi_k) * noise,   theta ~ N(0, diag(sigma^2)),

where k runs over its ops (and its dispatch) and phi_k says which effects an op has: of the device
and its kind, of its type, of its type on that kind, of its size, and of its own kernel. The maximum
a posteriori is found by Gauss-Newton steps on log seconds; what a step solves is a Gaussian process
over pieces whose kernel says how much two of them share (Rasmussen and Williams 2006, chapters 2
and 5). Noise and the spread of single kernels are chosen by marginal likelihood. Noise has a heavy
tail, too: a process that was preempted, a machine that was paused. What contradicts all other
observations is left out (`_outliers`).
AutoTVM (Chen et al. 2018) and Ansor (Zheng et al. 2020) learn the seconds of kernels
from measurements in the same loop; a prior mean from a cost model as in Kennedy and O'Hagan 2001.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import Cluster, Device
from gdp.costs.base import (
    DerivedCosts,
    MeasuredSeconds,
    Seconds,
    launch_floors_s,
)
from gdp.graph.op_graph import OpGraph

SIGMA = {
    "kind": 0.5, "device": 0.5, "type": 0.3, "type on kind": 0.15, "size": 0.15, "kernel": 0.1,
    "dispatch": 1.0, "links": 1.0, "link": 0.4, "together": 0.3,
}  # fmt: skip
"""Prior standard deviation of each kind of effect, of the natural log of seconds."""
ALIKE = 0.05
"""Devices of one kind whose learned multipliers are this near in the log are planned as equal:
replicas and searches use that they are, and repeated runs differ by as much."""
FINE = ("size", "kernel")
"""Effects whose spread is chosen by marginal likelihood."""
NOISES = tuple(0.01 * 1.5**k for k in range(10))
SPREADS = (0.3, 1.0, 3.0)
FEW_FLOP = 8.0
"""FLOP for each byte read, below which a product is one of a matrix and few vectors."""
LEAST_S = 2e-6
"""Error of a clock in any measurement, and the least dispatch that is scaled."""
STEPS = 8
TYPICAL_NOISE, TYPICAL_SPREAD = NOISES[5], SPREADS[1]
"""Noise and spread at the start of their choice, and of the search for outliers, which would raise
the likeliest noise."""
OUTLYING = 5.0
"""Deviations from the prediction by all others beyond which an observation is left out."""
LEAST_DEVIATION = 0.1
"""Of the log of seconds: what measurements of one piece differ by on a quiet machine is no sign."""
FIRST_DEVIATION = 0.5
"""Least deviation before anything is fitted, when types of ops are as far off as their costs."""
CAUCHY = 2.385
"""Deviations at which an observation has half its weight: 95% of the efficiency of least squares
where noise is normal (Holland and Welsch 1977, doi 10.1080/03610927708827533)."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Ops of a piece that share every effect, with their predicted seconds together."""

    op_type: str  # "" for dispatch
    size: int  # decades of its work
    kernel: str  # type and sizes
    seconds: Seconds


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a cut model on one device."""

    device: str
    kind: str
    shares: tuple[Share, ...]
    measured_s: MeasuredSeconds
    together: bool  # measured while other devices were busy


class LinkSeconds(msgspec.Struct, frozen=True, array_like=True):
    """All transfers of one run over one link."""

    source: str
    destination: str
    predicted_s: Seconds
    measured_s: MeasuredSeconds


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured placement: its pieces and links with their unadapted costs."""

    model: str
    pieces: tuple[Piece, ...]
    transfers: tuple[LinkSeconds, ...] = ()


Effects = tuple[str, ...]


def op_effects(op_type: str, size: int, kernel: str, device: str, kind: str) -> Effects:
    """Names of the effects on an op; a name begins with its kind of effect, a key of `SIGMA`."""
    return (
        f"kind:{kind}", f"device:{device}", f"type:{op_type}", f"type on kind:{op_type} on {kind}",
        f"size:{op_type} {size} on {kind}", f"kernel:{kernel} on {kind}",
    )  # fmt: skip


def dispatch_effects(kind: str) -> Effects:
    """Names of the effects on the dispatch of a piece."""
    return (f"dispatch:{kind}",)


def link_effects(source: str, destination: str) -> Effects:
    """Names of the effects on the transfers between two devices."""
    return ("links:", f"link:{source} to {destination}")


TOGETHER = "together:"
"""The effect of other devices that are busy."""


class _Observation(NamedTuple):
    """A measured piece, or all that crossed a link."""

    label: str
    shares: list[tuple[float, Effects]]  # predicted seconds, and the effects on them
    measured_s: float


@dataclass(frozen=True, eq=False)
class _Rows:
    """Observations as arrays: R of them, of K shares, each with its effects."""

    row: Int[np.ndarray, "K"]
    seconds: Float[np.ndarray, "K"]
    effects: list[list[int]]
    measured: Float[np.ndarray, "R"]

    def design(self, columns: int) -> Any:
        """Sparse matrix (K, P): one where a share has an effect."""
        from scipy.sparse import csr_array

        start = np.cumsum([0, *map(len, self.effects)])
        effect = np.array([e for own in self.effects for e in own], int)
        return csr_array((np.ones(len(effect)), effect, start), shape=(len(self.row), columns))


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Posterior of the log multipliers. Axes: P effects, R observations, of which at most P are
    kept: more are condensed into as many that say the same."""

    names: tuple[str, ...] = ()
    mean: Float[np.ndarray, "P"] = field(default_factory=lambda: np.zeros(0))
    variance: Float[np.ndarray, "P"] = field(default_factory=lambda: np.zeros(0))  # prior
    gain: Float[np.ndarray, "R P"] = field(default_factory=lambda: np.zeros((0, 0)))
    noise: float = 0.1  # of the log of seconds of a piece, beyond what effects explain
    spread: float = 1.0  # of fine effects, times `SIGMA`
    models: tuple[str, ...] = ()
    observations: int = 0  # measured pieces and links, outliers among them
    outliers: tuple[str, ...] = ()  # those that were left out, with how far off they were

    @cached_property
    def column(self) -> Mapping[str, int]:
        """Index of each effect."""
        return {name: p for p, name in enumerate(self.names)}

    def log_factor(self, effects: Iterable[str]) -> float:
        """Log of the multiplier of an op or a transfer with these effects."""
        return sum(float(self.mean[self.column[e]]) for e in effects if e in self.column)

    def sampled(self, seed: int) -> "Adaptation":
        """One draw of the multipliers from the posterior, as an adaptation without doubt.

        Matheron's rule: a draw of the prior, corrected by its errors of the observations.
        """
        rng = np.random.default_rng(seed)
        drawn = rng.normal(0.0, np.sqrt(self.variance))
        seen = np.zeros_like(drawn)
        if self.gain.size:
            rows = self.gain @ drawn + rng.normal(0.0, 1.0, len(self.gain))
            seen = self.variance * (self.gain.T @ np.linalg.solve(self._kernel, rows))
        return replace(self, mean=self.mean + drawn - seen, gain=np.zeros((0, len(self.mean))))

    @cached_property
    def _kernel(self) -> Float[np.ndarray, "R R"]:
        return (self.gain * self.variance) @ self.gain.T + np.eye(len(self.gain))


def adapt(runs: Sequence[Run]) -> Adaptation:
    """The posterior after these runs; without runs the prior.

    Milliseconds for some hundred pieces, half a second for thousands: R P min(R, P) for R pieces
    and links of P effects, for each of `NOISES` and `SPREADS`.
    """
    observations = _observations(runs)
    models = tuple(dict.fromkeys(run.model for run in runs))
    if not observations:
        return Adaptation(models=models)
    outliers = _outliers(observations)
    rows, names = _rows([o for i, o in enumerate(observations) if i not in outliers])
    design = rows.design(len(names))
    mean, noise, spread = np.zeros(len(names)), TYPICAL_NOISE, TYPICAL_SPREAD
    variance, gain = np.zeros(0), np.zeros((0, 0))
    for step in range(STEPS):
        slope, residual = _linear(rows, design, mean)
        if step in (2, STEPS - 2):
            noise, spread = _most_likely(slope, residual, rows.measured, names)
        variance = np.array([_variance(name, spread) for name in names])
        scale = 1.0 / _noise(noise, rows.measured)
        gain = slope * scale[:, None]
        new = np.sqrt(variance) * _regress(gain * np.sqrt(variance), residual * scale)[0]
        # Half a step at first: the slopes are those of costs that may be far off.
        mean = new if step else 0.5 * (mean + new)
    if len(gain) > len(mean):
        gain = np.linalg.qr(gain).R
    told = tuple(
        f"{observations[i].label} took {factor:.2g} times what all others say"
        for i, factor in outliers.items()
    )
    return Adaptation(
        tuple(names), mean, variance, gain, noise, spread, models, len(observations), told
    )


def _linear(
    rows: _Rows, design: Any, mean: Float[np.ndarray, "P"]
) -> tuple[Float[np.ndarray, "R P"], Float[np.ndarray, "R"]]:
    """The linear model of log seconds around a mean: slopes, which are the share of every effect in
    the predicted seconds, and what they have to explain."""
    from scipy.sparse import csr_array

    seconds = rows.seconds * np.exp(design @ mean)
    predicted = np.bincount(rows.row, seconds, len(rows.measured))
    share = csr_array((seconds / predicted[rows.row], (rows.row, np.arange(len(rows.row)))))
    slope = (share @ design).toarray()
    return slope, np.log(rows.measured) - np.log(predicted) + slope @ mean


def _outliers(observations: Sequence[_Observation]) -> dict[int, float]:
    """Observations that contradict all others, as factors on their prediction by these: errors of
    more than `OUTLYING` deviations.

    A fit of weighted least squares in which the weight of an observation falls with its error
    under a prediction by the others (Cauchy weights, as of a distribution with a heavy tail). An
    effect that several pieces share, such as a slow type of op, is predicted by the others and no
    contradiction; one that no other piece has is doubtful by as much as the prior allows.
    """
    rows, names = _rows(observations)
    design, clock = rows.design(len(names)), LEAST_S / rows.measured
    sigma = np.sqrt([_variance(name, TYPICAL_SPREAD) for name in names])
    noise = _noise(TYPICAL_NOISE, rows.measured)
    mean = np.zeros(len(names))
    # From the median of each kind of device, and of all links. The first effect is that of the
    # kind; of a piece that only starts, of its dispatch.
    kinds = np.array([observation.shares[0][1][0] for observation in observations])
    error = _linear(rows, design, mean)[1]
    medians = {kind: np.median(error[kinds == kind]) for kind in np.unique(kinds)}
    error = error - np.array([medians[kind] for kind in kinds])
    deviation = np.hypot(max(_usual(error), FIRST_DEVIATION), clock)
    for step in range(2 * STEPS):
        slope, residual = _linear(rows, design, mean)
        scale = 1.0 / np.hypot(1.0, error / deviation / CAUCHY) / noise
        fitted, error, doubt = _left_out(slope * sigma * scale[:, None], residual * scale)
        error, doubt = error / scale, doubt / scale
        deviation = np.sqrt(doubt**2 + _usual(error) ** 2 + clock**2)
        mean = sigma * fitted if step else 0.5 * sigma * fitted
    beyond = np.flatnonzero(np.abs(error) > OUTLYING * deviation)
    return {int(i): math.exp(error[i]) for i in beyond}


def _usual(error: Float[np.ndarray, "R"]) -> float:
    """Standard deviation of most errors, by the median of their absolute values, which outliers do
    not raise; 1.4826 of it where they are normal."""
    return max(1.4826 * float(np.median(np.abs(error))), LEAST_DEVIATION)


def _left_out(
    slope: Float[np.ndarray, "R P"], residual: Float[np.ndarray, "R"]
) -> tuple[Float[np.ndarray, "P"], Float[np.ndarray, "R"], Float[np.ndarray, "R"]]:
    """Mean of a linear model with unit prior and noise; of every observation the error of its
    prediction by all others, and the standard deviation of that prediction, without noise.

    With the leverage h of an observation its error is its residual over 1 - h, and the variance
    h over 1 - h (Rasmussen and Williams 2006, section 5.4.2).
    """
    from scipy.linalg import cholesky, solve_triangular

    mean = _regress(slope, residual)[0]
    if len(slope) <= slope.shape[1]:
        kernel = slope @ slope.T
        lower = cholesky(kernel + np.eye(len(slope)), lower=True)
        explained = solve_triangular(lower, kernel, lower=True)
        leverage = np.diag(kernel) - (explained**2).sum(axis=0)
    else:
        lower = cholesky(slope.T @ slope + np.eye(slope.shape[1]), lower=True)
        leverage = (solve_triangular(lower, slope.T, lower=True) ** 2).sum(axis=0)
    remaining = np.maximum(1.0 - leverage, 1e-9)
    doubt = np.sqrt(np.maximum(leverage, 0.0) / remaining)
    return mean, (residual - slope @ mean) / remaining, doubt


def _regress(
    slope: Float[np.ndarray, "R P"], residual: Float[np.ndarray, "R"]
) -> tuple[Float[np.ndarray, "P"], float]:
    """Mean and log marginal likelihood, but for a constant, of a linear model with unit prior and
    noise: by the kernel of observations or, where there are more of them, by that of effects."""
    from scipy.linalg import cho_solve, cholesky

    if len(slope) <= slope.shape[1]:
        lower = cholesky(slope @ slope.T + np.eye(len(slope)), lower=True)
        explained = cho_solve((lower, True), residual)
        mean, misfit = slope.T @ explained, residual @ explained
    else:
        lower = cholesky(slope.T @ slope + np.eye(slope.shape[1]), lower=True)
        moment = slope.T @ residual
        mean = cho_solve((lower, True), moment)
        misfit = residual @ residual - moment @ mean
    return mean, float(-0.5 * misfit - np.log(np.diag(lower)).sum())


def _observations(runs: Sequence[Run]) -> list[_Observation]:
    """All that was measured and predicted, run by run."""
    observations = []
    for run in runs:
        for piece in run.pieces:
            shares = [s for s in piece.shares if s.seconds > 0]
            if not piece.measured_s > 0 or not shares:
                continue
            longest = max(shares, key=lambda s: s.seconds).op_type or DISPATCH
            label = f"{longest} on {piece.device} in {run.model}"
            own = [(s.seconds, piece_effects(piece, s)) for s in shares]
            observations.append(_Observation(label, own, piece.measured_s))
        for sent in run.transfers:
            if sent.predicted_s > 0 and sent.measured_s > 0:
                label = f"transfers {sent.source} to {sent.destination} in {run.model}"
                own = [(sent.predicted_s, link_effects(sent.source, sent.destination))]
                observations.append(_Observation(label, own, sent.measured_s))
    return observations


def _rows(observations: Sequence[_Observation]) -> tuple[_Rows, list[str]]:
    """Observations as arrays, and the names of all effects in the order of their columns."""
    column: dict[str, int] = {}
    row, seconds, effects = [], [], []
    for r, observation in enumerate(observations):
        for predicted_s, names in observation.shares:
            row.append(r)
            seconds.append(predicted_s)
            effects.append([column.setdefault(name, len(column)) for name in names])
    measured = np.array([observation.measured_s for observation in observations])
    return _Rows(np.array(row, int), np.array(seconds), effects, measured), list(column)


def piece_effects(piece: Piece, share: Share) -> Effects:
    """Names of the effects on a share of a measured piece."""
    if not share.op_type:
        own = dispatch_effects(piece.kind)
    else:
        own = op_effects(share.op_type, share.size, share.kernel, piece.device, piece.kind)
    return (*own, TOGETHER) if piece.together else own


def _variance(name: str, spread: float) -> float:
    sort = name.partition(":")[0]
    return (SIGMA[sort] * (spread if sort in FINE else 1.0)) ** 2


def _noise(noise: float, measured: Float[np.ndarray, "R"]) -> Float[np.ndarray, "R"]:
    """Standard deviation of the log of each measurement."""
    return np.sqrt(noise**2 + (LEAST_S / measured) ** 2)


def _most_likely(
    slope: Float[np.ndarray, "R P"],
    residual: Float[np.ndarray, "R"],
    measured: Float[np.ndarray, "R"],
    names: Sequence[str],
) -> tuple[float, float]:
    """(noise, spread of fine effects) of the highest marginal likelihood."""
    fine = np.array([name.partition(":")[0] in FINE for name in names])
    sigma = np.sqrt([_variance(name, 1.0) for name in names])
    best, chosen = -np.inf, (NOISES[0], SPREADS[0])
    for spread in SPREADS:
        scaled = slope * np.where(fine, spread * sigma, sigma)
        for noise in NOISES:
            scale = 1.0 / _noise(noise, measured)
            likelihood = _regress(scaled * scale[:, None], residual * scale)[1]
            likelihood += float(np.log(scale).sum())
            if likelihood > best:
                best, chosen = likelihood, (noise, spread)
    return chosen


# Costs.


def op_keys(graph: OpGraph) -> list[tuple[str, int, str]]:
    """(type, decades of work, kernel) of every op: ops of one key cost the same on a device.

    In a language model with caches, products of one token are a type of their own: runtimes have
    other kernels for a matrix times a vector, whose errors say nothing of a prompt's.
    """
    keys, has_caches = [], bool(graph.cache_bytes.any())
    for op_type, flop, traffic in zip(
        graph.op_types, graph.flop.tolist(), graph.memory_traffic_bytes.tolist(), strict=True
    ):
        if has_caches and flop < FEW_FLOP * traffic:
            op_type = f"{op_type} of a token"
        size = round(math.log10(max(flop / 10 + traffic, 1.0)))
        keys.append((op_type, size, f"{op_type} {flop:.3g} {traffic:.3g}"))
    return keys


def piece_shares(
    keys: Sequence[tuple[str, int, str]],
    seconds: Float[np.ndarray, "N"],
    piece: Int[np.ndarray, "N"],
) -> dict[int, tuple[Share, ...]]:
    """Predicted seconds of the ops of each piece, those of one key of `op_keys` together.

    Ops in none (-1) have no share, nor have those that take no time or run nowhere.
    """
    sums = defaultdict[int, dict[tuple[str, int, str], float]](dict)
    for i in np.flatnonzero((piece >= 0) & np.isfinite(seconds) & (seconds > 0)).tolist():
        own = sums[int(piece[i])]
        own[keys[i]] = own.get(keys[i], 0.0) + float(seconds[i])
    return {p: tuple(Share(*key, s) for key, s in own.items()) for p, own in sums.items()}


@dataclass(frozen=True)
class AdaptedCosts(DerivedCosts):
    """A cost model with the multipliers of an adaptation on its seconds and overheads."""

    adaptation: Adaptation
    together: bool = False  # several devices are busy at once

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        return self.base(graph, cluster) * self.factors(graph, cluster)

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"] | None:
        """Launches of the other model by the same factors; see `KnowsLaunches`."""
        floor_s = launch_floors_s(self.base, graph, cluster)
        return None if floor_s is None else floor_s * self.factors(graph, cluster)

    def factors(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        """The multiplier of every op on every device; 1 on kinds that were never measured."""
        keys = op_keys(graph)
        row = {key: u for u, key in enumerate(dict.fromkeys(keys))}
        also = (TOGETHER,) if self.together else ()
        of_device = _device_factors(self.adaptation, cluster.devices)
        table = np.array(
            [
                [
                    of_device[d.name]
                    + self.adaptation.log_factor((*op_effects(*key, "", d.kind), *also))
                    if f"kind:{d.kind}" in self.adaptation.column
                    else 0.0
                    for d in cluster.devices
                ]
                for key in row
            ],
            float,
        ).reshape(len(row), cluster.num_devices)
        return np.exp(table)[[row[key] for key in keys]]

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The base model's cluster with dispatch and links as they were measured."""
        cluster = super().with_runtime_overheads(cluster)
        factor, names = self.adaptation.log_factor, cluster.device_names
        also = (TOGETHER,) if self.together else ()
        devices = tuple(
            replace(
                d, dispatch_s=base_dispatch_s(d)
                * math.exp(factor((*dispatch_effects(d.kind), *also))),
            )
            if f"kind:{d.kind}" in self.adaptation.column else d
            for d in cluster.devices
        )  # fmt: skip
        slower = np.exp([[factor(link_effects(a, b)) if a != b else 0.0 for b in names]
                         for a in names])  # fmt: skip
        return replace(
            cluster, devices=devices, link_latency_s=cluster.link_latency_s * slower,
            link_bytes_per_s=cluster.link_bytes_per_s / slower,
        )  # fmt: skip


def _device_factors(adaptation: Adaptation, devices: Sequence[Device]) -> dict[str, float]:
    """Log of the multiplier of each device by name.

    Devices of a kind within `ALIKE` have the same; one that was never measured has the mean of its
    kind.
    """
    factors = {}
    for kind in {d.kind for d in devices}:
        effects = {d.name: f"device:{d.name}" for d in devices if d.kind == kind}
        measured = {
            name: adaptation.log_factor((effect,))
            for name, effect in effects.items()
            if effect in adaptation.column
        }
        factors_of_kind = list(measured.values()) or [0.0]
        factors |= dict.fromkeys(effects, float(np.mean(factors_of_kind)))
        if max(factors_of_kind) - min(factors_of_kind) >= ALIKE:
            factors |= measured
    return factors


def base_dispatch_s(device: Device) -> float:
    """Seconds of a dispatch that a multiplier applies to: of a piece, none is too short to be
    wrong."""
    return (
        max(device.dispatch_s, LEAST_S) if device.dispatch_per == "segment" else device.dispatch_s
    )


class LearnedRow(NamedTuple):
    """Seconds of an op type on a device over some runs; "" stands for all types of the device."""

    op_type: str
    device: str
    planned_s: float  # by costs that are not adapted
    learned_s: float
    measured_s: float | None  # of whole devices alone: pieces hold many types


def learned_rows(adaptation: Adaptation, runs: Sequence[Run]) -> list[LearnedRow]:
    """Predicted seconds before and after learning, by device and op type, the longest first."""
    planned, learned = defaultdict[tuple[str, str], float](float), dict[tuple[str, str], float]()
    measured = defaultdict[str, float](float)
    for piece in (piece for run in runs for piece in run.pieces):
        measured[piece.device] += piece.measured_s
        for share in piece.shares:
            seconds = share.seconds * math.exp(adaptation.log_factor(piece_effects(piece, share)))
            for op_type in ("", share.op_type or DISPATCH):
                key = op_type, piece.device
                planned[key] += share.seconds
                learned[key] = learned.get(key, 0.0) + seconds
    rows = [
        LearnedRow(*key, planned[key], learned[key], None if key[0] else measured[key[1]])
        for key in planned
    ]
    return sorted(rows, key=lambda row: (row.op_type != "", -row.learned_s))


def lessons(adaptation: Adaptation, runs: Sequence[Run]) -> list[str]:
    """Multipliers that changed most of the predicted seconds, in words, largest first."""
    changes = []
    for row in learned_rows(adaptation, runs):
        if row.op_type:
            op_type = "starting pieces" if row.op_type == DISPATCH else row.op_type
            changes.append((row.planned_s, row.learned_s, f"{op_type} on {row.device}"))
    planned = defaultdict[tuple[str, str], float](float)
    for sent in (sent for run in runs for sent in run.transfers):
        planned[sent.source, sent.destination] += sent.predicted_s
    for ends, seconds in planned.items():
        factor = math.exp(adaptation.log_factor(link_effects(*ends)))
        changes.append((seconds, seconds * factor, f"transfers {ends[0]} to {ends[1]}"))
    weighted = [
        (abs(after - before), f"{text} {after / before:.2g} times the costs")
        for before, after, text in changes
        if abs(math.log(after / before)) > math.log(1.0 + WORTH_TELLING)
    ]
    return [text for _, text in sorted(weighted, reverse=True)[:MOST_LESSONS]]


MOST_LESSONS = 3
DISPATCH = "dispatch"
"""Of `LearnedRow.op_type`: starting pieces."""
WORTH_TELLING = 0.1
"""Least change of a multiplier that is reported."""
