"""The commands `profile` and `calibrate`: profiles of models, the costs that they teach of this
machine, and refused calibrations."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base import checkpoint
from gdp.base.errors import ArgumentError, ClusterError, ModelError
from gdp.base.files.reading import Kind, read_text
from gdp.cluster.detect import cpu_model
from gdp.cluster.presets import device_names, device_preset
from gdp.cluster.types import Cluster, Device, is_cpu_kind, make_cluster
from gdp.costs import machine
from gdp.costs.adapt import AdaptedCosts, Piece, Run, adapt, op_keys, piece_shares
from gdp.costs.base import CostModel
from gdp.costs.calibrate import Predicted, evaluate, recharge, refit
from gdp.costs.cost_file import load_costs, save_costs
from gdp.costs.default import SHIPPED, resolve_costs, shipped_for
from gdp.costs.kernels import components
from gdp.costs.learned import Calibration
from gdp.costs.profile import Profile, ProfiledModel, ProfileError
from gdp.graph.op_graph import OpGraph
from gdp.importers.python import python_function
from gdp.question.models import PYTHON_PREFIX, is_traced, traced_model, with_dims
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question

QUICK = ("bvlc_alexnet", "shufflenet", "zfnet512")
"""Small models of the installed onnx package."""
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
            machine was busy, or teaches costs that predict its models worse than before; or if
            they cannot be written.
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
    try:
        files = tuple(str(machine.remember(record)) for record in records.values())
    except OSError as error:
        raise ProfileError(f"what was learned cannot be kept: {error}") from error
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


def measured_profile(
    models: Sequence[tuple[str, str, str]],
    device: str,
    *,
    dims: Sequence[str] = (),
    overheads: bool = True,
    quick: bool = False,
    threads: int = 1,
    rounds: int = 5,
    seconds: float = 2.0,
    seed: int = 0,
) -> Profile:
    """Profile of models, measured by the runtime of a device.

    Args:
        models: Name, family and specification of each.
        device: "cpu:CORE", "jax:cpu", "jax:gpu", "torch:cpu" or "torch:cuda".
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        overheads: Measure the costs of sessions and hand-overs, too.
        quick: Measure small models that gdp brings instead.
        threads: Of ONNX Runtime.
        rounds: Of measuring.
        seconds: Of measuring each model.
        seed: Of inputs and weights.

    Raises:
        ClusterError: The device is unknown.
        ModelError: The runtime does not execute a model.
    """
    kind, _, index = device.partition(":")
    if quick and kind == "jax" and index in ("", "cpu"):
        return _quick_jax(rounds, seconds)
    if kind in ("jax", "torch") and not models:
        least = "--quick is for cpu:CORE and jax:cpu"
        if kind == "torch":
            least = "--quick and --only-overheads have none"
        name = device if kind == "jax" else "torch:..."
        raise ArgumentError(f"--device {name} needs models: {least}")
    if kind == "jax":
        from gdp.targets.jax.profile import profile_functions

        functions = [(name, group, *_jax_function(model)) for name, group, model in models]
        return profile_functions(functions, index or "cpu", rounds=rounds, seconds=seconds)
    if kind == "torch":
        from gdp.targets.pytorch.profile import profile_modules

        modules = [(name, group, _torch_model(model)) for name, group, model in models]
        return profile_modules(
            modules, index or "cpu", rounds=rounds, seconds=seconds, overheads=overheads
        )
    if kind == "cpu" and (index or "0").isdigit():
        from gdp.targets.onnxruntime.profile import ProfileConfig, profile_models

        config = ProfileConfig(int(index or 0), threads, rounds, seconds, seed=seed)
        if quick:
            models = [(name, name, f"onnx:light_{name}") for name in QUICK]
        return profile_models(models, config, dims=with_dims(dims), overheads=overheads)
    raise ClusterError(
        f"--device {device!r} must be cpu:CORE, jax:cpu, jax:gpu, torch:cpu or torch:cuda"
    )


def _quick_jax(rounds: int, seconds: float) -> Profile:
    """Profile of small JAX models on the CPU, split in two devices to time copies between them.

    JAX reads the number of devices when it is first used.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    from gdp.targets.jax.profile import quick_profile
    from gdp.targets.jax.small_models import small_models

    return quick_profile(list(small_models()), rounds, min(seconds, 1.0))


def _jax_function(model: str) -> tuple[Any, Any]:
    """The JAX function of a `python:` model, and its example arguments."""
    if not model.startswith(PYTHON_PREFIX):
        raise ModelError(
            f"{model!r}: --device jax:... measures python:package.module:function; ONNX models are "
            "measured with --device cpu:0"
        )
    result: Any = python_function(model)
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise ModelError(f"{model!r} must return a JAX function and a tuple of its arguments")
    return result[0], result[1]


def _torch_model(model: str) -> Any:
    """The PyTorch module of a `python:` or `hf:` model."""
    from gdp.importers.pytorch.model import TorchModel

    model_code = traced_model(model) if is_traced(model) else None
    if not isinstance(model_code, TorchModel):
        raise ModelError(
            f"{model!r} is no PyTorch module; --device torch:... measures python: and hf: models"
        )
    return model_code


def rebase(
    base: str, profile: Profile, output: str
) -> tuple[Calibration, list[tuple[str, float, float, float]]]:
    """Adapt the costs of a folder, or the "shipped" ones, to a profile, and write them.

    Returns:
        The calibration, and of each profiled model its name, and its seconds as measured, as
        predicted before, and as predicted after.

    Raises:
        ProfileError: It would predict whole models worse than before.
    """
    shipped = base == SHIPPED
    costs = shipped_for(profile.device.kind) if shipped else load_costs(base)
    report: dict[str, Any] = {} if shipped else checkpoint.read_meta(base).get("report", {})
    rows, recipe = [], Path(base) / "recipe.toml"
    if profile.models:
        adapted, reference = refit(costs, profile), reference_device(profile.device.kind)
        note = "fitted to the models of a profile: what others are off by is unknown"
        both = (costs, adapted)
        before, after = (evaluate(c, profile.models, reference, note=note) for c in both)
        require_better(before.models, after.models, profile.models)
        report = {"note": note, "train_models": len(profile.models)}
        rows = [
            (m.model, m.measured_s, m.predicted_s, n.predicted_s)
            for m, n in zip(before.models, after.models, strict=True)
        ]
    else:
        adapted = recharge(costs, profile)
    text = ""
    if not shipped and recipe.exists():
        text = read_text(recipe, Kind("recipe of costs", ProfileError))
    save_costs(adapted, output, report=report, recipe=text)
    return adapted, rows
