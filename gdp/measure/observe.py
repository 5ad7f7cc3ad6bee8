"""Observations of an executed placement: its pieces and links beside their predictions."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.costs.adapt import (
    LinkSeconds,
    Piece,
    Run,
    Share,
    base_dispatch_s,
    op_keys,
    piece_shares,
)
from gdp.costs.base import CostModel, RuntimeOverheads
from gdp.graph.groups import first_members
from gdp.graph.op_graph import OpGraph
from gdp.measure.plan import ExecutionPlan
from gdp.measure.report import RunReport
from gdp.sim.latency import simulate
from gdp.sim.objectives import find_objective
from gdp.sim.prediction import Prediction
from gdp.sim.segments import segment_problem, segment_values


def observed_run(
    graph: OpGraph,
    cluster: Cluster,
    base: CostModel,
    prediction: Prediction,
    plan: ExecutionPlan,
    report: RunReport,
) -> Run:
    """Predicted and measured seconds of all pieces and links of an execution.

    Args:
        graph: The model.
        cluster: Its devices, without overheads of a runtime.
        base: Costs that are not adapted, to which what is learned is relative.
        prediction: Of the placement, as it was executed.
        plan: Its segments.
        report: What was measured.
    """
    measured, together = _measured(plan, report)
    by_member = _by_member(report)
    overheads = (
        base.with_runtime_overheads(cluster) if isinstance(base, RuntimeOverheads) else cluster
    )
    shares = _shares(graph, cluster, base, prediction, plan)
    fused = prediction.problem.graph
    ops = np.bincount(
        _segment_of_fused(prediction, plan)[~fused.is_io],
        fused.repeats[~fused.is_io], len(plan.segment_device),
    )  # fmt: skip
    runs = np.ones(len(plan.segment_device), dtype=np.int64)
    np.maximum.at(runs, plan.segment, graph.repeats)
    pieces, by_device = [], defaultdict[int, list[Share]](list)
    for s, d in enumerate(plan.segment_device.tolist()):
        device = overheads.devices[d]
        dispatches = int(ops[s] if overheads.launches_ops[d] else runs[s])
        if s not in measured or s not in shares:
            continue
        own = (*shares[s], Share("", 0, "", base_dispatch_s(device) * dispatches))
        serving = plan.devices_of(d)
        each_s = by_member.get(s, ()) if together else ()
        if len(each_s) != len(serving):
            serving, each_s = (d,), (measured[s],)
        for member, seconds in zip(serving, each_s, strict=True):
            name, kind = overheads.devices[member].name, overheads.devices[member].kind
            pieces.append(Piece(name, kind, own, seconds, together))
        by_device[d] += own
    full = find_objective(report.objective).pipelined
    several = len(by_device) > 1
    if full and several and not together and not plan.teams:
        # Pieces were timed alone; with the pipeline full, the busiest device takes the period.
        load = {d: sum(m for s, m in measured.items() if plan.segment_device[s] == d)
                for d in by_device}  # fmt: skip
        busiest = overheads.devices[max(load, key=lambda d: load[d])]
        own = tuple(by_device[overheads.device_names.index(busiest.name)])
        period_s = 1.0 / report.measured_throughput_per_s
        pieces.append(Piece(busiest.name, busiest.kind, own, period_s, True))
    sent = () if full else _transfers(prediction, plan, overheads, measured, report)
    return Run(report.model, tuple(pieces), sent)


def _segment_of_fused(prediction: Prediction, plan: ExecutionPlan) -> Int[np.ndarray, "M"]:
    """The segment of every fused op."""
    return plan.segment[first_members(prediction.problem.origin.group_of)]


def _measured(plan: ExecutionPlan, report: RunReport) -> tuple[dict[int, float], bool]:
    """Seconds of every segment, and whether other devices were busy meanwhile."""
    full = find_objective(report.objective).pipelined
    rows = [row for row in report.segments if row.segment >= 0]
    together = full and all(row.pipelined_s is not None for row in rows)
    seconds = defaultdict[int, float](float)
    for row in rows:
        piped = row.pipelined_s if together and row.pipelined_s is not None else row.measured_s
        seconds[row.segment] += piped
    busy = {m for d in set(plan.segment_device.tolist()) for m in plan.devices_of(d)}
    return dict(seconds), together and len(busy) > 1


def _by_member(report: RunReport) -> dict[int, tuple[float, ...]]:
    """Seconds of every replicated segment on each of its devices."""
    total = dict[int, tuple[float, ...]]()
    for row in report.segments:
        if row.segment >= 0 and row.member_s:
            before = total.get(row.segment, (0.0,) * len(row.member_s))
            total[row.segment] = tuple(a + b for a, b in zip(before, row.member_s, strict=True))
    return total


def _shares(
    graph: OpGraph, cluster: Cluster, base: CostModel, prediction: Prediction, plan: ExecutionPlan
) -> dict[int, tuple[Share, ...]]:
    """The ops of every segment with their base-cost predictions, identical ops together."""
    if getattr(base, "reads_unfused", False):
        rows, segment = graph, plan.segment
    else:
        rows = prediction.problem.graph
        segment = _segment_of_fused(prediction, plan)
    seconds = base(rows, cluster)[np.arange(rows.num_ops), plan.segment_device[segment]]
    return piece_shares(op_keys(rows), seconds * rows.repeats, np.where(rows.is_io, -1, segment))


def _transfers(
    prediction: Prediction,
    plan: ExecutionPlan,
    base: Cluster,
    measured: dict[int, float],
    report: RunReport,
) -> tuple[LinkSeconds, ...]:
    """Links of a sample alone: its latency beyond the schedule of the measured pieces, spread
    evenly over the transfers."""
    problem = prediction.problem
    segment = _segment_of_fused(prediction, plan)
    cut = segment_problem(problem, segment)
    where = segment_values(prediction.assignment.device, segment)
    compute_s = cut.compute_s.copy()
    for s, seconds in measured.items():
        compute_s[s, where[s]] = seconds
    idle = tuple(replace(device, dispatch_s=0.0) for device in cut.cluster.devices)
    machine = replace(cut.cluster, devices=idle)
    timed = replace(cut, compute_s=compute_s, cluster=machine, launches=None)
    schedule = simulate(timed, where, None)
    sent = schedule.transfers
    count = len(sent.tensor)
    if not count or not np.isfinite(schedule.latency_s):
        return ()
    rest_s = (report.measured_latency_s - schedule.latency_s) / count
    totals = defaultdict[tuple[int, int], list[float]](lambda: [0.0, 0.0])
    for t, i, j, start_s, arrive_s in zip(
        sent.tensor.tolist(), sent.source.tolist(), sent.destination.tolist(),
        sent.start_s.tolist(), sent.arrive_s.tolist(), strict=True,
    ):  # fmt: skip
        bytes_ = float(timed.sent_bytes[t])
        both = totals[i, j]
        both[0] += float(base.link_latency_s[i, j]) + bytes_ / float(base.link_bytes_per_s[i, j])
        both[1] += max(arrive_s - start_s + rest_s, 0.1 * (arrive_s - start_s), 1e-7)
    names = base.device_names
    return tuple(
        LinkSeconds(names[i], names[j], predicted_s, measured_s)
        for (i, j), (predicted_s, measured_s) in totals.items()
    )
