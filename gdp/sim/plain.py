"""The simulator in plain Python: for a few placements, which need no compiled kernel.

The rules and, to the last bit, the answers of `gdp.sim.kernels`, whose first use costs seconds of
compilation or, where they were compiled before, of loading. All times are ticks.
"""

import math
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.graph.groups import inverse, lists, starts
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time
from gdp.sim.engine import arrays
from gdp.sim.memory import run_peaks
from gdp.sim.schedule import Schedule, Transfers


class _Sends(NamedTuple):
    """Tensors that leave the device of their maker, once for each that reads them, by maker. Axes:
    X sends, E uses."""

    tensor: Int[np.ndarray, "X"]
    source: Int[np.ndarray, "X"]  # device
    destination: Int[np.ndarray, "X"]
    seconds: Float[np.ndarray, "X"]
    channel: Int[np.ndarray, "X"]  # C where copies do not queue
    of_use: Int[np.ndarray, "E"]  # the send that a use waits for, -1 where none is needed


def simulated(
    problem: Problem, device: Int[np.ndarray, "N"], order: Int[np.ndarray, "N"] | None
) -> Schedule:
    """The schedule of one placement; the ops by priority, None for the one that was ready first."""
    sends = _sends(problem, device)
    schedule = _run(problem, device, order, sends)
    busiest_s = float(_serial_s(problem, device, sends).max(initial=0.0))
    return replace(
        schedule,
        peak_bytes=run_peaks(problem, schedule, device),
        latency_s=max(schedule.latency_s, busiest_s),
    )


def busy_seconds(
    problem: Problem, device: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "C"], Float[np.ndarray, "Q"]]:
    """Busy time per sample of each device, each channel, and each processor that devices share or
    thread that launches their ops."""
    sends, channels = _sends(problem, device), _num_channels(problem)
    busy_s = _sums(device, _op_seconds(problem, device), problem.num_devices)
    channel_s = _sums(sends.channel, sends.seconds, channels + 1)
    return busy_s, channel_s[:channels], _serial_s(problem, device, sends)


def _num_channels(problem: Problem) -> int:
    """C: channels on which transfers queue."""
    return len(np.unique(problem.cluster.channel[problem.cluster.queues]))


def _sends(problem: Problem, device: Int[np.ndarray, "N"]) -> _Sends:
    a, d = arrays(problem), problem.num_devices
    tensor, to = a.use_tensor, device[a.use_op]
    home = device[a.producer[tensor]]
    leaves = np.flatnonzero(home != to)
    _, first, number = np.unique((tensor * d + to)[leaves], return_index=True, return_inverse=True)
    by_request = np.argsort(first)  # of one tensor, destinations in the order of its readers
    of_use = np.full(len(tensor), -1)
    of_use[leaves] = inverse(by_request)[number]
    use = leaves[first[by_request]]
    tensor, source, to = tensor[use], home[use], to[use]
    link_s, rate = a.latency_s[source, to], a.bytes_per_s[source, to]
    seconds = send_time(link_s, a.sent_bytes[tensor], rate, a.round_to)
    return _Sends(tensor, source, to, seconds, a.channel[source, to], of_use)


def _opening_s(problem: Problem, device: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Seconds of each op's device to open a segment; 0 for ops that open none."""
    a, flat = arrays_of(problem), arrays(problem)
    opens = a.opens.copy()
    opens[flat.use_op[device[flat.use_op] != device[flat.producer[flat.use_tensor]]]] = True
    opens &= ~(a.is_io | problem.graph.rests)
    return np.where(opens, a.segment_s[device], 0.0)


def _op_seconds(problem: Problem, device: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Seconds that each op occupies its device for, with dispatch."""
    op_s = arrays_of(problem).compute_s[np.arange(len(device)), device]
    return op_s + _opening_s(problem, device)


def _serial_s(
    problem: Problem, device: Int[np.ndarray, "N"], sends: _Sends
) -> Float[np.ndarray, "Q"]:
    """Seconds of each processor that devices share, of ops and of copies inside it, and of each
    thread of the host that launches ops of several devices."""
    a, processor = arrays_of(problem), problem.cluster.processor
    if (a.serial < 0).all():
        return np.zeros(0)
    of_op, own = a.serial[device], processor[sends.source]
    on, inside = of_op >= 0, (own >= 0) & (own == processor[sends.destination])
    op_s = a.serial_s[np.arange(len(device)), device] + _opening_s(problem, device)
    added_s = np.concatenate([op_s[on], sends.seconds[inside]])
    return _sums(np.concatenate([of_op[on], own[inside]]), added_s, 1 + int(a.serial.max()))


def serial_seconds(
    problem: Problem, device: Int[np.ndarray, "N"], ops: Bool[np.ndarray, "N"]
) -> float:
    """Seconds that the busiest serial resource has of some ops, without copies."""
    a = arrays_of(problem)
    own, op_s = a.serial[device], a.serial_s[np.arange(len(device)), device]
    on, op_s = ops & (own >= 0), op_s + _opening_s(problem, device)
    return float(_sums(own[on], op_s[on], 0).max(initial=0.0))


def _sums(
    index: Int[np.ndarray, "M"], seconds: Float[np.ndarray, "M"], size: int
) -> Float[np.ndarray, "K"]:
    # An empty bincount forgets that its weights are floats.
    return np.bincount(index, seconds, size).astype(float)


def _readers(problem: Problem, sends: _Sends) -> tuple[list[int], list[int]]:
    """Ops that read what each op makes on its own device, and then what each send brings: (first
    reader of each, readers)."""
    a, n = arrays(problem), problem.num_ops
    shown_by = np.where(sends.of_use < 0, a.producer[a.use_tensor], n + sends.of_use)
    first, use = lists(shown_by.astype(np.int64), n + len(sends.tensor))
    return first.tolist(), a.use_op[use].tolist()


def _transfers(sends: _Sends, sent: list[tuple[int, float, float]]) -> Transfers:
    """Sends in the order in which they were requested, with their begin and end."""
    which = np.array([x for x, _, _ in sent], np.int64)
    begin_s, arrive_s = (np.array([row[i] for row in sent], float) for i in (1, 2))
    tensor, source, to = (part[which].astype(np.int64) for part in sends[:3])
    return Transfers(tensor, source, to, begin_s, arrive_s)


def _run(
    problem: Problem, device: Int[np.ndarray, "N"], order: Int[np.ndarray, "N"] | None,
    sends: _Sends,
) -> Schedule:  # fmt: skip
    """The schedule without its memory.

    Events of one instant that earlier ones cause are a round: ops end, by id, and transfers arrive;
    then the tensors of these ops are sent; then devices start ops. Events are
    (instant, op that ends) and (instant, N + send that arrives).
    """
    a, n, channels = arrays(problem), problem.num_ops, _num_channels(problem)
    first, reader = _readers(problem, sends)
    first_send = starts(np.bincount(a.producer[sends.tensor], minlength=n)).tolist()
    send_s, channel = sends.seconds.tolist(), sends.channel.tolist()
    missing = np.bincount(a.use_op, minlength=n).tolist()
    seconds, where = _op_seconds(problem, device).tolist(), device.tolist()
    position = None if order is None else inverse(order).tolist()
    start_s, finish_s, busy_s = [math.inf] * n, [math.inf] * n, [0.0] * problem.num_devices
    sent: list[tuple[int, float, float]] = []  # send, its begin and its end
    free_s = [0.0] * (channels + 1)
    ready: list[list[tuple[float, int]]] = [[] for _ in busy_s]
    idle, woken, now_s, done = [True] * len(busy_s), set(where), 0.0, 0
    events: list[tuple[float, int]] = []
    for op in a.source_op.tolist():
        heappush(ready[where[op]], (now_s if position is None else position[op], op))
    while True:
        for i in woken:
            if idle[i] and ready[i]:
                op = heappop(ready[i])[1]
                idle[i] = False
                start_s[op], finish_s[op] = now_s, now_s + seconds[op]
                busy_s[i] += seconds[op]
                heappush(events, (finish_s[op], op))
        if not events or events[0][0] == math.inf:
            break
        now_s = events[0][0]
        woken, ended = set[int](), list[int]()
        while events and events[0][0] == now_s:
            event = heappop(events)[1]
            if event < n:
                ended.append(event)
                idle[where[event]] = True
                woken.add(where[event])
            for k in range(first[event], first[event + 1]):
                op = reader[k]
                missing[op] -= 1
                if missing[op] == 0:
                    heappush(ready[where[op]], (now_s if position is None else position[op], op))
                    woken.add(where[op])
        done += len(ended)
        for op in ended:
            for x in range(first_send[op], first_send[op + 1]):
                begin_s = max(now_s, free_s[channel[x]])
                arrive_s = begin_s + send_s[x]
                if channel[x] < channels:
                    free_s[channel[x]] = arrive_s
                sent.append((x, begin_s, arrive_s))
                heappush(events, (arrive_s, n + x))
    return Schedule(
        start_s=np.array(start_s),
        finish_s=np.array(finish_s),
        transfers=_transfers(sends, sent),
        busy_s=np.array(busy_s),
        peak_bytes=np.zeros(len(busy_s), np.int64),
        latency_s=now_s if done == n else math.inf,
    )
