"""A coarse problem: groups of ops that are moved and simulated as one, and the way back."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.graph.index import inverse
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Assignment
from gdp.methods.ranks import upward_rank
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem, contracted
from gdp.sim.objectives import objective_of

_MOST_LEFT = 0.75  # a coarse problem has at most this share of the ops


@dataclass(frozen=True, eq=False)
class Coarse:
    """A contraction of a problem. Axes: N ops, M coarse ops."""

    problem: Problem
    part_of: Int[np.ndarray, "N"]  # the coarse op that holds each op
    work_s: Float[np.ndarray, "N"]  # mean compute of each op

    def project(self, problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "M"]:
        """The coarse placement nearest to a fine one: for each group, where most of its work is."""
        group = self.problem.group[self.part_of]
        share = np.zeros((self.problem.num_groups, problem.num_devices))
        np.add.at(share, (group, device), self.work_s + 1e-12)
        share = np.where(self.problem.group_allowed, share, -1.0)
        return share.argmax(axis=1)[self.problem.group]

    def expand_all(self, problem: Problem, assignment: Assignment) -> list[Assignment]:
        """Fine placements of a coarse one, with different priorities."""
        device = assignment.device[self.part_of]
        ranks: list[Int[np.ndarray, "N"] | None] = [None]
        if objective_of(problem).ordered:
            ranks.append(upward_rank(problem))
            if assignment.rank is not None:
                by_part = np.lexsort((np.arange(problem.num_ops), assignment.rank[self.part_of]))
                ranks.append(inverse(by_part))
        return [Assignment(device, rank) for rank in ranks]


def coarsened(
    problem: Problem, max_ops: int, near: Float[np.ndarray, "V"] | None = None
) -> Coarse | None:
    """The problem over at most `max_ops` coarse ops, where possible; None where little is gained.

    `near`, where given, says of every use of a tensor how much its ends belong together. Ops that
    differ in where they may run are kept apart, groups that must share a device stay so. A coarse
    op takes the time of its ops, dispatch included; dispatch per segment is counted once for each
    coarse op that opens a segment. A guide for search, never a score.
    """
    from gdp.graph.fuse import coarsen

    a = arrays_of(problem)
    apart = np.unique(problem.group_allowed[problem.group], axis=0, return_inverse=True)[1]
    graph = dataclasses.replace(problem.graph, colocate=problem.group)
    merged = coarsen(graph, max_ops, apart=apart.reshape(-1).astype(np.int64), near=near)
    if merged.graph.num_ops > _MOST_LEFT * problem.num_ops:
        return None
    # Dispatch per op is in the sums already.
    devices = tuple(
        dataclasses.replace(device, dispatch_s=0.0) if device.dispatch_per == "op" else device
        for device in problem.cluster.devices
    )
    cluster = dataclasses.replace(problem.cluster, devices=devices)
    coarse = contracted(
        problem, merged.graph, merged.group_of, compute_s=a.compute_s, cluster=cluster
    )
    if not (coarse.group_allowed.sum(axis=1) > 1).any():
        return None
    mean_s = np.where(problem.allowed, a.compute_s, 0.0).sum(axis=1) / problem.allowed.sum(axis=1)
    return Coarse(coarse, merged.group_of, mean_s)


def agreement(graph: OpGraph, parents: Sequence[Int[np.ndarray, "N"]]) -> Float[np.ndarray, "V"]:
    """The share of the placements that leave maker and reader of each use on one device."""
    maker, device = graph.producer[graph.use_tensor], np.stack(parents)
    return (device[:, maker] == device[:, graph.use_op]).mean(axis=0)


@cached_on_problem
def coarse_problem(problem: Problem, max_ops: int) -> Coarse | None:
    """`coarsened`, kept in the problem."""
    return coarsened(problem, max_ops)
