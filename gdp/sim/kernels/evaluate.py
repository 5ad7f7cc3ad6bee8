"""Latency, period and peak memory of placements; the rules of memory are in `gdp.sim.memory`."""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER, INNER_INLINE
from gdp.problem.weights_kernels import holder
from gdp.sim.engine import OPENS
from gdp.sim.kernels.direct import run_latency
from gdp.sim.kernels.events import run_events, sending_s, set_order

SUM, SCRATCH, NEXT_START, NEXT_FINISH = 0, 1, 2, 3  # columns of Workspace.hold


@numba.njit(**INNER)
@typing.no_type_check
def evaluate_with(a, w, device, by_rank, always):
    """Latency and overflow; with `always`, times, transfers and peaks are left in `w`."""
    record = always or (a.memory_binds and not fits_without_reuse(a, w, device))
    if always:  # transfers in the order of requests
        latency_s = run_events(a, w, device, by_rank, record)
    else:
        latency_s = run_latency(a, w, device, by_rank, record)
    if record:
        latency_peaks(a, w, device, latency_s)
    if a.is_serial:
        latency_s = max(latency_s, serial(a, w, device))
    if not record:
        return latency_s, np.int64(0)
    return latency_s, overflow(a, w)


@numba.njit(**INNER)
@typing.no_type_check
def serial(a, w, device):
    """Seconds that the busiest serial resource is busy for: a processor with the ops of its devices
    and the copies between them, or a thread of the host with launching ops.

    `serial_s` holds that of each.
    """
    w.serial_s[:] = 0.0
    for op in range(len(device)):
        own = a.serial[device[op]]
        if own >= 0:
            w.serial_s[own] += a.serial_s[op, device[op]] + opening_seconds(a, device, op)
    w.sent_to[:] = -1
    for tensor in range(len(a.producer)):
        home = device[a.producer[tensor]]
        own = a.processor[home]
        if own < 0:
            continue
        for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
            to = device[a.use_op[u]]
            if to != home and a.processor[to] == own and w.sent_to[to] != tensor:
                w.sent_to[to] = tensor
                w.serial_s[own] += sending_s(a, tensor, home, to)
    longest_s = 0.0
    for k in range(len(w.serial_s)):
        longest_s = max(longest_s, w.serial_s[k])
    return longest_s


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def evaluate(a, w, device, by_rank):
    """Latency in seconds and bytes over memory of one placement; see `gdp.sim.engine`."""
    return evaluate_with(a, w, device, by_rank, np.bool_(False))


@numba.njit(**INNER)
@typing.no_type_check
def overflow(a, w):
    """Bytes of `peak_bytes` over the devices' memories, and then over those that they share."""
    over = np.int64(0)
    for i in range(len(a.capacity_bytes)):
        over += max(0, w.peak_bytes[i] - a.capacity_bytes[i])
    for k in range(len(a.pool_bytes)):
        held = np.int64(0)
        for i in range(len(a.capacity_bytes)):
            if a.pool[i] == k:
                held += min(w.peak_bytes[i], a.capacity_bytes[i])
        over += max(0, held - a.pool_bytes[k])
    return over


@numba.njit(**INNER)
@typing.no_type_check
def weights(a, w, device):
    """Leave in `hold[:, SUM]` the bytes of weights and caches per device, each id once."""
    w.hold[:, SUM] = 0
    w.hold[:, SCRATCH] = 0
    k, count = 0, len(a.weight_op)
    while k < count:
        end = k + 1
        while end < count and a.weight_id[end] == a.weight_id[k]:
            end += 1
        kind = a.weight_kind[k]
        for member in range(k, end):
            i = holder(a, kind, np.int64(device[a.weight_op[member]]))
            more = a.weight_bytes[member] - w.hold[i, SCRATCH]
            if more > 0:
                w.hold[i, SUM] += more
                w.hold[i, SCRATCH] += more
        for member in range(k, end):
            w.hold[holder(a, kind, np.int64(device[a.weight_op[member]])), SCRATCH] = 0
        k = end


@numba.njit(**INNER)
@typing.no_type_check
def fits_without_reuse(a, w, device):
    """True if even all weights and tensors of each device together fit."""
    weights(a, w, device)
    for i in range(len(a.producer)):
        home = device[a.producer[i]]
        w.hold[home, SUM] += a.held_bytes[i]
        w.hold[home, SCRATCH] = i + 1
        for u in range(a.first_use[i], a.first_use[i + 1]):
            to = device[a.use_op[u]]
            if w.hold[to, SCRATCH] != i + 1:
                w.hold[to, SCRATCH] = i + 1
                w.hold[to, SUM] += a.held_bytes[i]
    fits = True
    for i in range(len(a.capacity_bytes)):
        fits &= w.hold[i, SUM] <= a.capacity_bytes[i]
    for k in range(len(a.pool_bytes)):
        held = np.int64(0)
        for i in range(len(a.capacity_bytes)):
            if a.pool[i] == k:
                held += w.hold[i, SUM]
        fits &= held <= a.pool_bytes[k]
    return fits


@numba.njit(**INNER)
@typing.no_type_check
def latency_peaks(a, w, device, latency_s):
    """Fill `peak_bytes` from the record of `run_events`; weights alone if the run never ended."""
    weights(a, w, device)
    for i in range(len(w.peak_bytes)):
        w.peak_bytes[i] = w.hold[i, SUM]
    if latency_s == np.inf:
        return
    _find_frees(a, w, device)
    _sort_by_lane(w)
    for i in range(a.op_s.shape[1]):
        _sweep(a, w, device, i)


@numba.njit(**INNER)
@typing.no_type_check
def _last_reader(a, w, device, tensor, i):
    """The op of device i that is last to finish reading a tensor, or -1; -2: held to the end."""
    last, last_s = -1, -1.0
    for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
        op = np.int64(a.use_op[u])
        if device[op] == i:
            if a.is_output[op]:
                return -2
            if w.finish_s[op] > last_s:
                last, last_s = op, w.finish_s[op]
    return last


@numba.njit(**INNER)
@typing.no_type_check
def _find_frees(a, w, device):
    """Attach the bytes of each tensor copy to the op or the transfer whose end frees it."""
    d = a.op_s.shape[1]
    w.free_bytes[:] = 0
    for tensor in range(len(a.producer)):
        op = np.int64(a.producer[tensor])
        stays = True
        for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
            stays &= device[a.use_op[u]] == device[op]
        if stays:  # the others follow with their transfers
            last = _last_reader(a, w, device, tensor, np.int64(device[op]))
            if last != -2:
                w.free_bytes[op if last == -1 else last] += a.held_bytes[tensor]
    k, count = 0, w.num_sent[0]
    while k < count:
        tensor = w.sent_tensor[k]
        latest = k
        while k < count and w.sent_tensor[k] == tensor:
            w.free_sent_bytes[k] = 0
            if w.sent_arrive_s[k] > w.sent_arrive_s[latest]:
                latest = k
            last = _last_reader(a, w, device, tensor, w.sent_lane[k] // d)
            if last != -2:
                w.free_bytes[last] += a.held_bytes[tensor]
            k += 1
        last = _last_reader(a, w, device, tensor, np.int64(device[a.producer[tensor]]))
        if last >= 0 and w.finish_s[last] > w.sent_arrive_s[latest]:
            w.free_bytes[last] += a.held_bytes[tensor]
        elif last != -2:
            w.free_sent_bytes[latest] += a.held_bytes[tensor]


@numba.njit(**INNER)
@typing.no_type_check
def _sort_by_lane(w):
    """Leave the transfers of lane l at sent_by_lane[stream[l, 1] : stream[l + 1, 1]], in order.

    And likewise in `arrived_by_lane` by arrival, which differs where copies do not queue.
    """
    w.stream[:, 1] = 0
    for k in range(w.num_sent[0]):
        w.stream[w.sent_lane[k] + 1, 1] += 1
    for lane in range(len(w.stream) - 1):
        w.stream[lane + 1, 1] += w.stream[lane, 1]
    for lane in range(len(w.stream)):
        w.stream[lane, 0] = w.stream[lane, 1]
    for k in range(w.num_sent[0]):
        lane = w.sent_lane[k]
        w.sent_by_lane[w.stream[lane, 0]] = k
        at = w.stream[lane, 0]
        while at > w.stream[lane, 1]:
            if w.sent_arrive_s[w.arrived_by_lane[at - 1]] <= w.sent_arrive_s[k]:
                break
            w.arrived_by_lane[at] = w.arrived_by_lane[at - 1]
            at -= 1
        w.arrived_by_lane[at] = k
        w.stream[lane, 0] += 1


@numba.njit(**INNER)
@typing.no_type_check
def _sweep(a, w, device, i):
    """The peak of device i: allocations in order of time, each after the frees up to its time."""
    d = a.op_s.shape[1]
    for j in range(d):
        w.stream[i * d + j, 0] = w.stream[i * d + j, 1]
        w.stream[j * d + i, 0] = w.stream[j * d + i, 1]
    started, finished = 0, 0
    held = w.peak_bytes[i]
    ops = np.int64(w.mark[d + i])  # started ops, section NEXT
    base = i * len(device)
    while True:
        now_s, lane = np.inf, -1
        if started < ops:
            now_s = w.start_s[w.queue_op[base + started]]
        for j in range(d):
            at = w.stream[i * d + j, 0]
            if at < w.stream[i * d + j + 1, 1]:
                start_s = w.sent_start_s[w.sent_by_lane[at]]
                if start_s < now_s:
                    now_s, lane = start_s, i * d + j
        if now_s == np.inf:
            return
        while finished < ops and w.finish_s[w.queue_op[base + finished]] <= now_s:
            held -= w.free_bytes[w.queue_op[base + finished]]
            finished += 1
        for j in range(d):
            at, end = w.stream[j * d + i, 0], w.stream[j * d + i + 1, 1]
            while at < end and w.sent_arrive_s[w.arrived_by_lane[at]] <= now_s:
                held -= w.free_sent_bytes[w.arrived_by_lane[at]]
                at += 1
            w.stream[j * d + i, 0] = at
        if lane < 0:
            held += a.output_bytes[w.queue_op[base + started]]
            started += 1
        else:
            held += a.held_bytes[w.sent_tensor[w.sent_by_lane[w.stream[lane, 0]]]]
            w.stream[lane, 0] += 1
        w.peak_bytes[i] = max(w.peak_bytes[i], held)


@numba.njit(**BARE)
@typing.no_type_check
def pipeline_peaks(a, w, device):
    """Fill `peak_bytes` for a pipeline that is full of samples; see `gdp.sim.memory`."""
    weights(a, w, device)
    w.free_bytes[:] = 0
    _pipeline_buffers(a, w, device)
    for i in range(len(w.peak_bytes)):
        w.peak_bytes[i] = w.hold[i, SUM]
    for op in range(len(device)):
        i = device[op]
        w.hold[i, SUM] += a.output_bytes[op]
        w.peak_bytes[i] = max(w.peak_bytes[i], w.hold[i, SUM])
        w.hold[i, SUM] -= w.free_bytes[op]


@numba.njit(**INNER)
@typing.no_type_check
def _pipeline_buffers(a, w, device):
    """Add to `hold` the buffers of received tensors and the sets kept for backward ops."""
    d = a.op_s.shape[1]
    trains = _devices_after(a, w, device)
    for tensor in range(len(a.producer)):
        source = np.int64(a.producer[tensor])
        home = device[source]
        size = a.held_bytes[tensor]
        last, sent = source, False
        w.hold[:, SCRATCH] = 0  # 1: the tensor is there, 2: and a backward op reads it
        for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
            op = np.int64(a.use_op[u])
            to = device[op]
            if to == home:
                last = op
            else:
                sent = True
                if w.hold[to, SCRATCH] == 0:
                    w.hold[to, SUM] += 2 * size
                    w.hold[to, SCRATCH] = 1
            if trains and a.is_backward[op] and not a.is_backward[source]:
                w.hold[to, SCRATCH] = 2
        if not sent:
            w.free_bytes[last] += size
        if trains:
            for i in range(d):
                if w.hold[i, SCRATCH] == 2:
                    w.hold[i, SUM] += size * w.hold[i, 3]


@numba.njit(**INNER)
@typing.no_type_check
def _devices_after(a, w, device):
    """Leave in `hold[:, 3]` how many stages follow each device's; whether the graph trains."""
    d = a.op_s.shape[1]
    never = len(device)
    w.hold[:, 2] = never  # first forward op
    w.hold[:, 3] = 0
    trains = False
    for op in range(len(device)):
        trains |= a.is_backward[op]
        if not a.is_backward[op] and not a.is_io[op]:
            w.hold[device[op], 2] = min(w.hold[device[op], 2], op)
    if trains:
        for i in range(d):
            for j in range(d):
                if w.hold[i, 2] < w.hold[j, 2] < never:
                    w.hold[i, 3] += 1
    return trains


@numba.njit(**INNER)
@typing.no_type_check
def period(a, w, device):
    """The period in seconds; leaves `busy_s` and, per channel, `channel_s` as busy seconds."""
    w.busy_s[:] = 0.0
    w.channel_s[:] = 0.0
    for op in range(len(device)):
        w.busy_s[device[op]] += op_seconds(a, device, op)
    w.sent_to[:] = -1
    for tensor in range(len(a.producer)):
        home = device[a.producer[tensor]]
        for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
            to = device[a.use_op[u]]
            if to != home and w.sent_to[to] != tensor:
                w.sent_to[to] = tensor
                w.channel_s[a.channel[home, to]] += sending_s(a, tensor, home, to)
    longest_s = 0.0
    for i in range(len(w.busy_s)):
        longest_s = max(longest_s, w.busy_s[i])
    for i in range(len(w.channel_s) - 1):  # the last is of links on which nothing queues
        longest_s = max(longest_s, w.channel_s[i])
    if a.is_serial:
        longest_s = max(longest_s, serial(a, w, device))
    return longest_s


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def op_seconds(a, device, op):
    """Seconds that an op occupies its device for, with dispatch."""
    return a.op_s[op, device[op]] + opening_seconds(a, device, op)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def opening_seconds(a, device, op):
    """Seconds of an op's device to open a segment, where the op opens one."""
    i = device[op]
    if a.has_segments and a.segment_s[i] > 0.0 and _opens(a, device, op):
        return a.segment_s[i]
    return 0.0


@numba.njit(**INNER)
@typing.no_type_check
def _opens(a, device, op):
    """True if an op opens a segment."""
    if a.is_io[op]:
        return False
    opens = (a.state[op] & OPENS) != 0
    for k in range(a.first_input[op], a.first_input[op + 1]):
        opens |= device[a.input_op[k]] != device[op]
    return opens


@numba.njit(**INNER)
@typing.no_type_check
def evaluate_period(a, w, device):
    """Period in seconds and bytes over memory of one placement."""
    period_s = period(a, w, device)
    if not a.pipeline_memory_binds:
        return period_s, np.int64(0)
    pipeline_peaks(a, w, device)
    return period_s, overflow(a, w)


@numba.njit(**BARE)
@typing.no_type_check
def evaluate_all(a, w, devices, orders, ranked, always, latency_s, overflow_bytes):
    """Latency and overflow of every placement.

    `orders` and `ranked` have no row, one for all placements, or one for each: the ops in order of
    priority, and whether it counts. With `always`, the last run's times, transfers and peaks are
    left in `w`.
    """
    by_rank = False
    for b in range(len(devices)):
        if b < len(ranked):
            by_rank = ranked[b]
            if by_rank:
                set_order(w, orders[b])
        latency_s[b], overflow_bytes[b] = evaluate_with(a, w, devices[b], by_rank, always)


@numba.njit(**BARE)
@typing.no_type_check
def evaluate_periods(a, w, devices, first, end, period_s, overflow_bytes):
    """Period and overflow of placements first..end."""
    for b in range(first, end):
        period_s[b], overflow_bytes[b] = evaluate_period(a, w, devices[b])
