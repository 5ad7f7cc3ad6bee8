"""Whether bounds keep their budget: `python -m benchmarks.bound_budget [--seconds 5]`.

Random graphs on unlike devices with so little memory that ops dealt out evenly, in order, just fit.
A line for each problem: CPU seconds of a bound of so many seconds of effort, what it proves, and
which programs were solved for it, each in how many CPU seconds; those that are not named were left
out, most often as too large for the effort. One bound of each objective goes before and does not
count: it compiles what is compiled.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from gdp.bounds import latency, throughput
from gdp.bounds.best import CUT_SHORT, best_bound
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score

SIZES = ((22, 8), (22, 20), (40, 4), (60, 16), (120, 4), (300, 2), (300, 8))
"""Ops and devices. In five seconds of effort the program of paths is solved for all but the fourth
and the last, and with whole placements for the first, the third and the sixth."""
PROGRAMS = (
    ("paths", latency, "dual_weights"),
    ("whole paths", latency, "least_whole"),
    ("loads", throughput, "dual_weights"),
    ("whole loads", throughput, "least_whole"),
)
"""What solves them."""


def random_problem(num_ops: int, num_devices: int, objective: str, seed: int) -> Problem:
    """Ops of 0 to 2 s that read up to three of those before them, over links of 1 s and more.

    Memory is what the fullest device needs when each gets as many ops in a row.
    """
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
    devices = [Device(f"d{i}", "d", {"default": 1.0}, 1.0) for i in range(num_devices)]
    cluster = make_cluster("many", devices, default_bytes_per_s=10.0, default_latency_s=1.0)
    compute_s = rng.uniform(0.0, 2.0, size=(num_ops, num_devices))
    ample = make_problem(graph, cluster, compute_s, objective)
    blocks = np.arange(num_ops) * num_devices // num_ops
    room = int(score(ample, blocks).peak_bytes.max())
    cluster = replace(cluster, devices=[replace(each, memory_bytes=room) for each in devices])
    return make_problem(graph, cluster, compute_s, objective)


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """CPU seconds in each of the programs that are solved meanwhile."""
    taken: dict[str, float] = {}

    def timed(name: str, solve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(solve)
        def solved(*args: Any) -> Any:
            begin_s = time.process_time()
            try:
                return solve(*args)
            finally:
                taken[name] = taken.get(name, 0.0) + time.process_time() - begin_s

        return solved

    with ExitStack() as stack:
        for name, module, solver in PROGRAMS:
            stack.enter_context(patch.object(module, solver, timed(name, getattr(module, solver))))
        yield taken


@click.command(help=__doc__)
@click.option("--seconds", default=5.0, show_default=True, help="Of effort, for each bound.")
@click.option("--seeds", default=2, show_default=True)
def main(seconds: float, seeds: int) -> None:
    """A line for each problem."""
    for objective in ("latency", "throughput"):
        best_bound(random_problem(22, 4, objective, 0), 1.0)
        for num_ops, num_devices in SIZES:
            for seed in range(seeds):
                problem = random_problem(num_ops, num_devices, objective, seed)
                begin_s = time.process_time()
                with watched() as programs:
                    bound = best_bound(problem, seconds)
                took_s = time.process_time() - begin_s
                solved = ", ".join(f"{name} {s:.1f}" for name, s in programs.items())
                ended = CUT_SHORT if bound.argument.endswith(CUT_SHORT) else ""
                click.echo(
                    f"{objective}, {num_ops} ops, {num_devices} devices, seed {seed}: "
                    f"{took_s:.1f} CPU s ({solved or 'no program'}), {bound.value_s:.3f} s by "
                    f"{bound.argument[:40]}{ended}"
                )


if __name__ == "__main__":
    main()
