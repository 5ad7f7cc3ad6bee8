"""Samples in flight never mix, errors surface, and rates count a full pipeline only."""

import threading
from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import make_cluster
from gdp.errors import ClusterError
from gdp.runtime.ort.measure import Contender, measure
from gdp.runtime.ort.pipeline import Pipeline, Slot, Stage, Trace, make_slot
from gdp.runtime.ort.sessions import can_pin, core_of_device, pinned, usable_cores

CORE = min(usable_cores())


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


def diamond() -> list[Stage]:
    """x -> a = -x; b = -a and c = |a| on two workers; y = b + c: twice the positive part of x."""
    return [
        Stage(0, session("Neg", ["x"], "a"), ("x",), ("a",), readers=(1, 2)),
        Stage(0, session("Neg", ["a"], "b"), ("a",), ("b",), readers=(3,), waits_for=1),
        Stage(1, session("Abs", ["a"], "c"), ("a",), ("c",), readers=(3,), waits_for=1),
        Stage(1, session("Add", ["b", "c"], "y"), ("b", "c"), ("y",), waits_for=2),
    ]


def slots_of(stages: list[Stage], count: int) -> tuple[list[Slot], list[np.ndarray]]:
    like = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(4, np.float32)) for name in "abcy"}
    rng = np.random.default_rng(0)
    feeds = [rng.standard_normal(4).astype(np.float32) for _ in range(count)]
    return [make_slot(stages, {"x": feed}, like) for feed in feeds], feeds


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_slot_holds_the_result_of_its_own_input(count: int) -> None:
    stages = diamond()
    slots, feeds = slots_of(stages, count)
    with Pipeline(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        trace = pipeline.run(40)
    for slot, feed in zip(slots, feeds, strict=True):
        np.testing.assert_array_equal(slot.read("y"), 2 * np.maximum(feed, 0))
    assert [len(seconds) for seconds in trace.stage_s] == [40] * 4
    assert len(trace.finish_s) == 40
    assert list(trace.finish_s) == sorted(trace.finish_s)
    assert all(start < finish for start, finish in zip(trace.start_s, trace.finish_s, strict=True))


def test_no_more_samples_are_in_flight_than_slots() -> None:
    stages = diamond()
    slots, _ = slots_of(stages, 3)
    with Pipeline(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        trace = pipeline.run(30)
    starts, finishes = np.sort(trace.start_s), np.sort(trace.finish_s)
    assert (starts[3:] >= finishes[:-3]).all()


def test_samples_are_let_in_until_the_time_given_and_then_the_pipeline_runs_dry() -> None:
    import time

    stages = diamond()
    slots, _ = slots_of(stages, 2)
    with Pipeline(stages, slots, [(CORE,), (CORE,)]) as pipeline:
        until_s = time.perf_counter() + 0.05
        trace = pipeline.run(1, until_s)
        assert len(trace.finish_s) > 2
        assert max(trace.start_s) < until_s + 0.5
        again = pipeline.run(4)
    assert len(again.finish_s) == 4


def test_threads_end_with_the_context() -> None:
    before = threading.active_count()
    stages = diamond()
    slots, _ = slots_of(stages, 2)
    with Pipeline(stages, slots, [(CORE,), (CORE,)]) as pipeline:
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
    stages[2] = Stage(1, Broken(stages[2].session), ("a",), ("c",), readers=(3,), waits_for=1)
    slots, _ = slots_of(stages, 2)
    with (
        Pipeline(stages, slots, [(CORE,), (CORE,)]) as pipeline,
        pytest.raises(RuntimeError, match="out of luck"),
    ):
        pipeline.run(10)


def test_the_older_sample_goes_first() -> None:
    """One worker, two samples: all four stages of the first run before the second ends."""
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
        Stage(0, Recorder("first", session("Neg", ["x"], "a")), ("x",), ("a",), readers=(1,)),
        Stage(0, Recorder("last", session("Neg", ["a"], "y")), ("a",), ("y",), waits_for=1),
    ]
    like = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(4, np.float32)) for name in "ay"}
    slots = [make_slot(stages, {"x": np.ones(4, np.float32)}, like) for _ in range(2)]
    pipeline = Pipeline(stages, slots, [(CORE,)])
    pipeline.start(2)  # both samples wait before the worker starts
    with pipeline:
        pipeline.wait()
    assert order == ["first", "last", "first", "last"]


def trace_of(start_s: list[float], finish_s: list[float]) -> Trace:
    return Trace(tuple(start_s), tuple(finish_s), ())


def test_rate_leaves_out_filling_and_running_dry() -> None:
    """Two slots. Samples end at 5 (slow first), then one a second until 9; the last enters at 8,
    so the one that ends at 9 does not count: 3 in 3 seconds after the first."""
    trace = trace_of([0.0, 0.0, 5.0, 6.0, 7.0, 8.0], [5.0, 6.0, 7.0, 8.0, 8.5, 8.7])
    assert trace.rate_per_s(1, 8.0) == pytest.approx(1.0)
    assert trace.rate_per_s(2, 8.0) == pytest.approx(1.0)
    assert trace.rate_per_s(1, 9.0) == pytest.approx(5 / 3.7)


def test_rate_of_a_slow_pipeline_takes_two_completions_at_least() -> None:
    assert trace_of([0.0, 2.0], [2.0, 4.0]).rate_per_s(1, 1.0) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="1 samples cannot fill"):
        trace_of([0.0], [2.0]).rate_per_s(1, 9.0)


def test_latency_is_the_median_from_input_to_output() -> None:
    assert trace_of([0.0, 1.0, 2.0], [0.5, 2.0, 12.0]).latency_s == 1.0


def test_contenders_take_turns_and_each_round_counts() -> None:
    ran: list[str] = []

    class Fake:
        num_slots = 1

        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def start(self, samples: int, until_s: float) -> None:
            ran.append(self.name)

        def wait(self) -> Trace:
            finish = [self.seconds * i for i in range(1, 9)]
            return Trace(tuple(f - self.seconds for f in finish), tuple(finish), ((self.seconds,),))

    contenders: Mapping[str, Contender] = {
        name: Contender.__new__(Contender) for name in ("slow", "fast")
    }
    for name, seconds in (("slow", 0.2), ("fast", 0.1)):
        object.__setattr__(contenders[name], "pipelines", (Fake(name, seconds),))
    found = measure(contenders, rounds=3, seconds=0.01)
    assert ran == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert found["slow"].latency_s == pytest.approx(0.2)
    assert found["fast"].throughput_per_s == pytest.approx(10.0)
    assert found["fast"].stage_s == (0.1,)
    assert len(found["fast"].round_latency_s) == 3


def test_rounds_and_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive, got 0"):
        measure({}, rounds=0, seconds=1.0)


@pytest.mark.skipif(not can_pin(), reason="no core affinity on this platform")
def test_pinning_holds_inside_and_ends_outside() -> None:
    before = usable_cores()
    with pinned([CORE]):
        assert usable_cores() == {CORE}
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
