"""Little memory: what search finds alone, what programs in rounds add to it, and the bound.

    python -m benchmarks.tight [--objective throughput|latency] [--over 1.1] [--evaluations 20000]
                               [--models A,B] [--clusters C,D]

Memory of every device is --over times the least share of it in which a heuristic or a short search
is known to fit. Stages are not replicated. "search" is the local search with so many evaluations,
"auto" the portfolio with as many and with the objective's program, which no clock ends, "long" the
search with ever more evaluations until it has taken auto's CPU seconds. CPU seconds are whole,
heuristics and programs included. The bound is that of three seconds of effort.
"""

import time
from dataclasses import replace
from typing import Any

import click
import numpy as np

from benchmarks.tables import geomean, head, line
from gdp.cluster.types import Cluster
from gdp.methods.base import Method, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.search.local_search import local_search
from gdp.problem.problem import Problem, make_problem
from gdp.question.question import Question
from gdp.sim.score import score

_STEPS = 10
_EVALUATIONS = 300
_MOST = 100_000_000  # evaluations, where search takes no time to speak of
MODELS = "squeezenet,inception_v1,resnet50,densenet121"
CLUSTERS = "2xt4-pcie3,v100+t4-pcie3,4xt4-pcie3"


def with_memory(problem: Problem, factor: float) -> Problem:
    """The problem with so much of every device's memory."""
    old = problem.cluster
    devices = tuple(
        replace(device, memory_bytes=max(1, int(device.memory_bytes * factor)))
        for device in old.devices
    )
    cluster = Cluster(
        old.name, devices, old.link_bytes_per_s, old.link_latency_s, old.channel, old.host
    )
    made = make_problem(
        problem.graph, cluster, problem.compute_s, problem.objective, allowed=problem.allowed
    )
    return replace(made, replicas=problem.replicas)


def least_factor(problem: Problem) -> float:
    """The least share of every device's memory in which some heuristic or short search fits.

    Bisection on a logarithmic scale, to about 1%; what smaller share may do is not known.
    """
    peak = max(_peak(problem), 1)
    high = 1.0
    low = min(1.0, peak / sum(d.memory_bytes for d in problem.cluster.devices) / 64)
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if _fits(with_memory(problem, middle)):
            high = middle
        else:
            low = middle
    return high


def tight(problem: Problem, over_least: float) -> Problem:
    """The problem with memory `over_least` times the least known to be enough, on every device."""
    return with_memory(problem, min(1.0, over_least * least_factor(problem)))


def _peak(problem: Problem) -> int:
    device = np.full(problem.num_ops, problem.cluster.host, dtype=np.int64)
    return int(score(problem, device, None).peak_bytes.sum())


def _fits(problem: Problem) -> bool:
    search = Search(seconds=None, evaluations=_EVALUATIONS)
    methods = [method for name, method in HEURISTICS if name not in ("round_robin", "single")]
    for method in (*methods, local_search):
        if method(problem, search).assignment is not None:
            return True
    return False


def row(problem: Problem, evaluations: int) -> dict[str, Any]:
    """Values in seconds of search alone and of auto, their CPU seconds, and the bound."""
    from gdp.bounds.best import best_bound
    from gdp.methods.portfolio import auto

    found: dict[str, Any] = {}
    local_search(problem, Search(seconds=None, evaluations=50))  # compiled before it is timed

    def timed(name: str, method: Method, evaluations: int) -> float:
        began_s = time.process_time()
        answer = method(problem, Search(seconds=None, evaluations=evaluations))
        found[f"{name}_cpu_s"] = time.process_time() - began_s
        placed = answer.assignment
        value_s = np.inf if placed is None else score(problem, placed.device, placed.rank).value_s
        found[f"{name}_s"] = value_s
        return found[f"{name}_cpu_s"]

    timed("search", local_search, evaluations)
    auto_cpu_s = timed("auto", auto, evaluations)
    while timed("long", local_search, evaluations) < auto_cpu_s and evaluations < _MOST:
        evaluations = int(
            evaluations * min(8.0, max(1.1, 1.1 * auto_cpu_s / max(found["long_cpu_s"], 1e-3)))
        )
    found["bound_s"] = best_bound(problem, 3.0).value_s
    return found


@click.command()
@click.option("--objective", type=click.Choice(["throughput", "latency"]), default="throughput")
@click.option("--over", type=float, default=1.1, show_default=True, help="times the least memory")
@click.option("--evaluations", type=int, default=20_000, show_default=True)
@click.option("--models", default=MODELS, show_default=True, help="light ONNX models")
@click.option("--clusters", default=CLUSTERS, show_default=True)
def main(objective: str, over: float, evaluations: int, models: str, clusters: str) -> None:
    """Print a row for each model and cluster, and geometric means."""
    import gdp
    from gdp.costs.base import roofline
    from gdp.question.prepare import prepare_problem

    timed = " | ".join(f"{name} ms (CPU s)" for name in ("search", "long", "auto"))
    click.echo(head(f"model | cluster | MB | {timed} | auto / long | bound / auto", left=2))
    gains, gaps = [], []
    for model in models.split(","):
        graph = gdp.load(f"onnx:light_{model}")
        for cluster in clusters.split(","):
            prepared = prepare_problem(
                Question(graph, Cluster.load(cluster), objective=objective, costs=roofline)
            )
            problem = tight(replace(prepared, replicas=False), over)
            r = row(problem, evaluations)
            gains.append(r["auto_s"] / r["long_s"])
            gaps.append(r["bound_s"] / r["auto_s"])
            cells = [
                f"{r[f'{name}_s'] * 1e3:.4f} ({r[f'{name}_cpu_s']:.1f})"
                for name in ("search", "long", "auto")
            ]
            memory = f"{problem.cluster.memory_bytes[0] / 1e6:.1f}"
            click.echo(line(model, cluster, memory, *cells, f"{gains[-1]:.3f}", f"{gaps[-1]:.3f}"))
    click.echo(
        f"geometric means: auto / long {geomean(gains):.3f}, bound / auto {geomean(gaps):.3f}"
    )


if __name__ == "__main__":
    main()
