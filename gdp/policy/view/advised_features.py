"""Features of what advisers propose: above all, the incumbent's schedule as the simulator ran it.

Axes: N ops, D devices, A rows of advice.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.priorities import RULES, rank_under
from gdp.methods.ranks import longest_s
from gdp.methods.timing import links, squash, timing
from gdp.policy.advice import ADVISERS, Advice
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of

NUM_ADVISED = 7
"""Columns of `op`."""
NUM_ADVISED_DEVICE = 3
NUM_ADVISED_WHOLE = len(ADVISERS) + 2 + len(RULES)


class Advised(NamedTuple):
    """Zeros where there is no advice."""

    op: Float[np.ndarray, "N 7"]
    device: Float[np.ndarray, "D 3"]
    whole: Float[np.ndarray, "12"]


def advised_features(problem: Problem, found: Advice | None) -> Advised:
    """What the incumbent and the advisers tell of ops, devices and the whole."""
    if found is None:
        return Advised(
            np.zeros((problem.num_ops, NUM_ADVISED)),
            np.zeros((problem.num_devices, NUM_ADVISED_DEVICE)),
            np.zeros(NUM_ADVISED_WHOLE),
        )
    return Advised(_ops(problem, found), _devices(problem, found), _whole(problem, found))


def _ops(problem: Problem, found: Advice) -> Float[np.ndarray, "N 7"]:
    """Seconds the incumbent sends to and from every op, advisers who agree, and its schedule.

    Of the schedule, for a latency: start and slack over the latency; how long the op waited for its
    device after its inputs could have come, and how long the device stood idle before it.
    """
    graph, device, times = problem.graph, found.device[0], timing(problem)
    table = np.zeros((problem.num_ops, NUM_ADVISED))
    cut = device[graph.producer[graph.use_tensor]] != device[graph.use_op]
    seconds = np.where(cut, times.send_s[graph.use_tensor], 0.0) / times.scale_s
    np.add.at(table[:, 0], graph.use_op, seconds)
    np.add.at(table[:, 1], graph.producer[graph.use_tensor], seconds)
    table[:, :2] = squash(table[:, :2])
    table[:, 2] = (found.device[1:] == device).mean(axis=0)
    if objective_of(problem).ordered:
        table[:, 3:] = _schedule(problem, device, found.rule)
    return table


def _schedule(
    problem: Problem, device: Int[np.ndarray, "N"], rule: int
) -> Float[np.ndarray, "N 4"]:
    from gdp.policy.view.feature_kernels import slacks
    from gdp.sim.latency import simulate

    run = simulate(problem, device, rank_under(problem, device, RULES[rule]))
    n = problem.num_ops
    table = np.zeros((n, 4))
    # Ops that take no time start with others; the decode order is topological.
    order = np.lexsort((np.argsort(timing(problem).order), run.start_s))
    latest_s, waited_s, idle_s = np.zeros(n), np.zeros(n), np.zeros(n)
    slacks(
        arrays_of(problem), links(problem)[1], device, order, run.start_s, run.finish_s, latest_s,
        waited_s, idle_s, np.zeros(problem.num_devices),
    )  # fmt: skip
    whole_s, scale_s = max(run.latency_s, 1e-12), timing(problem).scale_s
    table[:, 0] = run.start_s / whole_s
    table[:, 1] = np.clip((latest_s - run.start_s) / whole_s, 0.0, 1.0)
    table[:, 2] = squash(np.maximum(waited_s, 0.0) / scale_s)
    table[:, 3] = squash(np.maximum(idle_s, 0.0) / scale_s)
    return table


def _devices(problem: Problem, found: Advice) -> Float[np.ndarray, "D 3"]:
    """Seconds each device is busy, receives and sends under the incumbent, over its value."""
    graph, cluster, device = problem.graph, problem.cluster, found.device[0]
    times, d = timing(problem), problem.num_devices
    busy_s = np.bincount(device, times.cost_s[np.arange(problem.num_ops), device], d)
    src, dst = device[graph.producer[graph.use_tensor]], device[graph.use_op]
    moved = np.unique(np.stack([graph.use_tensor, src, dst])[:, src != dst], axis=1)
    seconds = cluster.link_latency_s[moved[1], moved[2]]
    seconds = seconds + graph.tensor_bytes[moved[0]] / cluster.link_bytes_per_s[moved[1], moved[2]]
    received_s, sent_s = np.bincount(moved[2], seconds, d), np.bincount(moved[1], seconds, d)
    total = np.stack([busy_s, received_s, sent_s], axis=1) / max(float(found.cost_s[0]), 1e-12)
    return np.minimum(total, 8.0)


def _whole(problem: Problem, found: Advice) -> Float[np.ndarray, "12"]:
    """How far each adviser is behind the incumbent, the incumbent from bounds, and its rule."""
    times = timing(problem)
    cost = np.where(problem.allowed, times.cost_s, np.inf).min(axis=1)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    free_send = np.zeros(problem.graph.num_tensors)
    path_s = float(longest_s(arrays_of(problem), cost, free_send).max())
    total = np.where(problem.allowed, times.cost_s, times.mean_cost_s[:, None]).sum(axis=0)
    fair_s = float(1.0 / (1.0 / np.maximum(total, 1e-30)).sum())
    lowest = np.maximum(np.array([path_s, fair_s]), 1e-12)
    gap = np.clip(np.log(found.cost_s[0] / lowest), -3.0, 6.0) / 2.0
    return np.concatenate([found.log_ratio[1:], gap, np.arange(len(RULES)) == found.rule])
