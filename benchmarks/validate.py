"""Predicted against measured time of real placements on pinned cores, model by model.

    python -m benchmarks.validate run -o validate.json --models resnet50,squeezenet [--seconds 700]
    python -m benchmarks.validate run -o validate.json --predict   predict again, only
    python -m benchmarks.validate report validate.json

Models are of held-out families of the calibration; `pretrain.profile_corpus.build` makes those that
the onnx package does not carry, in --folder. Every placement is measured as `gdp run` does it, one
sample at a time for the latency and with the pipeline full for the throughput, in interleaved
rounds: medians of rounds and their 95% intervals. Every other round is one repeat; how well two
repeats agree bounds what any prediction can reach. Placements that were measured before are kept:
`run` can be repeated. Errors are of medians over all rounds; rank correlations are means over the
two repeats, and between them for what the measurement has with itself.
"""

import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import GdpError
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel, roofline
from gdp.costs.default import resolve_costs
from gdp.costs.learned import LearnedCosts
from gdp.graph.fuse import fuse, group_seconds
from gdp.graph.op_graph import OpGraph
from gdp.measure.measuring import Measuring
from gdp.measure.measuring import measure as measure_contenders
from gdp.measure.plan import make_plan
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Assignment
from gdp.problem.problem import Origin, make_problem
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.sim.prediction import Prediction
from gdp.sim.segments import segment_values
from gdp.targets.onnx_source import Source, load_source, randomised
from gdp.targets.onnxruntime.pipeline import SideBySide
from gdp.targets.onnxruntime.run import CutPlan, cut_plan, prepare
from gdp.targets.onnxruntime.sessions import core_of_device

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
                result = solve.solve(
                    Question(
                        graph,
                        cluster,
                        objective=objective,
                        method=method,
                        costs=costs,
                        search=Search(seed=seed, seconds=1.0),
                        constraints=Constraints(replicas=False),
                    )
                )
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
    """The problem over fused ops with these costs."""
    fused = fuse(graph, apart=device)
    where = segment_values(device, fused.group_of)
    if isinstance(costs, LearnedCosts):
        seconds = group_seconds(fused, costs(graph, cluster))
        cluster = costs.with_runtime_overheads(cluster)
    else:
        seconds = costs(fused.graph, cluster)
    origin = Origin(fused.group_of)
    problem = make_problem(fused.graph, cluster, seconds, "throughput", origin=origin)
    return Prediction(problem, Assignment(where))


def predicted(
    source: Source, graph: OpGraph, cluster: Cluster, device: Int[np.ndarray, "N"],
    costs: CostModel,
) -> tuple[CutPlan, dict[str, Any]]:  # fmt: skip
    """The cut of a placement, and predictions of it by costs and by the roofline."""
    plan, plain = (
        make_plan(prediction(graph, cluster, device, c), "throughput") for c in (costs, roofline)
    )
    ours = cut_plan(source.model, graph, plan)
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


FORMAT = 2
"""Of the files: medians of rounds. Files without a format held the fastest round."""
SPREAD = 0.1
"""Models whose placements differ by less have no order to predict."""


def _rank_correlation(a: Float[np.ndarray, "P"], b: Float[np.ndarray, "P"]) -> float:
    """Spearman's, with ties ranked by their mean."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def read(path: Path) -> dict[str, Any]:
    """One pass; raises `ValueError` for files of another statistic."""
    document = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise ValueError(
            f"{path} was measured with another statistic than format {FORMAT} (medians of rounds "
            "of a full pipeline); measure again with python -m benchmarks.validate run"
        )
    return document


def repeats(rows: Sequence[dict[str, Any]], what: str) -> Float[np.ndarray, "P R"]:
    """Values of each placement by each repeat: the median of every other round."""
    rounds = [row[f"{what}_rounds_s"] for row in rows]
    return np.array([[np.median(own[0::2]), np.median(own[1::2])] for own in rounds])


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors and rank correlations of one model's placements."""
    found: dict[str, Any] = {"placements": len(rows)}
    for what in ("latency", "period"):
        measured = np.array([row[f"{what}_s"] for row in rows])
        again = repeats(rows, what)
        pairs = itertools.combinations(again.T, 2)
        found[what] = {
            "spread": float(measured.max() / measured.min() - 1),
            "width": float(np.median([_width(row, what) for row in rows])),
            "repeat_spearman": float(np.mean([_rank_correlation(a, b) for a, b in pairs])),
        }
        for name in ("predicted", "roofline"):
            made = np.array([row[f"{name}_{what}_s"] for row in rows])
            error = np.abs(made / measured - 1)
            found[what][name] = {
                "median_error": float(np.median(error)),
                "p90_error": float(np.quantile(error, 0.9)),
                "bias": float(np.median(made / measured - 1)),
                "spearman": float(np.mean([_rank_correlation(made, r) for r in again.T])),
            }
    return found


def _width(row: dict[str, Any], what: str) -> float:
    """Of a 95% interval, as a share of the value."""
    low, high = row[f"{what}_interval_s"]
    return np.inf if high is None else (high - low) / row[f"{what}_s"]


def report(models: dict[str, Any]) -> str:
    """The figures as a table; shares are Spearman's correlation of predicted and measured over
    that of the repeats."""
    document = {model: rows for model, rows in models.items() if rows}
    if not document:
        return "nothing was measured"
    lines = [
        f"{'model':14} {'n':>3} {'what':8} {'spread':>7} {'95%':>6} {'error':>7} "
        f"{'p90':>7} {'bias':>7} {'rank':>6} {'repeat':>7} {'share':>6} "
        f"| {'roofline':>8} {'rank':>6} {'share':>6}"
    ]
    per_model = {model: figures(rows) for model, rows in document.items()}
    for model, found in per_model.items():
        for what in ("latency", "period"):
            lines.append(_line(model, found["placements"], what, found[what]))
    rows = [row for entries in document.values() for row in entries]
    found = figures(rows)
    lines += [_line("all", len(rows), what, found[what]) for what in ("latency", "period")]
    lines += [_ranks(per_model, what) for what in ("latency", "period")]
    lines.append(f"95%: widths of the intervals of what was measured, in the median; {_fast(rows)}")
    return "\n".join(lines)


def _fast(rows: Sequence[dict[str, Any]]) -> str:
    """The share of pipelines that keep what was predicted of them."""
    share = np.array([row["predicted_period_s"] / row["period_s"] for row in rows])
    return f"{(share >= 0.95).mean():.0%} of the pipelines run at 0.95 of their predicted rate"


def _share(found: dict[str, Any], name: str) -> float:
    """The rank correlation with the measurement over what the measurement has with itself."""
    return found[name]["spearman"] / max(found["repeat_spearman"], 1e-9)


def _ranks(per_model: dict[str, dict[str, Any]], what: str) -> str:
    """Over the models whose placements spread: the mean share, and how many reach 0.95."""
    spread = [found[what] for found in per_model.values() if found[what]["spread"] > SPREAD]
    if not spread:
        return f"{what}: no model's placements spread by more than {SPREAD:.0%}"
    ours, plain = ([_share(found, name) for found in spread] for name in ("predicted", "roofline"))
    return (
        f"{what}: of {len(spread)} models whose placements spread by more than {SPREAD:.0%}, rank "
        f"correlation is {np.mean(ours):.3f} of the repeats' on average, at least 0.95 in "
        f"{sum(x >= 0.95 for x in ours)} (roofline {np.mean(plain):.3f}, "
        f"{sum(x >= 0.95 for x in plain)})"
    )


def _line(model: str, count: int, what: str, found: dict[str, Any]) -> str:
    ours, plain = found["predicted"], found["roofline"]
    return (
        f"{model:14} {count:3} {what:8} {found['spread']:7.0%} {found['width']:6.1%} "
        f"{ours['median_error']:7.1%} {ours['p90_error']:7.1%} {ours['bias']:+7.1%} "
        f"{ours['spearman']:6.3f} {found['repeat_spearman']:7.3f} "
        f"{_share(found, 'predicted'):6.3f} | {plain['median_error']:8.1%} "
        f"{plain['spearman']:6.3f} {_share(found, 'roofline'):6.3f}"
    )


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command("report")
@click.argument("file", type=click.Path(path_type=Path))
def report_verb(file: Path) -> None:
    """Errors and rank correlations, as a table."""
    print(report(read(file)["models"]))


@main.command()
@click.option("--folder", type=Path, default=Path(), help="Of models that were exported.")
@click.option("-o", "--output", "path", type=Path, default=Path("validate.json"))
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--placements", "count", default=10, show_default=True)
@click.option("--measure-seconds", default=12.0, show_default=True, help="Of each placement.")
@click.option("--seconds", default=float("inf"), help="Then stop; repeat to go on.")
@click.option("--predict", is_flag=True, help="Only predict again what is there.")
@click.option("--cluster", "preset", default="2xcpu-core", show_default=True)
@click.option("--costs", "file", help="Default: the shipped calibration.")
def run(
    folder: Path, path: Path, models: str, count: int, measure_seconds: float, seconds: float,
    predict: bool, preset: str, file: str | None,
) -> None:  # fmt: skip
    """Make placements once, predict and measure them, and print the report."""
    if unknown := set(models.split(",")) - set(MODELS):
        raise click.UsageError(f"no model {min(unknown)}; there are {', '.join(MODELS)}")
    cluster = Cluster.load(preset)
    costs, label = resolve_costs(file, cluster)
    print(label)
    started_s = time.monotonic()
    document = read(path) if path.exists() else {"format": FORMAT, "costs": label, "models": {}}
    for model in models.split(","):
        spec = MODELS[model]
        spec = spec if spec.startswith("onnx:") else str(folder / spec)
        rows = document["models"].setdefault(model, [])
        if not predict and len(rows) >= count:
            continue
        graph = load(spec, {})
        place = path.with_suffix(f".{model}.npz")
        if not place.exists():
            made = dict(placements(graph, cluster, costs, count, 0))
            np.savez_compressed(place, **made)  # type: ignore[arg-type]
        with np.load(place) as arrays:
            planned = {name: arrays[name] for name in arrays.files}
        source = randomised(load_source(spec), 0)
        have = {row["name"]: row for row in rows}
        for name, device in planned.items():
            if (name in have) != predict:
                continue
            if time.monotonic() - started_s > seconds:
                raise SystemExit(3)
            plan, said = predicted(source, graph, cluster, device, costs)
            if predict:
                have[name].update(said)
            else:
                found = measure(source, graph, cluster, plan, measure_seconds)
                rows.append({"name": name, **said, **found})
            path.write_text(json.dumps(document))
    print(report(document["models"]))


if __name__ == "__main__":
    main()
