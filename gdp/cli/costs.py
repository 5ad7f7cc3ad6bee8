"""`gdp profile` and `gdp calibrate`: costs that are measured."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.base.errors import ClusterError
from gdp.cli import options
from gdp.cli.show import show

if TYPE_CHECKING:
    from gdp.api.calibrate import Remembered
    from gdp.costs.profile import Overheads, Profile


SHIPPED = "shipped"
QUICK = ("bvlc_alexnet", "shufflenet", "zfnet512")


@dataclass(frozen=True)
class Rounds:
    """Duration and conditions of measuring a model."""

    threads: int = options.option("--threads", type=int, default=1)
    rounds: int = options.option("--rounds", type=int, default=5)
    seconds: float = options.option("--seconds", type=float, default=2.0, help="Per model.")
    seed: int = options.option("--seed", type=int, default=0, help="Of inputs and weights.")


@click.command()
@click.argument("models", nargs=-1, metavar="MODEL...")
@options.dims
@click.option(
    "--device", default="cpu:0", show_default=True, help="cpu:CORE, jax:DEVICE or torch:DEVICE."
)
@options.pass_dataclass("measuring", Rounds)
@click.option("--family", metavar="NAME", help="Of all these models; default: each its own.")
@click.option("--no-overheads", is_flag=True, help="Leave session and hand-over costs out.")
@click.option("--only-overheads", is_flag=True, help="Measure these costs, and no model.")
@click.option("--quick", is_flag=True, help="Small models that gdp brings: a minute or two.")
@options.outputs(
    profile=options.written(
        "-o",
        "--output",
        metavar="PROFILE",
        help=".json or .json.gz; without it gdp remembers for this machine what it learns.",
    )
)
@options.as_json
def profile(
    models: tuple[str, ...], dims: tuple[str, ...], device: str, measuring: Rounds,
    family: str | None, no_overheads: bool, only_overheads: bool, quick: bool,
    outputs: options.Outputs,
) -> None:  # fmt: skip
    """Measure models kernel by kernel, at the level that `gdp run` executes.

    Without -o, `place`, `run` and `report` predict by the learned costs from then on; with it a
    file is written for `gdp calibrate`.

    MODEL is what `gdp place` takes: ONNX models with --device cpu:CORE, JAX functions
    (python:package.module:function) with --device jax:cpu or jax:gpu, PyTorch modules (the same, or
    hf:CONFIG) with --device torch:cpu or torch:cuda.
    """
    from msgspec.structs import asdict as fields_of

    from gdp.costs.profile import save_profile

    if bool(models) + only_overheads + quick != 1 or (only_overheads and no_overheads):
        raise ValueError("name models to profile, or --quick or --only-overheads without a model")
    outputs.require(*models)
    named = [(_stem(model), family or _stem(model), model) for model in models]
    profile = _measured(named, dims, device, measuring, not no_overheads, quick)
    if "profile" in outputs.paths:
        save_profile(profile, outputs.paths["profile"])
    rows = [
        {"model": m.name, "latency_s": m.latency_s, "kernels": len(m.kernels),
         "kernel_s": m.kernel_s, "rounds": m.rounds, "runs": m.runs}
        for m in profile.models
    ]  # fmt: skip
    summary = {
        "profile": outputs.paths.get("profile"), "statistic": profile.statistic, "models": rows
    }  # fmt: skip
    lines = [
        f"{row['model']:24} {row['latency_s'] * 1e3:10.3f} ms  "
        f"{row['kernels']:5} kernels, {row['kernel_s'] * 1e3:.3f} ms"
        for row in rows
    ]
    lines += [_overheads_text(profile.overheads), f"statistic: {profile.statistic}"]
    if "profile" not in outputs.paths:
        learned = _remembered(profile)
        summary["learned"] = learned.to_json()
        lines += _remembered_lines(learned)
    show(summary | {"overheads": fields_of(profile.overheads)}, lambda: "\n".join(lines))


def _measured(
    named: list[tuple[str, str, str]],
    dims: tuple[str, ...],
    device: str,
    measuring: Rounds,
    overheads: bool,
    quick: bool,
) -> "Profile":
    """Profile of models, each with its name and family, by the runtime of the device."""
    from gdp.question.models import with_dims

    kind, _, index = device.partition(":")
    if kind == "jax" and quick and index in ("", "cpu"):
        return _quick_jax(measuring)
    if kind == "jax":
        if not named:
            raise ValueError(f"--device {device} needs models: --quick is for cpu:CORE and jax:cpu")
        from gdp.targets.jax.profile import profile_functions

        functions = [(name, group, *_jax_function(model)) for name, group, model in named]
        return profile_functions(
            functions, index or "cpu", rounds=measuring.rounds, seconds=measuring.seconds
        )
    if kind == "torch":
        from gdp.targets.pytorch.profile import profile_modules

        if not named:
            raise ValueError(
                "--device torch:... needs models: --quick and --only-overheads have none"
            )
        return profile_modules(
            [(name, group, _torch_model(model)) for name, group, model in named], index or "cpu",
            rounds=measuring.rounds, seconds=measuring.seconds, overheads=overheads,
        )  # fmt: skip
    if kind == "cpu" and (index or "0").isdigit():
        from gdp.targets.onnxruntime.profile import ProfileConfig, profile_models

        config = ProfileConfig(core=int(index or 0), **asdict(measuring))
        if quick:
            named = [(name, name, f"onnx:light_{name}") for name in QUICK]
        return profile_models(named, config, dims=with_dims(dims), overheads=overheads)
    raise ClusterError(
        f"--device {device!r} must be cpu:CORE, jax:cpu, jax:gpu, torch:cpu or torch:cuda"
    )


def _quick_jax(measuring: Rounds) -> "Profile":
    """Profile of small JAX models on the CPU, split in two devices to time copies between them.

    JAX reads the number of devices when it is first used.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    from gdp.targets.jax.profile import quick_profile
    from gdp.targets.jax.small_models import small_models

    return quick_profile(list(small_models()), measuring.rounds, min(measuring.seconds, 1.0))


def _overheads_text(overheads: "Overheads") -> str:
    """Costs of executing besides the kernels, in one line."""
    shown = {"session": overheads.session_s, "cut": overheads.cut_s, "kernel": overheads.kernel_s,
             "hand-over": overheads.handover_s}  # fmt: skip
    parts = [f"{name} {s * 1e6:.2f} us" for name, s in shown.items() if s is not None]
    return f"overheads: {', '.join(parts) or 'not measured'}"


def _jax_function(model: str) -> tuple[Any, Any]:
    """The JAX function of a `python:` model, and its example arguments."""
    from gdp.base.errors import ModelError
    from gdp.importers.python import PREFIX, python_function

    if not model.startswith(PREFIX):
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
    from gdp.base.errors import ModelError
    from gdp.importers.pytorch.model import TorchModel
    from gdp.question.models import is_traced, traced_model

    model_code = traced_model(model) if is_traced(model) else None
    if not isinstance(model_code, TorchModel):
        raise ModelError(
            f"{model!r} is no PyTorch module; --device torch:... measures python: and hf: models"
        )
    return model_code


def _stem(model: str) -> str:
    return model.rpartition("/")[2].removesuffix(".onnx").replace(":", "_")


@click.command()
@click.argument("profiles", nargs=-1, required=True, metavar="PROFILE...")
@click.option("--hold-out", metavar="A,B", help="Families to test on; default: a fixed choice.")
@options.seed
@click.option("--steps", type=int, default=None, help="Of fitting.")
@click.option("--base", metavar="COSTS",
              help="Keep the fit of this folder, or the shipped one; see below.")  # fmt: skip
@options.outputs(
    costs=options.written(
        "-o",
        "--output",
        metavar="COSTS",
        help="A folder; without it gdp remembers for this machine what it learns.",
    ),
    plot=options.written(
        "--plot", metavar="P.png", help="Predicted against measured (extra: plots)."
    ),
)
@options.as_json
def calibrate(
    profiles: tuple[str, ...], outputs: options.Outputs, hold_out: str | None, seed: int,
    steps: int | None, base: str | None,
) -> None:  # fmt: skip
    """Fit costs to profiles, and report the error on families of models held out.

    With --base little is: profiles of a few models scale the costs to this processor (a factor per
    class of kernels), profiles of overheads change what a session and a cut cost. `--base shipped`
    takes the costs that gdp brings. A calibration that predicts whole models worse than before is
    refused.

    Without -o nothing is fitted anew: what the profiles teach is remembered for this machine, as
    `gdp tune` remembers its runs.
    """
    from gdp.api.calibrate import reference_device
    from gdp.costs.calibrate import calibrate as fit_costs
    from gdp.costs.calibrate import report_text, write_plot
    from gdp.costs.cost_file import save_costs
    from gdp.costs.fit import FitConfig
    from gdp.costs.profile import load_profile, merge

    outputs.require(*profiles, folder="costs" if "costs" in outputs.paths else None)
    config = FitConfig(seed=seed)
    if steps is not None:
        config = replace(config, steps=steps)
    merged = merge([load_profile(path) for path in profiles])
    if "costs" not in outputs.paths:
        learned = _remembered(merged)
        show(learned.to_json(), lambda: "\n".join(_remembered_lines(learned)))
        return
    output = outputs.paths["costs"]
    if base is not None:
        _rebase(base, merged, output)
        return
    calibration, report = fit_costs(
        merged, reference_device(merged.device.kind),
        held_out=None if hold_out is None else hold_out.split(","), config=config,
    )  # fmt: skip
    summary: dict[str, Any] = report.summary()
    save_costs(calibration, output, report=summary, recipe=_recipe(config, profiles), force=True)
    if plot := outputs.paths.get("plot"):
        write_plot(report, Path(plot))
    show(summary, lambda: report_text(report))


def _rebase(base: str, profile: "Profile", output: str) -> None:
    """Adapt the costs of a folder, or the shipped ones, to a profile, and write them."""
    from gdp.api.calibrate import reference_device, require_better
    from gdp.base import checkpoint
    from gdp.base.files.reading import Kind, read_text
    from gdp.costs.calibrate import evaluate, recharge, refit
    from gdp.costs.cost_file import load_costs, save_costs
    from gdp.costs.default import shipped_for
    from gdp.costs.profile import ProfileError

    shipped = base == SHIPPED
    costs = shipped_for(profile.device.kind) if shipped else load_costs(base)
    report: dict[str, Any] = {} if shipped else checkpoint.read_meta(base).get("report", {})
    lines, recipe = [], Path(base) / "recipe.toml"
    if profile.models:
        adapted, reference = refit(costs, profile), reference_device(profile.device.kind)
        note = "fitted to the models of a profile: what others are off by is unknown"
        both = (costs, adapted)
        before, after = (evaluate(c, profile.models, reference, note=note) for c in both)
        require_better(before.models, after.models, profile.models)
        report = {"note": note, "train_models": len(profile.models)}
        lines += [
            f"{m.model:24} {m.measured_s * 1e3:9.3f} ms, predicted {n.predicted_s * 1e3:9.3f} ms, "
            f"before {m.predicted_s * 1e3:9.3f} ms"
            for m, n in zip(before.models, after.models, strict=True)
        ]
    else:
        adapted = recharge(costs, profile)
    text = ""
    if not shipped and recipe.exists():
        text = read_text(recipe, Kind("recipe of costs", ProfileError))
    save_costs(adapted, output, report=report, recipe=text)
    lines.append(f"{output}: a segment costs {1e6 * (adapted.segment_s or 0.0):.1f} us")
    show(
        {
            "costs": output,
            "segment_s": adapted.segment_s,
            "transfer": list(getattr(adapted.predictor, "transfer", ())),
        },
        lambda: "\n".join(lines),
    )


def _remembered(profile: "Profile") -> "Remembered":
    """Store a profile's costs of this machine."""
    from gdp.api.calibrate import remember_profile
    from gdp.costs.profile import ProfileError

    try:
        return remember_profile(profile)
    except OSError as error:
        raise ProfileError(f"what was learned cannot be kept: {error}") from error


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
