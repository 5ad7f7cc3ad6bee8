"""The simulator again, slow and obvious, in plain Python: what the fast one must equal to the bit.

It follows the rules one by one and shares no code with `gdp.sim`: at every instant it looks at
every op, every transfer and every device anew. O(instants * (N + E)).
"""

import itertools
import math
from dataclasses import dataclass, field, replace

from gdp.graph.op_graph import BUFFER, INPUT, OUTPUT, UNREAD
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks

LAUNCH_NOTHING = (INPUT, OUTPUT, UNREAD, BUFFER)
"""Types of ops that no device dispatches."""


@dataclass
class Sent:
    """One transfer."""

    tensor: int
    source: int
    destination: int
    start_s: float
    arrive_s: float


@dataclass
class Run:
    """Everything that happened in one run."""

    start_s: list[float]
    finish_s: list[float]
    sent: list[Sent] = field(default_factory=list)  # in order of request
    busy_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    latency_s: float = 0.0


def tables(problem: Problem) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The tensors each op reads, those it makes, and the ops that read each tensor."""
    graph = problem.graph
    reads: list[list[int]] = [[] for _ in range(graph.num_ops)]
    makes: list[list[int]] = [[] for _ in range(graph.num_ops)]
    readers: list[list[int]] = [[] for _ in range(graph.num_tensors)]
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        reads[op].append(tensor)
        readers[tensor].append(op)
    for tensor, op in enumerate(graph.producer.tolist()):
        makes[op].append(tensor)
    return reads, makes, readers


def op_seconds(problem: Problem, device: list[int], op: int, reads: list[list[int]]) -> float:
    """Compute plus dispatch."""
    return float(problem.compute_s[op, device[op]]) + dispatch_seconds(problem, device, op, reads)


def dispatch_seconds(problem: Problem, device: list[int], op: int, reads: list[list[int]]) -> float:
    """What an op pays beside its compute."""
    graph, here, seconds = problem.graph, problem.cluster.devices[device[op]], 0.0
    if graph.op_types[op] in LAUNCH_NOTHING:
        return seconds
    if here.dispatch_per == "op":
        return seconds + here.dispatch_s
    makers = [int(graph.producer[tensor]) for tensor in reads[op]]
    if not makers or any(
        device[maker] != device[op] or graph.op_types[maker] == INPUT for maker in makers
    ):
        seconds += here.dispatch_s
    return seconds


def transfer_seconds(problem: Problem, tensor: int, source: int, destination: int) -> float:
    """Latency plus the bytes of all runs over bandwidth, in whole ticks."""
    cluster, graph = problem.cluster, problem.graph
    size = float(graph.tensor_bytes[tensor]) * float(graph.repeats[graph.producer[tensor]])
    bandwidth = float(cluster.link_bytes_per_s[source, destination])
    seconds = float(cluster.link_latency_s[source, destination]) + size / bandwidth
    grid = problem.unit.grid
    return seconds if math.isinf(seconds) else round(seconds / grid) * grid


def run(problem: Problem, device: list[int], rank: list[int] | None = None) -> Run:
    """Simulate one placement."""
    unit_s, problem = problem.unit.seconds, in_ticks(problem)
    graph, cluster = problem.graph, problem.cluster
    n, d = graph.num_ops, cluster.num_devices
    reads, makes, readers = tables(problem)
    if rank is not None and len(set(rank)) == 1:
        rank = None
    result = Run(start_s=[math.inf] * n, finish_s=[math.inf] * n, busy_s=[0.0] * d)
    present: set[tuple[int, int]] = set()  # (tensor, device)
    ready_s: dict[int, float] = {}  # ops that are ready or started
    running: dict[int, int] = {}  # device -> op
    flying: list[Sent] = []
    channel_free_s: dict[int, float] = {}
    now_s = 0.0
    while True:
        # A round: what happens at this instant because of earlier rounds.
        finished = sorted(op for op in running.values() if result.finish_s[op] == now_s)
        for op in finished:
            del running[device[op]]
            present.update((tensor, device[op]) for tensor in makes[op])
        arrived = [sent for sent in flying if sent.arrive_s == now_s]
        flying = [sent for sent in flying if sent.arrive_s != now_s]
        present.update((sent.tensor, sent.destination) for sent in arrived)
        for op in finished:
            for tensor in makes[op]:
                for destination in dict.fromkeys(device[reader] for reader in readers[tensor]):
                    if destination == device[op]:
                        continue
                    channel = int(cluster.channel[device[op], destination])
                    free_s = channel_free_s.get(channel, 0.0) if channel >= 0 else 0.0
                    start_s = max(free_s, now_s)
                    seconds = transfer_seconds(problem, tensor, device[op], destination)
                    sent = Sent(tensor, device[op], destination, start_s, start_s + seconds)
                    channel_free_s[channel] = sent.arrive_s
                    flying.append(sent)
                    result.sent.append(sent)
        for op in range(n):
            here = all((tensor, device[op]) in present for tensor in reads[op])
            if here and op not in ready_s:
                ready_s[op] = now_s
        for i in range(d):
            waiting = [op for op in ready_s if device[op] == i and math.isinf(result.start_s[op])]
            if i in running or not waiting:
                continue
            if rank is None:
                op = min(waiting, key=lambda op: (ready_s[op], op))
            else:
                op = min(waiting, key=lambda op: (rank[op], op))
            seconds = op_seconds(problem, device, op, reads)
            result.start_s[op], result.finish_s[op] = now_s, now_s + seconds
            result.busy_s[i] += seconds
            running[i] = op
        times = [result.finish_s[op] for op in running.values()]
        times += [sent.arrive_s for sent in flying]
        now_s = min(times, default=math.inf)
        if math.isinf(now_s):
            break
    result.latency_s = max(
        *result.finish_s, *processor_seconds(problem, device), *launch_seconds(problem, device)
    )
    result.peak_bytes = run_peaks(problem, device, result)
    return in_seconds(result, problem.unit.seconds / unit_s)


def processor_seconds(problem: Problem, device: list[int]) -> list[float]:
    """Seconds in ticks of each processor's ops and of the copies inside it, 0 for no name's."""
    reads, makes, readers = tables(problem)
    name = [here.processor for here in problem.cluster.devices]
    shared = {x for x in name if x and name.count(x) > 1}
    seconds = dict.fromkeys(shared, 0.0)
    for op in range(problem.graph.num_ops):
        own = name[device[op]]
        if own not in shared:
            continue
        seconds[own] += op_seconds(problem, device, op, reads)
        for tensor in makes[op]:
            for to in {device[reader] for reader in readers[tensor]} - {device[op]}:
                if name[to] == own:
                    seconds[own] += transfer_seconds(problem, tensor, device[op], to)
    return [*seconds.values(), 0.0]


def launch_seconds(problem: Problem, device: list[int]) -> list[float]:
    """Seconds in ticks of each thread that launches ops of devices without a shared processor."""
    if problem.launches is None:
        return [0.0]
    name = [here.processor for here in problem.cluster.devices]
    reads, seconds = tables(problem)[0], {-1: 0.0}
    for op, d in enumerate(device):
        thread = int(problem.launches.thread[d])
        if thread < 0 or (name[d] and name.count(name[d]) > 1):
            continue
        own = float(problem.launches.seconds[op, d]) + dispatch_seconds(problem, device, op, reads)
        seconds[thread] = seconds.get(thread, 0.0) + own
    return [*seconds.values()]


def overflow_bytes(problem: Problem, peaks: list[int]) -> int:
    """Bytes over devices' own memories, and what is within those over memories that they share."""
    over, pools = 0, {}
    for here, peak in zip(problem.cluster.devices, peaks, strict=True):
        over += max(0, peak - here.memory_bytes)
        if here.memory_pool:
            size, held = pools.get(here.memory_pool, (0, 0))
            within = held + min(peak, here.memory_bytes)
            pools[here.memory_pool] = max(size, here.memory_bytes), within
    return over + sum(max(0, held - size) for size, held in pools.values())


def in_seconds(run: Run, factor: float) -> Run:
    """Convert all times of a run from ticks."""
    sent = [replace(x, start_s=x.start_s * factor, arrive_s=x.arrive_s * factor) for x in run.sent]
    start_s, finish_s, busy_s = (
        [x * factor for x in times] for times in (run.start_s, run.finish_s, run.busy_s)
    )
    return Run(start_s, finish_s, sent, busy_s, run.peak_bytes, run.latency_s * factor)


def weight_bytes(problem: Problem, *ways: list[int]) -> list[int]:
    """Weights per device in all of some placements, each id once (the largest, where ops of one id
    disagree). Caches are weights where every device keeps its own, otherwise they count apart,
    where they lie."""
    graph, names = problem.graph, [x.name for x in problem.cluster.devices]
    home = [
        names.index(x.runs_on) if x.runs_on else i for i, x in enumerate(problem.cluster.devices)
    ]
    apart = home != [*range(problem.num_devices)] and graph.cache_bytes.any()
    held: dict[tuple[int, int, str], int] = {}
    for op, device in itertools.product(range(graph.num_ops), ways):
        i, w = device[op], int(graph.weight_id[op])
        weights, cache = int(graph.weight_bytes[op]), int(graph.cache_bytes[op]) if apart else 0
        for key, size in (((i, w, "weight"), weights - cache), ((home[i], w, "cache"), cache)):
            held[key] = max(held.get(key, 0), size)
    total = [0] * problem.num_devices
    for (i, _, _), size in held.items():
        total[i] += size
    return total


def held_bytes(problem: Problem, tensor: int) -> int:
    """Bytes that a device holds of a tensor: those of one part of one run, rounded up."""
    graph = problem.graph
    return math.ceil(int(graph.tensor_bytes[tensor]) / int(graph.chunks[graph.producer[tensor]]))


def run_peaks(problem: Problem, device: list[int], result: Run) -> list[int]:
    """Peak bytes of one run: the largest sum of what is held from <= time < until."""
    graph = problem.graph
    total = weight_bytes(problem, device)
    if math.isinf(result.latency_s):
        return total
    _, _, readers = tables(problem)
    peaks = []
    held: list[list[tuple[float, float, int]]] = [[] for _ in range(problem.num_devices)]
    for tensor in range(graph.num_tensors):
        maker, size = int(graph.producer[tensor]), held_bytes(problem, tensor)
        copies = [sent for sent in result.sent if sent.tensor == tensor]
        places = [(device[maker], result.start_s[maker], result.finish_s[maker])]
        places += [(sent.destination, sent.start_s, 0.0) for sent in copies]
        for i, begin_s, end_s in places:
            here = [op for op in readers[tensor] if device[op] == i]
            ends = [end_s] + [result.finish_s[op] for op in here]
            if i == device[maker]:
                ends += [sent.arrive_s for sent in copies]
            if any(graph.op_types[op] == OUTPUT for op in here):
                ends.append(math.inf)
            held[i].append((begin_s, max(ends), size))
    for i in range(problem.num_devices):
        sums = [
            sum(size for begin, end, size in held[i] if begin <= now < end) for now, _, _ in held[i]
        ]
        peaks.append(total[i] + max(sums, default=0))
    return peaks


def period(problem: Problem, device: list[int]) -> float:
    """The busiest device's, channel's, processor's or launching thread's seconds per sample."""
    unit_s, problem = problem.unit.seconds, in_ticks(problem)
    graph, cluster = problem.graph, problem.cluster
    reads, makes, readers = tables(problem)
    device_s = [0.0] * problem.num_devices
    channel_s: dict[int, float] = {}
    for op in range(graph.num_ops):
        device_s[device[op]] += op_seconds(problem, device, op, reads)
        for tensor in makes[op]:
            for destination in sorted({device[reader] for reader in readers[tensor]}):
                if destination != device[op]:
                    channel = int(cluster.channel[device[op], destination])
                    if channel < 0:
                        continue  # nothing queues there, so it bounds no pace
                    channel_s[channel] = channel_s.get(channel, 0.0) + transfer_seconds(
                        problem, tensor, device[op], destination
                    )
    busy_s = [*device_s, *channel_s.values(), *processor_seconds(problem, device)]
    busy_s += launch_seconds(problem, device)
    return max(busy_s) * (problem.unit.seconds / unit_s)


def pipeline_peaks(problem: Problem, device: list[int]) -> list[int]:
    """Peak bytes of a full pipeline, as `gdp.sim.memory` states it."""
    graph = problem.graph
    n = graph.num_ops
    _, _, readers = tables(problem)
    trains = bool(graph.is_backward.any())
    is_io = [kind in (INPUT, OUTPUT) for kind in graph.op_types]
    peaks = []
    for i in range(problem.num_devices):
        fixed = weight_bytes(problem, device)[i]
        intervals = []  # (first op, last op, bytes), in op ids
        stages_after = _stages_after(problem, device, is_io, i)
        for tensor in range(graph.num_tensors):
            maker, size = int(graph.producer[tensor]), held_bytes(problem, tensor)
            here = [op for op in readers[tensor] if device[op] == i]
            if device[maker] == i:
                sent = any(device[op] != i for op in readers[tensor])
                intervals.append((maker, n if sent else max([maker, *here]), size))
            elif here:
                fixed += 2 * size
            kept = any(graph.is_backward[op] for op in here) and not graph.is_backward[maker]
            if trains and kept:
                fixed += size * stages_after
        sums = [sum(s for a, b, s in intervals if a <= now <= b) for now in range(n)]
        peaks.append(fixed + max(sums))
    return peaks


def _stages_after(problem: Problem, device: list[int], is_io: list[bool], i: int) -> int:
    """How many devices have their first forward op after that of device i."""
    first: dict[int, int] = {}
    for op in range(problem.num_ops):
        if not is_io[op] and not problem.graph.is_backward[op]:
            first.setdefault(device[op], op)
    return sum(i in first and first[i] < other for other in first.values())
