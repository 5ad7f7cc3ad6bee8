"""From a placement to pieces, and from pieces to sessions on pinned workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from jaxtyping import Int

from gdp.exporters.ort_cut import Cut, cut_model
from gdp.graph import OpGraph
from gdp.runtime.cycle import Cycle, cyclic_schedule
from gdp.runtime.ort_pipeline import Stage
from gdp.runtime.ort_sessions import make_session, pinned
from gdp.runtime.ort_source import Source
from gdp.runtime.prediction import Prediction
from gdp.sim.problem import Objective
from gdp.sim.segments import latency_segments, segment_problem, segment_values, segments


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement as pieces, with what the simulator says of them. Axes: N ops, S segments."""

    cut: Cut
    segment: Int[np.ndarray, "N"]
    segment_device: Int[np.ndarray, "S"]  # index into the cluster's devices
    piece_s: tuple[float, ...]  # predicted seconds of each piece, dispatch included
    latency_s: float
    period_s: float

    @property
    def piece_device(self) -> list[int]:
        """The device of each piece."""
        return [int(self.segment_device[piece.segment]) for piece in self.cut.pieces]


def make_plan(
    model: onnx.ModelProto, graph: OpGraph, prediction: Prediction, objective: Objective
) -> Plan:
    """The model cut for an objective: few segments for throughput, those that let other devices
    start early for latency."""
    from gdp.sim.latency import simulate
    from gdp.sim.throughput import periods

    problem, device, group_of = prediction
    if objective in ("latency", "block_latency"):
        fused_segment = latency_segments(problem, device)
    else:
        fused_segment = segments(problem.graph, device)
    segment = fused_segment[group_of]
    segment_device = segment_values(device, fused_segment)
    cut = segment_problem(problem, fused_segment)
    dispatch_s = np.array([d.dispatch_s for d in cut.cluster.devices])
    pieces = cut_model(model, graph, segment)
    return Plan(
        cut=pieces,
        segment=segment,
        segment_device=segment_device,
        piece_s=tuple(
            float(cut.compute_s[p.segment, d] + dispatch_s[d])
            for p in pieces.pieces
            for d in [segment_device[p.segment]]
        ),
        latency_s=simulate(cut, segment_device, None).latency_s,
        period_s=float(periods(cut, segment_device[None])[0][0]),
    )


def make_stages(
    plan: Plan, source: Source, cores: Sequence[int]
) -> tuple[list[Stage], list[tuple[int, ...]]]:
    """A stage with its session for every piece, and the cores of the workers that run them."""
    used = sorted(set(plan.piece_device))
    worker = {device: i for i, device in enumerate(used)}
    maker = plan.cut.maker()
    sources = [{maker[n] for n in piece.inputs if n in maker} for piece in plan.cut.pieces]
    stages = []
    for i, (piece, device) in enumerate(zip(plan.cut.pieces, plan.piece_device, strict=True)):
        with pinned([cores[device]]):
            session = make_session(piece.model, source)
        stages.append(
            Stage(
                worker=worker[device],
                session=session,
                inputs=piece.inputs,
                outputs=piece.outputs,
                readers=tuple(j for j, reads in enumerate(sources) if i in reads),
                waits_for=len(sources[i]),
            )
        )
    return stages, [(cores[device],) for device in used]


def plan_cycle(plan: Plan) -> Cycle:
    """When the pieces of several samples are due, by their predicted seconds."""
    maker = plan.cut.maker()
    sources = [sorted({maker[n] for n in piece.inputs if n in maker}) for piece in plan.cut.pieces]
    used = sorted(set(plan.piece_device))
    return cyclic_schedule([used.index(d) for d in plan.piece_device], plan.piece_s, sources)


def whole_stage(source: Source, cores: Sequence[int]) -> tuple[list[Stage], list[tuple[int, ...]]]:
    """The uncut model as one stage, with one runtime thread per core."""
    # The runtime's own threads inherit the cores of the thread that makes the session.
    with pinned(cores):
        session = make_session(source.model, source, threads=len(cores))
    return [_whole(session)], [tuple(cores)]


def _whole(session: Any) -> Stage:
    return Stage(
        worker=0,
        session=session,
        inputs=tuple(value.name for value in session.get_inputs()),
        outputs=tuple(value.name for value in session.get_outputs()),
    )
