"""Bounds of the energy of a run."""

from dataclasses import replace

import numpy as np

from gdp.bounds.best import bounds_of_latency
from gdp.bounds.budget import Bound, WorkBudget
from gdp.costs.power import Power, joules_above_idle
from gdp.problem.problem import Problem
from gdp.sim.energy import busy_seconds, op_joules


def energy_bounds(problem: Problem, budget: WorkBudget, found: float) -> list[Bound]:
    """Least joules of each op, and idle watts of one device while the least latency lasts.

    E = sum of idle watts of used devices * latency + sum over ops of joules(op, device)
      >= least idle watts of a device * bound of the latency + sum over ops of min over d of joules

    Parts of cut kernels may move more bytes than their kernel does whole, and take up to
    `Origin.slack_s` longer: then bytes count nothing, and as long at full power is taken off.

    Args:
        problem: Any.
        budget: Of the proofs of the latency.
        found: Joules of a known placement; nothing follows for its latency.
    """
    del found
    origin, works = problem.origin, problem.graph.flop > 0
    power, joules = Power.of(problem.cluster), op_joules(problem)
    if origin.is_relaxed:
        graph = replace(problem.graph, memory_traffic_bytes=np.zeros(problem.num_ops))
        joules = joules_above_idle(graph, problem.cluster, busy_seconds(problem))
    least_j = np.where(problem.allowed, joules, np.inf).min(axis=1).sum()
    may_use = problem.allowed[works].any(axis=0)
    idle_w = float(power.idle[may_use].min()) if works.any() else 0.0
    idle_w += problem.cluster.base_watts
    times = bounds_of_latency(replace(problem, objective="latency"), budget, np.inf)
    latency = max(times, key=lambda bound: bound.value_s)
    latency_s = latency.value_s * problem.unit.seconds
    slack_s = origin.slack_s if origin.is_relaxed else 0.0
    least_j += idle_w * max(0.0, latency_s - slack_s) - power.limit.max() * slack_s
    text = (
        f"the least joules of each op, and {idle_w:.3g} W of an idle device for the latency of at "
        f"least {latency_s:.3g} s: {latency.argument}"
    )
    return [Bound(max(0.0, float(least_j)), text)]
