"""Executes light models on two cores: outputs, throughput and latency against one core, the
runtime's own threads and replicas; predictions against measurements.

    python benchmarks/runtimes/run_light.py [one-core] [throughput] [latency] [overheads]
    ... throughput --shipped --models resnet50,squeezenet --seconds 60
    ... throughput latency --shipped --simplicity 0,2   # of fewer cuts
    ... throughput latency --shipped --simplicity 0,2 --models bert     # BERT-base, 128 tokens
    ... throughput --shipped --models model.onnx        # any ONNX file

Figures are medians of interleaved rounds with 95% intervals; what `gdp run` would advise ends every
line. With --shipped predictions are those of the shipped costs; without, plain roofline costs of
the `2xcpu-core` preset, times one constant that is fitted on the other light models: the median of
measured over predicted seconds on one core. Every timing keeps both cores busy; run nothing beside
it.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from gdp import api
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.roofline import roofline
from gdp.errors import GdpError
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx
from gdp.methods.base import Search
from gdp.placement import Teams
from gdp.posed import pose
from gdp.runtime.measure import Measuring, measure
from gdp.runtime.ort.inputs import make_inputs
from gdp.runtime.ort.pipeline import Pipeline, SideBySide, make_slot
from gdp.runtime.ort.reference import reference_values
from gdp.runtime.ort.run import run_onnx
from gdp.runtime.ort.sessions import core_of_device
from gdp.runtime.ort.source import load_source, randomised
from gdp.runtime.ort.stages import cut_plan, whole_stage
from gdp.runtime.prediction import Prediction
from gdp.runtime.report import RunReport, advice

LIGHT = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet",
    "squeezenet", "vgg19", "zfnet512",
)  # fmt: skip
PIPELINED = ("resnet50", "densenet121", "inception_v2", "squeezenet")
FOR_LATENCY = ("inception_v2",)
EXPORTS = Path("runs/exports")
"""Where BERT is kept once it is exported, below the current folder."""
CostsOf = Callable[[str], CostModel | None]
PARTS = ("one-core", "throughput", "latency", "overheads")
CANDIDATES = ("heft", "etf", "local_search", "round_robin", "metis", "blocks")


@dataclass(frozen=True)
class OneCore:
    """A light model on one core."""

    name: str
    graph: OpGraph  # fused
    measured_s: float
    roofline_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.roofline_s


def spec(name: str) -> str:
    """A light model by its name, BERT-base (exported when it is first asked for: a minute, needs
    the extra `corpus`), or any ONNX file by its path."""
    if name == "bert":
        from pretrain.profile_corpus.exports import BERT_BASE, export

        return str(export(BERT_BASE, EXPORTS))
    return name if name.endswith(".onnx") else f"onnx:light_{name}"


def one_core(name: str, cluster: Cluster, seconds: float) -> OneCore:
    """Median latency of the uncut model on the first core, and its roofline."""
    graph = load_onnx(spec(name))
    source = randomised(load_source(spec(name)), 0)
    feeds = make_inputs(source.model, graph, 0)
    (expected,) = reference_values(source, [v.name for v in source.model.graph.output], [feeds])
    stages, workers = whole_stage(source, core_of_device(cluster)[:1])
    slot = make_slot(stages, feeds, expected)
    with Pipeline(stages, [slot], workers) as pipeline:
        found = measure({name: SideBySide((pipeline,))}, rounds=5, seconds=seconds)[name]
    fused = fuse(graph).graph
    costs = roofline(fused, cluster)[:, cluster.host]
    return OneCore(name, fused, found.latency_s, float(costs.sum()))


def constant(rows: Sequence[OneCore], name: str) -> float:
    """What scales the roofline, fitted on every model but this one."""
    return float(np.median([row.ratio for row in rows if row.name != name]))


def scaled(factor: float) -> CostModel:
    """The roofline times a constant."""

    def costs(graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        return factor * roofline(graph, cluster)

    return costs


def execute(
    name: str,
    cluster: Cluster,
    device: Int[np.ndarray, "N"],
    objective: str,
    costs: CostModel | None,
    seconds: float,
    teams: Teams = (),
) -> RunReport:
    graph = load_onnx(spec(name))
    return run_onnx(
        spec(name), graph, cluster, device, objective=objective,
        measuring=Measuring(seconds=seconds),
        predict=prediction(graph, cluster, device, objective, costs)._replace(teams=teams),
    )  # fmt: skip


def prediction(
    graph: OpGraph,
    cluster: Cluster,
    device: Int[np.ndarray, "N"],
    objective: str,
    costs: CostModel | None,
) -> Prediction:
    posed = pose(graph, cluster, objective, costs=costs, keep_apart=device)
    fused_device = np.zeros(posed.problem.num_ops, dtype=np.int64)
    fused_device[posed.group_of] = device
    return Prediction(posed.problem, fused_device, posed.group_of)


def best_on_both_cores(
    name: str, cluster: Cluster, costs: CostModel | None, seconds: float
) -> tuple[str, Int[np.ndarray, "N"]] | None:
    """Of the methods' placements that give each core a fifth of the work at least, the one of the
    lowest latency as it would be executed, cut in segments; None where no method uses both."""
    graph = load_onnx(spec(name))
    source = load_source(spec(name))
    found: list[tuple[float, str, Int[np.ndarray, "N"]]] = []
    for method in CANDIDATES:
        try:
            search = Search(seconds=seconds)
            result = api.place(graph, cluster, method=method, costs=costs, search=search)
        except (GdpError, ImportError) as error:
            print(f"  {method}: {error}", file=sys.stderr)
            continue
        device = result.placement.device
        share = np.bincount(device, graph.flop, cluster.num_devices) / graph.flop.sum()
        if share.min() >= 0.2:
            predict = prediction(graph, cluster, device, "latency", costs)
            plan = cut_plan(source.model, graph, predict, "latency")
            found.append((plan.latency_s, method, device))
    if not found:
        return None
    _, method, device = min(found, key=lambda row: row[0])
    return method, device


def equal(report: RunReport) -> str:
    return "yes" if report.outputs_equal and report.inner_equal else "NO"


def percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+5.0f}%"


def show_one_core(rows: Sequence[OneCore]) -> None:
    print("one core: plain roofline times the constant fitted on the other models")
    print(f"{'model':14s}  GFLOP  measured ms  roofline ms  constant  predicted ms  error")
    for row in rows:
        factor = constant(rows, row.name)
        predicted_s = factor * row.roofline_s
        print(
            f"{row.name:14s} {row.graph.flop.sum() / 1e9:6.2f} {1e3 * row.measured_s:12.2f} "
            f"{1e3 * row.roofline_s:12.2f} {factor:9.3f} {1e3 * predicted_s:13.2f}  "
            f"{percent(predicted_s, row.measured_s)}"
        )

    flop_per_s, bytes_per_s = best_speeds(rows)
    print(f"speeds that fit best: {flop_per_s / 1e9:.0f} GFLOP/s, {bytes_per_s / 1e9:.1f} GB/s")


def best_speeds(rows: Sequence[OneCore]) -> tuple[float, float]:
    """The FLOP/s and bytes/s of least mean absolute logarithmic error over the models."""
    found = []
    for flop_per_s in np.arange(40e9, 200e9, 2e9):
        for bytes_per_s in np.arange(4e9, 30e9, 0.5e9):
            seconds = [
                np.maximum(
                    row.graph.flop / flop_per_s, row.graph.memory_traffic_bytes / bytes_per_s
                ).sum()
                for row in rows
            ]
            error = np.abs(np.log(seconds) - np.log([row.measured_s for row in rows])).mean()
            found.append((float(error), float(flop_per_s), float(bytes_per_s)))
    return min(found)[1:]


def show(name: str, label: str, report: RunReport, unit: float = 1.0) -> None:
    """The placement and its baselines for the report's objective; `unit` scales latencies."""
    latency = report.objective == "latency"
    field = "latency" if latency else "throughput"
    low, high = report.latency_interval_s if latency else report.throughput_interval_per_s
    predicted = report.predicted_latency_s if latency else report.predicted_throughput_per_s
    own = report.measured_latency_s if latency else report.measured_throughput_per_s
    rows = [
        getattr(row, f"{field}_s" if latency else f"{field}_per_s")
        for row in report.baselines.values()
    ]
    print(
        f"{name.rpartition('/')[2]:14s} {label:12s} {len(report.segments):3d} {equal(report):>5s} "
        f"{unit * predicted:9.2f} {unit * own:9.2f} ({unit * low:8.2f} to {unit * high:8.2f}) "
        f"{percent(predicted, own)} {' '.join(f'{unit * row:9.2f}' for row in rows)}  "
        f"{advice(report.to_json())}",
        flush=True,
    )
    for warning in report.warnings:
        print(f"  note: {warning}")


HEADER = (
    "model          method       seg equal predicted  measured   95% interval        error    "
    "1 core 2 threads  2 copies  fastest"
)


def throughput(
    cluster: Cluster, names: Sequence[str], costs_of: CostsOf, seconds: float, search: Search
) -> None:
    """Each model as `auto` places it, and as the best pipeline without replicated stages."""
    print(f"\nthroughput, samples/s; {search.simplicity:.1%} for simplicity\n{HEADER}")
    for name, replicas in itertools.product(names, (True, False)):
        costs = costs_of(name)
        result = api.place(
            load_onnx(spec(name)), cluster, objective="throughput", costs=costs, search=search,
            constraints=Constraints(replicas=replicas),
        )  # fmt: skip
        placed = result.placement
        report = execute(name, cluster, placed.device, "throughput", costs, seconds, placed.teams)
        sizes = "+".join(str(len(team)) for team in placed.teams)
        show(name, f"replicas {sizes}" if sizes else "pipeline", report)
        for note in result.notes:
            print(f"  {note}")


def latency(
    cluster: Cluster, names: Sequence[str], costs_of: CostsOf, seconds: float, search: Search
) -> None:
    """Each model as `auto` places it, and as the best placement that uses both cores."""
    print(f"\nlatency, ms; {search.simplicity:.1%} for simplicity\n{HEADER}")
    for name in names:
        costs = costs_of(name)
        result = api.place(load_onnx(spec(name)), cluster, costs=costs, search=search)
        report = execute(name, cluster, result.placement.device, "latency", costs, seconds)
        show(name, result.method, report, 1e3)
        for note in result.notes:
            print(f"  {note}")
        both = best_on_both_cores(name, cluster, costs, 2.0)
        if both is None:
            print(f"{name}: no method uses both cores")
            continue
        method, device = both
        report = execute(name, cluster, device, "latency", costs, seconds)
        show(name, f"both: {method}"[:12], report, 1e3)


def overheads(cluster: Cluster) -> None:
    from gdp.runtime.profile.overheads import measure_overheads

    found = measure_overheads(*core_of_device(cluster)[:2])
    for field, seconds in (
        ("per session call", found.session_s), ("per cut", found.cut_s),
        ("per hand-over", found.handover_s),
    ):  # fmt: skip
        print(f"{field}: {1e6 * (seconds or 0.0):.1f} us")
    print(f"hand-over bandwidth: {(found.handover_bytes_per_s or 0.0) / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Executes light models on two cores.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing one execution")
    parser.add_argument("--search-seconds", type=float, default=5.0, help="of placing a model")
    parser.add_argument(
        "--simplicity", default="2", help="percent, of placements; 0,2 runs them twice"
    )
    parser.add_argument(
        "--models", help="light models, bert or ONNX files; default: "
        f"{','.join(PIPELINED)} for throughput, {','.join(FOR_LATENCY)} for latency",
    )  # fmt: skip
    parser.add_argument("--shipped", action="store_true", help="predict with the shipped costs")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    cluster = cluster_preset("2xcpu-core")
    fitted = not arguments.shipped and {"throughput", "latency"} & set(parts)
    rows = [one_core(name, cluster, 1.5) for name in LIGHT] if fitted or "one-core" in parts else []

    def costs_of(name: str) -> CostModel | None:
        return None if arguments.shipped else scaled(constant(rows, name))

    if "one-core" in parts:
        show_one_core(rows)
    named = arguments.models.split(",") if arguments.models else None
    for percent_given in arguments.simplicity.split(","):
        search = Search(seconds=arguments.search_seconds, simplicity=float(percent_given) / 100)
        if "throughput" in parts:
            throughput(cluster, named or PIPELINED, costs_of, arguments.seconds, search)
        if "latency" in parts:
            latency(cluster, named or FOR_LATENCY, costs_of, arguments.seconds, search)
    if "overheads" in parts:
        overheads(cluster)


if __name__ == "__main__":
    main()
