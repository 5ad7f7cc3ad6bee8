"""Executes a placement of an ONNX model with ONNX Runtime, and measures it beside its baselines."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.cluster import Cluster
from gdp.graph import OpGraph
from gdp.runtime.ort_compare import Verdict, judge, reference_values
from gdp.runtime.ort_inputs import make_inputs
from gdp.runtime.ort_measure import Contender, Measured, measure
from gdp.runtime.ort_pipeline import Pipeline, Slot, Stage, make_slot
from gdp.runtime.ort_repeatable import Repeatable, repeatable
from gdp.runtime.ort_report import RunReport, SegmentTime, baseline
from gdp.runtime.ort_sessions import can_pin, core_of_device, versions
from gdp.runtime.ort_source import Source, load_source, randomised
from gdp.runtime.ort_stages import (
    Plan,
    Prediction,
    make_plan,
    make_stages,
    roofline_prediction,
    whole_stage,
)
from gdp.runtime.ort_values import to_array
from gdp.sim.problem import Objective

MAX_IN_FLIGHT = 16

ONE, FULL = "one sample", "pipeline"
SINGLE, DEFAULT, REPLICAS = "single_device", "runtime_default", "replicas"


@dataclass(frozen=True)
class Prepared:
    """A placement ready to run: its pieces as sessions, and a slot for every sample in flight."""

    plan: Plan
    stages: list[Stage]
    workers: list[tuple[int, ...]]  # cores of each
    slots: list[Slot]
    feeds: list[dict[str, np.ndarray]]  # of each slot
    expected: list[dict[str, Any]]  # of each slot: OrtValues of the uncut model
    known: Repeatable  # what of the model can be compared, and how closely


def run_onnx(
    path: str | os.PathLike[str],
    graph: OpGraph,
    cluster: Cluster,
    device: Int[np.ndarray, "N"],
    *,
    dims: Mapping[str, int] | None = None,
    objective: Objective = "latency",
    seed: int = 0,
    rounds: int = 5,
    seconds: float = 15.0,
    predict: tuple[Any, ...] | None = None,
) -> RunReport:
    """Execute a placement: one session per segment, one pinned thread per device that is a core.

    `graph` must be imported from `path`, with its symbolic dimensions bound. `predict` is what to
    predict with, a `Prediction`; without it, roofline costs of the fused ops. `seconds` is what the
    timing takes; loading comes on top. A model without weights of its own gets seeded random ones.
    Raises `ClusterError` for devices that are no cores, `ModelError` when weights are missing.
    """
    cores = core_of_device(cluster)
    source = randomised(load_source(path, dims), seed)
    if predict is None:
        predict = roofline_prediction(graph, cluster, device, objective)
    plan = make_plan(source.model, graph, Prediction._make(predict), objective)
    ready = prepare(source, graph, plan, cores, seed)
    comparison = check_outputs(ready)
    with _contenders(source, ready, cores, cores[cluster.host]) as contenders:
        times = measure(contenders, rounds=rounds, seconds=seconds)
    one, full, single = times[ONE], times[FULL], times[SINGLE]
    return RunReport(
        model=graph.name,
        objective=objective,
        predicted_latency_s=plan.latency_s,
        measured_latency_s=one.latency_s,
        predicted_throughput_per_s=1.0 / plan.period_s,
        measured_throughput_per_s=full.throughput_per_s,
        best_latency_s=one.best_latency_s,
        best_throughput_per_s=full.best_throughput_per_s,
        baselines={name: baseline(times[name]) for name in (SINGLE, DEFAULT, REPLICAS)},
        latency_speedup=_ratio(single.round_latency_s, one.round_latency_s),
        throughput_speedup=_ratio(full.round_throughput_per_s, single.round_throughput_per_s),
        outputs_equal=comparison.outputs_equal,
        inner_equal=comparison.inner_equal,
        worst_tensor=comparison.worst,
        random_ops=comparison.random_ops,
        max_abs_diff=comparison.max_abs_diff,
        max_relative_diff=comparison.max_relative_diff,
        compared_tensors=comparison.tensors,
        random_weights=bool(source.weights),
        segments=_segments(ready, cluster, one),
        samples_in_flight=len(ready.slots),
        cores=cores,
        pinned=can_pin(),
        note="" if can_pin() else "this platform has no core affinity: threads ran unpinned",
        rounds=rounds,
        seed=seed,
        versions=versions(),
    )


def prepare(
    source: Source, graph: OpGraph, plan: Plan, cores: Sequence[int], seed: int
) -> Prepared:
    """Sessions for the pieces of a plan, and slots with seeded inputs, each sample another one."""
    in_flight = min(len(plan.cut.pieces) + len(set(plan.piece_device)), MAX_IN_FLIGHT)
    feeds = [make_inputs(source.model, graph, seed + i) for i in range(in_flight)]
    names = list(dict.fromkeys((*plan.cut.crossing, *plan.cut.outputs)))
    expected = reference_values(source, names, feeds)
    stages, workers = make_stages(plan, source, cores)
    slots = [make_slot(stages, f, like) for f, like in zip(feeds, expected, strict=True)]
    return Prepared(plan, stages, workers, slots, feeds, expected, repeatable(source.model))


def check_outputs(ready: Prepared) -> Verdict:
    """Every output and crossing tensor of every sample against the uncut model, with the pipeline
    full, so that a sample that reads another one's tensors shows."""
    with Pipeline(ready.stages, ready.slots, ready.workers) as pipeline:
        pipeline.run(2 * len(ready.slots))
    pairs = [
        ({n: to_array(v) for n, v in values.items()}, {n: slot.read(n) for n in values})
        for slot, values in zip(ready.slots, ready.expected, strict=True)
    ]
    return judge(pairs, ready.plan.cut.outputs, ready.known)


@contextmanager
def _contenders(
    source: Source, ready: Prepared, cores: Sequence[int], host_core: int
) -> Iterator[dict[str, Contender]]:
    """The placement and its baselines, with their threads waiting for work."""
    with ExitStack() as stack:

        def pipeline(
            stages: Sequence[Stage],
            workers: Sequence[tuple[int, ...]],
            slots: Sequence[Slot],
        ) -> Pipeline:
            return stack.enter_context(Pipeline(stages, slots, workers))

        def whole(own: Sequence[int]) -> Pipeline:
            stages, workers = whole_stage(source, own)
            slot = make_slot(stages, ready.feeds[0], ready.expected[0])
            return pipeline(stages, workers, [slot])

        one = pipeline(ready.stages, ready.workers, ready.slots[:1])
        full = pipeline(ready.stages, ready.workers, ready.slots)
        copies = {core: whole([core]) for core in dict.fromkeys((host_core, *cores))}
        default = whole(cores) if len(cores) > 1 else copies[host_core]
        yield {
            ONE: Contender((one,)),
            FULL: Contender((full,)),
            SINGLE: Contender((copies[host_core],)),
            DEFAULT: Contender((default,)),
            REPLICAS: Contender(tuple(copies.values())),
        }


def _segments(ready: Prepared, cluster: Cluster, one: Measured) -> tuple[SegmentTime, ...]:
    values = ready.slots[0].values

    def size(names: Sequence[str]) -> int:
        return sum(values[name].tensor_size_in_bytes() for name in names)

    plan = ready.plan
    return tuple(
        SegmentTime(
            device=cluster.device_names[device],
            ops=len(piece.ops),
            input_bytes=size(piece.inputs),
            output_bytes=size(piece.outputs),
            predicted_s=predicted_s,
            measured_s=measured_s,
        )
        for piece, device, predicted_s, measured_s in zip(
            plan.cut.pieces, plan.piece_device, plan.piece_s, one.stage_s, strict=True
        )
    )


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds of one measurement over another."""
    return float(np.median(np.divide(above, below)))
