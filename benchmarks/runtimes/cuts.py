"""What a cut costs beside the kernels, and what two busy cores cost each other.

    python benchmarks/runtimes/cuts.py MODEL.onnx... [--pieces 2,4,8] [--seconds 1]

Each model is cut into runs of ops that two cores take in turn, and executed as `gdp run` does it.
A piece is a session: the costs of the cut model say what its kernels take. Beyond these, ratios say
by how much the pieces together take longer than the uncut model on one core: one sample at a time,
when the other core idles, and with the pipeline full, when both are busy; the last columns say what
that is for every cut, with a 95% interval over rounds in which the ways to cut take turns. Give
models that costs were fitted to, so that nothing is fitted to what predictions are tested on.
`gdp profile --only-overheads` measures the same on products of matrices, for the calibration.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.costs.default import resolve_costs
from gdp.costs.learned import LearnedCosts
from gdp.graph.fuse import fuse, group_seconds
from gdp.graph.op_graph import OpGraph
from gdp.models import load
from gdp.problem.problem import make_problem
from gdp.runtime.ort.pipeline import Pipeline
from gdp.runtime.ort.run import Prepared, prepare
from gdp.runtime.ort.sessions import core_of_device
from gdp.runtime.ort.source import Source, load_source, randomised
from gdp.runtime.ort.stages import cut_plan
from gdp.runtime.prediction import Prediction
from gdp.runtime.statistics import Estimate, estimate
from gdp.sim.segments import segment_values, segments

ROUNDS = 5


class Cut(NamedTuple):
    """One model cut one way, ready to run; seconds of kernels are predicted."""

    pieces: int
    kernels_s: float
    one: Pipeline  # one sample at a time
    full: Pipeline


def in_turns(
    graph: OpGraph, cluster: Cluster, costs: LearnedCosts, pieces: int
) -> Int[np.ndarray, "N"]:
    """Runs of ops of about equal cost, on the first two devices in turn."""
    seconds = costs(graph, cluster)[:, 0]
    done = np.cumsum(seconds) - seconds / 2
    device = np.minimum(done / seconds.sum() * pieces, pieces - 1).astype(np.int64) % 2
    device[graph.is_io] = cluster.host
    fused = fuse(graph)
    lead = np.zeros(fused.graph.num_ops, np.int64)
    lead[fused.group_of[::-1]] = device[::-1]
    return lead[fused.group_of]


def prepared(
    source: Source, graph: OpGraph, cluster: Cluster, costs: LearnedCosts, pieces: int
) -> tuple[Prepared, float]:
    """A model cut in turns, and the predicted seconds of its kernels."""
    device = in_turns(graph, cluster, costs, pieces)
    fused = fuse(graph, apart=device)
    where = segment_values(device, fused.group_of)
    apart = segments(fused.graph, where)[fused.group_of]
    problem = make_problem(
        fused.graph, cluster, group_seconds(fused, costs(graph, cluster, apart)), "throughput"
    )
    plan = cut_plan(source.model, graph, Prediction(problem, where, fused.group_of), "throughput")
    dispatch_s = np.array([d.dispatch_s for d in cluster.devices])[plan.piece_device]
    ready = prepare(source, graph, plan, core_of_device(cluster), 0)
    return ready, float(sum(plan.piece_s) - dispatch_s.sum())


def busy_s(pipeline: Pipeline, runs: int) -> float:
    """Seconds that a sample keeps its cores busy: medians of the pieces."""
    return sum(float(np.median(own)) for own in pipeline.run(runs).stage_s)


def measure(cuts: list[Cut], seconds: float) -> tuple[list[list[float]], list[list[float]]]:
    """Busy seconds of a sample for every cut, alone and with the pipeline full, in every round."""
    alone: list[list[float]] = [[] for _ in cuts]
    busy: list[list[float]] = [[] for _ in cuts]
    runs = [
        int(np.clip(seconds / 2 / ROUNDS / max(c.one.run(4).latency_s, 1e-5), 4, 100)) for c in cuts
    ]
    for _ in range(ROUNDS):
        for i, cut in enumerate(cuts):
            alone[i].append(busy_s(cut.one, runs[i]))
            busy[i].append(busy_s(cut.full, runs[i]))
    return alone, busy


def per_cut(cut: Cut, whole: Cut, found: list[float], reference: list[float]) -> Estimate:
    """Seconds that a cut costs beyond kernels: of every round, what all pieces take longer than the
    uncut model, scaled by what layouts and fusions lost at the cuts make kernels take."""
    more = cut.kernels_s / whole.kernels_s
    extra = (np.array(found) - more * np.array(reference)) / max(cut.pieces - 1, 1)
    return estimate(extra.tolist(), extra.tolist())


def shown(found: Estimate) -> str:
    return f"{found.value * 1e6:6.1f} ({found.low * 1e6:6.1f} to {found.high * 1e6:6.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--pieces", default="2,4,8")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring each cut")
    parser.add_argument("--cluster", default="2xcpu-core")
    arguments = parser.parse_args()
    cluster = Cluster.load(arguments.cluster)
    costs, label = resolve_costs(None, cluster)
    print(label)
    if not isinstance(costs, LearnedCosts):
        raise SystemExit("no calibration matches this cluster; make one with `gdp calibrate`")
    print(f"{'model':28} {'pieces':>6} {'alone ms':>9} {'busy ms':>9}  us a cut, alone; busy")
    values: list[tuple[float, float]] = []
    for model in arguments.models:
        graph, source = load(model, {}), randomised(load_source(model), 0)
        with ExitStack() as stack:
            cuts = []
            for pieces in (1, *map(int, arguments.pieces.split(","))):
                ready, kernels_s = prepared(source, graph, cluster, costs, pieces)
                one = stack.enter_context(ready.one_at_a_time())
                full = stack.enter_context(ready.pipeline())
                cuts.append(Cut(len(ready.plan.cut.pieces), kernels_s, one, full))
            alone, busy = measure(cuts, arguments.seconds)
        for i, cut in enumerate(cuts):
            costs_s = [per_cut(cut, cuts[0], found[i], found[0]) for found in (alone, busy)]
            text = "" if cut.pieces == 1 else "; ".join(map(shown, costs_s))
            if cut.pieces > 1:
                values.append((costs_s[0].value, costs_s[1].value))
            print(
                f"{Path(model).stem:28} {cut.pieces:6} {np.median(alone[i]) * 1e3:9.3f} "
                f"{np.median(busy[i]) * 1e3:9.3f}  {text}",
                flush=True,
            )
    for what, found in zip(
        ("one sample at a time", "pipeline full"), np.array(values).T, strict=True
    ):
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75)) * 1e6
        print(f"{what}: a cut costs {middle:.1f} us in the median ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
