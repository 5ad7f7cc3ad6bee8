"""What the policy knows of a problem before it decides: static features of ops, devices and all.

Axes: N ops, T tensors, P pairs of ops joined by at least one tensor, D devices, F features.
Every feature is dimensionless, so that a problem with all times doubled looks the same.
"""

import weakref
import zlib
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.policy.advice import Advice
from gdp.sim.problem import Problem

NUM_OP_TYPES = 64
"""Op types are hashed into this many classes, so that an unknown type has an embedding too."""
NUM_OP_FEATURES = 27
NUM_DEVICE_FEATURES = 15
NUM_GLOBAL_FEATURES = 18

FeatureSet = Literal["full", "published"]
"""full: costs, levels, memory. published: op type, output shape and neighbours, as in GDP."""


class Timing(NamedTuple):
    """Seconds behind the features; the decoder uses them too."""

    cost_s: Float[np.ndarray, "N D"]  # dispatch per op included; 0 where not allowed
    mean_cost_s: Float[np.ndarray, "N"]  # over allowed devices
    send_s: Float[np.ndarray, "T"]  # mean over ordered pairs of devices
    scale_s: float  # mean cost of an op that does work
    up_s: Float[np.ndarray, "N"]  # longest path to the end, transfers included
    order: Int[np.ndarray, "N"]  # decode order and priority: decreasing up_s, topological


class Features(NamedTuple):
    """Inputs of the network for one problem, not padded."""

    op: Float[np.ndarray, "N F"]
    op_type: Int[np.ndarray, "N"]
    src: Int[np.ndarray, "P"]
    dst: Int[np.ndarray, "P"]
    device: Float[np.ndarray, "D G"]
    whole: Float[np.ndarray, "H"]  # of graph and cluster together
    order: Int[np.ndarray, "N"]


_TIMINGS: weakref.WeakKeyDictionary[Problem, Timing] = weakref.WeakKeyDictionary()


def timing(problem: Problem) -> Timing:
    """The times of a problem, computed once."""
    if problem not in _TIMINGS:
        _TIMINGS[problem] = _timing(problem)
    return _TIMINGS[problem]


def features(problem: Problem, kind: FeatureSet = "full", found: Advice | None = None) -> Features:
    """Static features of a problem, and of what advisers propose for it. O((N + E) D)."""
    graph = problem.graph
    times = timing(problem)
    src, dst, _ = _pairs(problem, times.send_s)
    op = _full(problem, times, src, dst) if kind == "full" else _published(problem, src, dst)
    return Features(
        op=np.concatenate([op, _advised_ops(problem, times, found)], axis=1).astype(np.float32),
        op_type=np.array([zlib.crc32(t.encode()) % NUM_OP_TYPES for t in graph.op_types]),
        src=src,
        dst=dst,
        device=np.concatenate(
            [_devices(problem, times), _advised_devices(problem, times, found)], axis=1
        ).astype(np.float32),
        whole=np.concatenate(
            [_whole(problem, times), _advised_whole(problem, times, found)]
        ).astype(np.float32),
        order=times.order,
    )


def squash(ratio: Float[np.ndarray, "..."] | float) -> Float[np.ndarray, "..."] | float:
    """A ratio of times on a scale that is linear near zero and logarithmic far out."""
    return np.arcsinh(ratio) / 3.0


def mean_link(problem: Problem) -> tuple[float, float]:
    """(seconds per byte, latency in seconds), averaged over ordered pairs of devices."""
    cluster = problem.cluster
    off = ~np.eye(problem.num_devices, dtype=bool)
    if not off.any():
        return 0.0, 0.0
    return float((1.0 / cluster.link_bytes_per_s[off]).mean()), float(
        cluster.link_latency_s[off].mean()
    )


def _timing(problem: Problem) -> Timing:
    graph = problem.graph
    dispatch_s = np.array(
        [d.dispatch_s if d.dispatch_per == "op" else 0.0 for d in problem.cluster.devices]
    )
    cost_s = problem.compute_s + np.where(graph.is_io[:, None], 0.0, dispatch_s[None, :])
    cost_s = np.where(problem.allowed, cost_s, 0.0)
    mean_cost_s = cost_s.sum(axis=1) / np.maximum(problem.allowed.sum(axis=1), 1)
    per_byte, latency_s = mean_link(problem)
    send_s = latency_s + graph.tensor_bytes * per_byte
    if problem.tensor_s is not None:
        send_s = 2.0 * problem.tensor_s
    works = mean_cost_s > 0
    scale_s = float(mean_cost_s[works].mean()) if works.any() else max(latency_s, 1e-9)
    up_s = _up(problem, mean_cost_s, send_s)
    order = np.lexsort((np.arange(graph.num_ops), -up_s))
    return Timing(cost_s, mean_cost_s, send_s, scale_s, up_s, order)


def _pairs(
    problem: Problem, send_s: Float[np.ndarray, "T"]
) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"], Float[np.ndarray, "P"]]:
    """Ops joined by tensors (source, destination, longest transfer), each pair once."""
    src, dst = problem.graph.edges
    seconds = send_s[problem.graph.use_tensor]
    key = src * problem.num_ops + dst
    unique, which = np.unique(key, return_inverse=True)
    longest = np.zeros(len(unique))
    np.maximum.at(longest, which, seconds)
    return unique // problem.num_ops, unique % problem.num_ops, longest


def _csr(
    ends: Int[np.ndarray, "P"], num_ops: int
) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "M"]]:
    by_end = np.argsort(ends, kind="stable")
    return by_end, np.searchsorted(ends[by_end], np.arange(num_ops + 1))


def _up(
    problem: Problem, seconds: Float[np.ndarray, "N"], send_s: Float[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    from gdp.policy.feature_kernels import upward_rank

    src, dst, pair_s = _pairs(problem, send_s)
    by_src, first = _csr(src, problem.num_ops)
    return upward_rank(seconds, src, dst, pair_s, by_src, first)


def _down(
    problem: Problem, seconds: Float[np.ndarray, "N"], send_s: Float[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    from gdp.policy.feature_kernels import downward_rank

    src, dst, pair_s = _pairs(problem, send_s)
    by_dst, first = _csr(dst, problem.num_ops)
    return downward_rank(seconds, src, dst, pair_s, by_dst, first)


def _full(
    problem: Problem, times: Timing, src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"]
) -> Float[np.ndarray, "N F"]:
    """Costs, transfers, levels, degrees and memory of every op."""
    graph, n = problem.graph, problem.num_ops
    scale, free_send = times.scale_s, np.zeros(graph.num_tensors)
    cost = np.where(problem.allowed, times.cost_s, np.inf)
    fastest = np.where(np.isfinite(cost.min(axis=1)), cost.min(axis=1), 0.0)
    out_s, in_s, out_bytes, in_bytes = (np.zeros(n) for _ in range(4))
    np.add.at(out_s, graph.producer, times.send_s)
    np.add.at(out_bytes, graph.producer, graph.tensor_bytes)
    np.add.at(in_s, graph.use_op, times.send_s[graph.use_tensor])
    np.add.at(in_bytes, graph.use_op, graph.tensor_bytes[graph.use_tensor])
    up = times.up_s
    down = _down(problem, times.mean_cost_s, times.send_s)
    up_free = _up(problem, times.mean_cost_s, free_send)
    down_free = _down(problem, times.mean_cost_s, free_send)
    path, path_free = max(up.max(), 1e-12), max(up_free.max(), 1e-12)
    position = np.empty(n)
    position[times.order] = np.arange(n) / n
    group_size = np.bincount(problem.group)[problem.group]
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).mean())
    columns = [
        squash(times.mean_cost_s / scale), squash(fastest / scale),
        squash(times.cost_s.max(axis=1) / scale),
        squash(out_s / scale), squash(in_s / scale),
        squash(out_s / (times.mean_cost_s + 1e-3 * scale)),
        np.log1p(np.bincount(src, minlength=n)) / 2, np.log1p(np.bincount(dst, minlength=n)) / 2,
        up / path, down / path, (up + down) / path,
        up_free / path_free, down_free / path_free, (up_free + down_free) / path_free,
        position, graph.is_backward.astype(float), graph.is_io.astype(float),
        squash(1e3 * graph.weight_bytes / capacity), squash(1e3 * out_bytes / capacity),
        (graph.weight_bytes > 0).astype(float), np.log1p(group_size - 1) / 3,
        problem.allowed.mean(axis=1),
        squash((in_bytes - out_bytes) * mean_link(problem)[0] / scale),
        np.log1p(_width(down_free / path_free)) / 5,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def _width(level: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """How many ops share an op's sixty-fourth of the longest path."""
    bins = np.minimum((level * 64).astype(np.int64), 63)
    return np.bincount(bins, minlength=64)[bins].astype(float)


def _published(
    problem: Problem, src: Int[np.ndarray, "P"], dst: Int[np.ndarray, "P"]
) -> Float[np.ndarray, "N F"]:
    """Output shape and ids of neighbours, as GDP describes its input; the type is embedded apart.

    The first output's size and first four dimensions (logarithms), then up to six neighbours'
    positions (predecessors first), -1 where there are fewer. The rest of the width stays zero.
    """
    graph, n = problem.graph, problem.num_ops
    table = np.zeros((n, NUM_OP_FEATURES - 3))
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


def _devices(problem: Problem, times: Timing) -> Float[np.ndarray, "D G"]:
    """Speed, memory and links of every device relative to the others."""
    cluster, d = problem.cluster, problem.num_devices
    work = ~problem.graph.is_io
    runs = problem.allowed & work[:, None]
    total = np.where(runs, times.cost_s, times.mean_cost_s[:, None] * 4).sum(axis=0)
    total = np.maximum(total, 1e-12)
    off = ~np.eye(d, dtype=bool)
    per_byte = np.where(off, 1.0 / cluster.link_bytes_per_s, 0.0)
    peers = max(d - 1, 1)
    bytes_mean = float(problem.graph.tensor_bytes.mean()) if problem.graph.num_tensors else 0.0
    shared = np.zeros(d)
    for i in range(d):
        for j in range(d):
            if i != j:
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
        squash(np.array([x.dispatch_s for x in cluster.devices]) / times.scale_s),
        np.array([x.dispatch_per == "segment" for x in cluster.devices], dtype=float),
        np.log1p(shared) / 3, runs.sum(axis=0) / max(work.sum(), 1),
        np.full(d, d / 8.0), np.arange(d) / 8.0,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def _whole(problem: Problem, times: Timing) -> Float[np.ndarray, "H"]:
    """Size, ratio of communication to computation, parallelism, spread of speeds, tightness."""
    graph, d = problem.graph, problem.num_devices
    total = np.where(problem.allowed, times.cost_s, times.mean_cost_s[:, None]).sum(axis=0)
    total = np.maximum(total, 1e-12)
    work_s = max(float(times.mean_cost_s.sum()), 1e-12)
    path_s = max(float(times.up_s.max()), 1e-12)
    capacity = float(np.minimum(problem.cluster.memory_bytes, 1 << 50).sum())
    latency = problem.objective in ("latency", "block_latency")
    return np.array(
        [
            np.log10(graph.num_ops) / 4, d / 8.0, 1.0 / d,
            np.log(max(float(times.send_s.sum()), 1e-12) / work_s) / 4,
            np.log(work_s / path_s) / 4,
            float(latency), 1.0 - float(latency),
            np.log(total.max() / total.min()) / 3,
            squash(20.0 * graph.weight_bytes.sum() / capacity),
            squash(20.0 * graph.tensor_bytes.sum() / capacity),
            float(graph.is_backward.mean()),
            np.log1p(graph.num_uses / graph.num_ops),
        ]
    )  # fmt: skip


def _advised_ops(problem: Problem, times: Timing, found: Advice | None) -> Float[np.ndarray, "N 3"]:
    """Seconds that the incumbent sends to and from every op, and the share of advisers it has."""
    table = np.zeros((problem.num_ops, 3))
    if found is None:
        return table
    graph, device = problem.graph, found.device[0]
    cut = device[graph.producer[graph.use_tensor]] != device[graph.use_op]
    seconds = np.where(cut, times.send_s[graph.use_tensor], 0.0) / times.scale_s
    np.add.at(table[:, 0], graph.use_op, seconds)
    np.add.at(table[:, 1], graph.producer[graph.use_tensor], seconds)
    table[:, :2] = squash(table[:, :2])
    table[:, 2] = (found.device[1:] == device).mean(axis=0)
    return table


def _advised_devices(
    problem: Problem, times: Timing, found: Advice | None
) -> Float[np.ndarray, "D 1"]:
    """Busy time of every device under the incumbent, over its value."""
    if found is None:
        return np.zeros((problem.num_devices, 1))
    device = found.device[0]
    busy_s = np.bincount(
        device, times.cost_s[np.arange(problem.num_ops), device], problem.num_devices
    )
    return (busy_s / max(float(found.cost_s[0]), 1e-12))[:, None]


def _advised_whole(problem: Problem, times: Timing, found: Advice | None) -> Float[np.ndarray, "6"]:
    """How far each adviser is behind the best, and the incumbent from simple lower bounds."""
    if found is None:
        return np.zeros(6)
    cost = np.where(problem.allowed, times.cost_s, np.inf).min(axis=1)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    path_s = float(_up(problem, cost, np.zeros(problem.graph.num_tensors)).max())
    total = np.where(problem.allowed, times.cost_s, times.mean_cost_s[:, None]).sum(axis=0)
    fair_s = float(1.0 / (1.0 / np.maximum(total, 1e-30)).sum())
    lowest = np.maximum(np.array([path_s, fair_s]), 1e-12)
    gap = np.clip(np.log(found.cost_s[0] / lowest), -3.0, 6.0) / 2.0
    return np.concatenate([found.log_ratio[1:], gap])
