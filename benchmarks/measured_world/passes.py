"""Predicted passes of measured serving runs, with what their seconds go to, one JSON line each.

    python -m benchmarks.measured_world passes --bench FOLDER -o ROWS.jsonl [--data FOLDER]
        [--configs FOLDER] [--part K/N] [--of SOURCE] [NAME ...]

The rows that `pretrain.corrections` learns from. `FOLDER` holds `silicon_split.csv`,
`mlenergy_serving.csv` and `llm_pilot.csv` (see `serving`, `mlenergy` and `pilot` for what is read
of them). Rows are appended in a shuffled order and those in the file are not made again, so that a
run that was stopped goes on. `--part 0/2` makes every second pair of a model and lengths, for two
processes.
"""

import csv
import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from benchmarks.measured_world.engines import (
    COSTS,
    NO_ROOM,
    has_room,
    mlenergy_steps,
    pilot_steps,
)
from benchmarks.measured_world.servers import set_up
from benchmarks.measured_world.serving import (
    GET,
    RunPlan,
    as_measured,
    asked_model,
    configuration,
    installed,
    load,
    machine,
    plan_of,
    room,
    spec_of,
    splits_of,
)
from benchmarks.measured_world.serving_runs import Run, measured_runs
from gdp.base.errors import GdpError, InfeasibleError, ModelError
from gdp.cluster.file import load_cluster
from gdp.cluster.types import Cluster
from gdp.question.passes import passes_of, stack_of
from gdp.sim.serving import ServingEngine


class Measured(NamedTuple):
    """A measured run, and what else its table tells."""

    source: str
    run: Run
    version: str  # of the engine
    users: int  # clients
    ttft_s: float = math.nan  # median


def measured(bench: Path, data: Path) -> Iterator[Measured]:
    """Every row of the three tables."""
    with (data / "systems" / "silicon_sample.csv").open() as file:
        versions = {row["id"]: row["backend_version"] for row in csv.DictReader(file)}
    for run in measured_runs(data, bench / "silicon_split.csv", (), None):
        yield Measured("silicon", run, versions[run.name], run.batch)
    for step in mlenergy_steps(bench / "mlenergy_serving.csv"):
        yield Measured("mlenergy", step.run, "0.11.1", step.run.batch)
    with (bench / "llm_pilot.csv").open() as file:
        table = list(csv.DictReader(file))
    for step, row in zip(pilot_steps(bench / "llm_pilot.csv"), table, strict=True):
        ttft_s = float(row["ttft_ms_median"]) / 1e3
        yield Measured("pilot", step.run, "1.0", int(row["users"]), ttft_s)


def described(source: str, run: Run, plan: RunPlan, engine: ServingEngine) -> dict[str, Any]:
    """What is kept of a prediction: its passes, its step, the engine, the memory of a card."""
    question, placement, answer, _ = plan
    plain = engine._asdict()
    del plain["scheduler"]  # set by the run
    gpu = max(question.cluster.devices, key=lambda d: (not d.is_cpu, d.bytes_per_s))
    return {
        "source": source, "run": asdict(run), "step_s": answer.token_s, "engine": plain,
        "passes": msgspec.to_builtins(passes_of(question, answer, placement)),
        "stack": msgspec.to_builtins(stack_of(question, run.engine)),
        "memory_bytes": gpu.memory_bytes,
    }  # fmt: skip


def row_of(source: str, run: Run, data: Path, folders: list[Path], root: Path) -> dict[str, Any]:
    """The prediction of a run; why there is none."""
    cluster, spec, costs = asked_of(source, run, data, folders, root)
    batch = run.batch
    while batch:
        try:
            now = replace(run, batch=batch)
            plan = plan_of(spec, cluster, now, costs)
        except InfeasibleError:
            graph = load(asked_model(spec, cluster, replace(run, batch=batch)))
            batch = min(batch - 1, room(graph, cluster, batch, splits_of(run, cluster)))
            continue
        engine = plan.engine
        if source == "silicon":
            engine = as_measured(engine, plan.question.graph, cluster, run, batch)
            engine = set_up(engine, run)
        if source == "mlenergy" and not has_room(engine, run):
            return {"source": source, "run": asdict(run), "why": NO_ROOM}
        return described(source, run, plan, engine)
    return {"source": source, "run": asdict(run), "why": "not even one request fits"}


def asked_of(
    source: str, run: Run, data: Path, folders: list[Path], root: Path
) -> tuple[Cluster, str, str | None]:
    if source == "silicon":
        return machine(data, run.system, root, run.tensor), spec_of(run, folders), None
    spec, plain = configuration(run.model, folders), run.model.removesuffix("-FP8")
    # Published without a configuration of its own: the scheme of its name, as a user gives it.
    if spec is None and plain != run.model and (own := configuration(plain, folders)):
        spec = f"{own}?quantize=fp8"
    if spec is None:
        raise ModelError(f"no configuration of {run.model}")
    several = f"{run.tensor}x{run.system}" + ("" if source == "pilot" else "-nvlink")
    cluster = load_cluster(f"cpu-server-ddr5+{several if run.tensor > 1 else run.system}")
    return cluster, spec, COSTS.get(run.engine)


@click.command("passes", help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--bench", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("-o", "output", type=click.Path(path_type=Path), required=True)
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--configs", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--part",
    default="0/1",
    help="K/N: every N-th model and lengths, from the K-th on.",
)
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
        row
        for row in measured(bench, data)
        if (not sources or row.source in sources)
        and (not names or any(name in row.run.model for name in names))
    ]
    # Programs of all numbers of requests follow from those of a few.
    lengths = sorted({(row.source, *row.run.sizes[:3]) for row in asked}, key=str)
    random.Random(0).shuffle(lengths)
    first, _, count = part.partition("/")
    with tempfile.TemporaryDirectory(prefix="measured-world-") as root:
        for length in lengths[int(first) :: int(count)]:
            own = [row for row in asked if (row.source, *row.run.sizes[:3]) == length]
            for source, run, *told in sorted(own, key=lambda row: row.run.batch):
                if _key(source, asdict(run)) in done:
                    continue
                try:
                    row = row_of(source, run, data, folders, Path(root))
                except GdpError as error:
                    row = {"source": source, "run": asdict(run), "why": str(error)}
                row |= dict(zip(("version", "users", "ttft_s"), told, strict=True))
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                click.echo(f"{source} {run.name} {row.get('step_s', math.nan):.4f}", err=True)


def _key(source: str, run: dict[str, Any]) -> str:
    return f"{source} {json.dumps(run)}"
