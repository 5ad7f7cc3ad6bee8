"""A problem as flat arrays, and the memory that one simulation works in.

For kernels that simulate many placements (local search, roll-outs), inside numba:

    from gdp.sim.engine import arrays, workspace
    from gdp.sim.kernels.events import set_order
    from gdp.sim.kernels.evaluate import evaluate
    flat, work = arrays(problem), workspace(problem)  # one workspace per thread
    latency_s, overflow = evaluate(flat, work, device, False)  # in a kernel, not in Python

`evaluate(EngineArrays, Workspace, device: int32 [N], by_rank: bool) -> (float64, int64)` is a numba
function for other kernels; it allocates nothing. With `by_rank` True the devices follow the order
that the last `set_order(work, order)` left in the workspace, else each takes the op that was ready
first. Overflow is in bytes, summed over devices; peaks are accounted only where
memory can bind (`flat.memory_binds`), else it is 0 at no cost.
`gdp.sim.kernels.direct.run_latency(flat, work, device, by_rank, record) -> float64` is the latency
alone, likewise for kernels; with `record` it leaves times and transfers in `work`.

This module loads no numba, so that it may be imported anywhere.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OUTPUT
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem, cached_on_problem, stored_bytes
from gdp.problem.ticks import send_time

CHUNK = 64  # arrivals per chunk of a lane, a power of two; see Workspace.entry_s
MAX_DEVICES = 1 << 12
# An op's state: missing inputs * PENDING | PAYS | device * 2 | OPENS
OPENS = 1  # the op opens a segment
PAYS = 2 * MAX_DEVICES  # it is neither input nor output, so that opening a segment costs it
PENDING = 8 * MAX_DEVICES


class EngineArrays(NamedTuple):
    """A problem for kernels. Axes: N ops, T tensors, E uses, D devices, S ops without inputs, H
    weights and caches of ops.

    What `problem.arrays.Arrays` holds, in the forms that the loops of the engine want: 32 bits
    where they chase indices, links and costs flat.
    """

    op_s: Float[np.ndarray, "N D"]  # compute, plus dispatch on devices that pay it per op
    segment_s: Float[np.ndarray, "D"]  # added to ops that open a segment
    has_segments: bool  # some segment_s is not zero
    state: UInt[np.ndarray, "N"]  # at the start, without the device
    is_io: Bool[np.ndarray, "N"]  # never pays dispatch
    is_output: Bool[np.ndarray, "N"]
    is_backward: Bool[np.ndarray, "N"]
    source_op: UInt[np.ndarray, "S"]  # ops that read nothing, ascending
    op_first_use: UInt[np.ndarray, "N+1"]  # uses of all tensors of op i: [i]..[i+1]
    first_use: UInt[np.ndarray, "T+1"]  # uses of tensor t
    use_op: UInt[np.ndarray, "E"]
    use_tensor: UInt[np.ndarray, "E"]
    use_pairs: UInt[np.ndarray, "2E"]  # (op, tensor) of each use
    first_input: UInt[np.ndarray, "N+1"]  # inputs of op i
    input_tensor: UInt[np.ndarray, "E"]
    input_op: UInt[np.ndarray, "E"]  # the producer of that tensor
    producer: UInt[np.ndarray, "T"]
    sent_bytes: Float[np.ndarray, "T"]  # over a link in one sample
    held_bytes: Int[np.ndarray, "T"]
    output_bytes: Int[np.ndarray, "N"]  # held by all tensors of an op
    latency_s: Float[np.ndarray, "D D"]
    bytes_per_s: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]  # 0..C-1; C, where copies do not queue: it is always free
    op_s_flat: Float[np.ndarray, "N*D"]  # views and copies for the loops of the engine
    segment_pairs_s: Float[np.ndarray, "2D"]  # (0, segment_s) of each device
    link_pairs: Float[np.ndarray, "2DD"]  # (latency_s, bytes_per_s) of each link
    round_to: float  # see `gdp.problem.ticks.send_time`
    channel_flat: Int[np.ndarray, "D*D"]
    direct: bool  # each channel serves one device alone, and every transfer takes time
    host: int
    capacity_bytes: Int[np.ndarray, "D"]
    pool: Int[np.ndarray, "D"]  # of `problem.arrays.Arrays`, as the next four
    pool_bytes: Int[np.ndarray, "P"]
    processor: Int[np.ndarray, "D"]
    serial: Int[np.ndarray, "D"]
    serial_s: Float[np.ndarray, "N D"]
    is_serial: bool  # some devices have a serial resource
    weight_op: Int[np.ndarray, "H"]  # of `problem.StoredBytes`, as the next three
    weight_id: Int[np.ndarray, "H"]
    weight_bytes: Int[np.ndarray, "H"]
    weight_kind: Int[np.ndarray, "H"]
    held_on: Int[np.ndarray, "K D"]
    memory_binds: bool  # one run of some placement could overflow some device
    pipeline_memory_binds: bool  # a full pipeline of some placement could


class Workspace(NamedTuple):
    """Memory of one simulation. One per thread; the content between calls is unspecified.

    A lane is a pair (source, destination) of devices. Channels are first come first served, so a
    transfer's arrival is known when it is requested and the arrivals of a lane never overtake: a
    lane is a queue, kept in chunks of `CHUNK` entries (axis X) that are reused. Where copies do not
    queue a small one overtakes a large one, and takes its place in the lane before it. L = D * D
    lanes, C channels, K chunks, B = words of a set of N positions.
    """

    state: UInt[np.ndarray, "N"]  # see above
    queue_op: UInt[np.ndarray, "D*N"]  # each device's ops as they became ready, or by start
    clock_s: Float[np.ndarray, "X"]  # of devices and lanes, see kernels.events and .direct
    mark: UInt[np.ndarray, "Y"]  # the same for integers
    entry_s: Float[np.ndarray, "Z"]  # when an op gets an input, or all of them; Z >= N
    entry_op: UInt[np.ndarray, "Z"]
    ready_s: Float[np.ndarray, "N"]  # when an op has the inputs that are known, of the direct loop
    next_chunk: Int[np.ndarray, "2K"]  # of a chunk; then the one before it on its lane
    position: Int[np.ndarray, "N"]  # of an op in the order of (rank, op)
    by_position: Int[np.ndarray, "N"]  # its inverse
    ready_bits: UInt[np.ndarray, "D*B"]  # a set of positions for each device, in three levels
    start_s: Float[np.ndarray, "N"]
    finish_s: Float[np.ndarray, "N"]
    busy_s: Float[np.ndarray, "D"]
    sent_tensor: Int[np.ndarray, "E"]  # transfers in the order of requests
    sent_lane: Int[np.ndarray, "E"]  # to * D + from
    sent_start_s: Float[np.ndarray, "E"]
    sent_arrive_s: Float[np.ndarray, "E"]
    num_sent: Int[np.ndarray, "1"]
    done_op: Int[np.ndarray, "N"]  # ops in the order in which they ended
    num_done: Int[np.ndarray, "1"]
    channel_s: Float[np.ndarray, "C+1"]  # busy seconds, of throughput_kernels
    sent_to: Int[np.ndarray, "D"]  # the tensor last sent to each device, likewise
    serial_s: Float[np.ndarray, "Q"]  # busy seconds of serial resources
    free_bytes: Int[np.ndarray, "N"]  # scratch of memory_kernels, as all that follows
    free_sent_bytes: Int[np.ndarray, "E"]
    sent_by_lane: Int[np.ndarray, "E"]
    arrived_by_lane: Int[np.ndarray, "E"]
    stream: Int[np.ndarray, "M 2"]
    hold: Int[np.ndarray, "D 4"]
    peak_bytes: Int[np.ndarray, "D"]


@cached_on_problem
def arrays(problem: Problem) -> EngineArrays:
    """The problem's flat arrays. O(N D + E log E)."""
    graph, cluster, a = problem.graph, problem.cluster, arrays_of(problem)
    n, d = graph.num_ops, cluster.num_devices
    use_tensor = np.repeat(np.arange(graph.num_tensors), np.diff(a.use_start))
    num_inputs = np.diff(a.in_start)
    pays = np.where(a.is_io | graph.rests, 0, PAYS)
    channel = _channels(cluster)
    held = stored_bytes(problem)
    output_bytes = np.zeros(n, dtype=np.int64)
    np.add.at(output_bytes, a.producer, a.held_bytes)
    weight_bytes, all_bytes = int(graph.weight_bytes.sum()), int(a.held_bytes.sum())
    return EngineArrays(
        op_s=a.compute_s,
        segment_s=a.segment_s,
        has_segments=bool((a.segment_s > 0).any()),
        state=(num_inputs * PENDING + pays + a.opens * OPENS).astype(np.uint32),
        is_io=a.is_io,
        is_output=graph.has_type((OUTPUT,)),
        is_backward=a.is_backward,
        source_op=np.flatnonzero(num_inputs == 0).astype(np.uint32),
        op_first_use=a.use_start[a.out_start].astype(np.uint32),
        first_use=a.use_start.astype(np.uint32),
        use_op=a.use_op.astype(np.uint32),
        use_tensor=use_tensor.astype(np.uint32),
        use_pairs=np.stack([a.use_op, use_tensor], axis=1).astype(np.uint32).reshape(-1),
        first_input=a.in_start.astype(np.uint32),
        input_tensor=a.in_tensor.astype(np.uint32),
        input_op=a.producer[a.in_tensor].astype(np.uint32),
        producer=a.producer.astype(np.uint32),
        sent_bytes=a.sent_bytes.astype(np.float64),
        held_bytes=a.held_bytes,
        output_bytes=output_bytes,
        latency_s=a.latency_s,
        bytes_per_s=a.bytes_per_s,
        channel=channel,
        op_s_flat=a.compute_s.reshape(-1),
        segment_pairs_s=np.stack([np.zeros(d), a.segment_s], axis=1).reshape(-1),
        link_pairs=np.stack([a.latency_s, a.bytes_per_s], axis=2).reshape(-1),
        round_to=a.round_to,
        channel_flat=channel.reshape(-1),
        direct=_is_direct(cluster, channel, a),
        host=int(cluster.host),
        capacity_bytes=a.memory_bytes,
        pool=a.pool,
        pool_bytes=a.pool_bytes,
        processor=a.processor,
        serial=a.serial,
        serial_s=a.serial_s,
        is_serial=bool((a.serial >= 0).any()),
        weight_op=held.op,
        weight_id=held.id,
        weight_bytes=held.size_bytes,
        weight_kind=held.kind,
        held_on=a.held_on,
        memory_binds=_may_overflow(a, weight_bytes, all_bytes),
        # Two buffers of each tensor received, and one set for each stage that follows.
        pipeline_memory_binds=_may_overflow(a, weight_bytes, (d + 1) * all_bytes),
    )


def _may_overflow(a: Arrays, weight_bytes: int, tensor_bytes: int) -> bool:
    """True if a device, or devices that share a memory, may hold more than there is.

    Args:
        a: Of the problem.
        weight_bytes: Of all ops together, shared weights counted for each.
        tensor_bytes: That one device may hold; of a pool, each.
    """
    members = np.bincount(a.pool[a.pool >= 0], minlength=len(a.pool_bytes))
    alone = weight_bytes + tensor_bytes > int(a.memory_bytes.min())
    return alone or any(
        weight_bytes + int(count) * tensor_bytes > int(size)
        for count, size in zip(members, a.pool_bytes, strict=True)
    )


def _channels(cluster: Cluster) -> Int[np.ndarray, "D D"]:
    """Channel ids 0..C-1, or C where copies do not queue."""
    d, queues = cluster.num_devices, cluster.queues
    dense = np.zeros((d, d), dtype=np.int64)
    used, dense[queues] = np.unique(cluster.channel[queues], return_inverse=True)
    dense[~queues & ~np.eye(d, dtype=bool)] = len(used)
    return dense


def _is_direct(cluster: Cluster, channel: Int[np.ndarray, "D D"], a: Arrays) -> bool:
    """True if arrivals of a device's tensors depend on its own finishes alone."""
    source, to = np.nonzero(~np.eye(cluster.num_devices, dtype=bool))
    smallest = a.sent_bytes.min(initial=np.iinfo(np.int64).max)
    rates = a.latency_s[source, to], float(smallest), a.bytes_per_s[source, to]
    takes_time = send_time(*rates, a.round_to) > 0
    queues = cluster.queues[source, to]
    served = np.unique(np.stack([channel[source, to], source])[:, queues], axis=1)
    return bool(takes_time.all()) and len(np.unique(served[0])) == served.shape[1]


def workspace(problem: Problem) -> Workspace:
    """A workspace that fits the problem."""
    graph, d = problem.graph, problem.num_devices
    n, e = graph.num_ops, graph.num_uses
    # Every lane may leave one chunk half full.
    chunks = e // CHUNK + d * d + 1
    channels = len(np.unique(problem.cluster.channel[problem.cluster.queues])) + 1
    return Workspace(
        state=np.zeros(n, np.uint32),
        queue_op=np.zeros(d * n, np.uint32),
        clock_s=np.zeros(4 * d + d * d + channels),
        mark=np.zeros(5 * d + 2 * d * d, np.uint64),
        entry_s=np.zeros(max(n, chunks * CHUNK)),
        entry_op=np.zeros(max(n, chunks * CHUNK), np.uint32),
        ready_s=np.zeros(n),
        next_chunk=np.zeros(2 * chunks, np.int64),
        position=np.arange(n),
        by_position=np.arange(n),
        ready_bits=np.zeros(d * sum(level_words(n)), np.uint64),
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        busy_s=np.zeros(d),
        sent_tensor=np.zeros(e, np.int64),
        sent_lane=np.zeros(e, np.int64),
        sent_start_s=np.zeros(e),
        sent_arrive_s=np.zeros(e),
        num_sent=np.zeros(1, np.int64),
        done_op=np.zeros(n, np.int64),
        num_done=np.zeros(1, np.int64),
        channel_s=np.zeros(channels),
        sent_to=np.zeros(d, np.int64),
        serial_s=np.zeros(1 + int(arrays_of(problem).serial.max())),
        free_bytes=np.zeros(n, np.int64),
        free_sent_bytes=np.zeros(e, np.int64),
        sent_by_lane=np.zeros(e, np.int64),
        arrived_by_lane=np.zeros(e, np.int64),
        stream=np.zeros((d * d + 1, 2), np.int64),
        hold=np.zeros((d, 4), np.int64),
        peak_bytes=np.zeros(d, np.int64),
    )


def level_words(n: int) -> tuple[int, int, int]:
    """Words of each level of a set of n positions: 64 positions a word, 64 words a word above."""
    low = -(-n // 64)
    middle = -(-low // 64)
    return low, middle, -(-middle // 64)
