"""Overheads of executing a cut model: session calls, cuts, and hand-overs between cores.

Measured with the workers and queues that execute placements.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gdp.costs.profile import Overheads
from gdp.measure.record import timed
from gdp.targets.onnx_source import Source
from gdp.targets.onnxruntime.pipeline import PipelineExecutor, SessionStage, make_slot
from gdp.targets.onnxruntime.sessions import make_session, pinned

SIZES_BYTES = (1 << 8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_SAMPLES = 60
CUT_LAYERS, CUT_PIECES = 32, (2, 16)
_CUT_ROWS, _CUT_WIDTH = 64, 256  # 8 MFLOP a layer: a tenth of a millisecond on one core


def measure_overheads(core: int, other: int | None, rounds: int = 5) -> Overheads:
    """Seconds per session call and kernel; with another core, of handing tensors over.

    The session's cost is that of a stage with one element to compute, so it includes the worker's
    own bookkeeping. A hand-over is a chain of stages that alternates between two cores against the
    same chain on one: the part that does not grow with the tensor is the latency, the slope against
    bytes the bandwidth.
    """
    small = [chain_latency_s([core] * n, 64, rounds) for n in (1, 9)]
    session_s = (small[1] - small[0]) / 8
    few, many = 2, 66  # kernels of no work in one session
    with pinned([core]):
        seconds = [_run_s(_row_model("Neg", count, (1,)), rounds) for count in (few, many)]
    kernel_s = max((seconds[1] - seconds[0]) / (many - few), 0.0)
    if other is None:
        return Overheads(session_s=session_s, kernel_s=kernel_s)
    stages = 8
    extra = []
    for size in SIZES_BYTES:
        apart = chain_latency_s([core, other] * (stages // 2), size, rounds)
        together = chain_latency_s([core] * stages, size, rounds)
        extra.append((apart - together) / (stages - 1))
    latency_s = max(min(extra[:2]), 1e-7)
    slope = np.polyfit(SIZES_BYTES[2:], np.array(extra[2:]) - latency_s, 1)[0]
    return Overheads(
        session_s=session_s,
        cut_s=measure_cut_s(core, other, rounds),
        kernel_s=kernel_s,
        handover_s=latency_s,
        handover_bytes_per_s=float(1.0 / max(slope, 1e-13)),
    )


def _chain(
    models: Sequence[onnx.ModelProto], cores: Sequence[int], feed: np.ndarray
) -> PipelineExecutor:
    """Models in a row, x0 to x1 to x2 and so on, each on its core, with one sample in flight."""
    from gdp.targets.onnxruntime.telemetry import ort

    used = list(dict.fromkeys(cores))
    stages = []
    for i, (model, core) in enumerate(zip(models, cores, strict=True)):
        with pinned([core]):
            session = make_session(model, Source(model, Path()))
        stages.append(
            SessionStage(
                worker=used.index(core), session=session, inputs=(f"x{i}",),
                outputs=(f"x{i + 1}",), readers=(i + 1,) if i + 1 < len(models) else (),
                waits_for=min(i, 1),
            )
        )  # fmt: skip
    like = ort.OrtValue.ortvalue_from_numpy(feed)
    slot = make_slot(stages, {"x0": feed}, {f"x{i + 1}": like for i in range(len(models))})
    return PipelineExecutor(stages, [slot], [(core,) for core in used])


def chain_latency_s(cores: Sequence[int], size_bytes: int, rounds: int) -> float:
    """Seconds for one sample through a chain of sessions, each of which negates a tensor.

    The smallest over rounds of the median over samples.
    """
    feed = np.zeros(max(1, size_bytes // 4), np.float32)
    models = [_row_model("Neg", 1, feed.shape, f"x{i}", f"x{i + 1}") for i in range(len(cores))]
    with _chain(models, cores, feed) as pipeline:
        pipeline.run(4)
        return min(pipeline.run(_SAMPLES).latency_s for _ in range(rounds))


def measure_cut_s(core: int, other: int, rounds: int = 5, samples: int = _SAMPLES) -> float:
    """Busy seconds of cores that one further cut adds.

    Products of matrices in a row, in few and in many pieces that two cores take in turn: what the
    pieces together take longer, for each piece more. The kernels are the same, so this is what a
    cut does to them: inputs lie in the other core's cache, and weights have to be fetched again.
    The median over rounds, in which both take turns, of the difference of medians.
    """
    few, many = (cut_chain([core, other], pieces) for pieces in CUT_PIECES)
    cut_s = []
    with few, many:
        for pipeline in (few, many):
            pipeline.run(4)
        for _ in range(rounds):
            busy_s = [
                sum(float(np.median(own)) for own in pipeline.run(samples).stage_s)
                for pipeline in (few, many)
            ]
            cut_s.append((busy_s[1] - busy_s[0]) / (CUT_PIECES[1] - CUT_PIECES[0]))
    return max(float(np.median(cut_s)), 0.0)


def cut_chain(cores: Sequence[int], pieces: int) -> PipelineExecutor:
    """`CUT_LAYERS` matrix products, cut in pieces that the cores run round-robin."""
    layers, shape = CUT_LAYERS // pieces, (_CUT_ROWS, _CUT_WIDTH)
    # Random weights that keep the size of their input.
    rng, deviation = np.random.default_rng(0), 1 / np.sqrt(_CUT_WIDTH)
    models = []
    for i in range(pieces):
        drawn = rng.standard_normal((layers, _CUT_WIDTH, _CUT_WIDTH)) * deviation
        weights = list(drawn.astype(np.float32))
        models.append(_row_model("MatMul", layers, shape, f"x{i}", f"x{i + 1}", weights))
    own = [cores[i % len(cores)] for i in range(pieces)]
    return _chain(models, own, np.ones(shape, np.float32))


def _run_s(model: onnx.ModelProto, rounds: int) -> float:
    from gdp.targets.onnxruntime.telemetry import ort

    session = make_session(model, Source(model, Path()))
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
    binding.bind_output(session.get_outputs()[0].name, "cpu")
    return min(
        float(np.median(timed(lambda: session.run_with_iobinding(binding), 200)))
        for _ in range(rounds)
    )


def _row_model(
    op_type: str, nodes: int, shape: tuple[int, ...], first: str = "x", last: str = "y",
    weights: Sequence[np.ndarray] = (),
) -> onnx.ModelProto:  # fmt: skip
    """Kernels in a row that no optimisation removes, each with its weight where there are any."""
    names = [first, *(f"m{i}" for i in range(nodes - 1)), last]
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node(op_type, [a, *([f"w{i}"] * bool(len(weights)))], [b], name=f"n{i}")
                for i, (a, b) in enumerate(itertools.pairwise(names))
            ],
            "row",
            [helper.make_tensor_value_info(first, TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
        ),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )
