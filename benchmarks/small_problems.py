"""Small problems as plain data, drawn at random. The adversary (`benchmarks.adversary`) searches
among them by the steps of `benchmarks.small_changes`; `benchmarks.small_optimum` solves them.

What a problem may hold: inputs and outputs on a host, weights that ops share, caches and their
homes, ops that run several times or in parts, ops of no time, ops that must share a device, ops
barred from devices; memories that devices share, processors that they share, costs of starting ops
or pieces, offload devices; links that queue, share a channel or do not queue; replicated stages.
Axes: N ops, D devices.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gdp.cluster.types import NO_CHANNEL, UNLIMITED_BYTES, Device, make_cluster
from gdp.costs.offload import KINDS as OFFLOAD_KINDS
from gdp.errors import GdpError
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import in_ticks

OFFLOAD = OFFLOAD_KINDS["cpu"]
SECONDS = (0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 3.0, 7.0)
"""Of ops; few, so that events fall on one instant."""
BYTES = (0, 1, 1, 2, 5, 9, 30)
"""Of tensors and weights."""
RATES = (0.3, 1.0, 1.0, 2.0, 10.0, float("inf"))
DELAYS = (0.0, 0.0, 0.1, 0.5, 1.0)
OWN, FREE = "own", "free"
"""Channels of links: one of their own, and none, on which nothing queues. Others are names."""
CHANNELS = (OWN, OWN, FREE, "bus", "ring")
MOST_DEVICES = 4


class Op(NamedTuple):
    """An op, without its seconds."""

    kind: str = "Op"
    weight_bytes: int = 0
    cache_bytes: int = 0
    weight: int = -1  # ops of one number share a weight; -1: its own
    together: int = -1  # ops of one number share a device; -1: free
    repeats: int = 1
    chunks: int = 1


class Place(NamedTuple):
    """A device."""

    kind: str = "cpu"
    memory_bytes: int = 0  # 0: without limit
    dispatch_s: float = 0.0
    dispatch_per: str = "op"
    pool: str = ""
    processor: str = ""
    caches_on: int = -1  # another device; -1: this one


class Way(NamedTuple):
    """A link."""

    bytes_per_s: float = 1.0
    latency_s: float = 0.0
    channel: str = OWN


@dataclass(frozen=True)
class Small:
    """A small problem as tuples, so that it is one line of JSON."""

    objective: str
    replicas: bool
    host: int
    backward_from: int  # ops from this one on are of a backward pass; N: none
    ops: tuple[Op, ...]
    seconds: tuple[tuple[float | None, ...], ...]  # [N][D]; None: cannot run there
    barred: tuple[tuple[int, int], ...]  # (op, device) that the user forbids
    tensors: tuple[tuple[int, int], ...]  # (producer, bytes)
    uses: tuple[tuple[int, int], ...]  # (index of a tensor, op)
    places: tuple[Place, ...]
    ways: tuple[tuple[Way, ...], ...]  # [D][D]; the diagonal is not read

    def to_json(self) -> dict[str, Any]:
        """Lists and numbers; infinite rates are `null`."""
        row = asdict(self)
        row["ways"] = [
            [[None if w.bytes_per_s == np.inf else w.bytes_per_s, *w[1:]] for w in ways]
            for ways in self.ways
        ]
        return row

    @staticmethod
    def of_json(row: dict[str, Any]) -> "Small":
        """Inverse of `to_json`."""
        made: dict[str, Any] = {
            key: tuple(tuple(x) for x in row[key])
            for key in ("seconds", "barred", "tensors", "uses")
        }
        made["ways"] = tuple(
            tuple(Way(np.inf if w[0] is None else w[0], *w[1:]) for w in ways)
            for ways in row["ways"]
        )
        made["ops"] = tuple(Op(*x) for x in row["ops"])
        made["places"] = tuple(Place(*x) for x in row["places"])
        return Small(**(row | made))

    def problem(self) -> Problem:
        """The problem in ticks, made anew: nothing is known of it yet. Raises `GdpError` or
        `ValueError` where the data are none."""
        return in_ticks(self.in_seconds())

    def in_seconds(self) -> Problem:
        """The problem with times in seconds."""
        n, d = len(self.ops), len(self.places)
        order = sorted(range(len(self.tensors)), key=lambda t: self.tensors[t])
        number = {t: k for k, t in enumerate(order)}
        graph = make_graph(
            "small", [f"o{i}" for i in range(n)], [op.kind for op in self.ops],
            [self.tensors[t] for t in order], sorted({(number[t], op) for t, op in self.uses}),
            weight_bytes=[op.weight_bytes for op in self.ops],
            cache_bytes=[min(op.cache_bytes, op.weight_bytes) for op in self.ops],
            weight_id=[n + op.weight if op.weight >= 0 else i for i, op in enumerate(self.ops)],
            colocate=[n + op.together if op.together >= 0 else i for i, op in enumerate(self.ops)],
            repeats=[op.repeats for op in self.ops], chunks=[op.chunks for op in self.ops],
            is_backward=np.arange(n) >= self.backward_from,
        )  # fmt: skip
        compute_s = np.array(
            [[np.inf if x is None else x for x in row] for row in self.seconds], dtype=float
        )
        compute_s[graph.is_io] = np.inf
        compute_s[graph.is_io, self.host] = 0.0
        allowed = np.ones((n, d), dtype=bool)
        for op, place in self.barred:
            allowed[op, place] = graph.is_io[op]
        return make_problem(
            graph, self._cluster(), compute_s, self.objective, allowed=allowed,
            replicas=self.replicas,
        )  # fmt: skip

    def _cluster(self) -> Any:
        d = len(self.places)
        devices = [
            Device(
                f"d{i}", place.kind, {"default": 1.0}, 1.0, place.memory_bytes or UNLIMITED_BYTES,
                place.dispatch_s, place.dispatch_per, memory_pool=place.pool,
                processor=place.processor,
                caches_on=f"d{place.caches_on}" if place.caches_on not in (-1, i) else "",
            )
            for i, place in enumerate(self.places)
        ]  # fmt: skip
        cluster = make_cluster("small", devices, host=self.host)
        rate, latency, channel = np.full((d, d), np.inf), np.zeros((d, d)), np.zeros((d, d), int)
        ids: dict[str, int] = {}
        for i, j in itertools.permutations(range(d), 2):
            way = self.ways[i][j]
            rate[i, j], latency[i, j] = way.bytes_per_s, way.latency_s
            label = f"{i}>{j}" if way.channel == OWN else way.channel
            channel[i, j] = NO_CHANNEL if label == FREE else ids.setdefault(label, len(ids))
        return replace(cluster, link_bytes_per_s=rate, link_latency_s=latency, channel=channel)


def is_sound(small: Small) -> bool:
    """True if the data make a problem with something to place: indices in range, in order."""
    n, d = len(small.ops), len(small.places)
    kinds = [op.kind for op in small.ops]
    makers = [producer for producer, _ in small.tensors]
    if not (d >= 1 and n >= 1 and any(kind == "Op" for kind in kinds)):
        return False
    if any(kinds[maker] == OUTPUT for maker in makers):
        return False
    if any(not makers[t] < op or kinds[op] == INPUT for t, op in small.uses):
        return False
    try:
        small.problem()
    except (GdpError, ValueError):
        return False
    return True


def drawn(rng: np.random.Generator, objective: str, replicas: bool, most_ops: int) -> Small:
    """A random problem of plain devices; steps make it odd."""
    n, d = int(rng.integers(3, most_ops + 1)), int(rng.integers(2, MOST_DEVICES))
    small = Small(
        objective, replicas, 0, n,
        tuple(Op(weight_bytes=pick(rng, BYTES)) for _ in range(n)),
        tuple(tuple(pick(rng, SECONDS) for _ in range(d)) for _ in range(n)),
        (), tuple((op, pick(rng, BYTES)) for op in range(n)),
        tuple(
            (int(maker), op) for op in range(1, n) for maker in range(op)
            if rng.random() < 1.5 / op
        ),
        tuple(Place(memory_bytes=pick(rng, (0, 0, 15, 40))) for _ in range(d)),
        tuple(
            tuple(Way(pick(rng, RATES), pick(rng, DELAYS)) for _ in range(d)) for _ in range(d)
        ),
    )  # fmt: skip
    return small if is_sound(small) else drawn(rng, objective, replicas, most_ops)


def pick(rng: np.random.Generator, options: tuple[Any, ...]) -> Any:
    """One of the options."""
    return options[int(rng.integers(len(options)))]


def with_item(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """The row with another item at an index."""
    return (*row[:at], value, *row[at + 1 :])
