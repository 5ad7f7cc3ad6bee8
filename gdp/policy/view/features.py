"""Static features of a problem, which the policy reads before it decides: ops, devices, the whole.

Also those of its reference placements, above all the schedule of the incumbent as simulated. Axes:
N ops, T tensors, P pairs of ops joined by at least one tensor, D devices, F features, A rows of
advice. Every feature is dimensionless, so that a problem with all times doubled looks the same.
"""

import zlib
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.priorities import (
    RULES,
    PathTimes,
    down,
    links,
    longest_s,
    mean_link,
    pairs,
    rank_under,
    squash,
    timing,
)
from gdp.policy.advice import ADVISERS, Advice
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem
from gdp.sim.objectives import objective_of

OP_SIZES = (256, 512, 1024, 2048, 4096, 16384, 65536, 262144, 1048576)
DEVICE_SIZES = (4, 8, 16, 32, 64, 128)


def bucket(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `count`; beyond the largest, the next multiple of it.

    >>> bucket(5, (4, 8)), bucket(17, (4, 8))
    (8, 24)
    """
    for size in sizes:
        if count <= size:
            return size
    return -(-count // sizes[-1]) * sizes[-1]


NUM_ADVISED = 7
"""Columns of `op`."""
NUM_ADVISED_DEVICE = 3
NUM_ADVISED_WHOLE = len(ADVISERS) + 2 + len(RULES)


class Advised(NamedTuple):
    """Features of advice; zeros where there is none."""

    op: Float[np.ndarray, "N 7"]
    device: Float[np.ndarray, "D 3"]
    whole: Float[np.ndarray, "12"]


def advised_features(problem: Problem, advice: Advice | None) -> Advised:
    """Features of the incumbent and the advisers, of ops, devices and the whole."""
    if advice is None:
        return Advised(
            np.zeros((problem.num_ops, NUM_ADVISED)),
            np.zeros((problem.num_devices, NUM_ADVISED_DEVICE)),
            np.zeros(NUM_ADVISED_WHOLE),
        )
    return Advised(
        _advised_ops(problem, advice),
        _advised_devices(problem, advice),
        _advised_whole(problem, advice),
    )


def _advised_ops(problem: Problem, advice: Advice) -> Float[np.ndarray, "N 7"]:
    """Seconds the incumbent sends to and from every op, advisers who agree, and its schedule.

    Of the schedule, for a latency: start and slack over the latency; how long the op waited for its
    device after its inputs could have come, and how long the device stood idle before it.
    """
    graph, device, times = problem.graph, advice.device[0], timing(problem)
    table = np.zeros((problem.num_ops, NUM_ADVISED))
    cut = device[graph.producer[graph.use_tensor]] != device[graph.use_op]
    seconds = np.where(cut, times.send_s[graph.use_tensor], 0.0) / times.scale_s
    np.add.at(table[:, 0], graph.use_op, seconds)
    np.add.at(table[:, 1], graph.producer[graph.use_tensor], seconds)
    table[:, :2] = squash(table[:, :2])
    table[:, 2] = (advice.device[1:] == device).mean(axis=0)
    if not objective_of(problem).ordered:
        return table
    from gdp.policy.view.feature_kernels import slacks
    from gdp.sim.latency import simulate

    run = simulate(problem, device, rank_under(problem, device, RULES[advice.rule]))
    n = problem.num_ops
    # Ops that take no time start with others; the decode order is topological.
    order = np.lexsort((np.argsort(times.order), run.start_s))
    latest_s, waited_s, idle_s = np.zeros(n), np.zeros(n), np.zeros(n)
    slacks(
        arrays_of(problem), links(problem)[1], device, order, run.start_s, run.finish_s, latest_s,
        waited_s, idle_s, np.zeros(problem.num_devices),
    )  # fmt: skip
    whole_s, scale_s = max(run.latency_s, 1e-12), times.scale_s
    table[:, 3] = run.start_s / whole_s
    table[:, 4] = np.clip((latest_s - run.start_s) / whole_s, 0.0, 1.0)
    table[:, 5] = squash(np.maximum(waited_s, 0.0) / scale_s)
    table[:, 6] = squash(np.maximum(idle_s, 0.0) / scale_s)
    return table


def _advised_devices(problem: Problem, advice: Advice) -> Float[np.ndarray, "D 3"]:
    """Seconds each device is busy, receives and sends under the incumbent, over its value."""
    graph, cluster, device = problem.graph, problem.cluster, advice.device[0]
    times, d = timing(problem), problem.num_devices
    busy_s = np.bincount(device, times.cost_s[np.arange(problem.num_ops), device], d)
    src, dst = device[graph.producer[graph.use_tensor]], device[graph.use_op]
    moved = np.unique(np.stack([graph.use_tensor, src, dst])[:, src != dst], axis=1)
    seconds = cluster.link_latency_s[moved[1], moved[2]]
    seconds = seconds + problem.sent_bytes[moved[0]] / cluster.link_bytes_per_s[moved[1], moved[2]]
    received_s, sent_s = np.bincount(moved[2], seconds, d), np.bincount(moved[1], seconds, d)
    total = np.stack([busy_s, received_s, sent_s], axis=1) / max(float(advice.cost_s[0]), 1e-12)
    return np.minimum(total, 8.0)


def _advised_whole(problem: Problem, advice: Advice) -> Float[np.ndarray, "12"]:
    """Log cost ratios: advisers to the incumbent, the incumbent to bounds; the incumbent's rule."""
    times = timing(problem)
    cost = np.where(problem.allowed, times.cost_s, np.inf).min(axis=1)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    free_send = np.zeros(problem.graph.num_tensors)
    path_s = float(longest_s(arrays_of(problem), cost, free_send).max())
    total = np.where(problem.allowed, times.cost_s, times.mean_cost_s[:, None]).sum(axis=0)
    fair_s = float(1.0 / (1.0 / np.maximum(total, 1e-30)).sum())
    lowest = np.maximum(np.array([path_s, fair_s]), 1e-12)
    gap = np.clip(np.log(advice.cost_s[0] / lowest), -3.0, 6.0) / 2.0
    return np.concatenate([advice.log_ratio[1:], gap, np.arange(len(RULES)) == advice.rule])


NUM_OP_TYPES = 64
"""Op types are hashed into this many classes, so that an unknown type has an embedding too."""
NUM_OP_FEATURES = 31
NUM_DEVICE_FEATURES = 17
NUM_GLOBAL_FEATURES = 24

FeatureSet = Literal["full", "published"]
"""full: costs, levels, memory. published: op type, output shape and neighbours, as in GDP."""


class Features(NamedTuple):
    """Inputs of the network for one problem, not padded."""

    op: Float[np.ndarray, "N F"]
    op_type: Int[np.ndarray, "N"]
    src: Int[np.ndarray, "P"]
    dst: Int[np.ndarray, "P"]
    device: Float[np.ndarray, "D G"]
    whole: Float[np.ndarray, "H"]  # of graph and cluster together
    order: Int[np.ndarray, "N"]


def features(problem: Problem, kind: FeatureSet = "full", advice: Advice | None = None) -> Features:
    """Static features of a problem, and of the advisers' placements. O((N + E) D)."""
    plain = _plain(problem, kind)
    advised = advised_features(problem, advice)
    return plain._replace(
        op=np.concatenate([plain.op, advised.op], axis=1).astype(np.float32),
        device=np.concatenate([plain.device, advised.device], axis=1).astype(np.float32),
        whole=np.concatenate([plain.whole, advised.whole]).astype(np.float32),
    )


@cached_on_problem
def _plain(problem: Problem, kind: FeatureSet) -> Features:
    """Features that do not depend on advice."""
    times = timing(problem)
    src, dst = pairs(problem)
    op = _full(problem, times, src, dst) if kind == "full" else _published(problem, src, dst)
    types = [zlib.crc32(t.encode()) % NUM_OP_TYPES for t in problem.graph.op_types]
    devices, whole = _devices(problem, times), _whole(problem, times)
    return Features(op, np.array(types), src, dst, devices, whole, times.order)


def _full(
    problem: Problem, times: PathTimes, src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"]
) -> Float[np.ndarray, "N F"]:
    """Costs, transfers, levels, degrees and memory of every op."""
    graph, n = problem.graph, problem.num_ops
    scale, free_send = times.scale_s, np.zeros(graph.num_tensors)
    cost = np.where(problem.allowed, times.cost_s, np.inf)
    fastest = np.where(np.isfinite(cost.min(axis=1)), cost.min(axis=1), 0.0)
    out_s, in_s, out_bytes, in_bytes, held_bytes = (np.zeros(n) for _ in range(5))
    np.add.at(out_s, graph.producer, times.send_s)
    np.add.at(held_bytes, graph.producer, graph.held_bytes)
    np.add.at(out_bytes, graph.producer, problem.sent_bytes)
    np.add.at(in_s, graph.use_op, times.send_s[graph.use_tensor])
    np.add.at(in_bytes, graph.use_op, problem.sent_bytes[graph.use_tensor])
    up_s = times.up_s
    down_s = down(problem, times.mean_cost_s, times.send_s)
    up_free = longest_s(arrays_of(problem), times.mean_cost_s, free_send)
    down_free = down(problem, times.mean_cost_s, free_send)
    path, path_free = max(up_s.max(), 1e-12), max(up_free.max(), 1e-12)
    position = np.empty(n)
    position[times.order] = np.arange(n) / n
    group_size = np.bincount(problem.group)[problem.group]
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).mean())
    bins = np.minimum((down_free / path_free * 64).astype(np.int64), 63)  # of the longest path
    width = np.bincount(bins, minlength=64)[bins].astype(float)
    columns = [
        squash(times.mean_cost_s / scale), squash(fastest / scale),
        squash(times.cost_s.max(axis=1) / scale),
        squash(out_s / scale), squash(in_s / scale),
        squash(out_s / (times.mean_cost_s + 1e-3 * scale)),
        np.log1p(np.bincount(src, minlength=n)) / 2, np.log1p(np.bincount(dst, minlength=n)) / 2,
        up_s / path, down_s / path, (up_s + down_s) / path,
        up_free / path_free, down_free / path_free, (up_free + down_free) / path_free,
        position, graph.is_backward.astype(float), graph.is_io.astype(float),
        squash(1e3 * graph.weight_bytes / capacity), squash(1e3 * held_bytes / capacity),
        (graph.weight_bytes > 0).astype(float), np.log1p(group_size - 1) / 3,
        problem.allowed.mean(axis=1),
        squash((in_bytes - out_bytes) * mean_link(problem)[0] / scale),
        np.log1p(width) / 5,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def _published(
    problem: Problem, src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"]
) -> Float[np.ndarray, "N F"]:
    """Output shape and ids of neighbours, as GDP describes its input; the type is embedded apart.

    The first output's size and first four dimensions (logarithms), then up to six neighbours'
    positions (predecessors first), -1 where there are fewer. The rest of the width stays zero.
    """
    graph, n = problem.graph, problem.num_ops
    table = np.zeros((n, NUM_OP_FEATURES - NUM_ADVISED))
    np.add.at(table[:, 0], graph.producer, graph.tensor_bytes)
    table[:, 0] = np.log1p(table[:, 0]) / 10.0
    for op, detail in enumerate(graph.detail):
        shape = detail.output_shapes[0][:4] if detail.output_shapes else ()
        table[op, 1 : 1 + len(shape)] = np.log1p(np.maximum(shape, 0)) / 5.0
    table[:, 5:11] = -1.0
    filled = np.zeros(n, dtype=np.int64)
    for here, there in ((dst, src), (src, dst)):
        for op, other in zip(here.tolist(), there.tolist(), strict=True):
            if filled[op] < 6:
                table[op, 5 + filled[op]] = other / n
                filled[op] += 1
    return table


def _devices(problem: Problem, times: PathTimes) -> Float[np.ndarray, "D G"]:
    """Speed, memory and links of every device relative to the others."""
    cluster, d = problem.cluster, problem.num_devices
    work = ~problem.graph.is_io
    runs = problem.allowed & work[:, None]
    total = np.where(runs, times.cost_s, times.mean_cost_s[:, None] * 4).sum(axis=0)
    total = np.maximum(total, 1e-12)
    off = ~np.eye(d, dtype=bool)
    per_byte = np.where(off, 1.0 / cluster.link_bytes_per_s, 0.0)
    peers = max(d - 1, 1)
    bytes_mean = float(problem.sent_bytes.mean()) if problem.graph.num_tensors else 0.0
    shared = np.zeros(d)
    for i in range(d):
        for j in range(d):
            if cluster.queues[i, j]:
                shared[i] += (cluster.channel[off] == cluster.channel[i, j]).sum() - 1
    need = max(float(problem.graph.weight_bytes.sum()), 1.0)
    columns = [
        np.log(total / total.min()) / 3, np.log(total / total.mean()) / 3,
        np.log1p(np.minimum(cluster.memory_bytes, 64.0 * need) / need),
        squash(per_byte.sum(axis=1) / peers * bytes_mean / times.scale_s),
        squash(per_byte.sum(axis=0) / peers * bytes_mean / times.scale_s),
        squash(per_byte.min(axis=1, where=off, initial=1.0) * bytes_mean / times.scale_s),
        squash(cluster.link_latency_s.sum(axis=1) / peers / times.scale_s),
        (np.arange(d) == cluster.host).astype(float),
        squash(cluster.dispatch_s / times.scale_s),
        (~cluster.launches_ops).astype(float),
        np.log1p(shared) / 3, runs.sum(axis=0) / max(work.sum(), 1),
        np.full(d, d / 8.0), np.arange(d) / 8.0,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def _whole(problem: Problem, times: PathTimes) -> Float[np.ndarray, "H"]:
    """Size, ratio of communication to computation, parallelism, spread of speeds, tightness."""
    graph, d = problem.graph, problem.num_devices
    total = np.where(problem.allowed, times.cost_s, times.mean_cost_s[:, None]).sum(axis=0)
    total = np.maximum(total, 1e-12)
    work_s = max(float(times.mean_cost_s.sum()), 1e-12)
    path_s = max(float(times.up_s.max()), 1e-12)
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).sum())
    latency = not objective_of(problem).pipelined
    return np.array(
        [
            np.log10(graph.num_ops) / 4, d / 8.0, 1.0 / d,
            np.log(max(float(times.send_s.sum()), 1e-12) / work_s) / 4,
            np.log(work_s / path_s) / 4,
            float(latency), 1.0 - float(latency),
            np.log(total.max() / total.min()) / 3,
            squash(20.0 * graph.weight_bytes.sum() / capacity),
            squash(20.0 * graph.held_bytes.sum() / capacity),
            float(graph.is_backward.mean()),
            np.log1p(graph.num_uses / graph.num_ops),
        ]
    )  # fmt: skip
