"""The flat arrays that the heuristics and the local search read inside their kernels.

Axes: N ops, T tensors, E uses, D devices, G groups, W distinct weights and caches, M (group,
weight) pairs, P memories that devices share, K kinds of weights.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.graph.groups import distinct, lists, starts
from gdp.graph.op_graph import INPUT
from gdp.problem.problem import Launches, Problem, cached_on_problem, stored_bytes


class Arrays(NamedTuple):
    """A problem as CSR lists; every array is C-contiguous, int64, float64 or bool.

    A list `x_start`, `x` holds the entries of i at `x[x_start[i] : x_start[i + 1]]`.
    """

    in_start: Int[np.ndarray, "N+1"]
    in_tensor: Int[np.ndarray, "E"]  # the tensors an op reads
    out_start: Int[np.ndarray, "N+1"]
    out_tensor: Int[np.ndarray, "T"]  # the tensors an op makes
    use_start: Int[np.ndarray, "T+1"]
    use_op: Int[np.ndarray, "E"]  # the ops that read a tensor
    producer: Int[np.ndarray, "T"]
    held_bytes: Int[np.ndarray, "T"]  # by each device that has the tensor
    sent_bytes: Int[np.ndarray, "T"]  # over a link in one sample
    compute_s: Float[np.ndarray, "N D"]  # with the dispatch that is paid per op
    segment_s: Float[np.ndarray, "D"]  # the dispatch that is paid per segment, 0 elsewhere
    latency_s: Float[np.ndarray, "D D"]
    bytes_per_s: Float[np.ndarray, "D D"]
    round_to: float  # of `gdp.problem.ticks.send_time`, which every transfer's time comes from
    channel: Int[np.ndarray, "D D"]  # NO_CHANNEL, below zero, where copies do not queue
    is_io: Bool[np.ndarray, "N"]
    is_input: Bool[np.ndarray, "N"]
    is_backward: Bool[np.ndarray, "N"]
    opens: Bool[np.ndarray, "N"]  # opens a segment wherever it runs: reads an input, or nothing
    group: Int[np.ndarray, "N"]
    group_start: Int[np.ndarray, "G+1"]
    group_op: Int[np.ndarray, "N"]  # the ops of a group, in topological order
    group_allowed: Bool[np.ndarray, "G D"]
    group_weight_start: Int[np.ndarray, "G+1"]
    group_weight: Int[np.ndarray, "M"]  # the distinct weights of a group that hold any bytes
    weight_bytes: Int[np.ndarray, "W"]
    weight_kind: Int[np.ndarray, "W"]
    held_on: Int[np.ndarray, "K D"]  # device that holds each kind of weights, see `Problem.held_on`
    memory_bytes: Int[np.ndarray, "D"]
    pool: Int[np.ndarray, "D"]  # memory that a device shares with others, or below zero
    pool_bytes: Int[np.ndarray, "P"]
    processor: Int[np.ndarray, "D"]  # processor that it shares with others, or below zero
    # Serial resource, which works for several devices, one op at a time: a processor, or after
    # these a thread of the host that launches; 0..Q-1, or below zero.
    serial: Int[np.ndarray, "D"]
    serial_s: Float[np.ndarray, "N D"]  # of it, as `compute_s`


@cached_on_problem
def arrays_of(problem: Problem) -> Arrays:
    """The flat arrays of a problem. O((N + E) log + N D)."""
    graph, cluster = problem.graph, problem.cluster
    n, t = graph.num_ops, graph.num_tensors
    in_start, in_use = lists(graph.use_op, n)
    out_start, out_tensor = lists(graph.producer, n)
    use_start, tensor_use = lists(graph.use_tensor, t)
    group_start, group_op = lists(problem.group, problem.num_groups)
    weight_bytes, weight_kind, group_weight_start, group_weight = _weights(problem)
    is_input = graph.has_type((INPUT,))
    opens = np.diff(in_start) == 0
    opens[graph.use_op[is_input[graph.producer[graph.use_tensor]]]] = True
    unpaid = graph.is_io | graph.rests
    paid_s = np.where(unpaid[:, None], 0.0, cluster.op_dispatch_s)
    compute_s = np.ascontiguousarray(problem.compute_s + paid_s)
    serial, serial_s = _serial(problem, compute_s, paid_s)
    return Arrays(
        in_start=in_start,
        in_tensor=_int(graph.use_tensor[in_use]),
        out_start=out_start,
        out_tensor=out_tensor,
        use_start=use_start,
        use_op=_int(graph.use_op[tensor_use]),
        producer=_int(graph.producer),
        held_bytes=_int(graph.held_bytes),
        sent_bytes=_int(problem.sent_bytes),
        compute_s=compute_s,
        segment_s=cluster.segment_dispatch_s,
        latency_s=np.array(cluster.link_latency_s, dtype=np.float64),
        bytes_per_s=np.array(cluster.link_bytes_per_s, dtype=np.float64),
        round_to=1.5 * 2.0**52 * problem.unit.grid,
        channel=_int(cluster.channel),
        is_io=np.array(graph.is_io),
        is_input=is_input,
        is_backward=np.array(graph.is_backward),
        opens=opens & ~unpaid,
        group=_int(problem.group),
        group_start=group_start,
        group_op=group_op,
        group_allowed=np.array(problem.group_allowed),
        group_weight_start=group_weight_start,
        group_weight=group_weight,
        weight_bytes=weight_bytes,
        weight_kind=weight_kind,
        held_on=_int(problem.held_on),
        memory_bytes=_int(cluster.memory_bytes),
        pool=_int(cluster.pool),
        pool_bytes=_int(cluster.pool_bytes),
        processor=_int(cluster.processor),
        serial=serial,
        serial_s=serial_s,
    )


def _serial(
    problem: Problem, compute_s: Float[np.ndarray, "N D"], paid_s: Float[np.ndarray, "N D"]
) -> tuple[Int[np.ndarray, "D"], Float[np.ndarray, "N D"]]:
    """`Arrays.serial` and `Arrays.serial_s`. A thread's dispatch is work of the host."""
    serial, launches = _int(problem.cluster.processor), problem.launches
    if launches is None:
        return serial, compute_s
    launched = (serial < 0) & (launches.thread >= 0)
    serial_s = np.where(launched, launches.seconds + paid_s, compute_s)
    threads = np.unique(launches.thread[launched], return_inverse=True)[1]
    serial[launched] = int(serial.max()) + 1 + threads
    return serial, np.ascontiguousarray(serial_s)


def launches_with_dispatch(problem: Problem) -> Launches | None:
    """The problem's launches for costs that hold the dispatch of ops, as `Arrays.compute_s` do."""
    launches = problem.launches
    return launches and launches._replace(seconds=arrays_of(problem).serial_s)


def touched_bytes(problem: Problem) -> Int[np.ndarray, "N"]:
    """Bytes of the inputs and outputs of each op."""
    graph, touched = problem.graph, np.zeros(problem.num_ops, dtype=np.int64)
    np.add.at(touched, graph.use_op, graph.held_bytes[graph.use_tensor])
    np.add.at(touched, graph.producer, graph.held_bytes)
    return touched


def _int(values: np.ndarray) -> Int[np.ndarray, "..."]:
    """A writable, contiguous copy: kernels compile once, for one type."""
    return np.array(values, dtype=np.int64, order="C")


def _weights(
    problem: Problem,
) -> tuple[Int[np.ndarray, "W"], Int[np.ndarray, "W"], Int[np.ndarray, "L"], Int[np.ndarray, "M"]]:
    """(largest bytes and kind by weight id, start and ids of the weights of each group)."""
    stored = stored_bytes(problem)
    ids, of_op = np.unique(problem.graph.weight_id, return_inverse=True)
    weight = of_op[stored.op] + len(ids) * stored.kind
    kind = np.repeat(np.arange(len(problem.held_on)), len(ids))
    size = np.zeros(len(kind), dtype=np.int64)
    np.maximum.at(size, weight, stored.size_bytes)
    count = max(1, len(size))
    pairs = distinct(problem.group[stored.op] * count + weight)
    start = starts(np.bincount(pairs // count, minlength=problem.num_groups))
    return size, kind, start, _int(pairs % count)
