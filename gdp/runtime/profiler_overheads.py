"""What executing a cut model costs beside its kernels: session calls, and hand-overs between cores.

Measured with the same workers and queues that execute placements.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from gdp.costs.profile import Overheads
from gdp.runtime.ort_pipeline import Pipeline, Stage, make_slot
from gdp.runtime.ort_sessions import make_session, pinned
from gdp.runtime.ort_source import Source

SIZES_BYTES = (1 << 8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_SAMPLES = 60


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
    slot = make_slot(stages, {"x0": np.zeros(elements, np.float32)}, _like(len(cores), elements))
    with Pipeline(stages, [slot], [(core,) for core in used]) as pipeline:
        pipeline.run(4)
        return min(pipeline.run(_SAMPLES).latency_s for _ in range(rounds))


def _kernel_s(core: int, rounds: int) -> float:
    """Seconds that one more kernel of no work adds to a session."""
    few, many = 2, 66
    with pinned([core]):
        seconds = [_run_s(_scale_model(count, 1), rounds) for count in (few, many)]
    return max((seconds[1] - seconds[0]) / (many - few), 0.0)


def _run_s(model: onnx.ModelProto, rounds: int) -> float:
    from gdp.runtime.ort import ort

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


def _like(stages: int, elements: int) -> dict[str, Any]:
    from gdp.runtime.ort import ort

    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(elements, np.float32))
    return {f"x{i + 1}": value for i in range(stages)}
