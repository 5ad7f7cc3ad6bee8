"""Small problems for tests: hand-made ones with known answers, and random ones full of ties.

`from tiny import ...` works in every test, as pytest puts this folder on the path.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gdp.cluster.types import NO_CHANNEL, UNLIMITED_BYTES, Cluster, Device, Link, make_cluster
from gdp.graph.op_graph import BUFFER, INPUT, OUTPUT, UNREAD, OpGraph, make_graph
from gdp.graph.request import DECODE, PREFILL, Request
from gdp.problem.problem import Launches, Problem, make_problem
from gdp.problem.ticks import in_ticks
from gdp.sim.latency import simulate
from gdp.sim.score import values


def cpu(name: str, **fields) -> Device:
    """A device of 1 FLOP/s and 1 byte/s, so that costs can be read off."""
    return Device(name, "cpu", {"default": 1.0}, 1.0, **fields)


def unit_cluster(num_devices: int = 2, latency_s: float = 0.0, **fields) -> Cluster:
    """Equal devices d0, d1, ... whose links carry one byte per second."""
    devices = [cpu(f"d{i}", **fields) for i in range(num_devices)]
    return make_cluster("unit", devices, default_bytes_per_s=1.0, default_latency_s=latency_s)


def plain_graph(
    num_ops: int, edges: Sequence[tuple[int, int]], sizes: Sequence[int] | int = 1, **fields
) -> OpGraph:
    """Ops o0, o1, ... that make one tensor each (`sizes` bytes), read along the edges."""
    size_of = [sizes] * num_ops if isinstance(sizes, int) else sizes
    return make_graph(
        "plain",
        [f"o{i}" for i in range(num_ops)],
        fields.pop("op_types", ["Op"] * num_ops),
        list(enumerate(size_of)),
        edges,
        **fields,
    )


def fork_join(objective: str = "latency", latency_s: float = 0.0) -> Problem:
    """a -> b, c -> d on two devices; a 1 s, b 2 s, c 3 s, d 1 s, every tensor 1 byte (1 s to send).

    On one device 7 s, and that is also the best latency: with b or c elsewhere, a is sent (1 s)
    and the result sent back (1 s): 1 + max(3, 1 + 2 + 1) + 1 = 6 s for b, so 6 s is the optimum.
    Best period: {c} | {a, b, d} is max(3, 4, 1 s each way) = 4 s; no split of 7 s is better than
    4 and 3.
    """
    graph = plain_graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    compute_s = np.repeat(np.array([[1.0], [2.0], [3.0], [1.0]]), 2, axis=1)
    return make_problem(graph, unit_cluster(2, latency_s), compute_s, objective)


NAMES = ("cpu", "gpu1", "gpu0", "fast", "cuda:0", "a b")
"""Of devices, none of which says what it is."""


def sharing(rng: np.random.Generator, devices: list[Device]) -> list[Device]:
    """The devices, of which some share a memory and some a processor, now and then."""
    pooled = rng.random(len(devices)) < rng.choice([0.0, 0.0, 0.8])
    joined = rng.random(len(devices)) < rng.choice([0.0, 0.0, 0.7])
    size = int(rng.choice([18, 30, 45]))
    shared = [
        replace(device, memory_pool="ram", memory_bytes=size) if a else device
        for device, a in zip(devices, pooled, strict=True)
    ]
    return [
        replace(device, processor="socket") if b else device
        for device, b in zip(shared, joined, strict=True)
    ]


def keeping_caches(rng: np.random.Generator, devices: list[Device]) -> list[Device]:
    """The devices, of which some keep their caches on another one, now and then."""
    away = rng.random(len(devices)) < rng.choice([0.0, 0.6])
    home = rng.integers(len(devices), size=len(devices))
    return [
        replace(device, runs_on=devices[h].name) if moves else device
        for device, h, moves in zip(devices, home, away, strict=True)
    ]


def random_cluster(rng: np.random.Generator, num_devices: int, varied: bool = False) -> Cluster:
    """Devices and links with ties, zero latencies, infinite bandwidths and shared channels.

    If `varied`, some share a memory, a processor or both, or keep their caches on another one;
    names say nothing, and some copies do not queue.
    """
    more = rng.spawn(1)[0]
    names = more.permutation(NAMES)[:num_devices].tolist() if varied else []
    names += [f"d{i}" for i in range(len(names), num_devices)]
    devices = [
        cpu(
            names[i],
            memory_bytes=int(rng.choice([10, 40, UNLIMITED_BYTES])),
            dispatch_s=float(rng.choice([0.0, 0.5, 1.0])),
            dispatch_per=str(rng.choice(["op", "segment"])),
        )
        for i in range(num_devices)
    ]
    links = []
    for i in range(num_devices):
        for j in range(num_devices):
            if i != j and rng.random() < 0.8:
                link = Link(
                    names[i],
                    names[j],
                    bytes_per_s=float(rng.choice([0.3, 1.0, 2.0, np.inf])),
                    latency_s=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
                    channel=[None, "bus", "ring"][rng.integers(3)],
                    one_way=True,
                )
                free = varied and link.channel is None and more.random() < 0.3
                links.append(replace(link, contention=not free))
    return make_cluster(
        "random",
        keeping_caches(more, sharing(more, devices)) if varied else devices,
        links,
        default_bytes_per_s=1.0,
        default_latency_s=0.0,
        host=int(rng.integers(num_devices)),
    )


def random_problem(
    seed: int,
    *,
    objective: str = "latency",
    num_ops: int = 24,
    num_devices: int = 3,
    runs: bool = False,
    varied: bool = False,
) -> Problem:
    """A random problem in which everything that can tie or be zero does so now and then; with
    `runs`, ops run several times in a sample, or in several parts. If `varied`, parts of the
    weights are caches, ops may be those of a request, one thread may launch the ops of several
    devices, and devices are as in `random_cluster`."""
    rng = np.random.default_rng(seed)
    ties = rng.random() < 0.5  # few distinct times, so that events fall on one instant
    cluster = random_cluster(rng, num_devices, varied)
    kinds = ["Op"] * num_ops
    num_inputs, num_outputs = int(rng.integers(0, 3)), int(rng.integers(0, 3))
    kinds[:num_inputs] = [INPUT] * num_inputs
    first_output = num_ops - num_outputs
    kinds[first_output:] = [OUTPUT] * num_outputs
    tensors, uses = [], []
    for op in range(first_output):
        for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
            tensors.append((op, int(rng.choice([0, 1, 2, 5, 9]))))
    for op in range(num_inputs, num_ops):
        made = [t for t, (maker, _) in enumerate(tensors) if maker < op]
        for t in rng.permutation(made)[: int(rng.integers(0, 4))]:
            uses.append((int(t), op))
    weight_bytes = rng.choice([0, 0, 3, 6], size=num_ops)
    cached = np.random.default_rng([seed, 2]).choice([0, 1, 2, 6], size=num_ops) * varied
    # Ops that neither read nor make anything may be weights or room at rest, which launch nothing.
    alone = set(range(num_inputs, first_output))
    alone -= {maker for maker, _ in tensors} | {reader for _, reader in uses}
    at_rest = [op for op in sorted(alone) if np.random.default_rng([seed, op, 3]).random() < 0.5]
    for op in at_rest:
        kinds[op] = UNREAD if np.random.default_rng([seed, op, 4]).random() < 0.5 else BUFFER
    graph = make_graph(
        "random",
        [f"o{i}" for i in range(num_ops)],
        kinds,
        tensors,
        uses,
        weight_bytes=weight_bytes,
        cache_bytes=np.minimum(cached, weight_bytes),
        weight_id=rng.integers(num_ops, size=num_ops),
        is_backward=np.arange(num_ops) >= rng.choice([num_ops // 2, num_ops]),
    )
    graph = _with_runs(graph, seed) if runs else graph
    graph = _with_request(graph, seed) if varied else graph
    if ties:
        compute_s = rng.choice([0.0, 1.0, 2.0], size=(num_ops, num_devices))
    else:
        compute_s = rng.uniform(0.0, 2.0, size=(num_ops, num_devices))
    compute_s[at_rest] = 0.0
    compute_s[graph.is_io] = np.inf
    compute_s[graph.is_io, cluster.host] = 0.0
    launches = _launched(compute_s, seed, ties) if varied else None
    return in_ticks(make_problem(graph, cluster, compute_s, objective, launches=launches))


def _launched(compute_s: np.ndarray, seed: int, ties: bool) -> Launches | None:
    """Now and then a thread of the host launches the ops of several devices, or each of two does,
    in less or more time than they take."""
    rng = np.random.default_rng([seed, 6])
    if rng.random() < 0.5:
        return None
    works = np.isfinite(compute_s) & (compute_s > 0)
    shape = compute_s.shape
    seconds = rng.choice([0.0, 1.0, 2.0], shape) if ties else rng.uniform(0.0, 2.0, shape)
    return Launches(np.where(works, seconds, 0.0), rng.integers(-1, 2, shape[1]))


def _with_runs(graph: OpGraph, seed: int) -> OpGraph:
    """Links carry the tensors of all runs, and devices hold those of one part of one."""
    rng = np.random.default_rng([seed, 1])
    repeats, chunks = rng.choice([1, 1, 2, 5], size=(2, graph.num_ops))
    return replace(graph, repeats=repeats, chunks=chunks)


def _with_request(graph: OpGraph, seed: int) -> OpGraph:
    """Now and then the ops are those of a request: its prompt, and from some op on its decode
    steps."""
    rng = np.random.default_rng([seed, 5])
    if rng.random() < 0.5:
        return graph
    steps = np.arange(graph.num_ops) >= rng.integers(graph.num_ops + 1)
    request = Request(prompt=int(rng.integers(1, 9)), new=int(rng.integers(1, 9)))
    if rng.random() < 0.5:
        request = request._replace(is_served=True, pass_tokens=int(rng.integers(9)))
    phase = np.where(steps, DECODE, PREFILL).astype(graph.phase.dtype)
    return replace(graph, phase=phase, request=request)


def without_queues(problem: Problem, seed: int, share: float = 0.5) -> Problem:
    """The same problem with a share of its links, drawn at random, on which nothing queues."""
    channel = problem.cluster.channel.copy()
    channel[np.random.default_rng(seed).random(channel.shape) < share] = NO_CHANNEL
    np.fill_diagonal(channel, 0)
    return replace(problem, cluster=replace(problem.cluster, channel=channel))


def without_processors(problem: Problem) -> Problem:
    """The same problem on devices that all compute at once and launch their own ops."""
    devices = tuple(replace(device, processor="") for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices), launches=None)


def with_memory(problem: Problem, limit: int) -> Problem:
    """The same problem with so many bytes on every device."""
    old = problem.cluster
    devices = tuple(replace(device, memory_bytes=limit) for device in old.devices)
    return replace(problem, cluster=replace(old, devices=devices))


def tight_latency(seed: int, num_devices: int, over: float) -> Problem:
    """A random run whose memory is so many times the least that any placement needs by itself."""
    problem = random_problem(seed, num_ops=7 if num_devices == 2 else 6, num_devices=num_devices)
    problem = without_queues(problem, seed) if seed % 4 == 3 else problem
    free = with_memory(problem, 1 << 40)
    least = min(int(simulate(free, device).peak_bytes.max()) for device in all_devices(free))
    return with_memory(free, max(1, int(least * over)))


def random_devices(problem: Problem, seed: int, count: int = 1) -> np.ndarray:
    """Placements [B, N] that put every op, on its own, on a random device that can run it."""
    rng = np.random.default_rng(seed)
    scores = np.where(problem.allowed, rng.random((count, *problem.allowed.shape)), -1.0)
    return scores.argmax(axis=2)


def all_devices(problem: Problem) -> np.ndarray:
    """Every placement [B, N] that keeps groups together and ops where they may run."""
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    by_group = np.array(list(itertools.product(*choices)), dtype=np.int64)
    return by_group[:, problem.group]


def brute_force_s(problem: Problem) -> float:
    """The optimum by trying every placement that fits, and every priority; inf where none fits.

    Priorities matter for latency, where they order a device, and for block latency, where they cut
    blocks in two: there ranks 0..2 for each op, as ties are what keeps a block whole.
    """
    devices = all_devices(problem)
    found = [values(problem, devices)]
    if problem.objective in ("latency", "block_latency"):
        ranks = _all_ranks(problem)
        both = np.repeat(devices, len(ranks), axis=0), np.tile(ranks, (len(devices), 1))
        found.append(values(problem, *_distinct(*both)))
    fits = np.concatenate([value_s[overflow == 0] for value_s, overflow in found])
    return float(fits.min(initial=np.inf))


def _all_ranks(problem: Problem) -> np.ndarray:
    """Every order [B, N] of the ops that work, for latency; every ranking 0..2 for blocks."""
    if problem.objective == "block_latency":
        return np.array(list(itertools.product(range(3), repeat=problem.num_ops)), dtype=np.int64)
    works = np.flatnonzero(~problem.graph.is_io)
    orders = np.array(list(itertools.permutations(range(1, len(works) + 1))), dtype=np.int64)
    ranks = np.zeros((len(orders), problem.num_ops), dtype=np.int64)
    ranks[:, works] = orders
    return ranks


def _distinct(devices: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Placements and ranks [B, N], each order of the ops of a device once: a rank becomes the
    number of smaller ones on its device."""
    beside = devices[:, :, None] == devices[:, None, :]
    own = np.zeros_like(ranks)
    for rank in range(int(ranks.max(initial=0))):
        own += (ranks > rank) & (beside & (ranks == rank)[:, None, :]).any(axis=2)
    rows = np.unique(np.concatenate([devices, own], axis=1), axis=0)
    return rows[:, : devices.shape[1]], rows[:, devices.shape[1] :]


def branches(weight_bytes: int = 1000) -> OpGraph:
    """a feeds b and c, d reads both: two devices help when transfers are cheap."""
    return make_graph(
        "branches", ["a", "b", "c", "d"], ["Conv"] * 4,
        [(0, 1000), (1, 1000), (2, 1000)], [(0, 1), (0, 2), (1, 3), (2, 3)],
        flop=[1e9, 5e9, 5e9, 1e9], weight_bytes=[weight_bytes] * 4,
    )  # fmt: skip


TOY = """
[[device]]
name = "core0"
flop_per_s = 70e9
bytes_per_s = 1e12

[[device]]
name = "core1"
flop_per_s = 70e9
bytes_per_s = 1e12
"""


SMALL_NETWORK = """
[network]
width = 8
heads = 2
sage_layers = 1
attention_layers = 0
head_width = 8
segment = 64
"""
"""Of recipes: a network that trains in seconds."""
