"""Heads, tails and blocks: lower bounds of the time before and after ops, and what lies between.

A relaxation of the event simulator: an op waits for each of its inputs, but never for its device or
a channel, and every reader may assume another device for a producer. With ops in topological order

    head(v, d) = op_s(v, d) + max over inputs u of v, min over e of (head(u, e) + send(u, v, e, d))
    tail(u, e) = max over readers v of u, min over d of (send(u, v, e, d) + op_s(v, d) + tail(v, d))

where send is the time of all tensors from u to v on their lane, one after the other (side by side
where nothing queues), and the dispatch of v where it opens a segment because of them; ops of one
group share their device. No run is shorter than head(v, d) + tail(v, d) minimised over d, for any
v.

Series-parallel blocks are what models are made of: modules that branch and join again. All ops on
the paths from u to v run after the end of u and before the start of v; the linear program of paths
has a row for each of them (`gdp.bounds.path_program`).

Axes: N ops, V = N + 1: the ops and one more that reads all of them and ends the run; P arcs; D
devices; I ops inside a block.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

MAX_DEVICES = 64
MAX_OPS = 10_000  # bit sets of ancestors take N * N / 8 bytes, pairs N * N / 2 steps
_MAX_INNER = 18  # larger blocks count from their nearest gate alone


class Arcs(NamedTuple):
    """Ops, arcs and links of a problem, with an end that reads all ops."""

    op_s: Float[np.ndarray, "V D"]  # with unavoidable dispatch; inf where the group cannot go
    opens_s: Float[np.ndarray, "V D"]  # dispatch if an input comes from another device
    group: Int[np.ndarray, "V"]
    first_input: Int[np.ndarray, "V+1"]  # the arcs into op v: [v]..[v+1]
    source: Int[np.ndarray, "P"]
    tensors: Float[np.ndarray, "P"]  # how many tensors an arc stands for; 0 into the last op
    size_bytes: Float[np.ndarray, "P"]  # of these tensors
    largest_bytes: Float[np.ndarray, "P"]  # of any of them
    queues: Bool[np.ndarray, "D D"]  # whether one waits for the other on a lane
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]


class SeriesParallelBlock(NamedTuple):
    """The ops on the paths from u to v that take any time; u = -1 is the start, v = N the end."""

    source: int
    target: int
    inner: Int[np.ndarray, "I"]


def arcs_of(problem: Problem) -> Arcs:
    """The arcs of a problem. O(N D + E log E)."""
    graph, cluster = problem.graph, problem.cluster
    n, d = graph.num_ops, problem.num_devices
    a = arrays_of(problem)
    allowed = problem.group_allowed[problem.group]
    opening = np.where(a.opens[:, None] & ~a.is_io[:, None], a.segment_s[None, :], 0.0)
    op_s = np.zeros((n + 1, d))
    op_s[:n] = np.where(allowed, a.compute_s + opening, np.inf)
    opens_s = np.zeros((n + 1, d))
    opens_s[:n] = np.where((a.opens | a.is_io)[:, None], 0.0, a.segment_s[None, :])
    src, dst = graph.edges
    key, which = np.unique(dst * (n + 1) + src, return_inverse=True)
    count = np.bincount(which, minlength=len(key)).astype(np.float64)
    size = np.bincount(which, problem.sent_bytes[graph.use_tensor], minlength=len(key))
    largest = np.zeros(len(key))
    np.maximum.at(largest, which, problem.sent_bytes[graph.use_tensor].astype(np.float64))
    last = np.flatnonzero(np.bincount(src, minlength=n) == 0)
    source = np.concatenate([key % (n + 1), last])
    target = np.concatenate([key // (n + 1), np.full(len(last), n)])
    none = np.zeros(len(last))
    return Arcs(
        op_s=op_s,
        opens_s=opens_s,
        group=np.append(problem.group, -1),
        first_input=np.searchsorted(target, np.arange(n + 2)),
        source=source,
        tensors=np.concatenate([count, none]),
        size_bytes=np.concatenate([size, none]),
        largest_bytes=np.concatenate([largest, none]),
        queues=a.channel >= 0,
        latency_s=np.array(cluster.link_latency_s, np.float64),
        s_per_byte=1.0 / np.asarray(cluster.link_bytes_per_s, np.float64),
    )


def send_s(arcs: Arcs, k: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K D D"]:
    """Seconds in which arcs k send their tensors from device to device, dispatch aside."""
    tensors, size = arcs.tensors[k, None, None], arcs.size_bytes[k, None, None]
    queued_s = tensors * arcs.latency_s + size * arcs.s_per_byte
    largest = arcs.largest_bytes[k, None, None]
    alone_s = np.minimum(tensors, 1.0) * arcs.latency_s + largest * arcs.s_per_byte
    return np.where(arcs.queues, queued_s, alone_s)


def longest_s(arcs: Arcs) -> float:
    """Upper bound of a run without idling: every op on its slowest device, every use sent."""
    op_s = np.where(np.isfinite(arcs.op_s), arcs.op_s, 0.0)
    sent_s = arcs.tensors * arcs.latency_s.max() + arcs.size_bytes * arcs.s_per_byte.max()
    total_s = op_s.max(axis=1).sum() + arcs.opens_s.max(axis=1).sum() + sent_s.sum()
    return float(total_s) or 1.0


def heads_and_tails(
    arcs: Arcs,
) -> tuple[Float[np.ndarray, "V D"], Float[np.ndarray, "V D"]]:
    """(earliest end of every op on every device, least time from that end to the end of the run).

    Ends are inf where an op cannot run. O(P D^2).
    """
    from gdp.bounds.paths_kernels import heads, tails
    from gdp.kernels.struct import as_struct

    as_struct(Arcs)
    head_s, tail_s = np.empty_like(arcs.op_s), np.empty_like(arcs.op_s)
    heads(arcs, head_s)
    tails(arcs, tail_s)
    return head_s, tail_s


def find_blocks(arcs: Arcs, head_s: Float[np.ndarray, "V D"]) -> list[SeriesParallelBlock]:
    """The block between each op v that more than a chain leads to and a gate of v."""
    from gdp.bounds.paths_kernels import ancestors, between, gates

    count = len(arcs.op_s)
    above = np.zeros((count, (count + 63) // 64), dtype=np.uint64)
    ancestors(arcs.first_input, arcs.source, above)
    reads = np.diff(arcs.first_input)
    is_idle = (reads == 0) & (arcs.op_s.min(axis=1) <= 0.0)
    gate, depth = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    partial = np.zeros(count, bool)
    gates(arcs.first_input, arcs.source, is_idle, head_s.min(axis=1), above, gate, depth, partial)
    inner = np.empty(count, np.int64)
    blocks = []
    for v in np.flatnonzero(reads > 0).tolist():
        for u in (int(gate[v]), -1) if partial[v] and gate[v] >= 0 else (int(gate[v]),):
            size = between(above, u, v, inner)
            busy = inner[:size][~is_idle[inner[:size]]]
            small = len(busy) <= _MAX_INNER
            if len(busy) > 1 and (u == gate[v] or small):
                blocks.append(SeriesParallelBlock(u, v, busy.copy()))
    return blocks
