"""Whether bounds keep their budget: `python -m benchmarks.bound_budget [--seconds 5]`.

Random graphs on many unlike devices, whose memory holds 1.6 times all weights, the case in which
most is tried: CPU seconds of a bound of so many seconds of effort, and what it proves.
"""

import time

import click
import numpy as np

from gdp.bounds.best import best_bound
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import Problem, make_problem

SIZES = ((22, 20), (60, 16), (120, 12), (300, 8))
"""Ops and devices."""
MEMORY = 1.6


def random_problem(num_ops: int, num_devices: int, objective: str, seed: int) -> Problem:
    """Ops of 0 to 2 s that read up to three of those before them, over links of 1 s and more."""
    rng = np.random.default_rng([seed, num_ops, num_devices])
    uses = [
        (int(source), op)
        for op in range(1, num_ops)
        for source in rng.choice(op, size=min(op, int(rng.integers(4))), replace=False)
    ]
    weight_bytes = rng.choice([0, 3, 6], size=num_ops)
    graph = make_graph(
        f"random{num_ops}", [f"op{i}" for i in range(num_ops)], ["MatMul"] * num_ops,
        [(i, int(size)) for i, size in enumerate(rng.integers(1, 10, size=num_ops))], uses,
        weight_bytes=weight_bytes, weight_id=np.arange(num_ops),
    )  # fmt: skip
    room = max(24, int(MEMORY * weight_bytes.sum() / num_devices))
    devices = [Device(f"d{i}", "d", {"default": 1.0}, 1.0, room) for i in range(num_devices)]
    cluster = make_cluster("many", devices, default_bytes_per_s=10.0, default_latency_s=1.0)
    compute_s = rng.uniform(0.0, 2.0, size=(num_ops, num_devices))
    return make_problem(graph, cluster, compute_s, objective)


@click.command(help=__doc__)
@click.option("--seconds", default=5.0, show_default=True, help="Of effort, for each bound.")
@click.option("--seeds", default=2, show_default=True)
def main(seconds: float, seeds: int) -> None:
    """A line for each problem."""
    for objective in ("latency", "throughput"):
        for num_ops, num_devices in SIZES:
            for seed in range(seeds):
                problem = random_problem(num_ops, num_devices, objective, seed)
                begin_s = time.process_time()
                bound = best_bound(problem, seconds)
                took_s = time.process_time() - begin_s
                click.echo(
                    f"{objective}, {num_ops} ops, {num_devices} devices, seed {seed}: "
                    f"{took_s:.1f} CPU s, {bound.value_s:.3f} s by {bound.argument[:60]}"
                )


if __name__ == "__main__":
    main()
