"""Placed models executed on two cores: outputs, and predicted beside measured seconds.

    python -m benchmarks.executed light [--simplicity 0,2] [--seconds 60] [--models bert,a.onnx]
    python -m benchmarks.executed runtimes --costs costs [--only PyTorch,JAX] [--seconds 12]

`light`: throughput of light ONNX models against one core, the runtime's own threads and a copy on
every core; BERT-base of 128 tokens is exported when it is first asked for. Figures are medians of
interleaved rounds with 95% intervals; what `gdp run` would advise ends every line.

`runtimes`: models x runtimes. PyTorch's predictions are by costs fitted to other models on the same
machine, those of the other runtimes by the shipped ones:

    M=python:benchmarks.models
    gdp profile $M:{gpt2,distilbert,vit,resnet,qwen2,qwen2_moe} \\
        --device torch:cpu --rounds 4 --seconds 4 -o p.json.gz
    gdp calibrate p.json.gz --steps 300 -o costs

For accelerate, cores stand for the accelerators and a disk for host memory: outputs count there,
times do not, and nothing is predicted. Every timing keeps both cores busy; run nothing beside it.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import gdp
from benchmarks.tables import between, head, line
from gdp.api.run import Executor, export, run
from gdp.cluster.presets import cluster_preset
from gdp.measure.measuring import Measuring
from gdp.measure.report import advice
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question import solve
from gdp.question.models import load, traced_model
from gdp.question.question import Question

FLAG = "--xla_force_host_platform_device_count=2"
BOX = "2xcpu-core"
TORCH = ("bert", "llama", "mixtral")
LIGHT = ("inception_v2", "squeezenet", "resnet50")
PIPELINED = "resnet50,densenet121,inception_v2,squeezenet"
Row = dict[str, Any]


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


def spec(name: str) -> str:
    """A light model by its name, BERT-base (needs the extra `corpus`), or an ONNX file's path."""
    if name == "bert":
        from pretrain.profile_corpus.exports import BERT_BASE, export

        return str(export(BERT_BASE, Path("runs/exports")))
    return name if name.endswith(".onnx") else f"onnx:light_{name}"


@main.command()
@click.option("--seconds", default=60.0, show_default=True, help="Of timing one execution.")
@click.option("--search-seconds", default=5.0, show_default=True, help="Of placing a model.")
@click.option("--simplicity", default="2", show_default=True, help="Percent; 0,2 runs all twice.")
@click.option("--models", default=PIPELINED, show_default=True, help="Or bert, or ONNX files.")
def light(seconds: float, search_seconds: float, simplicity: str, models: str) -> None:
    """Each model as `auto` places it, and as the best pipeline without replicated stages."""
    cluster = cluster_preset(BOX)
    for percent in map(float, simplicity.split(",")):
        click.echo(f"\nthroughput, samples/s; {percent:g}% for simplicity")
        click.echo(
            head("model | executed | pieces | equal | predicted | measured | error | 1 core | "
                 "2 threads | 2 copies | fastest", left=2)
        )  # fmt: skip
        for name, replicas in itertools.product(models.split(","), (True, False)):
            graph = load(spec(name))
            question = Question(
                graph, cluster, spec(name), objective="throughput",
                constraints=Constraints(replicas=replicas),
                search=Search(seconds=search_seconds, simplicity=percent / 100),
            )  # fmt: skip
            result = solve.solve(question)
            executor = Executor.of(question)
            prediction = executor.predict(result.placement)
            report = executor.run(result.placement, prediction, Measuring(seconds, precision=0.0))
            equal = report.outputs_equal and report.inner_equal
            sizes = "+".join(str(len(team)) for team in result.placement.teams)
            predicted, own = report.predicted_throughput_per_s, report.measured_throughput_per_s
            click.echo(line(
                name.rpartition("/")[2], f"replicas {sizes}" if sizes else "pipeline",
                len(report.segments), "yes" if equal else "NO",
                f"{predicted:.2f}", between(own, *report.throughput_interval_per_s, ".2f"),
                f"{predicted / own - 1:+.0%}",
                *(f"{row.throughput_per_s:.2f}" for row in report.baselines.values()),
                advice(report.to_json()),
            ))  # fmt: skip
            for note in (*report.warnings, *result.notes):
                click.echo(f"  {note}")


@dataclass(frozen=True)
class Options:
    """Seconds of measuring each row, and costs of torch on this machine."""

    seconds: float
    costs: str | None


def named(model: str) -> str:
    """The model's `python:` name."""
    return f"python:benchmarks.models:{model}"


def executed(
    model: str, name: str, runtime: str, objective: str, seconds: float, costs: str | None = None
) -> Row:
    """One model by `gdp.run`, placed by `auto`."""
    report = run(
        model, BOX, objective=objective, costs=costs, measuring=Measuring(seconds),
        search=Search(seconds=None, evaluations=400),
    )  # fmt: skip
    pieces = report["segments"]
    where = sorted({device for row in pieces for device in row["device"].split(", ")})
    if objective == "throughput":
        predicted, measured = (
            1 / report[f"{k}_throughput_per_s"] for k in ("predicted", "measured")
        )
        low, high = (1 / x for x in reversed(report["throughput_interval_per_s"]))
        one = 1 / report["baselines"]["single_device"]["throughput_per_s"]
    else:
        predicted, measured = report["predicted_latency_s"], report["measured_latency_s"]
        low, high = report["latency_interval_s"]
        one = report["baselines"]["single_device"]["latency_s"]
    return {
        "model": name, "runtime": runtime,
        "executed": f"{objective}: {len(pieces)} pieces on {', '.join(where)}",
        "equal": bool(report["outputs_equal"] and report.get("inner_equal", True)),
        "apart": report["max_relative_diff"], "predicted_s": predicted, "measured_s": measured,
        "interval_s": [low, high], "one_core_s": one,
    }  # fmt: skip


def ort_rows(options: Options) -> Iterable[Row]:
    """Light models of the onnx package."""
    for name in LIGHT:
        yield executed(f"onnx:light_{name}", name, "ONNX Runtime", "throughput", options.seconds)


def jax_rows(options: Options) -> Iterable[Row]:
    """A training step; JAX has two devices because of `FLAG`."""
    yield executed(named("jax_step"), "training step", "JAX", "latency", options.seconds)


def torch_rows(options: Options) -> Iterable[Row]:
    """The runtime of gdp for torch, one graph module per piece."""
    for name in TORCH:
        yield executed(named(name), name, "PyTorch", "throughput", options.seconds, options.costs)


def pipelining_rows(options: Options) -> Iterable[Row]:
    """Two processes with gloo, as `gdp export --to pipelining` writes them: seconds are those of a
    microbatch, of as many as are advised."""
    for name in TORCH:
        model, cluster = named(name), cluster_preset(BOX)
        found = gdp.place(
            model, cluster, target="pipelining", objective="throughput", costs=options.costs
        )
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out"
            export(found, model, "pipelining", output, cluster)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                [sys.executable, str(output / "run.py"), "--rounds", "5"], check=False,
                capture_output=True, text=True, env=environment,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        report = json.loads(done.stdout.strip().splitlines()[-1])
        score, count = found.score, report["microbatches"]
        rounds = [seconds / count for seconds in report["rounds_s"]]
        yield {
            "model": name, "runtime": "torch.distributed.pipelining",
            "executed": f"throughput: {report['stages']} processes, {count} microbatches",
            "equal": report["outputs_equal"], "apart": report["max_relative_diff"],
            "predicted_s": (score.latency_s + (count - 1) * score.period_s) / count,
            "measured_s": report["batch_s"] / count, "interval_s": [min(rounds), max(rounds)],
            "one_core_s": report["uncut_s"] / count,
        }  # fmt: skip


def accelerate_rows(options: Options) -> Iterable[Row]:
    """gdp's device maps, dispatched: an accelerator with memory for 60% of the weights."""
    from dataclasses import replace

    import torch

    from benchmarks.offloaded import Machine, dispatched, equal, measured
    from gdp.cluster.presets import device_preset
    from gdp.costs.base import roofline
    from gdp.targets.hf_accelerate.device_map import device_map
    from gdp.targets.hf_accelerate.plan import plan_accelerate
    from gdp.targets.modules import kept_modules

    with tempfile.TemporaryDirectory() as scratch:
        host, card = (replace(device_preset(n), name=n) for n in ("cpu-server", "rtx4090"))
        machine = Machine(torch.device("cpu"), host, card, 1e-5, 1e10, Path(scratch))
        for name in TORCH:
            model: Any = traced_model(named(name))
            weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
            with torch.inference_mode():
                wanted = model.module(**model.kwargs)[0].clone()
            whole = Constraints(whole=tuple(kept_modules(model.module)))
            placed = plan_accelerate(
                Question(
                    model.trace().graph, machine.box(int(0.6 * weights)), constraints=whole,
                    costs=roofline, search=Search(seconds=None, evaluations=200),
                )
            )  # fmt: skip
            result = placed.placement
            found = device_map(model.trace().graph, result, placed.question.cluster, model.module)
            away = sum(where == "cpu" for where in found.values())
            row, logits = measured(dispatched(model, machine, found), machine, 2.0)
            yield {
                "model": name, "runtime": "accelerate",
                "executed": f"latency: {len(found)} entries of the map, {away} offloaded",
                **{"equal" if k == "outputs_equal" else k: v
                   for k, v in equal(logits, wanted).items()},
                "predicted_s": None, "measured_s": row["measured_s"],
                "interval_s": row["interval_s"], "one_core_s": None,
            }  # fmt: skip


RUNTIMES: dict[str, Callable[[Options], Iterable[Row]]] = {
    "ONNX Runtime": ort_rows, "JAX": jax_rows, "PyTorch": torch_rows,
    "pipelining": pipelining_rows, "accelerate": accelerate_rows,
}  # fmt: skip
HEADER = head(
    "model | runtime | executed | outputs equal, apart | predicted ms | measured ms | error | "
    "one core", left=4,
)  # fmt: skip


def text(row: Row) -> str:
    """A row of the table in Markdown."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.2f}"

    measured, predicted = row["measured_s"], row["predicted_s"]
    low, high = row["interval_s"]
    return line(
        row["model"], row["runtime"], row["executed"],
        f"{'yes' if row['equal'] else 'NO'}, {row['apart']:.0e}", ms(predicted),
        between(1e3 * measured, 1e3 * low, 1e3 * high, ".2f"),
        "-" if predicted is None else f"{predicted / measured - 1:+.0%}", ms(row["one_core_s"]),
    )  # fmt: skip


@main.command()
@click.option("--only", default=",".join(RUNTIMES), show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="Of measuring, for each row.")
@click.option("--costs", help="Of torch on this machine, made by gdp calibrate.")
def runtimes(only: str, seconds: float, costs: str | None) -> None:
    """Each model under each runtime that executes it."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    if unknown := sorted(set(only.split(",")) - set(RUNTIMES)):
        raise click.UsageError(f"no runtime {unknown[0]!r}; there are {', '.join(RUNTIMES)}")
    failed = False
    click.echo(HEADER)
    for name in only.split(","):
        try:
            for row in RUNTIMES[name](Options(seconds, costs)):
                click.echo(text(row))
        except Exception as error:  # the other runtimes are tried all the same
            failed = True
            click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
