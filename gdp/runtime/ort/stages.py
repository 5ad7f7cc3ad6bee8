"""From a placement to pieces, and from pieces to sessions on pinned workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from gdp.exporters.ort_cut import Cut, cut_model
from gdp.graph.op_graph import OpGraph
from gdp.runtime.cycle import Cycle, turn_schedule
from gdp.runtime.ort.pipeline import Serving, Stage
from gdp.runtime.ort.sessions import make_session, pinned
from gdp.runtime.ort.source import Source
from gdp.runtime.plan import ExecutionPlan, Prediction, make_plan


@dataclass(frozen=True, eq=False)
class CutPlan(ExecutionPlan):
    """A plan with the model cut as it says; a segment may be several pieces."""

    cut: Cut

    @property
    def piece_device(self) -> list[int]:
        """The device of each piece."""
        return [int(self.segment_device[piece.segment]) for piece in self.cut.pieces]

    @property
    def piece_s(self) -> list[float]:
        """Predicted seconds of each piece, dispatch included."""
        return [self.segment_s[piece.segment] for piece in self.cut.pieces]


def cut_plan(
    model: onnx.ModelProto, graph: OpGraph, prediction: Prediction, objective: str
) -> CutPlan:
    """The model cut for an objective."""
    plan = make_plan(prediction, objective)
    return CutPlan(**vars(plan), cut=cut_model(model, graph, plan.segment))


def make_stages(
    plan: CutPlan, source: Source, cores: Sequence[int]
) -> tuple[list[Stage], list[tuple[int, ...]]]:
    """A stage with its session for every piece, and the cores of the workers that run them."""
    used = _used_devices(plan)
    worker = {device: i for i, device in enumerate(used)}
    maker = plan.cut.maker()
    sources = [{maker[n] for n in piece.inputs if n in maker} for piece in plan.cut.pieces]
    stages = []
    for i, (piece, device) in enumerate(zip(plan.cut.pieces, plan.piece_device, strict=True)):
        serving = []
        for member in plan.devices_of(device):
            with pinned([cores[member]]):
                serving.append(Serving(worker[member], make_session(piece.model, source)))
        stages.append(
            Stage(
                worker=serving[0].worker,
                session=serving[0].session,
                inputs=piece.inputs,
                outputs=piece.outputs,
                readers=tuple(j for j, reads in enumerate(sources) if i in reads),
                waits_for=len(sources[i]),
                others=tuple(serving[1:]),
            )
        )
    return stages, [(cores[device],) for device in used]


def plan_cycle(plan: CutPlan) -> Cycle:
    """When the pieces of several samples are due, by their predicted seconds."""
    maker = plan.cut.maker()
    sources = [sorted({maker[n] for n in piece.inputs if n in maker}) for piece in plan.cut.pieces]
    return turn_schedule(
        [plan.devices_of(device) for device in plan.piece_device], plan.piece_s, sources
    )


def _used_devices(plan: CutPlan) -> list[int]:
    """The devices that some piece needs, ascending."""
    return sorted({d for device in plan.piece_device for d in plan.devices_of(device)})


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
