"""Predicted against measured time of real placements on pinned cores, model by model.

    python -m benchmarks.validate.run -o validate.json --models resnet50,squeezenet --plan    first
    python -m benchmarks.validate.run -o validate.json --models resnet50,squeezenet [--seconds 700]
    python -m benchmarks.validate.run -o validate.json --predict   predict again, only

Models are of held-out families of the calibration; `pretrain.profile_corpus.build` makes those that
the onnx package does not carry, in --folder. Every placement is measured as `gdp run` does it, one
sample at a time for the latency and with the pipeline full for the throughput, in interleaved
rounds: medians of rounds and their 95% intervals. Every other round is one repeat; how well two
repeats agree bounds what any prediction can reach. Placements that were measured before are kept:
the command can be repeated.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks.validate.report import FORMAT, read, report
from gdp import api
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel, roofline
from gdp.costs.default import resolve_costs
from gdp.costs.learned import LearnedCosts
from gdp.errors import GdpError
from gdp.graph.fuse import fuse, group_seconds
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import load
from gdp.problem.problem import make_problem
from gdp.runtime.measure import Measuring
from gdp.runtime.measure import measure as measure_contenders
from gdp.runtime.ort.pipeline import SideBySide
from gdp.runtime.ort.run import CutPlan, cut_plan, prepare
from gdp.runtime.ort.sessions import core_of_device
from gdp.runtime.ort.source import Source, load_source, randomised
from gdp.runtime.plan import Prediction
from gdp.sim.segments import segment_values, segments

LOG = logging.getLogger(__name__)
MODELS = {
    "squeezenet": "onnx:light_squeezenet",
    "resnet50": "onnx:light_resnet50",
    "densenet121": "onnx:light_densenet121",
    "inception_v2": "onnx:light_inception_v2",
    "mobilenet_v2": "exports/mobilenet_v2-0-b1-i224.onnx",
    "bert": "exports/bert-w384-b1-s64.onnx",
    "gpt2": "exports/gpt2-w512-b2-s64.onnx",
    "vit": "exports/vit-1-b1-i160.onnx",
    "convnext": "exports/convnext-1-b2-i192.onnx",
}
METHODS = ("single", "blocks", "heft", "auto")


def placements(
    graph: OpGraph, cluster: Cluster, costs: CostModel, count: int, seed: int
) -> Iterator[tuple[str, Int[np.ndarray, "N"]]]:
    """Named placements: the methods for both objectives, then random contiguous ones."""
    seen: set[bytes] = set()
    made = 0

    def fresh(device: np.ndarray) -> bool:
        key = device.astype(np.int64).tobytes()
        return not (key in seen or seen.add(key))

    for method in METHODS:
        for objective in ("latency", "throughput"):
            try:
                result = api.place(
                    graph, cluster, objective=objective, method=method, costs=costs,
                    search=Search(seed=seed, seconds=1.0), constraints=Constraints(replicas=False),
                )  # fmt: skip
            except (GdpError, ValueError) as error:
                LOG.warning("%s: %s", method, error)
                continue
            if fresh(result.placement.device):
                made += 1
                yield f"{method}:{objective}", result.placement.device
    rng = np.random.default_rng(seed)
    while made < count:
        device = random_contiguous(graph, cluster, rng)
        if fresh(device):
            made += 1
            yield f"contiguous:{made}", device


def random_contiguous(
    graph: OpGraph, cluster: Cluster, rng: np.random.Generator
) -> Int[np.ndarray, "N"]:
    """One to four runs of ops in topological order, on alternating devices."""
    pieces = int(rng.integers(2, 5))
    cuts = np.sort(rng.choice(np.arange(1, graph.num_ops), size=pieces - 1, replace=False))
    device = np.searchsorted(cuts, np.arange(graph.num_ops), side="right") % cluster.num_devices
    device = (device + int(rng.integers(cluster.num_devices))) % cluster.num_devices
    device[graph.is_io] = cluster.host
    # What fuses stays together, as in every placement that gdp makes.
    fused = fuse(graph)
    lead = np.zeros(fused.graph.num_ops, np.int64)
    lead[fused.group_of[::-1]] = device[::-1]
    return lead[fused.group_of]


def prediction(
    graph: OpGraph, cluster: Cluster, device: Int[np.ndarray, "N"], costs: CostModel
) -> Prediction:
    """The problem over fused ops with these costs, of the model as it is cut."""
    fused = fuse(graph, apart=device)
    where = segment_values(device, fused.group_of)
    if isinstance(costs, LearnedCosts):
        pieces = segments(fused.graph, where)[fused.group_of]
        seconds = group_seconds(fused, costs(graph, cluster, pieces))
        cluster = costs.with_runtime_overheads(cluster)
    else:
        seconds = costs(fused.graph, cluster)
    problem = make_problem(fused.graph, cluster, seconds, "throughput")
    return Prediction(problem, where, fused.group_of)


def predicted(
    source: Source, graph: OpGraph, cluster: Cluster, device: Int[np.ndarray, "N"],
    costs: CostModel,
) -> tuple[CutPlan, dict[str, Any]]:  # fmt: skip
    """How a placement is cut, and what costs and the roofline say of it."""
    ours, plain = (
        cut_plan(source.model, graph, prediction(graph, cluster, device, c), "throughput")
        for c in (costs, roofline)
    )
    return ours, {
        "pieces": len(ours.cut.pieces),
        "piece_device": ours.piece_device,
        "predicted_latency_s": ours.latency_s,
        "predicted_period_s": ours.period_s,
        "roofline_latency_s": plain.latency_s,
        "roofline_period_s": plain.period_s,
        "piece_predicted_s": list(ours.piece_s),
    }


def measure(
    source: Source, graph: OpGraph, cluster: Cluster, plan: CutPlan, seconds: float
) -> dict[str, Any]:
    """One placement as `gdp run` measures it: every block of a round, medians and intervals. Every
    other block belongs to the second repeat."""
    ready = prepare(source, graph, plan, core_of_device(cluster), 0)
    with ready.one_at_a_time() as one, ready.pipeline() as full:
        contenders = {"latency": SideBySide((one,)), "period": SideBySide((full,))}
        found = measure_contenders(contenders, Measuring(seconds, precision=0.0))
    latency, rate = found["latency"].latency, found["period"].throughput
    return {
        "latency_s": latency.value,
        "latency_interval_s": [latency.low, latency.high],
        "latency_rounds_s": list(found["latency"].block_latency_s),
        "period_s": 1.0 / rate.value,
        # A rate whose interval reaches down to nothing has no longest period.
        "period_interval_s": [1.0 / rate.high, 1.0 / rate.low if rate.low > 0 else None],
        "period_rounds_s": [1.0 / r for r in found["period"].block_throughput_per_s],
        "completions": found["period"].completions,
        "samples_in_flight": len(ready.slots),
        "piece_measured_s": list(found["latency"].stage_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("-o", "--output", type=Path, default=Path("validate.json"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--placements", type=int, default=10)
    parser.add_argument("--measure-seconds", type=float, default=12.0, help="per placement")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop; repeat")
    parser.add_argument("--plan", action="store_true", help="make the placements, measure later")
    parser.add_argument("--predict", action="store_true", help="only predict again what is there")
    parser.add_argument("--cluster", default="2xcpu-core")
    parser.add_argument("--costs", help="default: the shipped calibration")
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    cluster = Cluster.load(arguments.cluster)
    costs, label = resolve_costs(arguments.costs, cluster)
    print(label)
    started_s = time.monotonic()
    path = arguments.output
    document = read(path) if path.exists() else {"format": FORMAT, "costs": label, "models": {}}
    for model in arguments.models.split(","):
        spec = MODELS[model]
        spec = spec if spec.startswith("onnx:") else str(arguments.folder / spec)
        rows = document["models"].setdefault(model, [])
        if not arguments.predict and len(rows) >= arguments.placements:
            continue
        graph = load(spec, {})
        place = path.with_suffix(f".{model}.npz")
        planned = _planned(place, graph, cluster, costs, arguments)
        if arguments.plan:
            continue
        source = randomised(load_source(spec), 0)
        have = {row["name"]: row for row in rows}
        for name, device in planned.items():
            if (name in have) != arguments.predict:
                continue
            if time.monotonic() - started_s > arguments.seconds:
                raise SystemExit(3)
            plan, said = predicted(source, graph, cluster, device, costs)
            if arguments.predict:
                have[name].update(said)
            else:
                found = measure(source, graph, cluster, plan, arguments.measure_seconds)
                rows.append({"name": name, **said, **found})
            path.write_text(json.dumps(document))
    if not arguments.plan:
        print(report(document["models"]))


def _planned(
    path: Path, graph: OpGraph, cluster: Cluster, costs: CostModel, arguments: argparse.Namespace
) -> dict[str, Int[np.ndarray, "N"]]:
    """The placements of a model, made once."""
    if not path.exists():
        made = dict(placements(graph, cluster, costs, arguments.placements, 0))
        np.savez_compressed(path, **made)  # type: ignore[arg-type]
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


if __name__ == "__main__":
    main()
