"""The verbs that measure: `gdp profile` and `gdp calibrate`."""

import json
from pathlib import Path
from typing import Any

import click

from gdp.cli_targets import force_option, permit_of, require_files
from gdp.errors import ClusterError


def register(cli: click.Group) -> None:
    """Add the verbs to the command line."""
    cli.add_command(profile)
    cli.add_command(calibrate)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
@click.option("--device", default="cpu:0", show_default=True, help="cpu:CORE, or jax:DEVICE.")
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--seconds", type=float, default=2.0, show_default=True, help="Per model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of inputs and weights.")
@click.option("--family", metavar="NAME", help="Of all these models; default: each its own.")
@click.option("--no-overheads", is_flag=True, help="Leave session and hand-over costs out.")
@click.option("-o", "--output", required=True, metavar="PROFILE", help=".json or .json.gz")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def profile(
    models: tuple[str, ...], dims: tuple[str, ...], device: str, threads: int, rounds: int,
    seconds: float, seed: int, family: str | None, no_overheads: bool, output: str, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure models kernel by kernel, at the level that `gdp run` executes.

    MODEL is what `gdp place` takes: ONNX models with --device cpu:CORE, and
    python:package.module:function with --device jax:cpu or jax:gpu.
    """
    from gdp.api import with_dims
    from gdp.costs.profile import save_profile

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
        click.echo(json.dumps({"profile": output, "statistic": made.statistic, "models": rows}))
        return
    for row in rows:
        click.echo(
            f"{row['model']:24} {row['latency_s'] * 1e3:10.3f} ms  "
            f"{row['kernels']:5} kernels, {row['kernel_s'] * 1e3:.3f} ms"
        )
    click.echo(f"statistic: {made.statistic}")


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
@click.option("--plot", metavar="P.png", help="Predicted against measured (extra: plots).")
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def calibrate(
    profiles: tuple[str, ...], output: str, hold_out: str | None, seed: int, steps: int | None,
    plot: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit costs to profiles, and report the error on families of models held out."""
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


def _recipe(config: Any, profiles: tuple[str, ...]) -> str:
    """What was run, as TOML."""
    from dataclasses import asdict

    lines = [f"{key} = {value}" for key, value in asdict(config).items()]
    names = ", ".join(json.dumps(Path(p).name) for p in profiles)
    return "\n".join(["[fit]", *lines, "", "[data]", f"profiles = [{names}]", ""])
