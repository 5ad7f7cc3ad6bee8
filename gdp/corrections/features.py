"""A pass of a model and the stack that executes it, as corrections read them."""

import math
import re
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float

ENGINES = ("vllm", "sglang", "trtllm", "tgi", "llamacpp")
CAUSES = (
    "bandwidth", "arithmetic", "dispatch", "collectives", "streaming", "sending", "transfers",
    "processor bandwidth", "processor arithmetic",
)  # fmt: skip
"""Parts of the seconds of a pass, as an answer has them; those of a processor by themselves."""
BITS = (12.0, 7.0, 5.5, 4.5, 3.5)
"""Least bits of a weight of each class of formats: 16, 8, 6, 5 and 4 bits, then fewer."""
WIDEST = 4.0
"""Standard deviations beyond which a feature counts as this many."""
SERVED, LLAMA = "served", "llama.cpp"
"""Families of engines whose predictions have errors of one size."""
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e20)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


def family_of(engine: str) -> str:
    """The family of an engine: those that serve many requests, or llama.cpp."""
    return LLAMA if engine == "llamacpp" else SERVED


class EngineStack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that runs below a model. Runs of one stack teach it, whatever their model."""

    engine: _Name  # of `ENGINES`, or another
    card: _Name  # kind of the accelerator, such as "h100"; of the processor where there is none
    bytes_per_s: _Rate  # of the card
    flop_per_s: _Rate  # of it, in 16 bits
    version: _Name = ""  # of the engine, "" where unknown
    backend: _Name = ""  # such as "cuda"; "cpu" where there is no accelerator
    host: _Name = ""  # kind of the processor

    @property
    def key(self) -> str:
        """The stack in one word; versions that differ in the last of three numbers are one."""
        version = ".".join(re.findall(r"\d+", self.version)[:2])
        return "|".join((self.engine, version, self.backend, self.card, self.host))


def format_class(bits: float) -> int:
    """The class of a format by the bits of a weight: one of `BITS`, or the one below them."""
    return next((i for i, least in enumerate(BITS) if bits >= least), len(BITS))


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass of a model as it is predicted: of prompt tokens, or of a decode step."""

    prefill: bool
    parts_s: dict[str, _Seconds]  # by the causes of `CAUSES`; together the seconds of the pass
    tokens: _Size  # of all requests
    sequences: _Count  # side by side
    context: _Size  # mean tokens of a sequence, in its middle
    ops: _Count  # of the whole request
    weight_bytes: _Size  # on each of the GPUs that divide the layers
    active_bytes: _Size  # bytes of all weights for each weight that a token meets
    bits: Annotated[float, msgspec.Meta(gt=0, le=64)]  # of a weight, mean
    tensor: _Count = 1  # GPUs that divide each layer
    experts: bool = False  # each of them has whole experts

    def __post_init__(self) -> None:
        """Raise `ValueError` for seconds of another cause: no feature would show them."""
        if not self.parts_s.keys() <= set(CAUSES):
            raise ValueError(f"parts_s has other causes than {', '.join(CAUSES)}")

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        return sum(self.parts_s.values())

    def features(self) -> Float[np.ndarray, "F"]:
        """Features of the pass."""
        parts = np.array([self.parts_s.get(cause, 0.0) for cause in CAUSES])
        sizes = (
            math.log(max(self.tokens, 1.0)) / 3 - 1, math.log(self.sequences) / 3,
            math.log(max(self.context, 1.0)) / 3 - 2, math.log(self.ops) - 8,
            math.log(max(self.weight_bytes, 1e6) / 1e10), math.log(max(self.active_bytes, 0.1)),
            math.log(self.tensor), float(self.experts),
        )  # fmt: skip
        phase = (float(self.prefill), float(not self.prefill))
        shares = parts / max(self.seconds, 1e-9)
        return np.concatenate([phase, np.log10(parts + 1e-5) + 3, shares, sizes])

    def format_features(self) -> Float[np.ndarray, "G"]:
        """Features of the format of the weights: which class it is."""
        own = format_class(self.bits)
        return np.array([float(own == i) for i in range(len(BITS) + 1)])
