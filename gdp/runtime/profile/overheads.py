"""What executing a cut model costs beside its kernels: session calls, cuts, and hand-overs.

Measured with the same workers and queues that execute placements.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gdp.costs.profile import Overheads
from gdp.runtime.ort.pipeline import Pipeline, Stage, make_slot
from gdp.runtime.ort.sessions import make_session, pinned
from gdp.runtime.ort.source import Source

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
    kernel_s = _kernel_s(core, rounds)
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


def chain_latency_s(cores: Sequence[int], size_bytes: int, rounds: int) -> float:
    """Seconds for one sample through a chain of sessions, each of which scales a tensor by 1.

    The smallest over rounds of the median over samples.
    """
    elements = max(1, size_bytes // 4)
    used = sorted(set(cores))
    stages = []
    source = Source(_scale_model(1, elements), Path())
    for i, core in enumerate(cores):
        with pinned([core]):
            session = make_session(_scale_model(1, elements, f"x{i}", f"x{i + 1}"), source)
        stages.append(
            Stage(
                worker=used.index(core), session=session, inputs=(f"x{i}",),
                outputs=(f"x{i + 1}",), readers=(i + 1,) if i + 1 < len(cores) else (),
                waits_for=0 if i == 0 else 1,
            )
        )  # fmt: skip
    slot = make_slot(stages, {"x0": np.zeros(elements, np.float32)}, _like(len(cores), (elements,)))
    with Pipeline(stages, [slot], [(core,) for core in used]) as pipeline:
        pipeline.run(4)
        return min(pipeline.run(_SAMPLES).latency_s for _ in range(rounds))


def measure_cut_s(core: int, other: int, rounds: int = 5, samples: int = _SAMPLES) -> float:
    """Seconds that one further cut adds to what a model keeps its cores busy for.

    Products of matrices in a row, in few and in many pieces that two cores take in turn: what the
    pieces together take longer, for each piece more. The kernels are the same, so this is what a
    cut does to them: inputs lie in the other core's cache, and weights have to be fetched again.
    The median over rounds, in which both take turns, of the difference of medians.
    """
    few, many = (cut_chain([core, other], pieces) for pieces in CUT_PIECES)
    found = []
    with few, many:
        for pipeline in (few, many):
            pipeline.run(4)
        for _ in range(rounds):
            busy_s = [
                sum(float(np.median(own)) for own in pipeline.run(samples).stage_s)
                for pipeline in (few, many)
            ]
            found.append((busy_s[1] - busy_s[0]) / (CUT_PIECES[1] - CUT_PIECES[0]))
    return max(float(np.median(found)), 0.0)


def cut_chain(cores: Sequence[int], pieces: int) -> Pipeline:
    """`CUT_LAYERS` products of matrices, cut in pieces that the cores take in turn."""
    layers = CUT_LAYERS // pieces
    rng = np.random.default_rng(0)
    stages = []
    for i in range(pieces):
        model = _product_model(layers, f"x{i}", f"x{i + 1}", rng)
        with pinned([cores[i % len(cores)]]):
            session = make_session(model, Source(model, Path()))
        stages.append(
            Stage(
                worker=i % len(cores), session=session, inputs=(f"x{i}",),
                outputs=(f"x{i + 1}",), readers=(i + 1,) if i + 1 < pieces else (),
                waits_for=0 if i == 0 else 1,
            )
        )  # fmt: skip
    shape = (_CUT_ROWS, _CUT_WIDTH)
    slot = make_slot(stages, {"x0": np.ones(shape, np.float32)}, _like(pieces, shape))
    return Pipeline(stages, [slot], [(core,) for core in cores])


def _product_model(layers: int, first: str, last: str, rng: np.random.Generator) -> onnx.ModelProto:
    """Matrix products in a row, with random weights that keep the size of their input."""
    names = [first, *(f"m{i}" for i in range(layers - 1)), last]
    shape = (_CUT_WIDTH, _CUT_WIDTH)
    weights = [rng.standard_normal(shape) / np.sqrt(_CUT_WIDTH) for _ in range(layers)]
    value = [_CUT_ROWS, _CUT_WIDTH]
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("MatMul", [a, f"w{i}"], [b], name=f"n{i}")
                for i, (a, b) in enumerate(itertools.pairwise(names))
            ],
            "products",
            [helper.make_tensor_value_info(first, TensorProto.FLOAT, value)],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, value)],
            [numpy_helper.from_array(w.astype(np.float32), f"w{i}") for i, w in enumerate(weights)],
        ),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )


def _kernel_s(core: int, rounds: int) -> float:
    """Seconds that one more kernel of no work adds to a session."""
    few, many = 2, 66
    with pinned([core]):
        seconds = [_run_s(_scale_model(count, 1), rounds) for count in (few, many)]
    return max((seconds[1] - seconds[0]) / (many - few), 0.0)


def _run_s(model: onnx.ModelProto, rounds: int) -> float:
    from gdp.runtime.ort.telemetry import ort

    session = make_session(model, Source(model, Path()))
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
    binding.bind_output(session.get_outputs()[0].name, "cpu")
    seconds = np.empty((rounds, 200))
    for i in range(rounds):
        for j in range(200):
            start_s = time.perf_counter()
            session.run_with_iobinding(binding)
            seconds[i, j] = time.perf_counter() - start_s
    return float(np.median(seconds, axis=1).min())


def _scale_model(nodes: int, elements: int, first: str = "x", last: str = "y") -> onnx.ModelProto:
    """`nodes` element-wise kernels in a row that no optimisation removes."""
    names = [first, *(f"m{i}" for i in range(nodes - 1)), last]
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Neg", [a], [b], name=f"n{i}")
                for i, (a, b) in enumerate(itertools.pairwise(names))
            ],
            "chain",
            [helper.make_tensor_value_info(first, TensorProto.FLOAT, [elements])],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, [elements])],
        ),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )


def _like(stages: int, shape: tuple[int, ...]) -> dict[str, Any]:
    from gdp.runtime.ort.telemetry import ort

    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
    return {f"x{i + 1}": value for i in range(stages)}
