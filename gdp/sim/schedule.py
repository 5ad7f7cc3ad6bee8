"""The simulated run of one placement."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every tensor sent, in the order of requests. Axis: X transfers."""

    tensor: Int[np.ndarray, "X"]
    source: Int[np.ndarray, "X"]  # device
    destination: Int[np.ndarray, "X"]
    start_s: Float[np.ndarray, "X"]  # when its channel takes it
    arrive_s: Float[np.ndarray, "X"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Times of all ops and transfers.

    Where an op cannot run on its device, it and what waits for it end at inf.
    """

    start_s: Float[np.ndarray, "N"]
    finish_s: Float[np.ndarray, "N"]
    transfers: Transfers
    busy_s: Float[np.ndarray, "D"]
    peak_bytes: Int[np.ndarray, "D"]  # weights alone where the latency is inf
    latency_s: float  # the end of the run, or what devices of one processor take in all, if longer

    def in_seconds(self, unit_s: float) -> "Schedule":
        """The schedule with all its times multiplied by the seconds of their unit."""
        sent = self.transfers
        return replace(
            self,
            start_s=self.start_s * unit_s,
            finish_s=self.finish_s * unit_s,
            transfers=replace(sent, start_s=sent.start_s * unit_s, arrive_s=sent.arrive_s * unit_s),
            busy_s=self.busy_s * unit_s,
            latency_s=self.latency_s * unit_s,
        )
