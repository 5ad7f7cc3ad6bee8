"""Throughput: the time between two samples of a full pipeline."""

import numpy as np
from jaxtyping import Float, Int

from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.batch import checked_devices, split
from gdp.sim.engine import Workspace, arrays


def periods(
    problem: Problem, devices: Int[np.ndarray, "B N"], threads: int | None = None
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Period in seconds and overflow in bytes of each placement, over all cores by default.

    period = max over devices of (compute + dispatch) and over channels of (sum of transfer times),
    per sample: in steady state every device and channel works on some sample, so the busiest one
    sets the pace. A tensor is sent once to each device that reads it; latency occupies the channel.
    Memory is that of `gdp.sim.memory.pipeline_peaks`. O(N + E) a placement.
    """
    from gdp.sim.kernels.batch import evaluate_periods

    problem, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, devices, threads)
    flat = arrays(problem)
    period_s, overflow_bytes = np.empty(len(placed)), np.empty(len(placed), dtype=np.int64)

    def run(work: Workspace, first: int, end: int) -> None:
        evaluate_periods(flat, work, placed, first, end, period_s, overflow_bytes)

    split(problem, len(placed), threads, run)
    return period_s * unit_s, overflow_bytes
