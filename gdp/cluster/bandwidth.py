"""Memory bandwidth of this machine, measured by reading arrays that no cache holds."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gdp.cluster.types import CORE_KIND, Cluster

ARRAY_BYTES = 128 << 20
"""Of each thread: several times the last-level cache that it can have."""
MOST_BYTES = 2 << 30
SECONDS = 1.0


class Bandwidth(NamedTuple):
    """Bytes per second that are read from main memory, of the best round: others use it, too."""

    one_core: float
    all_cores: float
    cores: int


def measure_bandwidth(cores: int, seconds: float = SECONDS) -> Bandwidth:
    """Bandwidth of one thread and of one per core, each measured for half of the seconds."""
    size = min(ARRAY_BYTES, MOST_BYTES // cores)
    arrays = [np.ones(size // 4, dtype=np.float32) for _ in range(cores)]

    def best(threads: int) -> float:
        # numpy gives the interpreter's lock away while it reduces; a maximum only reads.
        fastest, end_s = 0.0, time.perf_counter() + seconds / 2
        with ThreadPoolExecutor(threads) as pool:
            while True:
                started_s = time.perf_counter()
                list(pool.map(np.maximum.reduce, arrays[:threads]))
                now_s = time.perf_counter()
                fastest = max(fastest, threads * size / (now_s - started_s))
                if now_s >= end_s:
                    return fastest

    one = best(1)
    # Two threads of one core never read more than one does.
    return Bandwidth(one, max(one, best(cores)) if cores > 1 else one, cores)


def with_bandwidth(cluster: Cluster, measured: Bandwidth) -> Cluster:
    """The cluster with processors as fast as measured; cores share what all of them read."""
    cores = sum(device.kind == CORE_KIND for device in cluster.devices)
    of_core = min(measured.one_core, measured.all_cores / max(1, cores))
    devices = [
        replace(d, bytes_per_s=of_core if d.kind == CORE_KIND else measured.all_cores)
        if d.is_cpu
        else d
        for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))
