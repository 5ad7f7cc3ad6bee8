"""Executes light models on two cores: outputs, throughput and latency against one core, the
runtime's own threads and replicas; predictions of the shipped costs against measurements.

    python benchmarks/runtimes/run_light.py [throughput] [latency]
    ... throughput --models resnet50,squeezenet --seconds 60
    ... throughput latency --simplicity 0,2   # of fewer cuts
    ... throughput latency --simplicity 0,2 --models bert     # BERT-base, 128 tokens
    ... throughput --models model.onnx        # any ONNX file

Figures are medians of interleaved rounds with 95% intervals; what `gdp run` would advise ends every
line. Every timing keeps both cores busy; run nothing beside it.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from gdp import api
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.errors import GdpError
from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx
from gdp.methods.base import Search
from gdp.placement import Teams
from gdp.prepare import prepare_problem
from gdp.runtime.measure import Measuring
from gdp.runtime.ort.run import cut_plan, run_onnx
from gdp.runtime.ort.source import load_source
from gdp.runtime.plan import Prediction
from gdp.runtime.report import RunReport, advice

PIPELINED = ("resnet50", "densenet121", "inception_v2", "squeezenet")
FOR_LATENCY = ("inception_v2",)
EXPORTS = Path("runs/exports")
"""Where BERT is kept once it is exported, below the current folder."""
PARTS = ("throughput", "latency")
CANDIDATES = ("heft", "etf", "local_search", "round_robin", "metis", "blocks")


def spec(name: str) -> str:
    """A light model by its name, BERT-base (exported when it is first asked for: a minute, needs
    the extra `corpus`), or any ONNX file by its path."""
    if name == "bert":
        from pretrain.profile_corpus.exports import BERT_BASE, export

        return str(export(BERT_BASE, EXPORTS))
    return name if name.endswith(".onnx") else f"onnx:light_{name}"


def execute(
    name: str,
    cluster: Cluster,
    device: Int[np.ndarray, "N"],
    objective: str,
    seconds: float,
    teams: Teams = (),
) -> RunReport:
    graph = load_onnx(spec(name))
    return run_onnx(
        spec(name), graph, cluster, device, objective=objective,
        measuring=Measuring(seconds, precision=0.0),
        predict=prediction(graph, cluster, device, objective)._replace(teams=teams),
    )  # fmt: skip


def prediction(
    graph: OpGraph,
    cluster: Cluster,
    device: Int[np.ndarray, "N"],
    objective: str,
) -> Prediction:
    prepared = prepare_problem(graph, cluster, objective, keep_apart=device)
    fused_device = np.zeros(prepared.problem.num_ops, dtype=np.int64)
    fused_device[prepared.group_of] = device
    return Prediction(prepared.problem, fused_device, prepared.group_of)


def best_on_both_cores(
    name: str, cluster: Cluster, seconds: float
) -> tuple[str, Int[np.ndarray, "N"]] | None:
    """Of the methods' placements that give each core a fifth of the work at least, the one of the
    lowest latency as it would be executed, cut in segments; None where no method uses both."""
    graph = load_onnx(spec(name))
    source = load_source(spec(name))
    found: list[tuple[float, str, Int[np.ndarray, "N"]]] = []
    for method in CANDIDATES:
        try:
            search = Search(seconds=seconds)
            result = api.place(graph, cluster, method=method, search=search)
        except (GdpError, ImportError) as error:
            print(f"  {method}: {error}", file=sys.stderr)
            continue
        device = result.placement.device
        share = np.bincount(device, graph.flop, cluster.num_devices) / graph.flop.sum()
        if share.min() >= 0.2:
            predict = prediction(graph, cluster, device, "latency")
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


def throughput(cluster: Cluster, names: Sequence[str], seconds: float, search: Search) -> None:
    """Each model as `auto` places it, and as the best pipeline without replicated stages."""
    print(f"\nthroughput, samples/s; {search.simplicity:.1%} for simplicity\n{HEADER}")
    for name, replicas in itertools.product(names, (True, False)):
        result = api.place(
            load_onnx(spec(name)), cluster, objective="throughput", search=search,
            constraints=Constraints(replicas=replicas),
        )  # fmt: skip
        placed = result.placement
        report = execute(name, cluster, placed.device, "throughput", seconds, placed.teams)
        sizes = "+".join(str(len(team)) for team in placed.teams)
        show(name, f"replicas {sizes}" if sizes else "pipeline", report)
        for note in result.notes:
            print(f"  {note}")


def latency(cluster: Cluster, names: Sequence[str], seconds: float, search: Search) -> None:
    """Each model as `auto` places it, and as the best placement that uses both cores."""
    print(f"\nlatency, ms; {search.simplicity:.1%} for simplicity\n{HEADER}")
    for name in names:
        result = api.place(load_onnx(spec(name)), cluster, search=search)
        report = execute(name, cluster, result.placement.device, "latency", seconds)
        show(name, result.method, report, 1e3)
        for note in result.notes:
            print(f"  {note}")
        both = best_on_both_cores(name, cluster, 2.0)
        if both is None:
            print(f"{name}: no method uses both cores")
            continue
        method, device = both
        report = execute(name, cluster, device, "latency", seconds)
        show(name, f"both: {method}"[:12], report, 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Executes light models on two cores.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; both by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing one execution")
    parser.add_argument("--search-seconds", type=float, default=5.0, help="of placing a model")
    parser.add_argument(
        "--simplicity", default="2", help="percent, of placements; 0,2 runs them twice"
    )
    parser.add_argument(
        "--models", help="light models, bert or ONNX files; default: "
        f"{','.join(PIPELINED)} for throughput, {','.join(FOR_LATENCY)} for latency",
    )  # fmt: skip
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    cluster = cluster_preset("2xcpu-core")
    named = arguments.models.split(",") if arguments.models else None
    for percent_given in arguments.simplicity.split(","):
        search = Search(seconds=arguments.search_seconds, simplicity=float(percent_given) / 100)
        if "throughput" in parts:
            throughput(cluster, named or PIPELINED, arguments.seconds, search)
        if "latency" in parts:
            latency(cluster, named or FOR_LATENCY, arguments.seconds, search)


if __name__ == "__main__":
    main()
