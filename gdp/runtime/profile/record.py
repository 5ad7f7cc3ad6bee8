"""What all profiles record alike: the core that was measured on, the statistic of the times."""

from pathlib import Path

import numpy as np

from gdp.costs.profile import DeviceRecord

CPU_FEATURES = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
"""What kernels for CPUs are chosen by."""


def this_core(threads: int = 1) -> DeviceRecord:
    """One core of this machine's processor, or several as one device."""
    from gdp.cluster.detect import cpu_model

    kind = "cpu-core" if threads == 1 else f"cpu-{threads}-cores"
    return DeviceRecord(kind, cpu_model(), cpu_features())


def cpu_features() -> tuple[str, ...]:
    """The vector extensions of this processor, as far as Linux tells."""
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
