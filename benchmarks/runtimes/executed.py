"""Models x runtimes: what was executed, whether outputs equal, predicted beside measured.

    M=python:benchmarks.runtimes.executed_models
    gdp profile $M:{gpt2,distilbert,vit,resnet,qwen2,qwen2_moe} \\
        --device torch:cpu --rounds 4 --seconds 4 -o p.json.gz
    gdp calibrate p.json.gz --steps 300 -o costs
    python -m benchmarks.runtimes.executed --costs costs [--only PyTorch,JAX]
        [--seconds 12] [--json]

On two cores. PyTorch's predictions are by costs fitted to other models on the same machine
(--costs), those of the other runtimes by the shipped ones. For accelerate, cores stand for the
accelerators and a disk for host memory: outputs count there, times do not, and nothing is
predicted. Every timing keeps both cores busy; run nothing beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAG = "--xla_force_host_platform_device_count=2"
BOX = "2xcpu-core"
TORCH = ("bert", "llama", "mixtral")
LIGHT = ("inception_v2", "squeezenet", "resnet50")
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How long, and with which costs."""

    seconds: float
    costs: str | None


def named(model: str) -> str:
    """The model's `python:` name."""
    return f"python:benchmarks.runtimes.executed_models:{model}"


def executed(
    spec: str, name: str, runtime: str, objective: str, seconds: float, costs: str | None = None
) -> Row:
    """One model by `gdp.run`, placed by `auto`."""
    from gdp.commands.execute import run
    from gdp.methods.base import Search
    from gdp.runtime.measure import Measuring

    report = run(
        spec, BOX, objective=objective, costs=costs, measuring=Measuring(seconds),
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
    from gdp.cluster.file import load_cluster
    from gdp.commands.execute import export
    from gdp.commands.placing import place_for
    from gdp.models import load

    for name in TORCH:
        spec, cluster = named(name), load_cluster(BOX)
        found = place_for("pipelining", load(spec), cluster, model=spec, objective="throughput",
                          costs=options.costs)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out"
            export(found.result, spec, "pipelining", output, cluster)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                [sys.executable, str(output / "run.py"), "--rounds", "5"], check=False,
                capture_output=True, text=True, env=environment,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        report = json.loads(done.stdout.strip().splitlines()[-1])
        score, count = found.result.score, report["microbatches"]
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

    from benchmarks.gpu.plans import Machine, dispatched, equal, measured
    from gdp.cluster.presets import device_preset
    from gdp.commands.accelerate import kept_modules, plan_accelerate
    from gdp.costs.base import roofline
    from gdp.exporters.accelerate import device_map
    from gdp.methods.base import Search
    from gdp.models import traced_model

    with tempfile.TemporaryDirectory() as scratch:
        host, card = (replace(device_preset(n), name=n) for n in ("cpu-server", "rtx4090"))
        machine = Machine(torch.device("cpu"), host, card, 1e-5, 1e10, Path(scratch))
        for name in TORCH:
            model: Any = traced_model(named(name))
            weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
            with torch.inference_mode():
                wanted = model.module(**model.kwargs)[0].clone()
            placed = plan_accelerate(
                model.trace().graph, machine.box(int(0.6 * weights)), costs=roofline,
                whole=tuple(kept_modules(model.module)),
                search=Search(seconds=None, evaluations=200),
            )  # fmt: skip
            result = placed.result.placement
            found = device_map(model.trace().graph, result, placed.cluster, model.module)
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


def text(row: Row) -> str:
    """A row of the table in Markdown."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.2f}"

    low, high = row["interval_s"]
    error = "-" if row["predicted_s"] is None else (
        f"{100 * (row['predicted_s'] / row['measured_s'] - 1):+.0f}%"
    )  # fmt: skip
    return (
        f"| {row['model']} | {row['runtime']} | {row['executed']} | "
        f"{'yes' if row['equal'] else 'NO'}, {row['apart']:.0e} | {ms(row['predicted_s'])} | "
        f"{ms(row['measured_s'])} ({ms(low)} to {ms(high)}) | {error} | {ms(row['one_core_s'])} |"
    )


HEADER = (
    "| model | runtime | executed | outputs equal, apart | predicted ms | measured ms | error | "
    "one core |\n| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"of {', '.join(RUNTIMES)}")
    parser.add_argument("--seconds", type=float, default=12.0, help="of measuring, for each row")
    parser.add_argument("--costs", help="costs of torch on this machine, of gdp calibrate")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    names = given.only.split(",") if given.only else list(RUNTIMES)
    if unknown := sorted(set(names) - set(RUNTIMES)):
        parser.error(f"no runtime {unknown[0]!r}; there are {', '.join(RUNTIMES)}")
    rows: list[Row] = []
    failed = 0
    if not given.json:
        print(HEADER, flush=True)
    for name in names:
        try:
            for row in RUNTIMES[name](Options(given.seconds, given.costs)):
                rows.append(row)
                if not given.json:
                    print(text(row), flush=True)
        except Exception as error:  # the other runtimes are tried all the same
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
