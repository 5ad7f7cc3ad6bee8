"""The verbs that measure: `gdp profile` and `gdp calibrate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.cli_targets import force_option, permit_of, require_files
from gdp.errors import ClusterError

if TYPE_CHECKING:
    from gdp.costs.profile import Overheads, Profile


def register(cli: click.Group) -> None:
    """Add the verbs to the command line."""
    cli.add_command(profile)
    cli.add_command(calibrate)


@click.command()
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
@click.option("--device", default="cpu:0", show_default=True, help="cpu:CORE, or jax:DEVICE.")
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--seconds", type=float, default=2.0, show_default=True, help="Per model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of inputs and weights.")
@click.option("--family", metavar="NAME", help="Of all these models; default: each its own.")
@click.option("--no-overheads", is_flag=True, help="Leave session and hand-over costs out.")
@click.option("--only-overheads", is_flag=True, help="Measure these costs, and no model.")
@click.option("-o", "--output", required=True, metavar="PROFILE", help=".json or .json.gz")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def profile(
    models: tuple[str, ...], dims: tuple[str, ...], device: str, threads: int, rounds: int,
    seconds: float, seed: int, family: str | None, no_overheads: bool, only_overheads: bool,
    output: str, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure models kernel by kernel, at the level that `gdp run` executes.

    MODEL is what `gdp place` takes: ONNX models with --device cpu:CORE, and
    python:package.module:function with --device jax:cpu or jax:gpu.
    """
    from msgspec.structs import asdict

    from gdp.api import with_dims
    from gdp.costs.profile import save_profile

    if bool(models) == only_overheads or (only_overheads and no_overheads):
        raise ValueError("name models to profile, or --only-overheads without a model")
    require_files({"profile": output}, permit_of(*models, force=force))
    named = [(_stem(model), family or _stem(model), model) for model in models]
    kind, _, index = device.partition(":")
    if kind == "jax":
        from gdp.runtime.profiler_jax import profile_functions

        functions = [(name, group, *_jax_function(model)) for name, group, model in named]
        made = profile_functions(functions, index or "cpu", rounds=rounds, seconds=seconds)
    elif kind == "cpu" and (index or "0").isdigit():
        from gdp.runtime.profiler import ProfileConfig, profile_models

        config = ProfileConfig(
            core=int(index or 0), threads=threads, rounds=rounds, seconds=seconds, seed=seed
        )
        made = profile_models(named, config, dims=with_dims(dims), overheads=not no_overheads)
    else:
        raise ClusterError(f"--device {device!r} must be cpu:CORE, jax:cpu or jax:gpu")
    save_profile(made, output)
    rows = [
        {"model": m.name, "latency_s": m.latency_s, "kernels": len(m.kernels),
         "kernel_s": m.kernel_s, "rounds": m.rounds, "runs": m.runs}
        for m in made.models
    ]  # fmt: skip
    if as_json:
        click.echo(
            json.dumps(
                {
                    "profile": output,
                    "statistic": made.statistic,
                    "models": rows,
                    "overheads": asdict(made.overheads),
                }
            )
        )
        return
    for row in rows:
        click.echo(
            f"{row['model']:24} {row['latency_s'] * 1e3:10.3f} ms  "
            f"{row['kernels']:5} kernels, {row['kernel_s'] * 1e3:.3f} ms"
        )
    click.echo(_overheads_text(made.overheads))
    click.echo(f"statistic: {made.statistic}")


def _overheads_text(found: "Overheads") -> str:
    """What executing costs beside the kernels."""
    shown = {"session": found.session_s, "cut": found.cut_s, "kernel": found.kernel_s,
             "hand-over": found.handover_s}  # fmt: skip
    parts = [f"{name} {s * 1e6:.2f} us" for name, s in shown.items() if s is not None]
    return f"overheads: {', '.join(parts) or 'not measured'}"


def _jax_function(model: str) -> tuple[Any, Any]:
    """What a `python:` model returns: a JAX function and its example arguments."""
    from gdp.errors import ModelError
    from gdp.models import PYTHON_PREFIX, python_function

    if not model.startswith(PYTHON_PREFIX):
        raise ModelError(
            f"{model!r}: --device jax:... measures python:package.module:function; ONNX models are "
            "measured with --device cpu:0"
        )
    made: Any = python_function(model)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ModelError(f"{model!r} must return a JAX function and a tuple of its arguments")
    return made[0], made[1]


def _stem(model: str) -> str:
    return model.rpartition("/")[2].removesuffix(".onnx").replace(":", "_")


@click.command()
@click.argument("profiles", nargs=-1, required=True, metavar="PROFILE...")
@click.option("-o", "--output", required=True, metavar="COSTS", help="A folder.")
@click.option("--hold-out", metavar="A,B", help="Families to test on; default: a fixed choice.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--steps", type=int, default=None, help="Of fitting.")
@click.option("--base", metavar="COSTS",
              help="Keep this folder's fit; take only overheads from the profiles.")  # fmt: skip
@click.option("--plot", metavar="P.png", help="Predicted against measured (extra: plots).")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def calibrate(
    profiles: tuple[str, ...], output: str, hold_out: str | None, seed: int, steps: int | None,
    base: str | None, plot: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit costs to profiles, and report the error on families of models held out.

    With --base nothing is fitted: what a session and a cut cost is all that changes.
    """
    from dataclasses import replace

    from gdp.costs.calibrate import calibrate as fit_costs
    from gdp.costs.calibrate_text import report_text, write_plot
    from gdp.costs.cost_file import save_costs
    from gdp.costs.fit import FitConfig
    from gdp.costs.profile import load_profile, merge
    from gdp.presets import device_names, device_preset
    from gdp.targets import require_folder

    permit = permit_of(*profiles, force=force)
    require_folder(output, "costs", permit)
    require_files({"plot": plot}, permit)
    config = FitConfig(seed=seed)
    if steps is not None:
        config = replace(config, steps=steps)
    merged = merge([load_profile(path) for path in profiles])
    if base is not None:
        click.echo(_recharged(base, merged, output, as_json))
        return
    kind = merged.device.kind
    nearest = "cpu-core" if kind.startswith("cpu") else "a100"  # for the roofline beside it
    calibration, report = fit_costs(
        merged, device_preset(kind if kind in device_names() else nearest),
        held_out=None if hold_out is None else hold_out.split(","), config=config,
    )  # fmt: skip
    summary: dict[str, Any] = report.summary()
    save_costs(calibration, output, report=summary, recipe=_recipe(config, profiles), force=True)
    if plot:
        write_plot(report, Path(plot))
    click.echo(json.dumps(summary) if as_json else report_text(report))


def _recharged(base: str, profile: "Profile", output: str, as_json: bool) -> str:
    """Writes the costs of a folder with the overheads of a profile; returns what to print."""
    from gdp import checkpoint
    from gdp.costs.calibrate import recharge
    from gdp.costs.cost_file import load_costs, save_costs

    calibration = recharge(load_costs(base), profile)
    recipe = Path(base) / "recipe.toml"
    save_costs(
        calibration, output, report=checkpoint.read_meta(base)["report"],
        recipe=recipe.read_text() if recipe.exists() else "",
    )  # fmt: skip
    found = {"costs": output, "segment_s": calibration.segment_s}
    text = f"{output}: a segment costs {1e6 * (calibration.segment_s or 0.0):.1f} us"
    return json.dumps(found) if as_json else text


def _recipe(config: Any, profiles: tuple[str, ...]) -> str:
    """What was run, as TOML."""
    from dataclasses import asdict

    lines = [f"{key} = {value}" for key, value in asdict(config).items()]
    names = ", ".join(json.dumps(Path(p).name) for p in profiles)
    return "\n".join(["[fit]", *lines, "", "[data]", f"profiles = [{names}]", ""])
