"""Features of engine stacks, as contenders that learn from public runs read them."""

import math
import re

import numpy as np
from jaxtyping import Float

from gdp.corrections.features import ENGINES, EngineStack, Pass

BACKENDS = ("cuda", "rocm", "vulkan", "metal", "sycl", "cpu")


def age_of(stack: EngineStack) -> float:
    """Version as a number, about one for a year of releases; 0 for the middle of those that were
    measured, and where it is unknown."""
    numbers = [int(number) for number in re.findall(r"\d{1,9}", stack.version)[:3]]
    if not numbers:
        return 0.0
    numbers += [0] * (3 - len(numbers))
    if stack.engine == "vllm":
        return min(max((numbers[1] - 15) / 6, -2.0), 2.0) if numbers[0] == 0 else 2.0
    if stack.engine == "sglang":
        return min(max((numbers[2] - 5) / 6, -2.0), 2.0)
    if stack.engine == "trtllm":
        return min(max(numbers[0] + numbers[1] / 4 - 1.3, -2.0), 2.0)
    return 0.0


def stack_features(stack: EngineStack, memory_bytes: float, asked: Pass) -> Float[np.ndarray, "G"]:
    """Features of a stack with a card of so much memory, under the format of a pass."""
    known = [float(stack.engine == name) for name in ENGINES]
    known += [float(stack.backend == name) for name in BACKENDS]
    card = (stack.bytes_per_s / 1e12, stack.flop_per_s / 3e14, memory_bytes / 6e10)
    rates = [math.log(x) / 2 for x in card]
    return np.array([*known, *asked.format_features(), age_of(stack), *rates])
