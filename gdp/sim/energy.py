"""Energy of a run: idle watts of the devices that it uses, and joules of its ops.

    joules = (idle watts of the used devices + base watts) * seconds
             + sum over ops of their joules above idle

Runs that take longer than `Problem.within_s` count more than any run within it draws, and the more
the longer they take, so that a search goes to short runs first.

A device is used if it does arithmetic; one that only holds inputs, outputs or embeddings, or
nothing, draws nothing here. Links draw nothing, as nothing is measured of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import ArgumentError
from gdp.cluster.types import Cluster
from gdp.costs.power import Power, joules_above_idle, require_power
from gdp.placement.placement import Assignment
from gdp.problem.problem import Problem, cached_on_problem
from gdp.sim.latency import latencies
from gdp.sim.objectives import OBJECTIVES, Rank, Score, Values
from gdp.sim.traffic import ServedTraffic


class RunPower(NamedTuple):
    """Power of the devices that a placement uses. Axes: N ops, D devices."""

    used: Bool[np.ndarray, "D"]
    idle_w: float  # of these together, and of the rest of the system
    limit_w: float
    op_j: Float[np.ndarray, "N"]  # above idle, on all devices that compute an op

    def joules(self, seconds: float) -> float:
        """Of one run that takes so long."""
        return self.idle_w * seconds + float(self.op_j.sum())

    def devices(self, cluster: Cluster) -> str:
        """Kinds of the devices that are counted, in words; raises `ArgumentError` where the watts
        of none, or of an accelerator, are unknown. Processors of unknown watts are left out."""
        known = Power.of(cluster).watts > 0
        missing = self.used & ~known
        if (missing & ~cluster.is_cpu).any() or not (self.used & known).any():
            require_power(cluster, missing)
            raise ArgumentError("no device computes")
        parts = {
            "GPU": self.used & ~cluster.is_cpu,
            "processor": self.used & known & cluster.is_cpu,
        }
        counts = {name: int(own.sum()) for name, own in parts.items()}
        words = [name + "s" * (count > 1) for name, count in counts.items() if count]
        words += ["rest of the system"] * bool(cluster.base_watts)
        return " and ".join(words) + (" alone" if len(words) == 1 else "")


@cached_on_problem
def _power(problem: Problem) -> Power:
    """Power of the devices; `ArgumentError` where the watts of one that computes are unknown."""
    require_power(problem.cluster)
    return Power.of(problem.cluster)


def busy_seconds(problem: Problem) -> Float[np.ndarray, "N D"]:
    """Seconds in which devices compute the ops of one sample: their `compute_s` without the
    dispatch that it holds of all runs but the first. Nothing is drawn for a dispatch."""
    graph = problem.graph
    runs = np.where(graph.is_io, 0, graph.repeats - 1)[:, None]
    seconds = problem.compute_s - runs * problem.cluster.op_dispatch_s
    return np.maximum(seconds, 0.0) * problem.unit.seconds


@cached_on_problem
def op_joules(problem: Problem) -> Float[np.ndarray, "N D"]:
    """Joules above idle of each op on each device."""
    return joules_above_idle(problem.graph, problem.cluster, busy_seconds(problem))


def run_power(problem: Problem, assignment: Assignment) -> RunPower:
    """Power of one run of an assignment, replica groups and splits included; devices of unknown
    watts draw nothing.

    All members of a replica group idle, one of them computes a sample.
    """
    device, cluster, ops = assignment.device, problem.cluster, np.arange(problem.num_ops)
    works = problem.graph.flop > 0
    used = np.zeros(problem.num_devices, dtype=bool)
    used[cluster.runs_on[device[works]]] = True
    op_j = op_joules(problem)[ops, device]
    seconds = busy_seconds(problem)[ops, device]
    for split in assignment.splits:
        mine = np.flatnonzero((device == split.devices[0]) & ~problem.graph.is_io)
        for d in split.devices[1:]:
            # A member waits for the slowest one, so that its ops take as long.
            graph = problem.origin.members.get(d, problem.graph)
            own_s = np.zeros((problem.num_ops, problem.num_devices))
            own_s[mine, d] = seconds[mine]
            op_j[mine] += joules_above_idle(graph, cluster, own_s)[mine, d]
            used[d] |= bool(works[mine].any())
    for team in assignment.teams:
        used[list(team)] |= used[team[0]]
    power = Power.of(cluster)
    idle_w, limit_w = (cluster.base_watts + float(w[used].sum()) for w in (power.idle, power.limit))
    return RunPower(used, idle_w, limit_w, op_j)


def values(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> Values:
    """Joules of one run of each placement, and its bytes over device memory.

    Raises:
        ArgumentError: The watts of a device that computes are unknown.
    """
    power = _power(problem)
    latency_s, overflow = latencies(problem, devices, ranks)
    works = problem.graph.flop > 0
    used = np.zeros((len(devices), problem.num_devices), dtype=bool)
    rows = np.arange(len(devices))[:, None]
    used[rows, problem.cluster.runs_on[devices[:, works]]] = True
    idle_w = used @ power.idle + problem.cluster.base_watts
    op_j = op_joules(problem)[np.arange(problem.num_ops), devices].sum(axis=1)
    seconds = latency_s * problem.unit.seconds
    return _limited(problem, idle_w * seconds + op_j, seconds), overflow


def chain_costs(problem: Problem, used: Sequence[int]) -> tuple[float, Float[np.ndarray, "N D"]]:
    """(watts while some devices are used, joules above idle of each op on each device)."""
    idle_w = _power(problem).idle[list(used)].sum() + problem.cluster.base_watts
    return float(idle_w), op_joules(problem)


ROUNDING = 1e-6
"""Share by which times in ticks, and sums in another order, may exceed a limit."""


def _limited(
    problem: Problem, joules: Float[np.ndarray, "*B"], seconds: Float[np.ndarray, "*B"]
) -> Float[np.ndarray, "*B"]:
    """Joules of runs within the limit; of others those of twice the limits of all devices."""
    if problem.within_s == np.inf:
        return joules
    limit_w = problem.cluster.base_watts + _power(problem).limit.sum()
    late = seconds > problem.within_s * (1 + ROUNDING)
    return np.where(late, 2 * limit_w * seconds, joules)


def score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank = None) -> Score:
    """Times and memory of one run, and its joules."""
    run = OBJECTIVES["latency"].score(problem, device, rank)
    return replace(run, value_s=float(values(problem, device[None], rank)[0][0]))


def value_under_traffic(served: ServedTraffic) -> float:
    """Joules of each token that is written; raises `ArgumentError` where watts are unknown."""
    if served.joules_per_token is None:
        raise ArgumentError("no watts are known of a GPU: give `watts` of it in a cluster file")
    return served.joules_per_token


def value_of(problem: Problem, assignment: Assignment, scored: Score) -> float:
    """Joules of one run with replica groups or splits."""
    require_power(problem.cluster)
    seconds = scored.latency_s * problem.unit.seconds
    joules = run_power(problem, assignment).joules(seconds)
    return float(_limited(problem, np.array(joules), np.array(seconds)))
