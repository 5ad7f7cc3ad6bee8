"""Compilation of kernels by two processes at the first run after installing, with a message.

numba compiles a kernel when it is first called and keeps it on disk for good. Until then a command
that searches would spend its first minute compiling one kernel after another, without a word. Here
the command and a second process compile into one cache: each takes the next group of kernels that
the command will call as soon as it has finished one, until none is left.
"""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from gdp.base.clock import Clock
from gdp.base.cores import num_cores
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import find_objective

MESSAGE = "compiling kernels, for the first run only (about 20 s on two idle cores)"


def _echo(message: str) -> None:
    click.echo(f"gdp: {message}", err=True)


def prepare(method: str, objective: str, say: Callable[[str], Any] = _echo) -> None:
    """Compile the kernels of a command that are not compiled yet, after a message.

    Args:
        method: Placement method of the command, which searches.
        objective: Objective of the command.
        say: Receives the message, if anything is compiled.
    """
    if not find_objective(objective).general:
        return
    first, *others = _groups_of(method, objective)
    helper: list[subprocess.Popen[bytes]] = []
    ours, theirs = os.pipe()  # one byte for every group that nobody has taken yet

    def begin() -> None:
        say(MESSAGE)
        os.write(theirs, bytes(GROUP_NAMES.index(name) for name in others))
        if num_cores() > 1:
            helper.append(_start(objective, ours))
        os.close(theirs)

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        with _watched(begin) as watch:
            compile_groups(objective, [first])
            if watch.begun:
                compile_groups(objective, _taken(ours))
            else:
                os.close(theirs)
    for process in helper:
        # What it fails at is compiled on the way, and the error is told there.
        with _ended(process):
            process.wait()


def _groups_of(method: str, objective: str) -> list[str]:
    """Groups of kernels that a method needs: those that others build on, then the costliest."""
    pipelined = find_objective(objective).pipelined
    bounds = [] if pipelined else ["bounds"]
    with_policy = method.startswith("policy")
    if method != "auto" and not with_policy:
        return ["simulator", *bounds, "lists"]
    pipeline = ["pipeline"] if pipelined else []
    return ["simulator", "policy", *pipeline, "search", *bounds, "lists", "paths"]


def _taken(pipe: int) -> Iterator[str]:
    """Groups that this process takes from the pipe, one after the other, until none is left."""
    while number := os.read(pipe, 1):
        yield GROUP_NAMES[number[0]]


def compile_groups(objective: str, names: Iterable[str]) -> None:
    """Run the kernels of these groups on a tiny problem."""
    problem = _tiny(objective)
    for name in names:
        GROUPS[name](problem)


@contextlib.contextmanager
def _watched(begin: Callable[[], None]) -> Iterator[Any]:
    """Call `begin` at the first compilation within, if there is any.

    No garbage is collected while numba compiles: of its millions of objects few are garbage.
    """
    from numba.core import event

    class Watch(event.Listener):
        def __init__(self) -> None:
            self.depth, self.begun, self.collects = 0, False, gc.isenabled()

        def on_start(self, event: Any) -> None:
            del event
            if not self.begun:
                self.begun = True
                begin()
            self.depth += 1
            gc.disable()

        def on_end(self, event: Any) -> None:
            del event
            self.depth -= 1
            if self.depth == 0 and self.collects:
                gc.enable()

    watch = Watch()
    with event.install_listener("numba:compile", watch):
        yield watch


def _start(objective: str, pipe: int) -> "subprocess.Popen[bytes]":
    """Run this module as a program that imports the same gdp and reads the same pipe."""
    package = str(Path(__file__).resolve().parent.parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, objective],
        stdin=pipe,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End the process with the command, also with an interrupted one."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _simulator(problem: Problem) -> None:
    import gdp.sim.kernels.evaluate  # noqa: F401  (from here on it simulates, not plain Python)
    from gdp.sim.score import score, values

    device = np.zeros(problem.num_ops, dtype=np.int64)
    values(problem, device[None], np.arange(problem.num_ops)[None])
    score(problem, device, None)


def _search(problem: Problem) -> None:
    from gdp.methods.annealing.annealer import annealer_of, make_annealer
    from gdp.methods.heuristics.simple import single_assignments
    from gdp.methods.repair import repair
    from gdp.methods.repair_kernels import pack
    from gdp.methods.scoring import best_of

    start = best_of(problem, single_assignments(problem))
    make_annealer(problem, start, seed=0).run(1, 1, annealer_of(problem).default)
    tight = _tiny(problem.objective, memory_bytes=70)
    a, share = arrays_of(tight), 1.0
    room = np.full(tight.num_devices, 70.0)
    pack(a, np.arange(tight.num_groups), room, a.pool_bytes * share)
    repair(tight, best_of(tight, single_assignments(tight)), Clock(None), seed=0)


def _lists(problem: Problem) -> None:
    from gdp.methods.heuristics.blocks import block_assignments
    from gdp.methods.heuristics.list_schedule import etf_assignments, heft_assignments
    from gdp.methods.priorities import rank_under

    for assignments in (heft_assignments, etf_assignments, block_assignments):
        list(assignments(problem))
    rank_under(problem, np.zeros(problem.num_ops, dtype=np.int64), "critical")


def _paths(problem: Problem) -> None:
    from gdp.methods.heuristics.list_schedule import critical_path_assignments

    list(critical_path_assignments(problem, seed=0))


def _bounds(problem: Problem) -> None:
    import numba  # noqa: F401  (from here on bounds are compiled)

    from gdp.bounds.budget import WorkBudget
    from gdp.bounds.latency import latency_bounds

    latency_bounds(problem, WorkBudget(0.1))


def _policy(problem: Problem) -> None:
    from gdp.policy.advice import ADVISERS, Advice
    from gdp.policy.decode import Head, decode, prepare
    from gdp.policy.model.config import NUM_PAIR_FEATURES, NetworkConfig
    from gdp.policy.view.features import features

    placed = np.zeros((1 + len(ADVISERS), problem.num_ops), dtype=np.int64)
    features(problem, advice=Advice(placed, np.ones(len(placed)), 0))
    width = NetworkConfig().head_width
    shapes = [
        (problem.num_ops, width), (problem.num_devices, width), (NUM_PAIR_FEATURES, width),
        (width, width), (width,), (width,),
    ]  # fmt: skip
    head = Head(*(np.zeros(shape, dtype=np.float32) for shape in shapes))
    decode(prepare(problem), head, samples=1, seed=0)


def _pipeline(problem: Problem) -> None:
    del problem
    from gdp.methods.pipeline.method import compile_pipelines

    compile_pipelines(linear_only=True)


GROUPS: dict[str, Callable[[Problem], None]] = {
    "simulator": _simulator,
    "policy": _policy,
    "pipeline": _pipeline,
    "search": _search,
    "bounds": _bounds,
    "lists": _lists,
    "paths": _paths,
}
"""Functions that call all kernels of a part of gdp."""
GROUP_NAMES = tuple(GROUPS)


def _tiny(objective: str, memory_bytes: int = 1000) -> Problem:
    """Two chains of ops on two equal devices; together they need about 80 bytes."""
    graph = make_graph(
        "tiny",
        [f"op{i}" for i in range(8)],
        ["MatMul", "Relu"] * 4,
        [(i, 8) for i in range(8)],
        [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)],
        flop=[1.0] * 8,
        weight_bytes=[8] * 8,
    )
    devices = [
        Device(name, "cpu", {"default": 1.0}, 1.0, memory_bytes=memory_bytes) for name in "ab"
    ]
    cluster = make_cluster("tiny", devices, default_bytes_per_s=8.0, default_latency_s=0.5)
    return make_problem(graph, cluster, np.ones((8, 2)), objective)


def main(objective: str) -> None:
    """The second process; its standard input is the pipe."""
    gc.disable()
    compile_groups(objective, _taken(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
