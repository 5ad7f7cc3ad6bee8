"""A pass of a model and the stack that executes it, as corrections read them."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

ENGINES = ("vllm", "sglang", "trtllm", "tgi", "llamacpp")
BACKENDS = ("cuda", "rocm", "vulkan", "metal", "sycl", "cpu")
SERVED, LLAMA = "served", "llama.cpp"


def family_of(engine: str) -> str:
    """Engines whose predictions are off alike: those that serve, or llama.cpp."""
    return LLAMA if engine == "llamacpp" else SERVED


CAUSES = (
    "bandwidth", "arithmetic", "dispatch", "collectives", "streaming", "sending", "transfers",
    "processor bandwidth", "processor arithmetic",
)  # fmt: skip
"""Parts of the seconds of a pass, as an answer tells them; those of a processor apart."""
BITS = (12.0, 7.0, 5.5, 4.5, 3.5)
"""Least bits of a weight of each class of formats: 16, 8, 6, 5 and 4 bits, then fewer."""
WIDEST = 4.0
"""Standard deviations beyond which a feature counts as this many."""
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e20)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]


class EngineStack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that runs below a model. Runs of one stack teach it, whatever their model."""

    engine: _Name  # of `ENGINES`, or another
    card: _Name  # kind of the accelerator, such as "h100"; of the processor where there is none
    bytes_per_s: _Rate  # of the card
    flop_per_s: _Rate  # of it, in 16 bits
    memory_bytes: _Rate  # of it
    version: _Name = ""  # of the engine, "" where unknown
    backend: _Name = ""  # of `BACKENDS`
    host: _Name = ""  # kind of the processor

    @property
    def key(self) -> str:
        """The stack in one word; versions that differ in the last of three numbers are one."""
        version = ".".join(re.findall(r"\d+", self.version)[:2])
        return "|".join((self.engine, version, self.backend, self.card, self.host))

    @property
    def age(self) -> float:
        """Version as a number, about one for a year of releases; 0 for the middle of those that
        were measured, and where it is unknown."""
        numbers = [int(number) for number in re.findall(r"\d{1,9}", self.version)[:3]]
        if not numbers:
            return 0.0
        numbers += [0] * (3 - len(numbers))
        if self.engine == "vllm":
            return min(max((numbers[1] - 15) / 6, -2.0), 2.0) if numbers[0] == 0 else 2.0
        if self.engine == "sglang":
            return min(max((numbers[2] - 5) / 6, -2.0), 2.0)
        if self.engine == "trtllm":
            return min(max(numbers[0] + numbers[1] / 4 - 1.3, -2.0), 2.0)
        return 0.0

    def features(self, bits: float) -> Float[np.ndarray, "G"]:
        """Features of the stack, for weights of so many bits."""
        known = [float(self.engine == name) for name in ENGINES]
        known += [float(self.backend == name) for name in BACKENDS]
        known += [float(format_class(bits) == i) for i in range(len(BITS) + 1)]
        card = (self.bytes_per_s / 1e12, self.flop_per_s / 3e14, self.memory_bytes / 6e10)
        return np.array([*known, self.age, *(math.log(x) / 2 for x in card)])


def format_class(bits: float) -> int:
    """The class of a format by the bits of a weight: one of `BITS`, or the one below them."""
    return next((i for i, least in enumerate(BITS) if bits >= least), len(BITS))


class Pass(NamedTuple):
    """One pass of a model as it is predicted: of prompt tokens, or of a decode step."""

    prefill: bool
    parts_s: Mapping[str, float]  # by the causes of `CAUSES`; together the seconds of the pass
    tokens: float  # of all requests
    sequences: int  # side by side
    context: float  # mean tokens of a sequence, in its middle
    ops: int  # of the whole request
    weight_bytes: float  # on each of the GPUs that divide the layers
    active_bytes: float  # of all weights over the weights that a token meets: sparse models' more
    bits: float  # of a weight, mean
    tensor: int = 1  # GPUs that divide each layer
    experts: bool = False  # each of them has whole experts

    @property
    def seconds(self) -> float:
        """Predicted."""
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
