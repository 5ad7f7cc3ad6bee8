"""Errors of costs on held-out families, and after a quick profile.

python benchmarks/costs.py report PROFILE             the shipped calibration on held-out families
python benchmarks/costs.py blind PROFILE              the shipped calibration on all of a profile
python benchmarks/costs.py transfer PROFILE           the shipped calibration, scaled to a device
                                                      of as many cores, on all of a profile
python benchmarks/costs.py quick QUICK PROFILE        the shipped costs fitted to a quick profile
                                                      of this processor, on other models
"""

import argparse
from dataclasses import replace

from gdp.cluster.presets import device_preset
from gdp.costs.calibrate import HELD_OUT, evaluate, refit, report_text
from gdp.costs.default import shipped, transferred
from gdp.costs.features import kernel_features
from gdp.costs.learned import Calibration
from gdp.costs.profile import Profile, load_profile

WHAT = ("report", "blind", "transfer", "quick")


def report(profile: Profile) -> str:
    """The shipped calibration on the held-out families of a profile."""
    held = [m for m in profile.models if m.family in HELD_OUT]
    train = [m for m in profile.models if m.family not in HELD_OUT]
    return report_text(evaluate(_calibration(), held, device_preset("cpu-core"), train))


def blind(profile: Profile) -> str:
    """The shipped calibration on models that were measured after all choices were made."""
    text = report_text(evaluate(_calibration(), profile.models, device_preset("cpu-core")))
    return text.partition("\n\n")[2]  # the first line says what was fitted: nothing here


def transfer(profile: Profile) -> str:
    """The shipped costs of one core, scaled by FLOP/s alone to the cores of a profile, and as they
    are; bandwidth counts as that of one core, as cores share it."""
    core, cores = device_preset("cpu-core"), profile.threads
    speeds = {name: cores * speed for name, speed in core.flop_per_s.items()}
    device = replace(core, kind=profile.device.kind, flop_per_s=speeds)
    rows = {"scaled": transferred(_calibration(), device), "as of one core": _calibration()}
    roofline, lines = "", [f"{cores} x {core.speed('float32') / 1e9:.0f} GFLOP/s"]
    for name, calibration in rows.items():
        report = report_text(evaluate(calibration, profile.models, device))
        *_, learned, roofline = report.splitlines()
        lines.append(f"{name}, {learned}")
    return "\n".join([*lines, roofline])


def quick(few: Profile, others: Profile) -> str:
    """Errors on the models of a profile, before and after a fit to a few models, beside what the
    kernels took in all: on a machine that does other things too, their fastest runs are less
    disturbed than whole models are."""
    before, after = _calibration(), refit(_calibration(), few)
    lines = [f"{'model':24} {'kernels':>10} {'whole':>10} {'shipped':>8} {'fitted':>8}   (ms)"]
    for model in others.models:
        errors = []
        for calibration in (before, after):
            networks = calibration.networks
            features = kernel_features(model.graph, networks.groups(model.graph))
            predicted_s = networks.seconds(features).sum()
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
    arguments = parser.parse_args()
    profiles = [load_profile(path) for path in arguments.profiles]
    if arguments.what == "report":
        print(report(profiles[0]))
    elif arguments.what == "blind":
        print(blind(profiles[0]))
    elif arguments.what == "transfer":
        print(transfer(profiles[0]))
    else:
        print(quick(profiles[0], profiles[1]))


if __name__ == "__main__":
    main()
