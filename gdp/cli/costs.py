"""`gdp profile` and `gdp calibrate`: costs that are measured."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.cli import options
from gdp.cli.asking import require_writable
from gdp.cli.show import show

if TYPE_CHECKING:
    from gdp.api.calibrate import Remembered
    from gdp.costs.profile import Overheads


@click.command()
@options.stack(
    click.argument("models", nargs=-1, metavar="MODEL..."), options.DIMS,
    click.option(
        "--device", default="cpu:0", show_default=True,
        help="cpu:CORE, jax:DEVICE or torch:DEVICE.",
    ),
    click.option("--threads", type=int, default=1, show_default=True),
    click.option("--rounds", type=int, default=5, show_default=True),
    click.option("--seconds", type=float, default=2.0, show_default=True, help="Per model."),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Of inputs and weights."
    ),
    click.option("--family", metavar="NAME", help="Of all these models; default: each its own."),
    click.option("--no-overheads", is_flag=True, help="Leave session and hand-over costs out."),
    click.option("--only-overheads", is_flag=True, help="Measure these costs, and no model."),
    click.option("--quick", is_flag=True, help="Small models that gdp brings: a minute or two."),
    options.output(
        "PROFILE", ".json or .json.gz; without it gdp remembers for this machine what it learns."
    ),
    options.FORCE, options.AS_JSON,
)  # fmt: skip
def profile(
    models: tuple[str, ...], dims: tuple[str, ...], device: str, family: str | None,
    no_overheads: bool, only_overheads: bool, quick: bool, output: str | None, force: bool,
    **measuring: Any,
) -> None:  # fmt: skip
    """Measure models kernel by kernel, at the level that `gdp run` executes.

    Without -o, `place`, `run` and `report` predict by the learned costs from then on; with it a
    file is written for `gdp calibrate`.

    MODEL is what `gdp place` takes: ONNX models with --device cpu:CORE, JAX functions
    (python:package.module:function) with --device jax:cpu or jax:gpu, PyTorch modules (the same, or
    hf:CONFIG) with --device torch:cpu or torch:cuda.
    """
    from msgspec.structs import asdict as fields_of

    from gdp.api.calibrate import measured_profile, remember_profile
    from gdp.costs.profile import save_profile

    if bool(models) + only_overheads + quick != 1 or (only_overheads and no_overheads):
        raise ValueError("name models to profile, or --quick or --only-overheads without a model")
    require_writable(force, *models, profile=output)
    named = [(_stem(model), family or _stem(model), model) for model in models]
    profile = measured_profile(
        named, device, dims=dims, overheads=not no_overheads, quick=quick, **measuring
    )
    if output:
        save_profile(profile, output)
    rows = [
        {"model": m.name, "latency_s": m.latency_s, "kernels": len(m.kernels),
         "kernel_s": m.kernel_s, "rounds": m.rounds, "runs": m.runs}
        for m in profile.models
    ]  # fmt: skip
    summary = {"profile": output, "statistic": profile.statistic, "models": rows}
    lines = [
        f"{row['model']:24} {row['latency_s'] * 1e3:10.3f} ms  "
        f"{row['kernels']:5} kernels, {row['kernel_s'] * 1e3:.3f} ms"
        for row in rows
    ]
    lines += [_overheads_text(profile.overheads), f"statistic: {profile.statistic}"]
    if not output:
        learned = remember_profile(profile)
        summary["learned"] = learned.to_json()
        lines += _remembered_lines(learned)
    show(summary | {"overheads": fields_of(profile.overheads)}, lambda: "\n".join(lines))


def _overheads_text(overheads: "Overheads") -> str:
    """Costs of executing besides the kernels, in one line."""
    shown = {"session": overheads.session_s, "cut": overheads.cut_s, "kernel": overheads.kernel_s,
             "hand-over": overheads.handover_s}  # fmt: skip
    parts = [f"{name} {s * 1e6:.2f} us" for name, s in shown.items() if s is not None]
    return f"overheads: {', '.join(parts) or 'not measured'}"


def _stem(model: str) -> str:
    return model.rpartition("/")[2].removesuffix(".onnx").replace(":", "_")


@click.command()
@options.stack(
    click.argument("profiles", nargs=-1, required=True, metavar="PROFILE..."),
    click.option(
        "--hold-out", metavar="A,B", help="Families to test on; default: a fixed choice."
    ),
    options.SEED,
    click.option("--steps", type=int, help="Of fitting."),
    click.option(
        "--base", metavar="COSTS",
        help="Keep the fit of this folder, or the shipped one; see below.",
    ),
    options.output("COSTS", "A folder; without it gdp remembers for this machine what it learns."),
    click.option(
        "--plot", metavar="P.png", help="Predicted against measured (extra: plots)."
    ),
    options.FORCE, options.AS_JSON,
)  # fmt: skip
def calibrate(
    profiles: tuple[str, ...], hold_out: str | None, seed: int, steps: int | None,
    base: str | None, output: str | None, plot: str | None, force: bool,
) -> None:  # fmt: skip
    """Fit costs to profiles, and report the error on families of models held out.

    With --base little is: profiles of a few models scale the costs to this processor (a factor per
    class of kernels), profiles of overheads change what a session and a cut cost. `--base shipped`
    takes the costs that gdp brings. A calibration that predicts whole models worse than before is
    refused.

    Without -o nothing is fitted anew: what the profiles teach is remembered for this machine, as
    `gdp tune` remembers its runs.
    """
    from gdp.api.calibrate import rebase, reference_device, remember_profile
    from gdp.costs.calibrate import calibrate as fit_costs
    from gdp.costs.calibrate import report_text, write_plot
    from gdp.costs.cost_file import save_costs
    from gdp.costs.fit import FitConfig
    from gdp.costs.profile import load_profile, merge

    require_writable(force, *profiles, folder="costs", costs=output, plot=plot)
    config = FitConfig(seed=seed)
    if steps is not None:
        config = replace(config, steps=steps)
    merged = merge([load_profile(path) for path in profiles])
    if output is None:
        learned = remember_profile(merged)
        show(learned.to_json(), lambda: "\n".join(_remembered_lines(learned)))
        return
    if base is not None:
        adapted, rows = rebase(base, merged, output)
        lines = [
            f"{model:24} {measured_s * 1e3:9.3f} ms, predicted {after_s * 1e3:9.3f} ms, "
            f"before {before_s * 1e3:9.3f} ms"
            for model, measured_s, before_s, after_s in rows
        ]
        lines.append(f"{output}: a segment costs {1e6 * (adapted.segment_s or 0.0):.1f} us")
        transfer = list(getattr(adapted.predictor, "transfer", ()))
        summary = {"costs": output, "segment_s": adapted.segment_s, "transfer": transfer}
        show(summary, lambda: "\n".join(lines))
        return
    calibration, report = fit_costs(
        merged, reference_device(merged.device.kind),
        held_out=None if hold_out is None else hold_out.split(","), config=config,
    )  # fmt: skip
    summary: dict[str, Any] = report.summary()
    save_costs(calibration, output, report=summary, recipe=_recipe(config, profiles), force=True)
    if plot:
        write_plot(report, Path(plot))
    show(summary, lambda: report_text(report))


def _remembered_lines(learned: "Remembered") -> list[str]:
    off_before, off = learned.off
    lines = [
        f"{model:24} {measured_s * 1e3:9.3f} ms, predicted {before_s * 1e3:9.3f} ms, learned from "
        f"the others {after_s * 1e3:9.3f} ms"
        for model, measured_s, before_s, after_s in learned.rows
    ]
    return [*lines, f"remembered for this machine: predictions were {off_before:.0%} off, now "
            f"{off:.0%}; gdp tune --forget removes it"]  # fmt: skip


def _recipe(config: Any, profiles: tuple[str, ...]) -> str:
    """Settings and profiles of a fit, as TOML."""
    lines = [f"{key} = {value}" for key, value in asdict(config).items()]
    names = ", ".join(json.dumps(Path(p).name) for p in profiles)
    return "\n".join(["[fit]", *lines, "", "[data]", f"profiles = [{names}]", ""])
