"""Samples in flight never mix, errors surface, and rates count a full pipeline only."""

import dataclasses
import threading

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from gdp.base.cores import usable_cores
from gdp.base.errors import ClusterError
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import make_cluster
from gdp.measure.cycle import Cycle
from gdp.measure.measuring import Quota
from gdp.targets.onnxruntime.run import (
    PipelineExecutor,
    Serving,
    SessionStage,
    SideBySide,
    Slot,
    make_slot,
)
from gdp.targets.onnxruntime.sessions import can_pin, core_of_device, pinned

CORE = usable_cores()[0]


def session(op_type: str, inputs: list[str], output: str) -> ort.InferenceSession:
    """A model of one op over [4] floats."""
    graph = helper.make_graph(
        [helper.make_node(op_type, inputs, [output])],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in inputs],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [4])],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def diamond() -> list[SessionStage]:
    """x -> a = -x; b = -a and c = |a| on two workers; y = b + c: twice the positive part of x."""
    return [
        SessionStage(0, session("Neg", ["x"], "a"), ("x",), ("a",), readers=(1, 2)),
        SessionStage(0, session("Neg", ["a"], "b"), ("a",), ("b",), readers=(3,), waits_for=1),
        SessionStage(1, session("Abs", ["a"], "c"), ("a",), ("c",), readers=(3,), waits_for=1),
        SessionStage(1, session("Add", ["b", "c"], "y"), ("b", "c"), ("y",), waits_for=2),
    ]


def slots_of(stages: list[SessionStage], count: int) -> tuple[list[Slot], list[np.ndarray]]:
    like = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(4, np.float32)) for name in "abcy"}
    rng = np.random.default_rng(0)
    feeds = [rng.standard_normal(4).astype(np.float32) for _ in range(count)]
    return [make_slot(stages, {"x": feed}, like) for feed in feeds], feeds


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_slot_holds_the_result_of_its_own_input(count: int) -> None:
    stages = diamond()
    slots, feeds = slots_of(stages, count)
    with PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        trace = pipeline.run(40)
    for slot, feed in zip(slots, feeds, strict=True):
        np.testing.assert_array_equal(slot.read("y"), 2 * np.maximum(feed, 0))
    assert [len(seconds) for seconds in trace.stage_s] == [40] * 4
    assert len(trace.finish_s) == 40
    assert list(trace.finish_s) == sorted(trace.finish_s)
    assert all(start < finish for start, finish in zip(trace.start_s, trace.finish_s, strict=True))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_workers_that_take_samples_in_turn_serve_every_second_one(count: int) -> None:
    """The middle of the diamond has two workers: both run half of the samples, whose results stay
    those of their own inputs, and leave in order of their slots."""
    stages = diamond()
    other = Serving(2, session("Abs", ["a"], "c"))
    stages[2] = dataclasses.replace(stages[2], others=(other,))
    stages[0] = dataclasses.replace(stages[0], others=(Serving(3, session("Neg", ["x"], "a")),))
    served: dict[int, list[int]] = {}
    slots, feeds = slots_of(stages, count)
    with PipelineExecutor(stages, slots, [(CORE,)] * 4) as pipeline:
        run = pipeline._run_stage

        def seen(worker: int, heap: list, position: int, slot: int) -> None:
            if position == 2:
                served.setdefault(worker, []).append(pipeline._sample_of[slot])
            run(worker, heap, position, slot)

        pipeline._run_stage = seen  # type: ignore[method-assign]
        trace = pipeline.run(40)
    for slot, feed in zip(slots, feeds, strict=True):
        np.testing.assert_array_equal(slot.read("y"), 2 * np.maximum(feed, 0))
    # A sample whose thread waits for a core may be overtaken.
    turns = {worker: sorted(samples) for worker, samples in served.items()}
    assert turns == {1: list(range(0, 40, 2)), 2: list(range(1, 40, 2))}
    assert trace.turns == (2, 1, 2, 1)
    assert sorted(trace.run_turns[2]) == [0] * 20 + [1] * 20
    assert set(trace.run_turns[1]) == {0}
    assert [len(seconds) for seconds in trace.stage_s] == [40] * 4


def test_no_more_samples_are_in_flight_than_slots() -> None:
    stages = diamond()
    slots, _ = slots_of(stages, 3)
    with PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        trace = pipeline.run(30)
    starts, finishes = np.sort(trace.start_s), np.sort(trace.finish_s)
    assert (starts[3:] >= finishes[:-3]).all()


def test_samples_are_let_in_until_the_time_given_and_then_the_pipeline_runs_dry() -> None:
    stages = diamond()
    slots, _ = slots_of(stages, 2)
    with PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        pipeline.start(Quota(0, 0.05, 100.0))
        trace = pipeline.wait()
        assert trace.finish_s[-1] - trace.finish_s[1] >= 0.05
        again = pipeline.run(20)
    assert len(again.finish_s) == 20


def test_the_cap_ends_a_run_that_has_not_met_its_quota() -> None:
    stages = diamond()
    slots, _ = slots_of(stages, 2)
    with PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        pipeline.start(Quota(10**9, 100.0, 0.05))
        assert 7 <= len(pipeline.wait().finish_s) < 10**6


def test_pipelines_side_by_side_share_the_quota() -> None:
    stages, others = diamond(), diamond()
    first = PipelineExecutor(stages, slots_of(stages, 1)[0], [(CORE,), (CORE,)])
    second = PipelineExecutor(others, slots_of(others, 1)[0], [(CORE,), (CORE,)])
    with first, second:
        both = SideBySide((first, second))
        assert both.slots == 2
        assert [len(trace.finish_s) for trace in both.run(Quota(21, 0.0, 100.0))] == [13, 13]


def test_threads_end_with_the_context() -> None:
    before = threading.active_count()
    stages = diamond()
    slots, _ = slots_of(stages, 2)
    with PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        pipeline.run(4)
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


class Broken:
    """A session whose third run fails."""

    def __init__(self, real: ort.InferenceSession) -> None:
        self.real, self.runs = real, 0

    def io_binding(self) -> ort.IOBinding:
        return self.real.io_binding()

    def run_with_iobinding(self, binding: ort.IOBinding) -> None:
        self.runs += 1
        if self.runs == 3:
            raise RuntimeError("out of luck")
        self.real.run_with_iobinding(binding)


def test_what_a_stage_raises_reaches_the_caller() -> None:
    stages = diamond()
    stages[2] = SessionStage(
        1, Broken(stages[2].session), ("a",), ("c",), readers=(3,), waits_for=1
    )
    slots, _ = slots_of(stages, 2)
    with (
        PipelineExecutor(stages, slots, [(CORE,), (CORE,)]) as pipeline,
        pytest.raises(RuntimeError, match="out of luck"),
    ):
        pipeline.run(10)


@pytest.mark.parametrize(
    ("cycle", "expected"),
    [(None, ["first", "last", "first", "last"]),
     (Cycle(1.0, (0.0, 1.5), 2), ["first", "first", "last", "first"])],
)  # fmt: skip
def test_the_stage_that_is_due_first_goes_first(cycle: Cycle | None, expected: list[str]) -> None:
    """One worker, two samples. Without a cycle all of the older goes first; in one where the last
    stage is due a period and a half after the first, the first of the next sample does."""
    order: list[str] = []

    class Recorder:
        def __init__(self, name: str, real: ort.InferenceSession) -> None:
            self.name, self.real = name, real

        def io_binding(self) -> ort.IOBinding:
            return self.real.io_binding()

        def run_with_iobinding(self, binding: ort.IOBinding) -> None:
            order.append(self.name)
            self.real.run_with_iobinding(binding)

    stages = [
        SessionStage(
            0, Recorder("first", session("Neg", ["x"], "a")), ("x",), ("a",), readers=(1,)
        ),
        SessionStage(0, Recorder("last", session("Neg", ["a"], "y")), ("a",), ("y",), waits_for=1),
    ]
    like = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(4, np.float32)) for name in "ay"}
    slots = [make_slot(stages, {"x": np.ones(4, np.float32)}, like) for _ in range(2)]
    pipeline = PipelineExecutor(stages, slots, [(CORE,)], cycle)
    pipeline.start(Quota(0, 0.0, 0.0))  # both samples wait before the worker starts
    with pipeline:
        pipeline.wait()
    assert order[:4] == expected


@pytest.mark.skipif(not can_pin(), reason="no core affinity on this platform")
def test_pinning_holds_inside_and_ends_outside() -> None:
    before = usable_cores()
    with pinned([CORE]):
        assert usable_cores() == [CORE]
    assert usable_cores() == before


def test_cores_follow_the_names_of_devices() -> None:
    core = device_preset("cpu-core", f"core{CORE}")
    assert core_of_device(make_cluster("one", [core])) == (CORE,)


def test_a_device_that_is_no_core_is_named() -> None:
    with pytest.raises(ClusterError, match="'a100:0' of kind 'a100' cannot be executed here"):
        core_of_device(cluster_preset("2xa100"))


def test_a_core_that_is_not_there_is_named() -> None:
    core = device_preset("cpu-core", "core99999")
    with pytest.raises(ClusterError, match="device 'core99999': this process may use cores"):
        core_of_device(make_cluster("one", [core]))
