"""Table of the objectives, and their evaluation.

Everything here and above asks a row for its properties, never for its name. What only some
objectives have (bounds, exact programs, compiled annealers) is a table of its own, keyed by name,
on the floor that has it: `gdp.bounds.best.BOUNDS`, `gdp.methods.exact.method.PROGRAMS`,
`gdp.methods.annealing.annealer.ANNEALERS`.

Axes: N ops, D devices, B placements.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import overflow_bytes
from gdp.errors import ArgumentError
from gdp.problem.problem import Problem
from gdp.sim import host_load
from gdp.sim.engine import arrays
from gdp.sim.latency import latencies, periods, simulate
from gdp.sim.memory import pipeline_peaks, weights_held
from gdp.units import format_seconds

Rank = Int[np.ndarray, "N"] | None
Values = tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]


@dataclass(frozen=True, eq=False)
class Score:
    """Evaluation of one placement. Seconds hold even where memory does not fit."""

    latency_s: float  # one inference or training step
    period_s: float  # between two samples of a full pipeline
    overflow_bytes: int  # over device memory, own and shared, summed; 0 means feasible
    peak_bytes: Int[np.ndarray, "D"]
    value_s: float  # what the problem's objective minimises

    @property
    def feasible(self) -> bool:
        """True if every device can hold what it is given."""
        return self.overflow_bytes == 0

    def __str__(self) -> str:
        text = f"latency {self.latency_s * 1e3:.3f} ms, period {self.period_s * 1e3:.3f} ms"
        if self.feasible:
            return text
        return f"infeasible: {self.overflow_bytes / 2**30:.2f} GiB over device memory ({text})"


EvaluateMany = Callable[..., Values]
"""(problem, devices [B, N], ranks [N] or [B, N] or None): value and overflow in bytes of each."""
EvaluateOne = Callable[[Problem, Int[np.ndarray, "N"], Rank], Score]


@dataclass(frozen=True)
class Objective:
    """An objective and the properties that methods depend on."""

    values: EvaluateMany  # of many placements
    score: EvaluateOne  # all that is known of one
    quantity: str  # what its value is called
    ordered: bool  # priorities of ops change its value
    pipelined: bool  # of a full pipeline; else of one sample alone
    on_links: bool  # transfers use the cluster's links; else they take `tensor_s` to the host
    memory: Literal["run", "pipeline", "weights"]  # what fills a device
    unit: str = "s"  # of its value

    @property
    def copies(self) -> float:
        """Copies of a received tensor on its device: while one is read, one arrives."""
        return 2.0 if self.pipelined else 1.0

    def text(self, value: float) -> str:
        """A value with its unit."""
        return format_seconds(value) if self.unit == "s" else f"{value:.4g} {self.unit}"


def find_objective(name: str) -> Objective:
    """The row of an objective; raises `ValueError` that lists those there are."""
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ArgumentError(f"objective must be one of {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]


def objective_of(problem: Problem) -> Objective:
    """The row of a problem's objective."""
    return find_objective(problem.objective)


def link_objectives() -> tuple[str, ...]:
    """The objectives of the event simulator, in which transfers use the cluster's links."""
    return tuple(name for name, row in OBJECTIVES.items() if row.on_links)


def peaks(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Rank = None
) -> Int[np.ndarray, "D"]:
    """Bytes that each device holds at its fullest, by the objective's rule of memory."""
    rule = objective_of(problem).memory
    if rule == "run":
        return simulate(problem, device, rank).peak_bytes
    return (pipeline_peaks if rule == "pipeline" else weights_held)(problem, device)


def memory_binds(problem: Problem) -> bool:
    """True if placements of the event simulator can overflow a device at all."""
    flat = arrays(problem)
    pipeline = objective_of(problem).memory == "pipeline"
    return bool(flat.pipeline_memory_binds if pipeline else flat.memory_binds)


def _latency_score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    schedule = simulate(problem, device, rank)
    period_s, _ = periods(problem, device[None])
    overflow = overflow_bytes(problem.cluster, schedule.peak_bytes)
    latency_s = schedule.latency_s
    return Score(latency_s, float(period_s[0]), overflow, schedule.peak_bytes, latency_s)


def _period_score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    latency_s = simulate(problem, device, rank).latency_s
    period_s = float(periods(problem, device[None])[0][0])
    peak_bytes = pipeline_peaks(problem, device)
    overflow = overflow_bytes(problem.cluster, peak_bytes)
    return Score(latency_s, period_s, overflow, peak_bytes, period_s)


def _load_score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    latency_s = float(host_load.block_values(problem, device[None], rank)[0][0])
    load_s = float(host_load.values(problem, device[None])[0][0])
    held = weights_held(problem, device)
    return Score(latency_s, load_s, overflow_bytes(problem.cluster, held), held, load_s)


def _block_score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    evaluation = _load_score(problem, device, rank)
    return replace(evaluation, value_s=evaluation.latency_s)


def _loads(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> Values:
    del ranks
    return host_load.values(problem, devices)


OBJECTIVES: dict[str, Objective] = {
    "latency": Objective(
        values=latencies, score=_latency_score, quantity="latency",
        ordered=True, pipelined=False, on_links=True, memory="run",
    ),
    "throughput": Objective(
        values=periods, score=_period_score, quantity="period",
        ordered=False, pipelined=True, on_links=True, memory="pipeline",
    ),
    # Tarnawski et al. 2020: devices meet in host memory.
    "max_load": Objective(
        values=_loads, score=_load_score, quantity="load",
        ordered=False, pipelined=True, on_links=False, memory="weights",
    ),
    # Ranks only cut blocks further, which no method here tries.
    "block_latency": Objective(
        values=host_load.block_values, score=_block_score, quantity="latency",
        ordered=False, pipelined=False, on_links=False, memory="weights",
    ),
}  # fmt: skip
"""By the name that a user writes."""
