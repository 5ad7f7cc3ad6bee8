"""Objectives of Tarnawski et al. 2020, whose devices meet in host memory: load and block latency.

Load is the time per sample of a pipeline: an accelerator (any device that is no CPU) that holds the
ops S is busy for

    load(S) = sum of compute_s over S  +  sum of tensor_s over the tensors that S cuts

where S cuts a tensor when some, but not all, of its producer and readers are in S: what the device
makes is written to host memory once, and what it needs is read once. A CPU pays for compute alone.
The value is the largest load: arXiv 2006.16423, section 4 (compute and transfers do not overlap).
Devices of one processor (`Device.processor`) add up to one load.

Block latency is that of one sample when accelerators are called. An accelerator runs its ops as
blocks, each a call: wait for all inputs of the block, load them one after another, compute, store
the outputs that others read, and only then may anyone read them:

    finish(b) = max of finish over inputs + sum of tensor_s over inputs
                + sum of compute_s over b + sum of tensor_s over outputs

CPUs are without number: an op on a CPU starts when its inputs are finished and moves nothing. Every
device that is a CPU stands for all of them.

The ops of one accelerator are cut into blocks so that no block waits for itself: an op's level is
the number of times that the paths to it have come back to its device, and each level is a block.
Ranks cut further: ops of unlike rank are in unlike blocks, which run in the order of rank.
(arXiv 2006.16423, section 5.2; with equal ranks exactly what the authors' program evaluates.)

Axes: N ops, T tensors, E uses, D devices, B placements, H weights and caches of ops.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import Cluster
from gdp.errors import ArgumentError
from gdp.graph.op_graph import OpGraph
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem, stored_bytes
from gdp.problem.ticks import in_ticks, seconds_per_unit


class LoadArrays(NamedTuple):
    """A problem as the flat arrays that the kernels of both objectives read.

    Without dispatch, which neither objective has; the structure is that of `problem.arrays`.
    """

    compute_s: Float[np.ndarray, "N D"]
    tensor_s: Float[np.ndarray, "T"]
    producer: Int[np.ndarray, "T"]
    use_start: Int[np.ndarray, "T+1"]  # the readers of tensor t: use_op[use_start[t] : ...[t + 1]]
    use_op: Int[np.ndarray, "E"]
    is_cpu: Bool[np.ndarray, "D"]
    weight_op: Int[np.ndarray, "H"]  # of `problem.StoredBytes`, as the next three
    weight_id: Int[np.ndarray, "H"]
    weight_bytes: Int[np.ndarray, "H"]
    first_cache: int
    cache_home: Int[np.ndarray, "D"]
    memory_bytes: Int[np.ndarray, "D"]
    pool: Int[np.ndarray, "D"]
    pool_bytes: Int[np.ndarray, "P"]
    processor: Int[np.ndarray, "D"]


def is_cpu(problem: Problem) -> Bool[np.ndarray, "D"]:
    """True for the devices that share the host's memory and so pay for no transfer."""
    return np.array([device.is_cpu for device in problem.cluster.devices], dtype=bool)


@cached_on_problem
def load_arrays(problem: Problem) -> LoadArrays:
    """The flat arrays of a problem."""
    a, stored = arrays_of(problem), stored_bytes(problem)
    return LoadArrays(
        compute_s=np.array(problem.compute_s, dtype=np.float64, order="C"),
        tensor_s=np.array(_tensor_s(problem), dtype=np.float64),
        producer=a.producer,
        use_start=a.use_start,
        use_op=a.use_op,
        is_cpu=is_cpu(problem),
        weight_op=stored.op,
        weight_id=stored.id,
        weight_bytes=stored.size_bytes,
        first_cache=stored.first_cache,
        cache_home=a.cache_home,
        memory_bytes=a.memory_bytes,
        pool=a.pool,
        pool_bytes=a.pool_bytes,
        processor=a.processor,
    )


def loads(problem: Problem, device: Int[np.ndarray, "N"]) -> Float[np.ndarray, "D"]:
    """Seconds per sample that each device is busy."""
    from gdp.sim.kernels.host_load import device_loads

    loads = device_loads(load_arrays(in_ticks(problem)), np.array(device, dtype=np.int64))
    return loads * seconds_per_unit(problem)


def values(
    problem: Problem, devices: Int[np.ndarray, "B N"]
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """(largest load in seconds, bytes over device memory) of each placement. O(B (N + E + T D))."""
    from gdp.sim.kernels.host_load import batch_loads, batch_overflow

    flat, rows = load_arrays(in_ticks(problem)), np.array(devices, dtype=np.int64, order="C")
    return batch_loads(flat, rows) * seconds_per_unit(problem), batch_overflow(flat, rows)


def host_transfer_s(graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "T"]:
    """Seconds to move each tensor between an accelerator and the host, over the slowest such link,
    in all runs of its producer.

    What `tensor_s` of a problem is where nothing else states it.
    """
    host = cluster.host
    others = [d for d, device in enumerate(cluster.devices) if not device.is_cpu and d != host]
    seconds = np.zeros(graph.num_tensors)
    for d in others:
        for i, j in ((d, host), (host, d)):
            link_s = (
                cluster.link_latency_s[i, j] + graph.tensor_bytes / cluster.link_bytes_per_s[i, j]
            )
            seconds = np.maximum(seconds, link_s)
    return seconds * graph.repeats[graph.producer]


def _tensor_s(problem: Problem) -> Float[np.ndarray, "T"]:
    if problem.tensor_s is None:
        raise ArgumentError(
            f"objective {problem.objective} needs tensor_s, the seconds to move each tensor to or "
            "from host memory; give it to make_problem"
        )
    return problem.tensor_s


def blocks(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Int[np.ndarray, "N"]:
    """A block id 0..K-1 for every op; an op on a CPU is a block of its own.

    Blocks of one accelerator are numbered in the order in which they run. O(N + E) for each
    distinct (accelerator, rank).
    """
    from gdp.sim.kernels.host_load import block_ids

    return block_ids(load_arrays(problem), *_rows(device[None], rank))[0]


def block_values(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """(latency in seconds, bytes over device memory) of each placement; `ranks` is [N] or [B, N].

    A latency of inf means that no order of the blocks exists: two of them need each other.
    """
    from gdp.sim.kernels.host_load import batch_overflow, block_finish, block_ids

    flat = load_arrays(in_ticks(problem))
    rows, sets = _rows(devices, ranks)
    block = block_ids(flat, rows, sets)
    latency = np.array([block_finish(flat, rows[b], block[b]).max() for b in range(len(rows))])
    return latency.astype(np.float64) * seconds_per_unit(problem), batch_overflow(flat, rows)


def _rows(
    devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"]]:
    """Devices, and a number for every distinct (device, rank) of a row, ascending in both."""
    rows = np.array(devices, dtype=np.int64, order="C")
    if ranks is None:
        return rows, rows
    by_rank = np.unique(ranks, return_inverse=True)[1].reshape(np.shape(ranks))
    keys = rows * (int(by_rank.max(initial=0)) + 1) + by_rank
    sets = [np.unique(row, return_inverse=True)[1] for row in keys]
    return rows, np.array(sets, dtype=np.int64).reshape(rows.shape)
