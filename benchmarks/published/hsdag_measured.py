"""HSDAG's three models executed on two cores: what runtimes do by themselves, HSDAG with measured
rewards, and gdp's answer.

    python -m benchmarks.published.hsdag_measured [--models all] [--seconds 20] [--draws 40]
        [--folder runs/exports] [--json]

Milliseconds of one inference, medians over rounds with 95% intervals: ONNX Runtime on one core and
with its own threads on both, gdp's answer and HSDAG's executed by ONNX Runtime, in turns; then
OpenVINO's CPU plug-in, AUTO and HETERO with its hint for latency in float32, in turns. HSDAG is
trained from nothing, each placement rewarded by a run of a second (`--draws 0` leaves it out).
Every timing keeps both cores busy; run nothing beside it. Needs the extra `corpus` and openvino.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.published.cases import chosen
from benchmarks.published.hsdag_onnx import MODELS, onnx_file
from gdp.cluster.types import Cluster
from gdp.commands.execute import Executor, run
from gdp.learn.hsdag.train import train
from gdp.methods.base import Assignment, Search
from gdp.models import load
from gdp.placement import make_placement
from gdp.prepare import prepare_problem
from gdp.runtime.measure import Measured, Measuring, Quota, measure
from gdp.runtime.statistics import Trace

BOX = "2xcpu-core"
Row = dict[str, Any]


class OneByOne:
    """A compiled model of OpenVINO that takes a sample when the one before it is done."""

    slots = 1

    def __init__(self, compiled: Any, feeds: dict[str, np.ndarray]) -> None:
        self.request, self.feeds = compiled.create_infer_request(), feeds

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """What happened until the quota was met."""
        began_s = time.perf_counter()
        starts: list[float] = []
        ends: list[float] = []
        while True:
            now_s = time.perf_counter()
            full_s = now_s - (ends[0] if ends else now_s)
            if not quota.wants(len(starts), 1, now_s - began_s, full_s):
                break
            starts.append(now_s)
            self.request.infer(self.feeds)
            ends.append(time.perf_counter())
        return (Trace(tuple(starts), tuple(ends)),)


def openvino_rows(path: Path, seconds: float) -> list[Row]:
    """The defaults of OpenVINO on a machine that has a processor alone."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    rng = np.random.default_rng(0)
    feeds = {
        port.get_any_name(): rng.integers(0, 100, tuple(port.shape)).astype(np.int64)
        if port.get_element_type().is_integral()
        else rng.standard_normal(tuple(port.shape)).astype(np.float32)
        for port in model.inputs
    }
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    contenders = {
        f"OpenVINO {name}": OneByOne(core.compile_model(model, device, hints), feeds)
        for name, device in (("CPU", "CPU"), ("AUTO", "AUTO"), ("HETERO", "HETERO:CPU"))
    }
    found = measure(contenders, Measuring(seconds, precision=0.0))
    return [_row(name, one) for name, one in found.items()]


def _row(name: str, found: Measured) -> Row:
    interval_s = [found.latency.low, found.latency.high]
    return {"row": name, "latency_s": found.latency_s, "interval_s": interval_s}


def ort_rows(path: Path, seconds: float, draws: int) -> list[Row]:
    """gdp's answer and HSDAG's beside ONNX Runtime's defaults."""
    search = Search(seconds=None, evaluations=400)
    report = run(path, BOX, measuring=Measuring(seconds, precision=0.0), search=search)
    baselines = report["baselines"]
    rows = [
        {"row": f"ONNX Runtime, {words}", "latency_s": baselines[name]["latency_s"],
         "interval_s": baselines[name]["latency_interval_s"]}
        for name, words in (("single_device", "one core"), ("runtime_default", "its own threads"))
    ]  # fmt: skip
    placed = [("gdp", report)]
    if draws:
        placed.insert(0, (f"HSDAG, {draws} measured draws", _hsdag(path, seconds, draws)))
    for name, found in placed:
        pieces = f"{len(found['segments'])} pieces"
        rows.append({
            "row": f"{name} ({pieces})", "latency_s": found["measured_latency_s"],
            "interval_s": found["latency_interval_s"], "equal": found["outputs_equal"],
        })  # fmt: skip
    return rows


def _hsdag(path: Path, seconds: float, draws: int) -> Row:
    """What runs of the placement that HSDAG finds with measured rewards report."""
    graph, cluster = load(path), Cluster.load(BOX)
    prepared = prepare_problem(graph, cluster)
    executor = Executor.of(path, graph, cluster, "latency", {})

    def latency_s(a: Assignment) -> float:
        placed = make_placement(graph, cluster, prepared.expand(a.device))
        ready = executor.prepare(placed, None)
        report = executor.run(placed, ready, Measuring(1.0), baselines=False)
        return report.measured_latency_s

    found = train(prepared.problem, seed=0, evaluations=draws, reward=latency_s)
    placement = make_placement(graph, cluster, prepared.expand(found.assignment.device))
    return run(path, BOX, placement, measuring=Measuring(seconds, precision=0.0))


def table_text(model: str, rows: list[Row]) -> str:
    """The table of one model, in Markdown."""
    lines = [f"{model} on two cores", "", "| row | ms | 95% |", "| --- | ---: | --- |"]
    for row in rows:
        low, high = (1e3 * x for x in row["interval_s"])
        lines.append(f"| {row['row']} | {1e3 * row['latency_s']:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


@click.command()
@click.option("--models", default="all", show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Of each measurement.")
@click.option("--draws", default=40, show_default=True, help="Placements that HSDAG executes.")
@click.option("--folder", default="runs/exports", show_default=True,
              type=click.Path(path_type=Path))  # fmt: skip
@click.option("--json", "as_json", is_flag=True)
def main(models: str, seconds: float, draws: int, folder: Path, as_json: bool) -> None:
    """Print the tables."""
    found = {}
    for name in chosen(models, MODELS, "model"):
        path = onnx_file(name, folder)
        found[name] = ort_rows(path, seconds, draws) + openvino_rows(path, seconds)
        if not as_json:
            click.echo(table_text(name, found[name]) + "\n")
    if as_json:
        click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
