"""What a cut costs beside the kernels, and what two busy cores cost each other.

    python benchmarks/cuts.py MODEL.onnx... [--pieces 2,4,8] [--seconds 1]

Each model is cut into runs of ops that two cores take in turn, and executed as `gdp run` does it.
A piece is a session: the costs of the cut model say what its kernels take. Beyond these, ratios say
by how much the pieces together take longer than the uncut model on one core: one sample at a time,
when the other core idles, and with the pipeline full, when both are busy. Give models that costs
were fitted to, so that nothing is fitted to what predictions are tested on.
"""

import argparse
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
from gdp.runtime.ort.run import prepare
from gdp.runtime.ort.sessions import core_of_device
from gdp.runtime.ort.source import Source, load_source, randomised
from gdp.runtime.ort.stages import Prediction, make_plan
from gdp.sim.segments import segment_values, segments


class Measured(NamedTuple):
    """One model cut one way; seconds are sums over its pieces."""

    pieces: int
    predicted_s: float
    alone_s: float  # one sample at a time
    busy_s: float  # with the pipeline full


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


def measure(
    source: Source, graph: OpGraph, cluster: Cluster, costs: LearnedCosts, pieces: int,
    seconds: float,
) -> Measured:  # fmt: skip
    """The pieces of one cut, alone and with both cores busy."""
    device = in_turns(graph, cluster, costs, pieces)
    fused = fuse(graph, apart=device)
    where = segment_values(device, fused.group_of)
    apart = segments(fused.graph, where)[fused.group_of]
    problem = make_problem(
        fused.graph, cluster, group_seconds(fused, costs(graph, cluster, apart)), "throughput"
    )
    plan = make_plan(source.model, graph, Prediction(problem, where, fused.group_of), "throughput")
    dispatch_s = np.array([d.dispatch_s for d in cluster.devices])[plan.piece_device]
    ready = prepare(source, graph, plan, core_of_device(cluster), 0)
    one = Pipeline(ready.stages, ready.slots[:1], ready.workers)
    full = Pipeline(ready.stages, ready.slots, ready.workers)
    alone: list[list[float]] = [[] for _ in ready.stages]
    busy: list[list[float]] = [[] for _ in ready.stages]
    with one, full:
        runs = int(np.clip(seconds / 6 / max(one.run(3).latency_s, 1e-5), 4, 100))
        for _ in range(3):
            for found, pipeline in ((alone, one), (busy, full)):
                for own, of_stage in zip(found, pipeline.run(runs).stage_s, strict=True):
                    own += of_stage
    sums = [sum(_fast(own) for own in found) for found in (alone, busy)]
    return Measured(
        len(plan.cut.pieces), float(sum(plan.piece_s) - dispatch_s.sum()), sums[0], sums[1]
    )


def _fast(seconds: list[float]) -> float:
    """The mean of the fastest quarter, the statistic of profiles."""
    return float(np.sort(seconds)[: max(1, len(seconds) // 4)].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--pieces", default="2,4,8")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring each cut")
    parser.add_argument("--cluster", default="2xcpu-core")
    arguments = parser.parse_args()
    cluster = Cluster.load(arguments.cluster)
    costs, label = resolve_costs(None, cluster)
    print(label)
    if not isinstance(costs, LearnedCosts):
        raise SystemExit("no calibration matches this cluster; make one with `gdp calibrate`")
    print(f"{'model':28} {'pieces':>6} {'alone ms':>9} {'ratio':>7} {'busy ms':>9} {'ratio':>7}")
    ratios: list[tuple[float, float]] = []
    for model in arguments.models:
        graph, source = load(model, {}), randomised(load_source(model), 0)
        whole = None
        for pieces in (1, *map(int, arguments.pieces.split(","))):
            found = measure(source, graph, cluster, costs, pieces, arguments.seconds)
            whole = whole or found
            more = found.predicted_s / whole.predicted_s  # layouts and fusions lost at the cuts
            alone, busy = found.alone_s / whole.alone_s / more, found.busy_s / whole.busy_s / more
            if found.pieces > 1:
                ratios.append((alone, busy))
            print(
                f"{Path(model).stem:28} {found.pieces:6} {found.alone_s * 1e3:9.3f} {alone:7.3f} "
                f"{found.busy_s * 1e3:9.3f} {busy:7.3f}",
                flush=True,
            )
    for what, found in zip(
        ("one sample at a time", "pipeline full"), np.array(ratios).T, strict=True
    ):
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
        print(f"{what}: pieces take {middle:.3f} of the uncut model ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
