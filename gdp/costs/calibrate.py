"""From profiles to a calibration, and the proof of it on families of models it never saw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from gdp.cluster.types import Device
from gdp.costs.features import KernelFeatures, kernel_features
from gdp.costs.fit import FitConfig, fit, rows_of
from gdp.costs.kernels import components, learn_fusions
from gdp.costs.learned import Calibration, kernel_seconds, kernels_of
from gdp.costs.profile import Overheads, Profile, ProfiledModel, ProfileError

HELD_OUT = (
    "bert", "convnext", "densenet", "gpt2", "inception", "mobilenet_v2", "resnet", "squeezenet",
    "swin", "t5", "vit", "whisper",
)  # fmt: skip
"""Families that the shipped calibration is tested on and was never fitted or tuned to."""


@dataclass(frozen=True)
class KernelError:
    """One measured kernel of a held-out model, or several that were predicted as one."""

    model: str
    type: str  # of the costliest op
    measured_s: float
    predicted_s: float
    roofline_s: float


@dataclass(frozen=True)
class ModelError:
    """One held-out model as a whole."""

    model: str
    family: str
    measured_s: float  # without the profiler
    predicted_s: float
    roofline_s: float
    kernels: int


@dataclass(frozen=True)
class Report:
    """Errors on held-out families; shares, not percent."""

    kernels: tuple[KernelError, ...]
    models: tuple[ModelError, ...]
    train_models: int
    train_families: int
    held_families: tuple[str, ...]
    note: str = ""

    def summary(self) -> dict[str, Any]:
        """The figures of the report, learned beside roofline."""
        if not self.models:
            return {"note": self.note, "train_models": self.train_models}
        return {
            "train_models": self.train_models,
            "train_families": self.train_families,
            "held_out_models": len(self.models),
            "held_out_families": list(self.held_families),
            "kernel_error": self._kernel_figures(self.kernels),
            "by_type": {
                name: {"time_share": share, **self._kernel_figures(own)}
                for name, share, own in self._by_type()
            },
            "model_error": self._model_figures(),
            "models": [
                {
                    "model": m.model, "measured_s": m.measured_s, "predicted_s": m.predicted_s,
                    "error": m.predicted_s / m.measured_s - 1,
                    "roofline_error": m.roofline_s / m.measured_s - 1,
                }
                for m in self.models
            ],
            "note": self.note,
        }  # fmt: skip

    def _kernel_figures(self, kernels: Sequence[KernelError]) -> dict[str, Any]:
        measured = np.array([k.measured_s for k in kernels])
        found: dict[str, Any] = {"kernels": len(kernels)}
        for name in ("learned", "roofline"):
            key = "predicted_s" if name == "learned" else "roofline_s"
            error = np.abs(np.array([getattr(k, key) for k in kernels]) / measured - 1)
            found[name] = {
                "median": weighted_quantile(error, measured, 0.5),
                "p90": weighted_quantile(error, measured, 0.9),
                "median_unweighted": float(np.median(error)),
                "p90_unweighted": float(np.quantile(error, 0.9)),
            }
        return found

    def _by_type(self) -> list[tuple[str, float, list[KernelError]]]:
        total = sum(k.measured_s for k in self.kernels)
        names = {k.type for k in self.kernels}
        groups = [(n, [k for k in self.kernels if k.type == n]) for n in names]
        shared = [(n, sum(k.measured_s for k in own) / total, own) for n, own in groups]
        return sorted(shared, key=lambda entry: -entry[1])

    def _model_figures(self) -> dict[str, Any]:
        measured = np.array([m.measured_s for m in self.models])
        found = {}
        for name in ("learned", "roofline"):
            key = "predicted_s" if name == "learned" else "roofline_s"
            error = np.array([getattr(m, key) for m in self.models]) / measured - 1
            found[name] = {
                "mean": float(np.abs(error).mean()),
                "median": float(np.median(np.abs(error))),
                "within_10_percent": float((np.abs(error) <= 0.1).mean()),
                "bias": float(error.mean()),
                "worst": float(np.abs(error).max()),
            }
        return found


def weighted_quantile(
    values: Float[np.ndarray, "K"], weights: Float[np.ndarray, "K"], share: float
) -> float:
    """The least value that is not exceeded by this share of the weight.

    >>> weighted_quantile(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 8.0]), 0.5)
    3.0
    """
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    at = np.searchsorted(total, share * total[-1] * (1 - 1e-12))
    return float(values[order][min(int(at), len(order) - 1)])


def split(
    models: Sequence[ProfiledModel], held_out: Sequence[str] | None
) -> tuple[list[ProfiledModel], list[ProfiledModel], str]:
    """(to fit, held out, note) by whole families.

    Without names, the families of `HELD_OUT` that are there; where there are none, every fourth
    family, and none where there are fewer than four.
    """
    families = sorted({m.family for m in models})
    if held_out is None:
        held = [f for f in families if f in HELD_OUT]
        if not held or len(held) == len(families):
            held = families[3::4]
    else:
        unknown = sorted(set(held_out) - set(families))
        if unknown:
            raise ProfileError(
                f"no family {unknown[0]!r} in the profiles; there are {', '.join(families)}"
            )
        held = list(held_out)
    note = "" if held else "fewer than four families: nothing was held out, errors are unknown"
    train = [m for m in models if m.family not in held]
    if not train:
        raise ProfileError("all families are held out; leave some to fit")
    return train, [m for m in models if m.family in held], note


def calibrate(
    profile: Profile,
    reference: Device,
    *,
    held_out: Sequence[str] | None = None,
    config: FitConfig | None = None,
) -> tuple[Calibration, Report]:
    """The calibration of a profile's device, and its errors on held-out families.

    `reference` is the device with datasheet numbers, for the roofline beside it. Two to three
    minutes on two cores for some ten thousand kernels.
    """
    if not profile.models:
        raise ProfileError("the profile holds no models; make one with `gdp profile`")
    train, held, note = split(profile.models, held_out)
    rows = rows_of(train)
    calibration = Calibration(
        device=profile.device,
        runtime=profile.runtime,
        level=profile.level,
        versions=profile.versions,
        date=profile.date,
        fusions=learn_fusions(train),
        ensemble=fit(rows, config),
        segment_s=segment_s(profile.overheads),
    )
    return calibration, evaluate(calibration, held, reference, train, note)


def segment_s(overheads: Overheads) -> float | None:
    """What one more piece of a cut model costs its device beyond its kernels: a session call, and
    what a cut does to the kernels beside it. None where neither was measured."""
    known = [s for s in (overheads.session_s, overheads.cut_s) if s is not None]
    return sum(known) if known else None


def recharge(calibration: Calibration, profile: Profile) -> Calibration:
    """A calibration with the overheads of another profile, such as one measured on a quieter day.

    They hardly depend on the processor's vector units, so its model may be another one; device
    kind, runtime and threads must agree.
    """
    kinds = (profile.device.kind, profile.runtime), (calibration.device.kind, calibration.runtime)
    if kinds[0] != kinds[1]:
        raise ProfileError(
            f"a profile of {' with '.join(kinds[0])} cannot be charged to costs of "
            f"{' with '.join(kinds[1])}"
        )
    found = segment_s(profile.overheads)
    if found is None:
        raise ProfileError("the profile holds no overheads; profile without --no-overheads")
    return replace(calibration, segment_s=found)


def evaluate(
    calibration: Calibration,
    held: Sequence[ProfiledModel],
    reference: Device,
    train: Sequence[ProfiledModel] = (),
    note: str = "",
) -> Report:
    """Errors of a calibration on models, kernel by kernel and as a whole."""
    kernels: list[KernelError] = []
    models: list[ModelError] = []
    for model in held:
        group = kernels_of(calibration, model.graph)
        features = kernel_features(model.graph, group)
        seconds = kernel_seconds(calibration, features)
        datasheet = roofline_s(features, model, reference)
        own = _kernel_errors(model, group, features, seconds, datasheet)
        kernels += own
        models.append(
            ModelError(
                model.name, model.family, model.latency_s, float(seconds.sum()),
                float(datasheet.sum()), len(seconds),
            )
        )  # fmt: skip
    return Report(
        tuple(kernels), tuple(models), len(train), len({m.family for m in train}),
        tuple(sorted({m.family for m in held})), note,
    )  # fmt: skip


def roofline_s(
    features: KernelFeatures, model: ProfiledModel, device: Device
) -> Float[np.ndarray, "K"]:
    """Datasheet seconds of every kernel: the slower of its arithmetic and its traffic."""
    flop, read, made, weights = (np.exp(features.size[:, i]) for i in (1, 2, 3, 4))
    speed = np.array([device.speed(model.graph.detail[op].dtype) for op in features.lead.tolist()])
    return np.maximum(flop / speed, (read + made + weights) / device.bytes_per_s)


def _kernel_errors(
    model: ProfiledModel,
    group: np.ndarray,
    features: KernelFeatures,
    seconds: Float[np.ndarray, "K"],
    datasheet: Float[np.ndarray, "K"],
) -> list[KernelError]:
    """Measured against predicted where kernels agree, and where they do not, of what they share."""
    timed = [k for k in model.kernels if k.ops]
    members, of_group = components([k.ops for k in timed], group)
    measured = np.array([sum(timed[k].seconds for k in own) for own in members])
    predicted, plain = np.zeros(len(members)), np.zeros(len(members))
    kind: dict[int, tuple[float, str]] = {}
    for g, place in of_group.items():
        predicted[place] += seconds[g]
        plain[place] += datasheet[g]
        kind[place] = max(kind.get(place, (0.0, "")), (float(seconds[g]), features.lead_type[g]))
    return [
        KernelError(
            model.name, kind.get(place, (0.0, "none"))[1], float(measured[place]),
            float(predicted[place]), float(plain[place]),
        )
        for place in range(len(members))
        if measured[place] > 0
    ]  # fmt: skip
