"""The least memory that a placement is known to fit, and problems with a little more than that."""

from dataclasses import replace

from gdp.cluster.types import Cluster
from gdp.methods.base import Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.search.local_search import local_search
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score

_STEPS = 10
_EVALUATIONS = 300


def with_memory(problem: Problem, factor: float) -> Problem:
    """The same problem with so much of every device's memory."""
    old = problem.cluster
    devices = tuple(
        replace(device, memory_bytes=max(1, int(device.memory_bytes * factor)))
        for device in old.devices
    )
    cluster = Cluster(
        old.name, devices, old.link_bytes_per_s, old.link_latency_s, old.channel, old.host
    )
    return make_problem(problem.graph, cluster, problem.compute_s, problem.objective)


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
    import numpy as np

    device = np.full(problem.num_ops, problem.cluster.host, dtype=np.int64)
    return int(score(problem, device, None).peak_bytes.sum())


def _fits(problem: Problem) -> bool:
    search = Search(seconds=None, evaluations=_EVALUATIONS)
    methods = [method for name, method in HEURISTICS if name not in ("round_robin", "single")]
    for method in (*methods, local_search):
        if method(problem, search).assignment is not None:
            return True
    return False
