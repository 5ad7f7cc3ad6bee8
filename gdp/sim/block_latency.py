"""Latency of one sample when accelerators are called: Tarnawski et al. 2020, latency objective.

An accelerator runs its ops as blocks, each a call: wait for all inputs of the block, load them one
after another, compute, store the outputs that others read, and only then may anyone read them:

    finish(b) = max of finish over inputs + sum of tensor_s over inputs
                + sum of compute_s over b + sum of tensor_s over outputs

CPUs are without number: an op on a CPU starts when its inputs are finished and moves nothing. Every
device that is a CPU stands for all of them.

The ops of one accelerator are cut into blocks so that no block waits for itself: an op's level is
the number of times that the paths to it have come back to its device, and each level is a block.
Ranks cut further: ops of unlike rank are in unlike blocks, which run in the order of rank.
(arXiv 2006.16423, section 5.2; with equal ranks exactly what the authors' program evaluates.)

Axes: N ops, D devices, B placements.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.host_load import load_arrays


def blocks(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Int[np.ndarray, "N"]:
    """A block id 0..K-1 for every op; an op on a CPU is a block of its own.

    Blocks of one accelerator are numbered in the order in which they run. O(N + E) for each
    distinct (accelerator, rank).
    """
    from gdp.sim.kernels.block_latency import block_ids

    return block_ids(load_arrays(problem), *_rows(problem, device[None], rank))[0]


def finish_s(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Float[np.ndarray, "N"]:
    """When each op's block is done; inf for all where blocks wait for each other in a circle."""
    from gdp.sim.kernels.block_latency import block_finish, block_ids

    flat = load_arrays(in_ticks(problem))
    devices, sets = _rows(problem, device[None], rank)
    block = block_ids(flat, devices, sets)[0]
    return block_finish(flat, devices[0], block)[block] * seconds_per_unit(problem)


def values(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """(latency in seconds, bytes over device memory) of each placement; `ranks` is [N] or [B, N].

    A latency of inf means that no order of the blocks exists: two of them need each other.
    """
    from gdp.sim.kernels.block_latency import block_finish, block_ids
    from gdp.sim.kernels.host_load import batch_overflow

    flat = load_arrays(in_ticks(problem))
    rows, sets = _rows(problem, devices, ranks)
    block = block_ids(flat, rows, sets)
    latency = np.array([block_finish(flat, rows[b], block[b]).max() for b in range(len(rows))])
    return latency.astype(np.float64) * seconds_per_unit(problem), batch_overflow(flat, rows)


def _rows(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"]]:
    """Devices, and a number for every distinct (device, rank) of a row, ascending in both."""
    rows = np.array(devices, dtype=np.int64, order="C")
    if ranks is None:
        return rows, rows
    by_rank = np.unique(ranks, return_inverse=True)[1].reshape(np.shape(ranks))
    keys = rows * (int(by_rank.max(initial=0)) + 1) + by_rank
    sets = [np.unique(row, return_inverse=True)[1] for row in keys]
    return rows, np.array(sets, dtype=np.int64).reshape(rows.shape)
