"""The test instances of the policy's benchmark, and the best values known of them.

The list was fixed before training: every graph of the test families that has at most 1,000 ops,
with one random cluster, objective and memory limit each. Test families serve for no choice.
"""

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.learn.instances import Instance, Problems, load_problems
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.search.local_search import local_search
from gdp.placement import write_atomic
from gdp.problem.problem import Problem
from gdp.sim.score import values

CORPUS = "data/corpus"
LIST = Path("data/labels/test_instances.json")


@dataclass(frozen=True)
class Known:
    """One instance, and what is known of it; seconds of its objective, inf where nothing fits."""

    instance: Instance
    single_s: float = float("inf")  # best single device
    heuristic_s: float = float("inf")  # best of all heuristics
    best_s: float = float("inf")  # best of everything run before the list was fixed
    evaluations: int = 0  # of the longest search behind it
    found_by: str = ""
    since_s: float = float("inf")  # lowest found since the list was fixed

    @property
    def lowest_s(self) -> float:
        """The best of everything, what was found after training included."""
        return min(self.best_s, self.since_s)

    @property
    def is_trivial(self) -> bool:
        """Whether nothing known beats the best single device."""
        return self.best_s >= self.single_s * (1 - 1e-9)


@functools.cache
def problems(min_ops: int = 30, max_ops: int = 1000) -> Problems:
    """The corpus, test graphs of benchmark size included."""
    return load_problems(CORPUS, random_graphs=0, min_ops=min_ops, max_ops=max_ops)


def value(problem: Problem, assignment: Assignment) -> float:
    """Seconds of the objective under the assignment's own priorities; inf where it overflows."""
    seconds, overflow = values(problem, assignment.device[None], assignment.rank)
    return float(seconds[0]) if overflow[0] == 0 else float("inf")


def heuristic_answers(problem: Problem) -> dict[str, Answer]:
    """What every heuristic of the portfolio answers."""
    return {name: method(problem, Search(seconds=None)) for name, method in HEURISTICS}


def with_heuristics(known: Known, problem: Problem) -> Known:
    """The same with the values of the heuristics."""
    found = {
        name: value(problem, answer.assignment)
        for name, answer in heuristic_answers(problem).items()
        if answer.assignment is not None
    }
    best = min(found.values(), default=float("inf"))
    known = replace(known, single_s=found.get("single", float("inf")), heuristic_s=best)
    if best < known.best_s:
        known = replace(known, best_s=best, found_by=min(found, key=lambda name: found[name]))
    return known


def searched(known: Known, problem: Problem, evaluations: int, seed: int) -> Known:
    """The same after the heuristics and a local search of so many evaluations."""
    if np.isinf(known.heuristic_s):
        known = with_heuristics(known, problem)
    answer = local_search(problem, Search(seed=seed, seconds=None, evaluations=evaluations))
    longest = max(known.evaluations, answer.evaluations)
    known = replace(known, evaluations=longest)
    if answer.assignment is None:
        return known
    return improved(known, value(problem, answer.assignment), "local_search")


def improved(known: Known, seconds: float, by: str) -> Known:
    """The same, with a better value if this one is."""
    return replace(known, best_s=seconds, found_by=by) if seconds < known.best_s else known


def save(known: list[Known]) -> None:
    """Write the committed list; JSON has no infinity, so what is not known is null."""
    rows = []
    for entry in known:
        row = asdict(entry) | {"instance": msgspec.to_builtins(entry.instance)}
        rows.append({k: None if v == float("inf") else v for k, v in row.items()})
    write_atomic(LIST, json.dumps({"instances": rows}, indent=1).encode())


def load() -> list[Known]:
    """Read the committed list."""
    found = []
    for row in json.loads(LIST.read_text())["instances"]:
        given: dict[str, Any] = {k: v for k, v in row.items() if v is not None}
        given["instance"] = Instance(**row["instance"])
        found.append(Known(**given))
    return found


def geomean(ratios: list[float]) -> float:
    """The geometric mean; nan of nothing."""
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def hard(known: list[Known]) -> list[Known]:
    """Instances with a known placement that beats the best single device."""
    return [entry for entry in known if np.isfinite(entry.best_s) and not entry.is_trivial]


def spread(known: list[Known], count: int) -> list[Known]:
    """`count` instances evenly over the list."""
    if count >= len(known):
        return known
    return [known[int(k)] for k in np.linspace(0, len(known) - 1, count)]


def unseen_cluster(kind: int, graph: OpGraph) -> Cluster:
    """10 alike with links of 1 TB/s, 12 up to 30 times apart, 16 behind links of 1 GB/s and 0.2 ms.

    Speeds are scaled so that moving all tensors over a link takes a third of all arithmetic.
    """
    size = (10, 12, 16)[kind]
    slower = [float(np.linspace(1, 30, size)[i]) if kind == 1 else 1.0 for i in range(size)]
    link, latency_s = ((1e12, 0.5e-6), (60e9, 5e-6), (1e9, 2e-4))[kind]
    moved_s = float(graph.tensor_bytes.sum()) / link
    flop_per_s = float(graph.flop.sum()) / (3.0 * moved_s)
    devices = [
        Device(f"d{i}", "x", {"default": flop_per_s / x}, flop_per_s / x / 10.0)
        for i, x in enumerate(slower)
    ]
    return make_cluster("unseen", devices, default_bytes_per_s=link, default_latency_s=latency_s)
