"""Compilation of kernels at the first run after installation, with its progress.

numba compiles a kernel at its first call and keeps it on disk for good. Without this module the
first command that searches would compile one kernel after another within its budget, without a
word.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gdp.base.clock import Clock
from gdp.cluster.types import Device, make_cluster
from gdp.graph.op_graph import make_graph
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import find_objective

MESSAGE = "compiling kernels, for the first run only, about 30 s in all"


def prepare(method: str, objective: str, say: Callable[[str], Any]) -> None:
    """Compile the kernels of a command that are not compiled yet, and report each group of them.

    Args:
        method: Placement method of the command, which searches.
        objective: Objective of the command.
        say: Receives the messages, if anything is compiled.
    """
    if not find_objective(objective).general:
        return
    first, *others = _groups_of(method, objective)
    with _watched(lambda: say(f"{MESSAGE} (1 of {1 + len(others)})")) as watch:
        compile_groups(objective, [first])
        for number, name in enumerate(others if watch.begun else (), 2):
            say(f"{MESSAGE} ({number} of {1 + len(others)})")
            compile_groups(objective, [name])


def _groups_of(method: str, objective: str) -> list[str]:
    """Groups of kernels that a method needs: those that others build on, then the costliest."""
    if method != "auto" and not method.startswith("policy"):
        return ["simulator", "lists"]
    pipeline = ["pipeline"] if find_objective(objective).pipelined else []
    return ["simulator", "policy", *pipeline, "search", "lists"]


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
    "lists": _lists,
}
"""Functions that call all kernels of a part of gdp."""


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
