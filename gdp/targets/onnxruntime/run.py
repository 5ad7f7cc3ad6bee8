"""Execution of ONNX models by ONNX Runtime: a placement and its baselines, measured."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.importers.program import executed
from gdp.measure.compare import Arrays, OutputCheck, Repeatable, judge
from gdp.measure.cycle import Cycle, turn_schedule
from gdp.measure.measuring import Measured, measure
from gdp.measure.plan import ExecutionPlan
from gdp.measure.report import DEFAULT, PLACED, REPLICAS, SINGLE, RunReport, SegmentTime, row
from gdp.measure.request import RunRequest
from gdp.sim.objectives import find_objective
from gdp.targets.onnx_inputs import MADE_UP, make_inputs, repeatable
from gdp.targets.onnx_source import Source, load_source, randomised
from gdp.targets.onnxruntime.cut import Cut, cut_model
from gdp.targets.onnxruntime.pipeline import (
    PipelineExecutor,
    Serving,
    SessionStage,
    SideBySide,
    Slot,
    make_slot,
)
from gdp.targets.onnxruntime.sessions import (
    can_pin,
    core_of_device,
    from_array,
    make_session,
    pinned,
    to_array,
    versions,
)

ONE, FULL = "the placement, one sample at a time", "the placement"


@dataclass(frozen=True, eq=False)
class CutPlan(ExecutionPlan):
    """A plan with its model cut; a segment may be several pieces."""

    cut: Cut

    @property
    def piece_device(self) -> list[int]:
        """The device of each piece."""
        return [int(self.segment_device[piece.segment]) for piece in self.cut.pieces]

    @property
    def piece_s(self) -> list[float]:
        """Predicted seconds of each piece, dispatch included."""
        return [self.segment_s[piece.segment] for piece in self.cut.pieces]


def cut_plan(model: onnx.ModelProto, graph: OpGraph, plan: ExecutionPlan) -> CutPlan:
    """The plan with the model cut."""
    return CutPlan(**vars(plan), cut=cut_model(model, graph, plan.segment))


@dataclass(frozen=True)
class Prepared:
    """A placement ready to run: its pieces as sessions, and a slot for every sample in flight."""

    source: Source
    cores: tuple[int, ...]  # of each device
    plan: CutPlan
    stages: list[SessionStage]
    workers: list[tuple[int, ...]]  # cores of each
    slots: list[Slot]
    feeds: list[dict[str, np.ndarray]]  # of each slot
    expected: list[dict[str, Any]]  # of each slot: OrtValues of the uncut model
    cycle: Cycle
    known: Repeatable  # what of the model can be compared, and how closely

    def pipeline(self) -> PipelineExecutor:
        """As many samples in flight as keep every worker busy."""
        return PipelineExecutor(self.stages, self.slots, self.workers, self.cycle)

    def one_at_a_time(self) -> PipelineExecutor:
        """The stages with one sample in flight, for latency."""
        return PipelineExecutor(self.stages, self.slots[:1], self.workers)


def run_onnx(request: RunRequest) -> RunReport:
    """Execute a placement: one session per segment, one pinned thread per device that is a core;
    the devices of a team of the prediction have a session each and take the samples in turn.

    A model without weights of its own gets seeded random ones. Raises `ClusterError` for devices
    that are no cores, `ModelError` when weights are missing, `MeasurementError` when a measured
    rate is impossible.
    """
    graph, cluster, measuring = request.graph, request.cluster, request.measuring
    cores = core_of_device(cluster)
    source = randomised(load_source(request.model, request.dims), measuring.seed)
    plan = cut_plan(source.model, graph, request.plan)
    pieces = len(plan.cut.pieces)
    measuring.say(f"cutting the model in {pieces} pieces" if pieces > 1 else "loading the model")
    ready = prepare(source, graph, plan, cores, measuring.seed)
    measuring.say("checking outputs against the uncut model's")
    comparison = check_outputs(ready)
    others = {
        name: prepare(source, graph, cut_plan(source.model, graph, other), cores, measuring.seed)
        for name, other in request.rival_plans.items()
    }
    full = find_objective(request.objective).pipelined
    ways = {ONE: ready.one_at_a_time(), FULL: ready.pipeline()}
    ways |= {name: o.pipeline() if full else o.one_at_a_time() for name, o in others.items()}
    with ExitStack() as stack:  # threads wait for work until it is closed
        contenders = {name: SideBySide((stack.enter_context(way),)) for name, way in ways.items()}
        uncut = _uncut(stack, ready, cores[cluster.host]) if request.baselines else {}
        times = measure(contenders | uncut, measuring)
    rows = {name: row(times[name]) for name in (*uncut, *others)}
    return request.report(
        plan,
        {PLACED: row(times[ONE], times[FULL])} | rows,
        comparison,
        random_weights=bool(source.weights),
        segments=_segments(ready, cluster, times[ONE], times[FULL]),
        samples_in_flight=len(ready.slots),
        cores=cores,
        pinned=can_pin(),
        note="" if can_pin() else "this platform has no core affinity: threads ran unpinned",
        versions=versions(),
    )  # fmt: skip


def prepare(
    source: Source, graph: OpGraph, plan: CutPlan, cores: Sequence[int], seed: int
) -> Prepared:
    """Sessions for the pieces of a plan, and slots with seeded inputs, each sample another one."""
    cycle = plan_cycle(plan)
    feeds = [make_inputs(source.model, graph, seed + i) for i in range(cycle.in_flight)]
    return _prepared(source, plan, cores, feeds, cycle)


def _prepared(
    source: Source,
    plan: CutPlan,
    cores: Sequence[int],
    feeds: list[dict[str, np.ndarray]],
    cycle: Cycle,
) -> Prepared:
    names = list(dict.fromkeys((*plan.cut.crossing, *plan.cut.outputs)))
    expected = reference_values(source, names, feeds)
    stages, workers = make_stages(plan, source, cores)
    slots = [make_slot(stages, f, like) for f, like in zip(feeds, expected, strict=True)]
    known = repeatable(source.model)
    return Prepared(
        source, tuple(cores), plan, stages, workers, slots, feeds, expected, cycle, known
    )


def check_outputs(ready: Prepared) -> OutputCheck:
    """Every output and crossing tensor of every sample against the uncut model, with the pipeline
    full, so that a sample that reads another one's tensors shows.

    Where tensors between pieces differ behind a quantiser, sessions that round no floats to 8 bits
    decide: with those, a right cut is equal."""
    check = _judged(ready)
    if check.inner_equal or not ready.known.step:
        return check
    exact = replace(ready.source, exact=True)
    inner = _judged(_prepared(exact, ready.plan, ready.cores, ready.feeds, ready.cycle))
    equal = inner.inner_equal and check.outputs_equal is not False
    return replace(check, inner_equal=inner.inner_equal, equal=equal)


def _judged(ready: Prepared) -> OutputCheck:
    with ready.pipeline() as pipeline:
        pipeline.run(3 * len(ready.slots) + 1)
    pairs = [
        ({n: to_array(v) for n, v in values.items()}, {n: slot.read(n) for n in values})
        for slot, values in zip(ready.slots, ready.expected, strict=True)
    ]
    return judge(pairs, ready.plan.cut.outputs, ready.known)


def _uncut(stack: ExitStack, ready: Prepared, host_core: int) -> dict[str, SideBySide]:
    """The baselines: the uncut model on one core, by the runtime's own threads, on every core."""

    def whole(own: Sequence[int]) -> PipelineExecutor:
        stages, workers = whole_stage(ready.source, own)
        slot = make_slot(stages, ready.feeds[0], ready.expected[0])
        return stack.enter_context(PipelineExecutor(stages, [slot], workers))

    copies = {core: whole([core]) for core in dict.fromkeys((host_core, *ready.cores))}
    default = whole(ready.cores) if len(ready.cores) > 1 else copies[host_core]
    return {
        SINGLE: SideBySide((copies[host_core],)),
        DEFAULT: SideBySide((default,)),
        REPLICAS: SideBySide(tuple(copies.values())),
    }


def _segments(
    ready: Prepared, cluster: Cluster, one: Measured, full: Measured
) -> tuple[SegmentTime, ...]:
    values = ready.slots[0].values

    def size(names: Sequence[str]) -> int:
        return sum(values[name].tensor_size_in_bytes() for name in names)

    plan = ready.plan
    return tuple(
        SegmentTime(
            device=",".join(cluster.device_names[d] for d in plan.devices_of(device)),
            ops=len(piece.ops),
            input_bytes=size(piece.inputs),
            output_bytes=size(piece.outputs),
            predicted_s=predicted_s,
            measured_s=measured_s,
            segment=piece.segment,
            pipelined_s=pipelined_s,
            member_s=member_s,
        )
        for piece, device, predicted_s, measured_s, pipelined_s, member_s in zip(
            plan.cut.pieces,
            plan.piece_device,
            plan.piece_s,
            one.stage_s,
            full.stage_s,
            full.member_s,
            strict=True,
        )
    )


def make_stages(
    plan: CutPlan, source: Source, cores: Sequence[int]
) -> tuple[list[SessionStage], list[tuple[int, ...]]]:
    """A stage with its session for every piece, and the cores of the workers that run them."""
    used = sorted({d for device in plan.piece_device for d in plan.devices_of(device)})
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
            SessionStage(
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
    """Cyclic schedule of the pieces, by their predicted seconds."""
    maker = plan.cut.maker()
    sources = [sorted({maker[n] for n in piece.inputs if n in maker}) for piece in plan.cut.pieces]
    return turn_schedule(
        [plan.devices_of(device) for device in plan.piece_device], plan.piece_s, sources
    )


def whole_stage(
    source: Source, cores: Sequence[int]
) -> tuple[list[SessionStage], list[tuple[int, ...]]]:
    """The uncut model as one stage, with one runtime thread per core."""
    # The runtime's own threads inherit the cores of the thread that makes the session.
    with pinned(cores):
        session = make_session(source.model, source, threads=len(cores))
    inputs = tuple(value.name for value in session.get_inputs())
    outputs = tuple(value.name for value in session.get_outputs())
    return [SessionStage(0, session, inputs, outputs)], [tuple(cores)]


def reference_values(
    source: Source, names: Sequence[str], feeds: Sequence[Arrays]
) -> list[dict[str, Any]]:
    """Of each feed, the named tensors of the uncut model as OrtValues.

    Raises `ModelError` when the model cannot run on the feeds.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in outputs
    )
    session = make_session(model, source)
    wanted = {value.name for value in session.get_inputs()}
    references = []
    for feed in feeds:
        values = {name: from_array(array) for name, array in feed.items() if name in wanted}
        with executed(source.model.graph.name, MADE_UP):
            results = session.run_with_ort_values(list(names), values)
        references.append(dict(zip(names, results, strict=True)))
    return references
