"""The judge of every method: latency, period and memory of a placement."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.problem.problem import Problem
from gdp.sim import block_latency, host_load
from gdp.sim.latency import latencies, simulate
from gdp.sim.memory import overflow_bytes, pipeline_peaks
from gdp.sim.throughput import periods

HOST_OBJECTIVES = ("max_load", "block_latency")
"""The objectives of devices that meet in host memory, which have no event simulator."""


@dataclass(frozen=True, eq=False)
class Score:
    """What the simulator says of one placement. Seconds hold even where memory does not fit."""

    latency_s: float  # one inference or training step
    period_s: float  # between two samples of a full pipeline
    overflow_bytes: int  # over device memory, summed over devices; 0 means feasible
    peak_bytes: Int[np.ndarray, "D"]

    @property
    def feasible(self) -> bool:
        """Whether every device's memory suffices."""
        return self.overflow_bytes == 0

    def value_s(self, objective: str) -> float:
        """The seconds that an objective minimises."""
        return self.latency_s if objective in ("latency", "block_latency") else self.period_s

    def __str__(self) -> str:
        text = f"latency {self.latency_s * 1e3:.3f} ms, period {self.period_s * 1e3:.3f} ms"
        if self.feasible:
            return text
        return f"infeasible: {self.overflow_bytes / 2**30:.2f} GiB over device memory ({text})"


def score(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Score:
    """The score of one placement. Memory is of one run, or of a full pipeline for throughput.

    `max_load` and `block_latency` have evaluators of their own: the period is then the largest
    load, the latency that of blocks, and memory that of the weights.
    """
    if problem.objective in HOST_OBJECTIVES:
        return _host_score(problem, device, rank)
    schedule = simulate(problem, device, rank)
    period_s, _ = periods(problem, device[None])
    pipeline = problem.objective == "throughput"
    peak_bytes = pipeline_peaks(problem, device) if pipeline else schedule.peak_bytes
    return Score(
        latency_s=schedule.latency_s,
        period_s=float(period_s[0]),
        overflow_bytes=overflow_bytes(problem, peak_bytes),
        peak_bytes=peak_bytes,
    )


def values(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "N"] | Int[np.ndarray, "B N"] | None = None,
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Seconds of the problem's objective and overflow in bytes, for each placement."""
    if problem.objective == "latency":
        return latencies(problem, devices, ranks)
    if problem.objective == "throughput":
        return periods(problem, devices)
    if problem.objective == "max_load":
        return host_load.values(problem, devices)
    return block_latency.values(problem, devices, ranks)


def _host_score(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None
) -> Score:
    held = host_load.held_bytes(problem, device)
    return Score(
        latency_s=float(block_latency.values(problem, device[None], rank)[0][0]),
        period_s=float(host_load.values(problem, device[None])[0][0]),
        overflow_bytes=overflow_bytes(problem, held),
        peak_bytes=held,
    )
