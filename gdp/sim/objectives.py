"""Table of the objectives, and their evaluation.

A row holds all that belongs to an objective: evaluators, unit and text of its values, and the names
of its bounds, annealer and programs, which higher floors import ("module:function"). Other code
reads the properties of a row, never its name: without bounds none is claimed, without an annealer
every step of a search evaluates, without a program `exact` refuses.

Axes: N ops, T tensors, D devices, B placements.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import ArgumentError
from gdp.base.rows import later
from gdp.base.units import format_seconds
from gdp.cluster.types import overflow_bytes
from gdp.problem.problem import Problem
from gdp.sim.engine import arrays
from gdp.sim.latency import latencies, periods, simulate
from gdp.sim.memory import pipeline_peaks, weights_held

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
        """True if no device's memory overflows."""
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
    """An objective: its evaluation, the facts that methods depend on, and its own programs."""

    values: EvaluateMany  # of many placements
    score: EvaluateOne  # all that is known of one
    quantity: str  # what its value is called
    ordered: bool = False  # priorities of ops change its value
    pipelined: bool = False  # of a full pipeline; else of one sample alone
    memory: Literal["run", "pipeline", "weights"] = "run"  # what fills a device
    unit: str = "s"  # of its value
    general: bool = True  # every method may place for it; else only those with a program below
    bounds: str = ""  # (problem, budget, value of a known placement) -> bounds; "": none is known
    annealer: str = ""  # a compiled `gdp.methods.annealing.annealer.Annealer`
    # By method, in its place: an `ExactProgram` of `exact`, a method of `pipeline_dp`.
    programs: Mapping[str, str] = field(default_factory=dict)
    sent_s: str = ""  # (graph, cluster) -> `Problem.sent_s`; "": transfers take the cluster's links
    # (problem, assignment, score) -> value with replica groups or splits; "": one of the times.
    assigned: str = ""
    # (problem, used devices) -> costs of a second, and beside it of each op on each device, of runs
    # whose ops take turns; "": none is known.
    chain: str = ""
    limited: bool = False  # heeds `Problem.within_s`
    served: str = ""  # (ServedTraffic) -> value of a plan under traffic; "": seconds of a request

    @property
    def copies(self) -> float:
        """Copies of a received tensor on its device: while one is read, one arrives."""
        return 2.0 if self.pipelined else 1.0

    @property
    def compared(self) -> str:
        """Words between a ratio of two values and the other placement, whose value is larger."""
        return "times as fast as" if self.unit == "s" else f"times less {self.quantity} than"

    def text(self, value: float) -> str:
        """A value with its unit."""
        return format_seconds(value) if self.unit == "s" else f"{value:.4g} {self.unit}"

    def scale(self, unit_s: float) -> float:
        """The factor to a value in the objective's unit, from one of a problem whose times are in
        units of `unit_s` seconds: values that are no seconds are the same in all units of time."""
        return unit_s if self.unit == "s" else 1.0


def find_objective(name: str) -> Objective:
    """The row of an objective; raises `ValueError` that lists those there are."""
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ArgumentError(f"objective must be one of {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]


def objective_of(problem: Problem) -> Objective:
    """The row of a problem's objective."""
    return find_objective(problem.objective)


def value_text(problem: Problem, value: float) -> str:
    """A value of a problem's objective, as methods have it, with its unit."""
    row = objective_of(problem)
    return row.text(value * row.scale(problem.unit.seconds))


def general_objectives() -> tuple[str, ...]:
    """The objectives that every method may place for."""
    return tuple(name for name, row in OBJECTIVES.items() if row.general)


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


def _score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    """The score of a run, or of a full pipeline."""
    schedule, pipelined = simulate(problem, device, rank), objective_of(problem).pipelined
    period_s = float(periods(problem, device[None])[0][0])
    peak_bytes = pipeline_peaks(problem, device) if pipelined else schedule.peak_bytes
    overflow = overflow_bytes(problem.cluster, peak_bytes)
    value_s = period_s if pipelined else schedule.latency_s
    return Score(schedule.latency_s, period_s, overflow, peak_bytes, value_s)


OBJECTIVES: dict[str, Objective] = {
    "latency": Objective(
        values=latencies, score=_score, quantity="latency", ordered=True,
        bounds="gdp.bounds.best:bounds_of_latency",
        annealer="gdp.methods.annealing.annealer:LatencyAnnealer",
        programs={"exact": "gdp.methods.exact.method:LEAST_LATENCY"},
    ),
    "throughput": Objective(
        values=periods, score=_score, quantity="period", pipelined=True, memory="pipeline",
        bounds="gdp.bounds.best:load_bounds",
        annealer="gdp.methods.annealing.annealer:PeriodAnnealer",
        programs={"exact": "gdp.methods.exact.method:LEAST_PERIOD"},
    ),
    "energy": Objective(
        values=later("gdp.sim.energy:values"), score=later("gdp.sim.energy:score"),
        quantity="energy", unit="J", ordered=True, bounds="gdp.bounds.energy:energy_bounds",
        assigned="gdp.sim.energy:value_of", chain="gdp.sim.energy:chain_costs", limited=True,
        served="gdp.sim.energy:value_under_traffic",
    ),
    # Tarnawski et al. 2020: devices meet in host memory.
    "max_load": Objective(
        values=later("gdp.methods.host_memory.load:values"),
        score=later("gdp.methods.host_memory.load:load_score"),
        quantity="load", pipelined=True, memory="weights", general=False,
        bounds="gdp.methods.host_memory.load:load_bounds",
        sent_s="gdp.methods.host_memory.load:host_transfer_s",
        programs={
            "exact": "gdp.methods.host_memory.program:LEAST_LOAD",
            "pipeline_dp": "gdp.methods.host_memory.pipelines:pipelines",
        },
    ),
    # Ranks only cut blocks further, which no method here tries.
    "block_latency": Objective(
        values=later("gdp.methods.host_memory.load:block_values"),
        score=later("gdp.methods.host_memory.load:load_score"),
        quantity="latency", memory="weights", general=False,
        bounds="gdp.methods.host_memory.load:block_bounds",
        sent_s="gdp.methods.host_memory.load:host_transfer_s",
        programs={
            "exact": "gdp.methods.host_memory.blocks:LEAST_BLOCK_LATENCY",
            "pipeline_dp": "gdp.methods.host_memory.pipelines:pipelines",
        },
    ),
}  # fmt: skip
"""By the name that a user writes."""
