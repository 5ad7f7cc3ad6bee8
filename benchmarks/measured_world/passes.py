"""Predicted passes of measured serving runs, with what their seconds go to, one JSON line each.

    python -m benchmarks.measured_world passes --bench FOLDER -o ROWS.jsonl [--data FOLDER]
        [--configs FOLDER] [--part K/N] [--of SOURCE] [NAME ...]

The rows that `pretrain.corrections` learns from. `FOLDER` holds `silicon_split.csv`,
`mlenergy_serving.csv` and `llm_pilot.csv` (see `serving`, `mlenergy` and `pilot` for what is read
of them). Rows are appended in a shuffled order and those in the file are not made again, so that a
run that was stopped goes on. `--part 0/2` makes every second model and size, for two processes.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.measured_world.engines import COSTS, mlenergy_steps, pilot_steps
from benchmarks.measured_world.servers import set_up
from benchmarks.measured_world.serving import (
    GET,
    as_measured,
    asked_model,
    configuration,
    installed,
    machine,
    plan_of,
    room,
    spec_of,
    splits_of,
)
from benchmarks.measured_world.serving_runs import Run, measured_runs
from gdp.base.errors import GdpError, InfeasibleError
from gdp.cluster.file import load_cluster
from gdp.cluster.types import Cluster
from gdp.question.models import load
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer
from gdp.sim.serving import ServingEngine


def measured(bench: Path, data: Path) -> Iterator[tuple[str, Run, int]]:
    """Source, run and clients of every row."""
    for run in measured_runs(data, bench / "silicon_split.csv", (), None):
        yield "silicon", run, run.batch
    for step in mlenergy_steps(bench / "mlenergy_serving.csv"):
        yield "mlenergy", step.run, step.run.batch
    for step in pilot_steps(bench / "llm_pilot.csv"):
        yield "pilot", step.run, step.run.batch


def described(
    source: str, run: Run, question: Question, answer: GenerationAnswer, engine: ServingEngine
) -> dict[str, Any]:
    """What is kept of a prediction: seconds of a pass and their parts, the engine, the devices."""
    plain = engine._asdict()
    scheduler = plain.pop("scheduler")
    devices = question.cluster.devices
    gpu = max(devices, key=lambda device: device.speed("bfloat16"))
    weights = sum(row.weights_bytes for row in answer.memory)
    return {
        "source": source, "run": asdict(run), "first_s": answer.first_token_s,
        "step_s": answer.token_s, "caches_s": answer.caches_s,
        "shares": [[[p.cause, p.share] for p in phase] for phase in answer.shares],
        "engine": plain, "scheduler": type(scheduler).__name__,
        "batch": answer.request.batch, "weights_bytes": weights,
        "ops": question.graph.num_ops,
        "gpu": {"name": gpu.name, "kind": gpu.kind, "memory_bytes": gpu.memory_bytes,
                "bytes_per_s": gpu.bytes_per_s, "flop_per_s": gpu.speed("bfloat16")},
    }  # fmt: skip


def row_of(source: str, run: Run, data: Path, folders: list[Path], root: Path) -> dict[str, Any]:
    """The prediction of a run; why there is none."""
    cluster, spec, costs = _asked_of(source, run, data, folders, root)
    batch = run.batch
    while batch:
        try:
            now = replace(run, batch=batch)
            question, answer, engine = plan_of(spec, cluster, now, costs)
        except InfeasibleError:
            graph = load(asked_model(spec, cluster, replace(run, batch=batch)))
            batch = min(batch - 1, room(graph, cluster, batch, splits_of(run, cluster)))
            continue
        if source == "silicon":
            engine = as_measured(engine, question.graph, cluster, run, batch)
            engine = set_up(engine, run)
        return described(source, run, question, answer, engine)
    return {"source": source, "run": asdict(run), "why": "not even one request fits"}


def _asked_of(
    source: str, run: Run, data: Path, folders: list[Path], root: Path
) -> tuple[Cluster, str, str | None]:
    if source == "silicon":
        return machine(data, run.system, root, run.tensor), spec_of(run, folders), None
    spec = configuration(run.model, folders)
    if spec is None:
        raise click.UsageError(f"no configuration of {run.model}")
    several = f"{run.tensor}x{run.system}" + ("" if source == "pilot" else "-nvlink")
    cluster = load_cluster(f"cpu-server-ddr5+{several if run.tensor > 1 else run.system}")
    return cluster, spec, COSTS.get(run.engine)


@click.command("passes", help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--bench", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("-o", "output", type=click.Path(path_type=Path), required=True)
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--configs", type=click.Path(exists=True, path_type=Path))
@click.option("--part", default="0/1", help="K/N: every N-th model and size from the K-th on.")
@click.option("--of", "sources", multiple=True, help="silicon, mlenergy, pilot; default: all.")
def main(
    names: tuple[str, ...], bench: Path, output: Path, data: Path | None, configs: Path | None,
    part: str, sources: tuple[str, ...],
) -> None:  # fmt: skip
    data = data or installed()
    if data is None:
        raise click.UsageError(GET)
    folders = [*([configs] if configs else []), data / "model_configs"]
    done = set[str]()
    if output.is_file():
        done = {_key(row["source"], row["run"]) for row in map(json.loads, output.open())}
    asked = [
        (source, run)
        for source, run, _ in measured(bench, data)
        if (not sources or source in sources) and (not names or any(n in run.model for n in names))
    ]
    sizes = sorted({(source, *run.sizes) for source, run in asked}, key=str)
    random.Random(0).shuffle(sizes)
    first, _, count = part.partition("/")
    with tempfile.TemporaryDirectory(prefix="measured-world-") as root:
        for size in sizes[int(first) :: int(count)]:
            for source, run in asked:
                if (source, *run.sizes) == size and _key(source, asdict(run)) not in done:
                    try:
                        row = row_of(source, run, data, folders, Path(root))
                    except GdpError as error:
                        row = {"source": source, "run": asdict(run), "why": str(error)}
                    with output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    click.echo(f"{source} {run.name} {row.get('step_s', math.nan):.4f}", err=True)


def _key(source: str, run: dict[str, Any]) -> str:
    return f"{source} {json.dumps(run)}"
