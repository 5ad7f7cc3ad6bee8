"""A placement as the segments that a runtime executes, with the times that are predicted."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.units import format_bytes
from gdp.bounds.loads import least_launches
from gdp.cluster.types import Cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.measure.report import SegmentTime
from gdp.placement.placement import Assignment, Teams
from gdp.problem.problem import Origin, make_problem
from gdp.sim.objectives import find_objective
from gdp.sim.prediction import Prediction
from gdp.sim.score import score, score_of
from gdp.sim.segments import (
    border_tensors,
    latency_segments,
    segment_problem,
    segment_values,
    segments,
)


def roofline_prediction(
    graph: OpGraph, cluster: Cluster, device: Int[np.ndarray, "N"], objective: str
) -> Prediction:
    """Prediction by datasheet costs of the ops as the runtime fuses them."""
    from gdp.graph.fuse import fuse

    fused = fuse(graph, apart=device)
    problem = make_problem(
        fused.graph, cluster, roofline(fused.graph, cluster), objective,
        origin=Origin(fused.group_of),
    )  # fmt: skip
    return Prediction(problem, Assignment(segment_values(device, fused.group_of)))


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """A placement as segments. Axes: N ops, S segments."""

    segment: Int[np.ndarray, "N"]
    segment_device: Int[np.ndarray, "S"]  # index into the cluster's devices
    order: tuple[int, ...]  # in which the segments run
    segment_s: tuple[float, ...]  # predicted, dispatch included
    latency_s: float
    period_s: float
    teams: Teams  # devices that serve the segments of their first member in turn

    @property
    def device(self) -> Int[np.ndarray, "N"]:
        """The device of every op."""
        return self.segment_device[self.segment]

    def devices_of(self, device: int) -> tuple[int, ...]:
        """Devices that serve the segments of a device, in the order of the samples."""
        return next((team for team in self.teams if team[0] == device), (device,))

    def segment_time(
        self, graph: OpGraph, cluster: Cluster, segment: int, ops: Bool[np.ndarray, "N"],
        measured_s: float,
    ) -> SegmentTime:  # fmt: skip
        """Seconds of ops of a segment, with the bytes of the tensors that cross their border."""
        reads, makes = (graph.tensor_bytes[t].sum() for t in border_tensors(graph, ops))
        device = cluster.device_names[int(self.segment_device[segment])]
        return SegmentTime(
            device, int(ops.sum()), int(reads), int(makes), self.segment_s[segment], measured_s,
            segment,
        )  # fmt: skip


def make_plan(prediction: Prediction, objective: str) -> ExecutionPlan:
    """Segments for an objective, as the simulator runs them: few for throughput, those that let
    other devices start early for latency."""
    from gdp.sim.latency import simulate

    problem, placed = prediction
    device, teams = placed.device, placed.teams
    if not find_objective(objective).pipelined:
        segment = latency_segments(problem, device)
    else:
        segment = segments(problem.graph, device)
    where = segment_values(device, segment)
    cut = segment_problem(problem, segment)
    schedule = simulate(cut, where, None)
    judged = score(cut, where, None, teams)
    seconds = cut.compute_s[np.arange(len(where)), where] + cut.cluster.dispatch_s[where]
    return ExecutionPlan(
        segment=problem.origin.expand(segment),
        segment_device=where,
        # Ids are topological, so they decide between segments that start together.
        order=tuple(np.lexsort((np.arange(len(where)), schedule.start_s)).tolist()),
        segment_s=tuple(seconds.tolist()),
        latency_s=judged.latency_s,
        period_s=judged.period_s,
        teams=teams,
    )


def uncut_s(prediction: Prediction, objective: str, d: int) -> tuple[float, float] | None:
    """Predicted (seconds of a sample alone, seconds per sample of many) of the model on device d,
    its inputs and outputs on the host; None where d may not run all of it."""
    problem = prediction.problem
    device = np.where(problem.graph.is_io, problem.cluster.host, d)
    if not np.isfinite(problem.compute_s[np.arange(problem.num_ops), device]).all():
        return None
    plan = make_plan(Prediction(problem, Assignment(device)), objective)
    return plan.latency_s, plan.period_s


def replicas_s(prediction: Prediction, objective: str) -> tuple[float, float] | None:
    """Predicted seconds as of `uncut_s`, with a copy of the model on every device that may run all
    of it, and samples dealt out."""
    copies = [
        seconds
        for d in range(prediction.problem.num_devices)
        if (seconds := uncut_s(prediction, objective, d)) is not None
    ]
    if not copies:
        return None
    latency_s = min(alone for alone, _ in copies)
    if (prediction.problem.cluster.processor >= 0).any():
        return latency_s, min(period_s for _, period_s in copies)
    launches_s, threads = least_launches(prediction.problem)
    period_s = 1.0 / sum(1.0 / period_s for _, period_s in copies)
    return latency_s, max(period_s, launches_s / max(threads, 1))


def too_large_alone(prediction: Prediction) -> str:
    """That no device alone has memory for the model, in a sentence; "" where one has."""
    problem, ops = prediction.problem, np.arange(prediction.problem.num_ops)
    cluster, is_io = problem.cluster, problem.graph.is_io
    fullest: list[tuple[int, int]] = []
    for d in range(problem.num_devices):
        device = np.where(is_io, cluster.host, d)
        if not np.isfinite(problem.compute_s[ops, device]).all():
            continue
        alone = score_of(problem, Assignment(device))
        if alone.feasible:
            return ""
        fullest.append((int(alone.peak_bytes[d]), d))
    if not fullest:
        return ""
    needs, d = min(fullest)
    device = cluster.devices[d]
    return (
        f"no device alone has memory for the model ({format_bytes(needs)} of "
        f"{format_bytes(device.memory_bytes)} on {device.name}): the rows of the uncut model are "
        "yardsticks that take more"
    )
