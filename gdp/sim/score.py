"""The judge of every method: latency, period and memory of a placement."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gdp.sim.problem import Problem


@dataclass(frozen=True, eq=False)
class Score:
    """What the simulator says of one placement. Seconds hold even where memory does not fit."""

    latency_s: float  # one inference or training step
    period_s: float  # between two samples of a full pipeline
    overflow_bytes: int  # over device memory, summed over devices; 0 means feasible
    peak_bytes: Int[np.ndarray, "D"]

    @property
    def feasible(self) -> bool:
        return self.overflow_bytes == 0

    def value_s(self, objective: str) -> float:
        """The seconds that an objective minimises."""
        return self.latency_s if objective in ("latency", "block_latency") else self.period_s

    def __str__(self) -> str:
        text = f"latency {self.latency_s * 1e3:.3f} ms, period {self.period_s * 1e3:.3f} ms"
        if self.feasible:
            return text
        return f"infeasible: {self.overflow_bytes / 2**30:.2f} GiB over device memory ({text})"
