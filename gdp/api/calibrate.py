"""The command `calibrate`: what profiles teach of this machine, and refused calibrations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.detect import cpu_model
from gdp.cluster.presets import device_names, device_preset
from gdp.cluster.types import Cluster, Device, is_cpu_kind, make_cluster
from gdp.costs import machine
from gdp.costs.adapt import AdaptedCosts, Piece, Run, adapt, op_keys, piece_shares
from gdp.costs.base import CostModel
from gdp.costs.calibrate import Predicted
from gdp.costs.default import SHIPPED, resolve_costs
from gdp.costs.kernels import components
from gdp.costs.profile import Profile, ProfiledModel, ProfileError
from gdp.graph.op_graph import OpGraph
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question

BUSY = 1.25
"""Whole model over the sum of its kernels, above which the machine did something else meanwhile:
kernels take the smallest of rounds, whole models what a round took."""


def reference_device(kind: str) -> Device:
    """The device with datasheet numbers that is nearest to a kind."""
    nearest = "cpu-core" if is_cpu_kind(kind) else "a100"
    return device_preset(kind if kind in device_names() else nearest)


def busy(models: Sequence[ProfiledModel]) -> str:
    """A sentence about models that took longer than their kernels together; "" where none did."""
    ratios = [m.latency_s / m.kernel_s for m in models if m.kernel_s > 0]
    if not ratios or (median := float(np.median(ratios))) <= BUSY:
        return ""
    return f"the machine was busy: whole models took {median:.1f} times their kernels"


def require_better(
    before: Sequence[Predicted], after: Sequence[Predicted], models: Sequence[ProfiledModel]
) -> None:
    """Raise `ProfileError` where a calibration predicts whole models worse than the one before.

    Args:
        before: Predictions of the costs that were calibrated.
        after: Predictions of the same models by the calibration.
        models: The models, as they were profiled.
    """
    errors = [np.mean([abs(m.predicted_s / m.measured_s - 1) for m in own])
              for own in (before, after)]  # fmt: skip
    if errors[1] > errors[0]:
        reason = busy(models) or "kernels that were timed one by one do not explain whole models"
        raise ProfileError(
            f"this calibration would predict whole models {errors[1]:.0%} off, without it "
            f"{errors[0]:.0%}: {reason}; nothing was written. Profile again with nothing else "
            "running, or learn from whole runs: gdp tune"
        )


@dataclass(frozen=True)
class Remembered:
    """Predictions of profiled models before and after their machine was remembered."""

    rows: tuple[tuple[str, float, float, float], ...]  # model, measured, before, after, in seconds
    files: tuple[str, ...]

    @property
    def off(self) -> tuple[float, float]:
        """Mean share by which whole models are missed, before and after."""
        both = [(abs(b / m - 1), abs(a / m - 1)) for _, m, b, a in self.rows]
        return float(np.mean([x for x, _ in both])), float(np.mean([x for _, x in both]))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        names = ("model", "measured_s", "before_s", "after_s")
        off_before, off = self.off
        return {
            "models": [dict(zip(names, row, strict=True)) for row in self.rows],
            "off_before": off_before, "off": off, "remembered_in": list(self.files),
        }  # fmt: skip


def remember_profile(profile: Profile) -> Remembered:
    """Store a profile's costs of this machine, which `place`, `run` and `report` read.

    Seconds after learning are of every model by the others' runs, of a lone one by its own.

    Raises:
        ProfileError: if the profile is of another machine, holds no models, was made while the
            machine was busy, or teaches costs that predict its models worse than before.
        OSError: if it cannot be written.
    """
    _require_here(profile)
    if reason := busy(profile.models):
        raise ProfileError(f"{reason}; nothing is remembered, profile again")
    # Presets do not name their processor, detected machines do; their shipped costs may differ.
    learned = [_learned(profile, name) for name in (profile.device.model, "")]
    off_before, off = learned[0][0].off
    if off > off_before:
        raise ProfileError(
            f"what these models teach predicts each other {off:.0%} off, costs as they are "
            f"{off_before:.0%}: nothing is remembered. Learn from whole runs: gdp tune"
        )
    records = {(r.digest, r.costs): r for _, own in learned for r in own}
    files = tuple(str(machine.remember(record)) for record in records.values())
    return replace(learned[0][0], files=files)


def _learned(profile: Profile, name: str) -> tuple[Remembered, list[machine.MachineRecord]]:
    """Predictions and records of a profile, for devices whose processor has a name, or none."""
    kind = profile.device.kind
    device = replace(reference_device(kind), name="core0", kind=kind, model=name)
    cluster = make_cluster("profiled", [device])
    taught = [_observed(model, cluster) for model in profile.models]
    rows, records = [], []
    for k, model in enumerate(profile.models):
        others = [one.run for j, one in enumerate(taught) if j != k] or [taught[k].run]
        costs = AdaptedCosts(taught[k].base, adapt(others))
        problem = prepare_problem(Question(model.graph, cluster, costs=costs))
        after_s = float(problem.compute_s[:, 0].sum())
        rows.append((model.name, model.latency_s, taught[k].planned_s, after_s))
        records.append(machine.MachineRecord(
            schema=machine.SCHEMA, date=machine.now(), model=model.name, digest=model.graph.digest,
            runtime=profile.runtime,
            versions={k: v for k, v in profile.versions.items() if k == profile.runtime},
            costs=taught[k].label, devices=machine.measured_devices(cluster),
            runs=(taught[k].run,), off_before=abs(taught[k].planned_s / model.latency_s - 1),
            off=abs(after_s / model.latency_s - 1),
        ))  # fmt: skip
    return Remembered(tuple(rows), ()), records


def _require_here(profile: Profile) -> None:
    here = cpu_model()
    if not is_cpu_kind(profile.device.kind) or profile.device.model != here:
        measured = profile.device.model or profile.device.kind
        raise ProfileError(
            f"the profile is of {measured}, this machine is {here}: write costs for it with -o"
        )
    if not profile.models:
        raise ProfileError("the profile holds no models; make one with `gdp profile --quick`")


class _Observed(NamedTuple):
    """One profiled model as a run of `gdp.costs.adapt`."""

    base: CostModel  # the shipped one
    label: str
    planned_s: float
    run: Run


def _observed(model: ProfiledModel, cluster: Cluster) -> _Observed:
    """Measured seconds of the kernels of each op type, compared with shipped costs; kernels are
    scaled to the whole model's seconds."""
    graph = model.graph
    base, label = resolve_costs(SHIPPED, cluster, graph)
    problem = prepare_problem(Question(graph, cluster, costs=base))
    unfused = bool(getattr(base, "reads_unfused", False))
    rows = graph if unfused else problem.graph
    group = np.arange(graph.num_ops) if unfused else problem.origin.group_of
    seconds = base(rows, cluster)[:, 0]
    works = ~rows.is_io & np.isfinite(seconds) & (seconds > 0)
    kernels = [kernel for kernel in model.kernels if kernel.ops]
    members, of_group = components([k.ops for k in kernels], np.where(works[group], group, -1))
    component_s = [sum(kernels[k].seconds for k in own) for own in members]
    if not kernels:
        component_s, of_group = [model.latency_s], dict.fromkeys(np.flatnonzero(works).tolist(), 0)
    component = np.array([of_group.get(row, -1) for row in range(rows.num_ops)], dtype=np.int64)
    pieces = _pieces(rows, seconds, component, component_s, cluster.devices[0], model.latency_s)
    planned_s = float(problem.compute_s[:, 0].sum())
    return _Observed(base, label, planned_s, Run(model.name, pieces))


def _pieces(
    rows: OpGraph, seconds: Float[np.ndarray, "N"], component: Int[np.ndarray, "N"],
    component_s: Sequence[float], device: Device, latency_s: float,
) -> tuple[Piece, ...]:  # fmt: skip
    """Components whose longest op is of one type, together."""
    keys, lead = op_keys(rows), dict[int, str]()
    for row in np.argsort(-seconds, kind="stable").tolist():
        lead.setdefault(int(component[row]), keys[row][0])
    lead.pop(-1, None)
    measured = defaultdict[str, float](float)
    for each, name in lead.items():
        measured[name] += component_s[each]
    number = {name: k for k, name in enumerate(measured)}
    piece = np.array([number[lead[c]] if c >= 0 else -1 for c in component.tolist()])
    shares, scale = piece_shares(keys, seconds, piece), latency_s / sum(measured.values())
    return tuple(
        Piece(device.name, device.kind, shares[number[name]], own_s * scale, False)
        for name, own_s in measured.items()
        if own_s > 0
    )
