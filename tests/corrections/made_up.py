"""Made-up stacks and passes of corrections."""

from typing import Any

import msgspec
import numpy as np

from gdp.corrections.features import CAUSES, LLAMA, SERVED, EngineStack, Pass
from gdp.corrections.process import CorrectionMeta, CorrectionProcess, features_of, scales_of

H100 = EngineStack("vllm", "h100", 3.35e12, 9.9e14, "0.19.0", "cuda", "cpu-server-ddr5")
STACKS = [
    H100,
    EngineStack("vllm", "l40s", 8.6e11, 3.6e14, "0.15.1", "cuda", "cpu-server-ddr5"),
    EngineStack("sglang", "a100", 2e12, 3.1e14, "0.5.5", "cuda", "cpu"),
    EngineStack("trtllm", "b200", 8e12, 2.2e15, "1.2.0", "cuda", "cpu"),
]


WIDTHS = [(3.0, 2.0), (2.5, 1.5), (2.0, 1.2)]


def a_pass(prefill: bool = False, **changed: Any) -> Pass:
    """A pass of a model of eight billion weights."""
    own = Pass(
        prefill=prefill,
        parts_s={"arithmetic": 0.04} if prefill else {"bandwidth": 6e-3, "dispatch": 1e-3},
        tokens=4096.0 if prefill else 8.0, sequences=8, context=1100.0, ops=3000,
        weight_bytes=1.6e10, active_bytes=2.0, bits=16.0,
    )  # fmt: skip
    return msgspec.structs.replace(own, **changed)


BOTH = (a_pass(True), a_pass())


def drawn_pass(rng: np.random.Generator, prefill: bool | None = None) -> Pass:
    """Any pass."""
    causes = rng.choice(CAUSES, size=3, replace=False)
    is_prefill = bool(rng.random() < 0.5) if prefill is None else prefill
    return Pass(
        is_prefill, {str(c): float(10 ** rng.uniform(-4, -1)) for c in causes},
        float(rng.integers(1, 20_000)), int(rng.integers(1, 300)), float(rng.integers(10, 9000)),
        int(rng.integers(500, 20_000)), float(10 ** rng.uniform(9, 11)),
        float(rng.uniform(0.5, 20)), float(rng.choice([16.0, 8.0, 4.5])),
        int(rng.choice([1, 2, 4, 8])), bool(rng.random() < 0.2),
    )  # fmt: skip


def drawn_process(seed: int, count: int = 12) -> CorrectionProcess:
    """A process with the scales of any passes."""
    rng = np.random.default_rng(seed)
    passes = [drawn_pass(rng, prefill=bool(i % 2)) for i in range(count)]
    return CorrectionProcess(scales_of(*features_of(passes)))


def made_up_meta() -> CorrectionMeta:
    """Of a process that was measured on vLLM with an H100."""
    return CorrectionMeta(
        shapes={}, constants={}, quantiles={SERVED: WIDTHS, LLAMA: WIDTHS},
        far={SERVED: 50.0, LLAMA: 40.0},
        stacks={H100.key: 10}, formats={"vllm": (0, 1)}, source="made up", date="2026-01-01",
        known=[("vllm", "cuda", float(np.log(3.35e12)), float(np.log(9.9e14)))],
    )  # fmt: skip
