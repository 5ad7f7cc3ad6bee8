"""Timing that all profilers share, its statistic, and the record of the core it ran on."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from gdp.costs.profile import DeviceRecord, Overheads

SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Of copies that are timed: the smallest gives the latency, the slope of the others the rate."""
CPU_FEATURES = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
"""Vector extensions by which kernels for CPUs are chosen."""


def this_core(threads: int = 1) -> DeviceRecord:
    """One core of this machine's processor, or several as one device."""
    from gdp.cluster.detect import cpu_model

    kind = "cpu-core" if threads == 1 else f"cpu-{threads}-cores"
    return DeviceRecord(kind, cpu_model(), cpu_features())


def cpu_features() -> tuple[str, ...]:
    """Vector extensions of this processor, as far as Linux reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    words = {w for line in lines if line.lower().startswith(("flags", "features"))
             for w in line.split()}  # fmt: skip
    return tuple(feature for feature in CPU_FEATURES if feature in words)


def statistic(times: np.ndarray) -> tuple[float, float]:
    """The smallest over rounds of the mean of the fastest quarter [rounds, runs], and the spread.

    >>> statistic(np.array([[1.0, 3.0, 9.0, 9.0], [2.0, 5.0, 9.0, 9.0]]))
    (1.0, 0.5)
    """
    fast = np.sort(times, axis=1)[:, : max(1, times.shape[1] // 4)].mean(axis=1)
    least = float(fast.min())
    return least, (float(np.median(fast)) / least - 1.0) if least > 0 else 0.0


def timed(run: Callable[[], object], runs: int) -> Float[np.ndarray, "T"]:
    """Seconds of each of `runs` calls."""
    seconds = np.empty(runs)
    for i in range(runs):
        start_s = time.perf_counter()
        run()
        seconds[i] = time.perf_counter() - start_s
    return seconds


def runs_within(run: Callable[[], object], seconds: float, least: int = 3, most: int = 500) -> int:
    """Number of calls that fill `seconds`, estimated from one call."""
    return int(np.clip(seconds / max(float(timed(run, 1)[0]), 1e-6), least, most))


def timed_rounds(
    run: Callable[[], object], rounds: int, seconds: float, least: int = 3, most: int = 500
) -> Float[np.ndarray, "R T"]:
    """Seconds of every call in rounds that together take about `seconds`."""
    runs = runs_within(run, seconds / rounds, least, most)
    return np.array([timed(run, runs) for _ in range(rounds)])


def bandwidth(sizes_bytes: Sequence[int], seconds: Sequence[float], most: float = 1e13) -> float:
    """Bytes per second by the slope of seconds over sizes."""
    return float(1.0 / max(np.polyfit(sizes_bytes, seconds, 1)[0], 1.0 / most))


def copy_overheads(call_s: float, seconds: Sequence[float]) -> Overheads:
    """Overheads of a call, and of copies of `SIZES_BYTES` from the host."""
    rate = bandwidth(SIZES_BYTES[2:], seconds[2:])
    return Overheads(session_s=call_s, handover_s=seconds[0], handover_bytes_per_s=rate)
