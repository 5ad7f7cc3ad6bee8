"""Times cut and uncut JAX programs in interleaved rounds: what disturbs one disturbs all."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.runtime.jax.devices import block_until_ready
from gdp.runtime.ort.measure import Measured

_LEAST_SAMPLES = 3
"""Of one measurement, however little time it has."""


@dataclass(frozen=True)
class Contender:
    """Ways to start one sample, taken in turn, and how many samples may be on their way at once."""

    issues: tuple[Callable[[], Any], ...]
    in_flight: int


def measure(
    contenders: Mapping[str, Contender], rounds: int, seconds: float
) -> dict[str, Measured]:
    """Every contender's latency and throughput; `seconds` is the wall clock of all rounds."""
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"rounds and seconds must be positive, got {rounds} and {seconds}")
    for contender in contenders.values():  # first runs compile and allocate
        for _ in range(2):
            block_until_ready([issue() for issue in contender.issues])
    share_s = seconds / (2 * rounds * max(len(contenders), 1))
    latency_s: dict[str, list[float]] = {name: [] for name in contenders}
    rate_per_s: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        # Another order every round: what follows a contender finds other caches than what leads it.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            latency_s[name].append(_latency_s(contenders[name].issues[0], share_s))
            rate_per_s[name].append(_rate_per_s(contenders[name], share_s))
    return {
        name: Measured(tuple(latency_s[name]), tuple(rate_per_s[name]), ()) for name in contenders
    }


def _latency_s(issue: Callable[[], Any], seconds: float) -> float:
    """The median of single samples, each waited for."""
    found: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(found) < _LEAST_SAMPLES or time.perf_counter() < until_s:
        start_s = time.perf_counter()
        block_until_ready(issue())
        found.append(time.perf_counter() - start_s)
    return float(np.median(found))


def _rate_per_s(contender: Contender, seconds: float) -> float:
    """Samples per second once as many are on their way as may be."""
    waiting: collections.deque[Any] = collections.deque()
    done = issued = 0
    start_s = until_s = np.inf
    while done < _LEAST_SAMPLES * contender.in_flight or time.perf_counter() < until_s:
        waiting.append(contender.issues[issued % len(contender.issues)]())
        issued += 1
        if len(waiting) > contender.in_flight:
            block_until_ready(waiting.popleft())
            if start_s == np.inf:
                start_s = time.perf_counter()
                until_s = start_s + seconds
            else:
                done += 1
    rate_per_s = done / (time.perf_counter() - start_s)
    block_until_ready(list(waiting))
    return rate_per_s


def piece_seconds(
    functions: Sequence[Callable[..., Any]], arguments: Sequence[Sequence[Any]], rounds: int
) -> list[float]:
    """Every piece alone, with its arguments on its device: medians."""
    found = np.empty((rounds, len(functions)))
    for i in range(rounds):
        for j, (function, arrays) in enumerate(zip(functions, arguments, strict=True)):
            start_s = time.perf_counter()
            block_until_ready(function(*arrays))
            found[i, j] = time.perf_counter() - start_s
    return [float(s) for s in np.median(found, axis=0)]
