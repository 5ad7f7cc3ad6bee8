"""Calibrations from profiles, their errors on held-out families, and refits to other devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from gdp.base.errors import MissingExtraError
from gdp.base.files.writing import atomic
from gdp.base.terminal import printable_lines
from gdp.base.version import install_command
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.costs.features import KernelFeatures, kernel_features, transfer_design
from gdp.costs.fit import FitConfig, fit, rows_of
from gdp.costs.kernels import components, learn_fusions
from gdp.costs.learned import Calibration, KernelNetworks
from gdp.costs.profile import Overheads, Profile, ProfiledModel, ProfileError
from gdp.costs.work_rates import fit_work_rates

HELD_OUT = (
    "bert", "convnext", "densenet", "gpt2", "inception", "mobilenet_v2", "resnet", "squeezenet",
    "swin", "t5", "vit", "whisper",
)  # fmt: skip
"""Families that the shipped calibration is tested on and was never fitted or tuned to."""


PRIOR_LOG_STD = (0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.5, 0.5, 0.5)
"""Prior deviation of each coefficient of `fit_transfer`: of bounds, of classes, of slopes."""
NOISE_LOG_STD = 0.15
"""Deviation of the log seconds of one kernel from the regression."""


@dataclass(frozen=True)
class Predicted:
    """A model that was held out, or one of its kernels, or several that were predicted as one."""

    model: str
    kind: str  # family of a model; of a kernel the type of its costliest op
    measured_s: float  # of a model without the profiler
    predicted_s: float
    roofline_s: float


@dataclass(frozen=True)
class Report:
    """Errors on held-out families; shares, not percent."""

    kernels: tuple[Predicted, ...]
    models: tuple[Predicted, ...]
    train_models: int
    train_families: int
    held_families: tuple[str, ...]
    note: str = ""

    def summary(self) -> dict[str, Any]:
        """The figures of the report, learned costs compared with roofline."""
        if not self.models:
            return {"note": self.note, "train_models": self.train_models}
        by_kernel = {} if not self.kernels else {
            "kernel_error": self._kernel_figures(self.kernels),
            "by_type": {
                name: {"time_share": share, **self._kernel_figures(own)}
                for name, share, own in self._by_type()
            },
        }  # fmt: skip
        return {
            "train_models": self.train_models,
            "train_families": self.train_families,
            "held_out_models": len(self.models),
            "held_out_families": list(self.held_families),
            **by_kernel,
            "model_error": {
                name: {
                    "mean": float(np.abs(error).mean()),
                    "median": float(np.median(np.abs(error))),
                    "within_10_percent": float((np.abs(error) <= 0.1).mean()),
                    "bias": float(error.mean()),
                    "worst": float(np.abs(error).max()),
                }
                for name, error in _errors(self.models).items()
            },
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

    def _kernel_figures(self, kernels: Sequence[Predicted]) -> dict[str, Any]:
        measured = np.array([k.measured_s for k in kernels])
        figures: dict[str, Any] = {"kernels": len(kernels)}
        for name, signed in _errors(kernels).items():
            error = np.abs(signed)
            figures[name] = {
                "median": weighted_quantile(error, measured, 0.5),
                "p90": weighted_quantile(error, measured, 0.9),
                "median_unweighted": float(np.median(error)),
                "p90_unweighted": float(np.quantile(error, 0.9)),
            }
        return figures

    def _by_type(self) -> list[tuple[str, float, list[Predicted]]]:
        total = sum(k.measured_s for k in self.kernels)
        names = {k.kind for k in self.kernels}
        groups = [(n, [k for k in self.kernels if k.kind == n]) for n in names]
        shared = [(n, sum(k.measured_s for k in own) / total, own) for n, own in groups]
        return sorted(shared, key=lambda entry: -entry[1])


def _errors(rows: Sequence[Predicted]) -> dict[str, Float[np.ndarray, "R"]]:
    """Relative errors of both predictions."""
    measured, learned, datasheet = np.array(
        [(row.measured_s, row.predicted_s, row.roofline_s) for row in rows]
    ).T
    return {"learned": learned / measured - 1, "roofline": datasheet / measured - 1}


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
    if profile.runtime == "jax":
        return _calibrate_rates(profile, reference)
    train, held, note = split(profile.models, held_out)
    rows = rows_of(train)
    calibration = Calibration(
        device=profile.device,
        runtime=profile.runtime,
        level=profile.level,
        versions=profile.versions,
        date=profile.date,
        predictor=KernelNetworks(learn_fusions(train), fit(rows, config)),
        segment_s=segment_s(profile.overheads),
    )
    return calibration, evaluate(calibration, held, reference, train, note)


def _calibrate_rates(profile: Profile, reference: Device) -> tuple[Calibration, Report]:
    """Rates of a compiler's work, and the error of every model by a fit without its family."""
    rates, predicted_s = fit_work_rates(profile)
    one = make_cluster("reference", [reference])
    models = tuple(
        Predicted(m.name, m.family, m.latency_s, float(p), float(roofline(m.graph, one).sum()))
        for m, p in zip(profile.models, predicted_s, strict=True)
    )
    families = tuple(sorted({m.kind for m in models}))
    note = "each family held out in turn"
    report = Report((), models, len(models), len(families), families, note)
    return Calibration(
        profile.device, profile.runtime, profile.level, profile.versions, profile.date, rates,
        segment_s=segment_s(profile.overheads), handover_s=profile.overheads.handover_s,
        handover_bytes_per_s=profile.overheads.handover_bytes_per_s,
        mean_error=report.summary()["model_error"]["learned"]["mean"],
    ), report  # fmt: skip


def segment_s(overheads: Overheads) -> float | None:
    """Seconds that one more piece of a cut model costs its device, in addition to its kernels.

    A session call and the effect of the cut on its neighbours; None where neither was measured.
    """
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
    per_cut_s = segment_s(profile.overheads)
    if per_cut_s is None:
        raise ProfileError("the profile holds no overheads; profile without --no-overheads")
    return replace(calibration, segment_s=per_cut_s)


def refit(calibration: Calibration, profile: Profile) -> Calibration:
    """A calibration for another processor of its kind, from the kernels of a few models there.

    Only nine coefficients are fitted, so that a minute of measuring is enough. The cost of a
    segment is the profile's where it was measured. Raises `ProfileError` where the kinds or the
    runtimes differ, or the profile holds no models.
    """
    if (profile.device.kind, profile.runtime) != (calibration.device.kind, calibration.runtime):
        raise ProfileError(
            f"costs of {calibration.device.kind} with {calibration.runtime} cannot be fitted to a "
            f"profile of {profile.device.kind} with {profile.runtime}"
        )
    if not profile.models:
        raise ProfileError("the profile holds no models; make one with `gdp profile --quick`")
    networks = replace(calibration.networks, transfer=())
    rows = rows_of(profile.models)
    transfer = fit_transfer(rows.features, networks.seconds(rows.features), rows.seconds)
    measured_s = segment_s(profile.overheads)
    return replace(
        calibration, device=profile.device, versions=profile.versions, date=profile.date,
        predictor=replace(networks, transfer=transfer), mean_error=None,
        segment_s=calibration.segment_s if measured_s is None else measured_s,
    )  # fmt: skip


def fit_transfer(
    features: KernelFeatures,
    known_s: Float[np.ndarray, "K"],
    measured_s: Float[np.ndarray, "K"],
) -> tuple[float, ...]:
    """Coefficients of log(seconds on a new device / seconds by the calibration of another one).

    Devices of one kind run the same kernels at other speeds. The log ratio is linear in a kernel's
    shares of arithmetic, traffic and launch, its class (products, reductions, the rest) and its
    length within the class, as threads and caches help long kernels more. Bayesian linear
    regression with a Gaussian prior around zero of precision P:
    (X'X / noise^2 + P) b = X'y / noise^2.
    """
    x = transfer_design(features, known_s)
    y = np.log(measured_s) - np.log(known_s)
    precision = np.diag(np.array(PRIOR_LOG_STD) ** -2.0)
    right = x.T @ y / NOISE_LOG_STD**2
    return tuple(np.linalg.solve(x.T @ x / NOISE_LOG_STD**2 + precision, right).tolist())


def evaluate(
    calibration: Calibration,
    held: Sequence[ProfiledModel],
    reference: Device,
    train: Sequence[ProfiledModel] = (),
    note: str = "",
) -> Report:
    """Errors of learned kernels on models, kernel by kernel and as a whole."""
    networks = calibration.networks
    kernels: list[Predicted] = []
    models: list[Predicted] = []
    for model in held:
        group = networks.groups(model.graph)
        features = kernel_features(model.graph, group)
        seconds = networks.seconds(features)
        datasheet = roofline_s(features, model, reference)
        kernels += _kernel_errors(model, group, features, seconds, datasheet)
        whole = model.latency_s, float(seconds.sum()), float(datasheet.sum())
        models.append(Predicted(model.name, model.family, *whole))
    return Report(
        tuple(kernels), tuple(models), len(train), len({m.family for m in train}),
        tuple(sorted({m.family for m in held})), note,
    )  # fmt: skip


def roofline_s(
    features: KernelFeatures, model: ProfiledModel, device: Device
) -> Float[np.ndarray, "K"]:
    """Datasheet seconds of every kernel: the slower of its arithmetic and its traffic."""
    flop, read, written, weights = (np.exp(features.size[:, i]) for i in (1, 2, 3, 4))
    speed = np.array([device.speed(model.graph.detail[op].dtype) for op in features.lead.tolist()])
    return np.maximum(flop / speed, (read + written + weights) / device.bytes_per_s)


def _kernel_errors(
    model: ProfiledModel,
    group: np.ndarray,
    features: KernelFeatures,
    seconds: Float[np.ndarray, "K"],
    datasheet: Float[np.ndarray, "K"],
) -> list[Predicted]:
    """Errors per kernel; kernels that fuse differently are merged before they are compared."""
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
        Predicted(
            model.name, kind.get(place, (0.0, "none"))[1], float(measured[place]),
            float(predicted[place]), float(plain[place]),
        )
        for place in range(len(members))
        if measured[place] > 0
    ]  # fmt: skip


def report_text(report: Report) -> str:
    """The figures of a report as aligned tables."""
    fitted = report.summary()
    if not report.models:
        return f"fitted to {report.train_models} models; {report.note}"
    lines = [
        f"fitted to {fitted['train_models']} models of {fitted['train_families']} families; "
        f"held out {len(report.models)} models of {len(report.held_families)} families: "
        f"{', '.join(report.held_families)}",
    ]
    if report.kernels:
        lines += [
            "",
            f"{'kernels, weighted by time':28} {'share':>6} {'count':>6} {'median':>8} {'p90':>8}"
            f" {'roofline':>9} {'p90':>8}",
            _kernel_line("all", 1.0, fitted["kernel_error"]),
            *(_kernel_line(name, f["time_share"], f) for name, f in fitted["by_type"].items()),
        ]
    lines += [
        "",
        f"{'whole models':28} {'measured':>10} {'predicted':>10} {'error':>8} {'roofline':>9}",
    ]
    lines += [
        f"{m['model']:28} {m['measured_s'] * 1e3:7.2f} ms {m['predicted_s'] * 1e3:7.2f} ms "
        f"{m['error']:+8.1%} {m['roofline_error']:+9.1%}"
        for m in fitted["models"]
    ]
    for name, figures in fitted["model_error"].items():
        lines.append(
            f"{name}: mean error {figures['mean']:.1%}, median {figures['median']:.1%}, "
            f"within 10%: {figures['within_10_percent']:.0%}, worst {figures['worst']:.1%}, "
            f"bias {figures['bias']:+.1%}"
        )
    return printable_lines(lines)


def _kernel_line(name: str, share: float, figures: dict[str, Any]) -> str:
    ours, plain = figures["learned"], figures["roofline"]
    return (
        f"{name:28} {share:6.1%} {figures['kernels']:6} {ours['median']:8.1%} {ours['p90']:8.1%} "
        f"{plain['median']:9.1%} {plain['p90']:8.1%}"
    )


def write_plot(report: Report, path: Path) -> None:
    """Predicted against measured seconds on logarithmic axes, kernels and whole models."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError(f"a plot needs matplotlib: {install_command('plots')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5.2))
    for axis, rows, title in (
        (axes[0], report.kernels, "kernels of held-out families"),
        (axes[1], report.models, "whole held-out models"),
    ):
        measured = [row.measured_s * 1e3 for row in rows]
        axis.loglog(measured, [r.roofline_s * 1e3 for r in rows], ".", color="0.7", ms=4,
                    label="roofline")  # fmt: skip
        axis.loglog(measured, [r.predicted_s * 1e3 for r in rows], ".", color="C0", ms=4,
                    label="learned")  # fmt: skip
        ends = [min(measured, default=1.0), max(measured, default=1.0)]
        axis.loglog(ends, ends, "k-", lw=0.8)
        for factor in (0.9, 1.1):
            axis.loglog(ends, [e * factor for e in ends], "k:", lw=0.8)
        axis.set(xlabel="measured, ms", ylabel="predicted, ms", title=title)
        axis.legend()
    figure.tight_layout()
    # `gdp.base.files.writing` recognises gdp's plots by the software named in them.
    with atomic(path) as file:
        figure.savefig(file, dpi=80, format="png", metadata={"Software": "gdp"})
    pyplot.close(figure)
