"""Objectives of Tarnawski et al. 2020, whose devices meet in host memory: load and block latency.

Load is the time per sample of a pipeline: an accelerator (any device that is no CPU) that holds the
ops S is busy for

    load(S) = sum of compute_s over S  +  sum of sent_s over the tensors that S cuts

where S cuts a tensor when some, but not all, of its producer and readers are in S: what the device
makes is written to host memory once, and what it needs is read once. A CPU pays for compute alone.
The value is the largest load: arXiv 2006.16423, section 4 (compute and transfers do not overlap).
Devices of one processor (`Device.processor`) add up to one load.

Block latency is that of one sample when accelerators are called. An accelerator runs its ops as
blocks, each a call: wait for all inputs of the block, load them one after another, compute, store
the outputs that others read, and only then may anyone read them:

    finish(b) = max of finish over inputs + sum of sent_s over inputs
                + sum of compute_s over b + sum of sent_s over outputs

CPUs are without number: an op on a CPU starts when its inputs are finished and moves nothing. Every
device that is a CPU stands for all of them.

The ops of one accelerator are cut into blocks so that no block waits for itself: an op's level is
the number of times that the paths to it have come back to its device, and each level is a block.
Ranks cut further: ops of unlike rank are in unlike blocks, which run in the order of rank.
(arXiv 2006.16423, section 5.2; with equal ranks exactly what the authors' program evaluates.)

Axes: N ops, T tensors, E uses, D devices, B placements, K blocks.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import ArgumentError
from gdp.bounds.budget import Bound, WorkBudget
from gdp.bounds.work import earliest_ends, work_over_speed_s
from gdp.cluster.types import Cluster, overflow_bytes
from gdp.graph.groups import inverse, sum_per_group
from gdp.graph.op_graph import OpGraph, topological_order
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.memory import weights_held
from gdp.sim.objectives import Rank, Score, Values, find_objective


def is_cpu(problem: Problem) -> Bool[np.ndarray, "D"]:
    """True for the devices that share the host's memory and so pay for no transfer."""
    return np.array([device.is_cpu for device in problem.cluster.devices], dtype=bool)


def sent_s(problem: Problem) -> Float[np.ndarray, "T"]:
    """Seconds to move each tensor between an accelerator and host memory."""
    if problem.sent_s is None:
        raise ArgumentError(
            f"objective {problem.objective} needs sent_s, the seconds to move each tensor to or "
            "from host memory; give it to make_problem"
        )
    return np.array(problem.sent_s, dtype=float)


def host_transfer_s(graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "T"]:
    """Seconds to move each tensor between an accelerator and the host, over the slowest such link,
    in all runs of its producer: `Problem.sent_s` where nothing else states it."""
    host, latency_s, rate = cluster.host, cluster.link_latency_s, cluster.link_bytes_per_s
    seconds = np.zeros(graph.num_tensors)
    for d, device in enumerate(cluster.devices):
        for i, j in ((d, host), (host, d)) if not device.is_cpu and d != host else ():
            seconds = np.maximum(seconds, latency_s[i, j] + graph.tensor_bytes / rate[i, j])
    return seconds * graph.repeats[graph.producer]


# Load.


def loads(problem: Problem, device: Int[np.ndarray, "N"]) -> Float[np.ndarray, "D"]:
    """Seconds per sample that each device is busy. O(N + E + T D)."""
    ticks, graph = in_ticks(problem), problem.graph
    compute_s = ticks.compute_s[np.arange(problem.num_ops), device]
    work_s = np.bincount(device, compute_s, minlength=problem.num_devices)
    touched = np.zeros((graph.num_tensors, problem.num_devices), dtype=bool)
    touched[np.arange(graph.num_tensors), device[graph.producer]] = True
    touched[graph.use_tensor, device[graph.use_op]] = True
    cut = touched & (touched.sum(axis=1) > 1)[:, None] & ~is_cpu(problem)
    return (work_s + sent_s(ticks) @ cut) * seconds_per_unit(problem)


def values(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> Values:
    """(largest load in seconds, bytes over device memory) of each placement, under any ranks."""
    del ranks
    shared = problem.cluster.processor
    value_s = []
    for device in devices:
        load_s = loads(problem, device)
        together_s = np.bincount(shared[shared >= 0], load_s[shared >= 0])
        value_s.append(max(load_s.max(), together_s.max(initial=0.0)))
    return np.array(value_s), overflow(problem, devices)


def load_score(problem: Problem, device: Int[np.ndarray, "N"], rank: Rank) -> Score:
    """The score whose value is the largest load, the period of a pipeline."""
    latency_s = float(block_values(problem, device[None], rank)[0][0])
    load_s = float(values(problem, device[None])[0][0])
    held = weights_held(problem, device)
    over = overflow_bytes(problem.cluster, held)
    value_s = load_s if find_objective(problem.objective).pipelined else latency_s
    return Score(latency_s, load_s, over, held, value_s)


def load_bounds(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    """Compute alone, without transfers through host memory."""
    del budget, found_s
    work_s = work_over_speed_s(_fastest_s(problem))
    return [Bound(work_s, "work over the speed of all devices, or the largest op")]


def group_work_s(problem: Problem) -> Float[np.ndarray, "G D"]:
    """Seconds of each group on each device; inf where barred."""
    seconds = sum_per_group(np.where(problem.allowed, problem.compute_s, 0.0), problem.group)
    return np.where(problem.group_allowed, seconds, np.inf)


def _fastest_s(problem: Problem) -> Float[np.ndarray, "N D"]:
    return np.where(problem.allowed, problem.compute_s, np.inf)


def overflow(problem: Problem, devices: Int[np.ndarray, "B N"]) -> Int[np.ndarray, "B"]:
    """Bytes of weights and caches over device memory of each placement."""
    held = (weights_held(problem, device) for device in devices)
    return np.array([overflow_bytes(problem.cluster, row) for row in held], dtype=np.int64)


# Block latency.


def blocks(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Rank = None
) -> Int[np.ndarray, "N"]:
    """A block id 0..K-1 for every op; each op on a CPU is a separate block.

    Blocks of one accelerator are numbered in the order in which they run. O((N + E) S) for S
    distinct pairs of device and rank.
    """
    n = problem.num_ops
    by_rank = 0 if rank is None else np.unique(rank, return_inverse=True)[1].reshape(-1)
    op_set = np.unique(device * n + by_rank, return_inverse=True)[1].reshape(-1)
    called = op_set * (n + 1) + _levels(problem, op_set)
    alone = n * (n + 1) + np.arange(n)
    key = np.where(is_cpu(problem)[device], alone, called)
    return np.unique(key, return_inverse=True)[1].reshape(-1)


def _levels(problem: Problem, op_set: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Times that the paths to an op have come back to its set, itself included.

    level(v) = max(1, max_u level(u) + [u not in S]) in the set S of v, and on the way to it,
    through ops outside, max(0, max_u level(u)). Uses are in the order of their producers: levels
    are final when read.
    """
    own = np.arange(problem.num_ops), op_set
    level = np.zeros((problem.num_ops, op_set.max() + 1), dtype=np.int64)
    level[own] = 1
    src, dst = problem.graph.edges
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        known = level[u].copy()
        known[op_set[v]] += op_set[u] != op_set[v]
        np.maximum(level[v], known, out=level[v])
    return level[own]


def block_latency_s(
    problem: Problem, device: Int[np.ndarray, "N"], block: Int[np.ndarray, "N"]
) -> float:
    """The latency of blocks in the problem's units; inf where two of them need each other."""
    graph, moved_s, count = problem.graph, sent_s(problem), int(block.max()) + 1
    home = np.zeros(count, dtype=np.int64)
    home[block] = device
    pays = ~is_cpu(problem)[home]
    seconds = np.bincount(block, problem.compute_s[np.arange(problem.num_ops), device], count)
    ends = np.stack(
        [graph.use_tensor, block[graph.producer[graph.use_tensor]], block[graph.use_op]]
    )
    tensor, maker, reader = np.unique(ends[:, ends[1] != ends[2]], axis=1)
    np.add.at(seconds, reader, moved_s[tensor] * pays[reader])
    stored = np.unique(tensor)
    made = block[graph.producer[stored]]
    np.add.at(seconds, made, moved_s[stored] * pays[made])
    again = 1 + np.flatnonzero((home[1:] == home[:-1]) & pays[1:])
    src, dst = np.append(maker, again - 1), np.append(reader, again)
    order = topological_order(count, src, dst)
    if len(order) < count:
        return np.inf
    finish = seconds.copy()
    for e in np.argsort(inverse(order)[src], kind="stable").tolist():
        finish[dst[e]] = max(finish[dst[e]], finish[src[e]] + seconds[dst[e]])
    return float(finish.max())


def block_values(
    problem: Problem, devices: Int[np.ndarray, "B N"], ranks: Int[np.ndarray, "..."] | None = None
) -> Values:
    """(latency in seconds, bytes over device memory) of each placement; `ranks` is [N] or [B, N].

    A latency of inf means that no order of the blocks exists: two of them need each other.
    """
    ticks = in_ticks(problem)
    rows = [None] * len(devices) if ranks is None else np.broadcast_to(ranks, devices.shape)
    value_s = [
        block_latency_s(ticks, device, blocks(ticks, device, rank))
        for device, rank in zip(devices, rows, strict=True)
    ]
    return np.array(value_s) * seconds_per_unit(problem), overflow(problem, devices)


def block_bounds(problem: Problem, budget: WorkBudget, found_s: float) -> list[Bound]:
    """The critical path of compute alone."""
    del budget, found_s
    finish_s = earliest_ends(problem, _fastest_s(problem).min(axis=1))
    return [Bound(float(finish_s.max()), "critical path of ops on their fastest devices")]
