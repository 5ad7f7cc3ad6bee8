"""How well costs are known: held-out errors, agreement of repeats, transfer to another device.

python benchmarks/costs.py report PROFILE             the shipped calibration on held-out families
python benchmarks/costs.py blind PROFILE              the shipped calibration on all of a profile
python benchmarks/costs.py robust PROFILE PROFILE     two calibrations from two profile runs
python benchmarks/costs.py seeds PROFILE [--seeds 3]  refits with other random numbers
python benchmarks/costs.py transfer PROFILE --flop-per-s 140e9 --bytes-per-s 20e9
                                                      few kernels of another device, error by k
python benchmarks/costs.py quick QUICK PROFILE        the shipped costs fitted to a quick profile
                                                      of this processor, on other models
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gdp.cluster.presets import device_preset
from gdp.cluster.types import Device
from gdp.costs.calibrate import HELD_OUT, calibrate, evaluate
from gdp.costs.calibrate_text import report_text
from gdp.costs.default import shipped
from gdp.costs.features import KernelFeatures, kernel_features
from gdp.costs.fit import FitConfig, rows_of
from gdp.costs.learned import Calibration, kernel_seconds, kernels_of
from gdp.costs.profile import Profile, ProfiledModel, load_profile
from gdp.costs.transfer import adapt, datasheet_transfer, fit_transfer, most_telling, refit

WHAT = ("report", "blind", "robust", "seeds", "transfer", "quick")
SINGLE = ("synthetic_ops", "synthetic_image_ops")
"""Families that are single operators: what is worth measuring on a new device."""


def report(profile: Profile) -> str:
    """The shipped calibration on the held-out families of a profile."""
    held = [m for m in profile.models if m.family in HELD_OUT]
    train = [m for m in profile.models if m.family not in HELD_OUT]
    return report_text(evaluate(_calibration(), held, device_preset("cpu-core"), train))


def blind(profile: Profile) -> str:
    """The shipped calibration on models that were measured after all choices were made."""
    text = report_text(evaluate(_calibration(), profile.models, device_preset("cpu-core")))
    return text.partition("\n\n")[2]  # the first line says what was fitted: nothing here


def robust(first: Profile, second: Profile) -> str:
    """Whole-model predictions of two calibrations, each from a profile run of its own.

    Both are fitted to the models that both runs measured, so that only the measurements differ.
    """
    both = {m.name for m in first.models} & {m.name for m in second.models}
    reference = device_preset("cpu-core")
    made = []
    for profile in (first, second):
        common = tuple(m for m in profile.models if m.name in both)
        found, errors = calibrate(
            replace(profile, models=common), reference,
            held_out=sorted({m.family for m in common} & set(HELD_OUT)),
        )  # fmt: skip
        made.append({m.model: m.predicted_s for m in errors.models})
        del found
    ratio = np.array([made[1][name] / made[0][name] for name in made[0]]) - 1
    lines = [f"{name:28} {a * 1e3:9.2f} {made[1][name] * 1e3:9.2f} ms {made[1][name] / a - 1:+7.1%}"
             for name, a in made[0].items()]  # fmt: skip
    lines.append(
        f"{len(both)} models in both runs; on {len(ratio)} held-out models predictions differ by "
        f"{np.abs(ratio).mean():.1%} on average, {np.abs(ratio).max():.1%} at most; within 5%: "
        f"{(np.abs(ratio) <= 0.05).mean():.0%}"
    )
    return "\n".join(lines)


def seeds(profile: Profile, count: int) -> str:
    """Errors on held-out families of calibrations fitted with other random numbers."""
    lines = []
    for seed in range(count):
        _, errors = calibrate(profile, device_preset("cpu-core"), config=FitConfig(seed=seed))
        found = errors.summary()
        kernels, models = found["kernel_error"]["learned"], found["model_error"]["learned"]
        lines.append(
            f"seed {seed}: kernels median {kernels['median']:.1%}, p90 {kernels['p90']:.1%}; "
            f"models mean {models['mean']:.1%}, within 10% {models['within_10_percent']:.0%}, "
            f"worst {models['worst']:.1%}, bias {models['bias']:+.1%}"
        )
    return "\n".join(lines)


def transfer(profile: Profile, target: Device, counts: Sequence[int], draws: int) -> str:
    """Errors on the other device's models, by the number of single kernels measured on it.

    Kernels are chosen by what they tell, and, for comparison, at random (mean over draws).
    """
    source = _calibration()
    single = [m for m in profile.models if m.family in SINGLE]
    whole = [m for m in profile.models if m.family not in SINGLE]
    rows = rows_of(single)
    known_s = kernel_seconds(source, rows.features)
    prior = datasheet_transfer(device_preset("cpu-core"), target)
    lines = [
        f"{'k':>4} {'kernels':>9} {'p90':>7} {'models':>8} {'worst':>7}   random kernels: models"
    ]
    for count in counts:
        at = np.array(most_telling(rows.features, count) if count else [], dtype=np.int64)
        figures = _errors(source, prior, rows.features, known_s, rows.seconds, at, whole)
        random = []
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            drawn = rng.choice(len(known_s), size=count, replace=False)
            random.append(
                _errors(source, prior, rows.features, known_s, rows.seconds, drawn, whole)[2]
            )
        lines.append(
            f"{count:4} {figures[0]:9.1%} {figures[1]:7.1%} {figures[2]:8.1%} {figures[3]:7.1%}"
            f"   {np.mean(random):.1%}"
        )
    return "\n".join(lines)


def _errors(
    source: Calibration, prior, features: KernelFeatures, known_s: np.ndarray,
    measured_s: np.ndarray, at: np.ndarray, whole: Sequence[ProfiledModel],
) -> tuple[float, float, float, float]:  # fmt: skip
    """(median kernel error, p90, mean model error, worst) after measuring these kernels."""
    chosen = take(features, at)
    found = fit_transfer(prior, chosen, known_s[at], measured_s[at])
    moved = adapt(source, found, source.device)
    errors = evaluate(moved, whole, device_preset("cpu-core")).summary()
    kernels, models = errors["kernel_error"]["learned"], errors["model_error"]["learned"]
    return kernels["median"], kernels["p90"], models["mean"], models["worst"]


def take(features: KernelFeatures, at: np.ndarray) -> KernelFeatures:
    """Some of the kernels."""
    return KernelFeatures(
        lead_type=tuple(features.lead_type[i] for i in at),
        member_types=tuple(features.member_types[i] for i in at),
        size=features.size[at],
        other=features.other[at],
        lead=features.lead[at],
        ops=tuple(features.ops[i] for i in at),
    )


def quick(few: Profile, others: Profile) -> str:
    """Errors on the models of a profile, before and after a fit to a few models, beside what the
    kernels took in all: on a machine that does other things too, their fastest runs are less
    disturbed than whole models are."""
    before, after = _calibration(), refit(_calibration(), few)
    lines = [f"{'model':24} {'kernels':>10} {'whole':>10} {'shipped':>8} {'fitted':>8}   (ms)"]
    for model in others.models:
        errors = []
        for calibration in (before, after):
            group = kernels_of(calibration, model.graph)
            predicted_s = kernel_seconds(calibration, kernel_features(model.graph, group)).sum()
            errors.append(predicted_s / model.kernel_s - 1.0)
        lines.append(
            f"{model.name:24} {model.kernel_s * 1e3:10.3f} {model.latency_s * 1e3:10.3f} "
            f"{errors[0]:+8.0%} {errors[1]:+8.0%}"
        )
    return "\n".join(lines)


def _calibration() -> Calibration:
    found = [c for c in shipped() if c.device.kind == "cpu-core"]
    if not found:
        raise SystemExit("no calibration ships for cpu-core; make one with `gdp calibrate`")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("profiles", nargs="+")
    parser.add_argument("--counts", default="0,1,2,4,8,16,32,64")
    parser.add_argument("--seeds", type=int, help="of refits (3), of draws of kernels (5)")
    parser.add_argument("--flop-per-s", type=float, default=140e9, help="datasheet of the target")
    parser.add_argument("--bytes-per-s", type=float, default=20e9)
    arguments = parser.parse_args()
    profiles = [load_profile(path) for path in arguments.profiles]
    if arguments.what == "report":
        print(report(profiles[0]))
    elif arguments.what == "blind":
        print(blind(profiles[0]))
    elif arguments.what == "robust":
        print(robust(profiles[0], profiles[1]))
    elif arguments.what == "seeds":
        print(seeds(profiles[0], arguments.seeds or 3))
    elif arguments.what == "quick":
        print(quick(profiles[0], profiles[1]))
    else:
        target = Device(
            "target", "target", {"default": arguments.flop_per_s}, arguments.bytes_per_s
        )
        counts = json.loads(f"[{arguments.counts}]")
        print(transfer(profiles[0], target, counts, arguments.seeds or 5))


if __name__ == "__main__":
    main()
