"""Memory: what each device holds at its fullest, in bytes.

One run (latency). Weights, and optimizer state with them, are there throughout, each weight id once
per device. A tensor is held
* on the device that makes it: from the start of its producer until its last reader there has
  finished and its last outgoing transfer has arrived, or, with neither, until its producer ends;
* on a device that receives it: from when the channel takes the transfer until its last reader
  there has finished;
* on the host, where an `Output` op reads it: until the run ends.
Intervals are half open: what ends at an instant makes room for what starts at it.

A full pipeline (throughput). Each device runs its ops of one sample in topological order, and holds
* weights, as above;
* each tensor that it receives, twice and throughout: one is read while the next arrives;
* each tensor that it makes: from its producer until its last reader there has run, or, if it is
  sent, until the sample is done;
* in training (some op is backward), once more for every stage that follows: the tensors that a
  forward op made and a backward op reads there. A device with k stages after it starts k more
  samples forward before the first comes back (1F1B: Narayanan et al. 2019, PipeDream,
  doi 10.1145/3341301.3359646). Stages are devices in the order of their first forward op.
"""

import numpy as np
from jaxtyping import Int

from gdp.problem.problem import Problem
from gdp.sim.batch import borrowed, checked_devices
from gdp.sim.engine import arrays


def latency_peaks(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Int[np.ndarray, "D"]:
    """Peak bytes of each device in one run."""
    from gdp.sim.latency import simulate

    return simulate(problem, device, rank).peak_bytes


def pipeline_peaks(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "D"]:
    """Peak bytes of each device in a full pipeline."""
    from gdp.sim.kernels import memory

    placed = checked_devices(problem, device[None], None)[0]
    with borrowed(problem) as work:
        memory.pipeline_peaks(arrays(problem), work, placed)
        return work.peak_bytes.copy()


def overflow_bytes(problem: Problem, peak_bytes: Int[np.ndarray, "D"]) -> int:
    """Bytes over the devices' memories, summed."""
    return int(np.maximum(peak_bytes - problem.cluster.memory_bytes, 0).sum())
