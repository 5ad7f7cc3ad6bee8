"""Exact evaluations a second, against one plain pass over the same arrays.

    python -m benchmarks.simulator [--rounds 7]

The plain pass visits ops in topological order and starts each at max(device free, inputs' arrival):
no queues, no contention, so it is no simulation but the least that any evaluation must do. Both are
compiled by numba with the same flags and read the same arrays. Rounds are interleaved; the best of
each is printed, with the ratio (plain time over exact time) and ns per use. Graphs: random DAGs of
average degree 2 whose ops read the 100 before them; 4 devices; placements uniformly random, and
blocks of equal size. Seconds are of this process's CPU but for those of two cores.
"""

import time
import typing
from collections.abc import Callable
from typing import Any

import click
import numba
import numpy as np

from benchmarks.tables import head, line
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.problem import Problem, make_problem
from gdp.sim.engine import arrays, workspace
from gdp.sim.kernels.direct import run_latency

DEVICES = 4
REACH = 100  # ops before an op that it may read


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def plain_pass(a, latency_s, bytes_per_s, device, finish_s, free_s):
    """Seconds of one pass in topological order; `finish_s` [N] and `free_s` [D] are scratch."""
    free_s[:] = 0.0
    last_s = 0.0
    for op in range(len(device)):
        d = device[op]
        start_s = free_s[d]
        for k in range(a.first_input[op], a.first_input[op + 1]):
            source = a.input_op[k]
            s = device[source]
            arrive_s = finish_s[source]
            if s != d:
                arrive_s += latency_s[s, d] + a.sent_bytes[a.input_tensor[k]] / bytes_per_s[s, d]
            start_s = max(start_s, arrive_s)
        end_s = start_s + a.op_s[op, d]
        finish_s[op] = end_s
        free_s[d] = end_s
        last_s = max(last_s, end_s)
    return last_s


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def plain_all(a, latency_s, bytes_per_s, placements, finish_s, free_s):
    """The plain pass over many placements, so that calls from Python do not count."""
    total_s = 0.0
    for row in range(len(placements)):
        total_s += plain_pass(a, latency_s, bytes_per_s, placements[row], finish_s, free_s)
    return total_s


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def exact_all(a, w, placements):
    """The exact simulation of many placements."""
    total_s = 0.0
    for row in range(len(placements)):
        total_s += run_latency(a, w, placements[row], False, False)
    return total_s


def random_problem(num_ops: int, seed: int = 0) -> Problem:
    """A random DAG of average degree 2 on four equal devices."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 5, size=num_ops)
    reader = np.repeat(np.arange(num_ops), count)
    source = reader - rng.integers(1, REACH + 1, size=len(reader))
    pairs = np.unique(np.stack([source, reader])[:, source >= 0], axis=1)
    graph = make_graph(
        f"random{num_ops}",
        [f"op{i}" for i in range(num_ops)],
        ["MatMul"] * num_ops,
        [(i, int(size)) for i, size in enumerate(rng.integers(10**3, 10**6, size=num_ops))],
        list(zip(*pairs.tolist(), strict=True)),
    )
    devices = [Device(f"d{i}", "d", {"default": 1e12}, 1e12) for i in range(DEVICES)]
    cluster = make_cluster("four", devices, default_bytes_per_s=1e11, default_latency_s=1e-6)
    seconds = np.tile(rng.uniform(1e-6, 5e-5, size=(num_ops, 1)), (1, DEVICES))
    return make_problem(graph, cluster, seconds)


def seconds_of(call: Callable[[], object], now: Callable[[], float] = time.process_time) -> float:
    """Seconds of one call, by default of the CPU."""
    began_s = now()
    call()
    return now() - began_s


def drawn(num_ops: int, kind: str, count: int) -> np.ndarray:
    """Placements [count, N]: uniformly random, or blocks of equal size on the devices in turn."""
    if kind == "random":
        rng = np.random.default_rng(1)
        return rng.integers(DEVICES, size=(count, num_ops)).astype(np.int32)
    blocks = np.arange(num_ops) * DEVICES // num_ops
    return np.stack([np.roll(np.arange(DEVICES), i)[blocks] for i in range(count)]).astype(np.int32)


def row(num_ops: int, kind: str, rounds: int) -> dict[str, Any]:
    """One size and one kind of placement."""
    from gdp.sim.latency import latencies

    problem = random_problem(num_ops)
    flat, work = arrays(problem), workspace(problem)
    count = max(4, 100_000 // num_ops)
    placements = drawn(num_ops, kind, count)
    links = problem.cluster.link_latency_s, problem.cluster.link_bytes_per_s
    finish_s, free_s = np.zeros(num_ops), np.zeros(DEVICES)

    batch = np.concatenate([placements] * max(1, 64 // len(placements))).astype(np.int64)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "plain": (lambda: plain_all(flat, *links, placements, finish_s, free_s), count),
        "exact": (lambda: exact_all(flat, work, placements), count),
        "one": (lambda: latencies(problem, batch, threads=1), len(batch)),
        "two": (lambda: latencies(problem, batch, threads=2), len(batch)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first round compiles
        for name, (call, size) in calls.items():
            now = time.perf_counter if name in ("one", "two") else time.process_time
            times[name].append(seconds_of(call, now) / size)
    fastest = {name: min(values[1:]) for name, values in times.items()}
    return {
        "exact_per_s": 1 / fastest["exact"],
        "plain_per_s": 1 / fastest["plain"],
        "ratio": fastest["plain"] / fastest["exact"],
        "exact_ns_per_use": fastest["exact"] / problem.graph.num_uses * 1e9,
        "plain_ns_per_use": fastest["plain"] / problem.graph.num_uses * 1e9,
        "two_cores_speedup": fastest["one"] / fastest["two"],
    }


@click.command()
@click.option("--rounds", type=int, default=7, show_default=True)
def main(rounds: int) -> None:
    """Print the table."""
    titles = (
        "ops | placements | exact /s | plain /s | ratio | exact ns/use | plain ns/use | 2 cores"
    )
    click.echo(head(titles, left=2))
    for count in (1000, 10_000, 50_000):
        for kind in ("random", "blocks"):
            r = row(count, kind, rounds)
            click.echo(line(
                count, kind, f"{r['exact_per_s']:.0f}", f"{r['plain_per_s']:.0f}",
                f"{r['ratio']:.2f}", f"{r['exact_ns_per_use']:.1f}", f"{r['plain_ns_per_use']:.1f}",
                f"{r['two_cores_speedup']:.2f}",
            ))  # fmt: skip


if __name__ == "__main__":
    main()
