"""Small problems as plain data: drawn at random, changed one step at a time, and solved by trying
every placement. The adversary (`benchmarks.adversary`) searches among them.

What a problem may hold: inputs and outputs on a host, weights that ops share, caches and their
homes, ops that run several times or in parts, ops of no time, ops that must share a device, ops
barred from devices; memories that devices share, processors that they share, costs of starting ops
or pieces, offload devices; links that queue, share a channel or do not queue; replicated stages.
Axes: N ops, D devices.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import NO_CHANNEL, UNLIMITED_BYTES, Device, make_cluster
from gdp.costs.offload import KINDS as OFFLOAD_KINDS
from gdp.errors import GdpError
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.methods.base import Assignment
from gdp.methods.search.replica_groups import partitions
from gdp.placement import Teams
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import in_ticks
from gdp.sim.objectives import objective_of
from gdp.sim.score import may_replicate, score_of, values

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
        tuple(Op(weight_bytes=_pick(rng, BYTES)) for _ in range(n)),
        tuple(tuple(_pick(rng, SECONDS) for _ in range(d)) for _ in range(n)),
        (), tuple((op, _pick(rng, BYTES)) for op in range(n)),
        tuple(
            (int(maker), op) for op in range(1, n) for maker in range(op)
            if rng.random() < 1.5 / op
        ),
        tuple(Place(memory_bytes=_pick(rng, (0, 0, 15, 40))) for _ in range(d)),
        tuple(
            tuple(Way(_pick(rng, RATES), _pick(rng, DELAYS)) for _ in range(d)) for _ in range(d)
        ),
    )  # fmt: skip
    return small if is_sound(small) else drawn(rng, objective, replicas, most_ops)


def _pick(rng: np.random.Generator, options: tuple[Any, ...]) -> Any:
    return options[int(rng.integers(len(options)))]


def _with(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


def _change_op(s: Small, rng: np.random.Generator) -> Small:
    """One property of one op."""
    at = int(rng.integers(len(s.ops)))
    name, options = _pick(rng, (
        ("kind", ("Op", INPUT, OUTPUT)), ("weight_bytes", BYTES), ("cache_bytes", BYTES),
        ("weight", (-1, 0, 1)), ("together", (-1, -1, 0, 1)), ("repeats", (1, 1, 2, 5)),
        ("chunks", (1, 1, 2, 5)),
    ))  # fmt: skip
    op = s.ops[at]._replace(**{name: _pick(rng, options)})
    s = replace(s, ops=_with(s.ops, at, op))
    if op.kind == OUTPUT:
        return _without_tensors(s, at)
    return replace(s, uses=tuple(u for u in s.uses if u[1] != at)) if op.kind == INPUT else s


def _without_tensors(s: Small, op: int) -> Small:
    """The problem without what one op makes."""
    kept = [t for t, (maker, _) in enumerate(s.tensors) if maker != op]
    number = {t: k for k, t in enumerate(kept)}
    return replace(
        s, tensors=tuple(s.tensors[t] for t in kept),
        uses=tuple((number[t], o) for t, o in s.uses if t in number),
    )  # fmt: skip


def _change_seconds(s: Small, rng: np.random.Generator) -> Small:
    """Of one op on one device or on all, or of all ops on one device."""
    op, place, value = int(rng.integers(len(s.ops))), int(rng.integers(len(s.places))), None
    if rng.random() < 0.93:
        value = _pick(rng, SECONDS) if rng.random() < 0.7 else float(rng.integers(1, 100)) / 10
    how = rng.random()
    if how < 0.15 and value is not None:
        rows = tuple(_with(row, place, value) for row in s.seconds)
    elif how < 0.5 and value is not None:
        rows = _with(s.seconds, op, tuple(value for _ in s.places))
    else:
        rows = _with(s.seconds, op, _with(s.seconds[op], place, value))
    return replace(s, seconds=rows)


def _change_tensor(s: Small, rng: np.random.Generator) -> Small:
    """Its bytes, or another one."""
    if not s.tensors or rng.random() < 0.2:
        maker = int(rng.integers(len(s.ops)))
        return replace(s, tensors=(*s.tensors, (maker, _pick(rng, BYTES))))
    at = int(rng.integers(len(s.tensors)))
    return replace(s, tensors=_with(s.tensors, at, (s.tensors[at][0], _pick(rng, BYTES))))


def _change_use(s: Small, rng: np.random.Generator) -> Small:
    """One more, or one less."""
    if s.uses and rng.random() < 0.5:
        at = int(rng.integers(len(s.uses)))
        return replace(s, uses=s.uses[:at] + s.uses[at + 1 :])
    if not s.tensors:
        return s
    tensor, op = int(rng.integers(len(s.tensors))), int(rng.integers(len(s.ops)))
    return replace(s, uses=tuple(sorted({*s.uses, (tensor, op)})))


def _change_place(s: Small, rng: np.random.Generator) -> Small:
    """One property of one device; memory often just beside what is needed."""
    at, d = int(rng.integers(len(s.places))), len(s.places)
    held = sum(op.weight_bytes for op in s.ops)
    name, options = _pick(rng, (
        ("memory_bytes", (0, 10, 20, 40, held, max(1, held // 2), int(rng.integers(1, 80)))),
        ("memory_bytes", tuple(max(1, s.places[at].memory_bytes + k) for k in (-3, -1, 1, 3))),
        ("dispatch_s", DELAYS), ("dispatch_per", ("op", "segment")), ("pool", ("", "ram", "ram")),
        ("processor", ("", "socket", "socket")), ("caches_on", (-1, *range(d))),
        ("kind", ("cpu", "gpu", OFFLOAD, OFFLOAD)),
    ))  # fmt: skip
    place = s.places[at]._replace(**{name: _pick(rng, options)})
    places = _with(s.places, at, place)
    if place.pool:  # a shared memory has one size
        places = tuple(
            p._replace(memory_bytes=place.memory_bytes) if p.pool == place.pool else p
            for p in places
        )
    return replace(s, places=places)


def _change_way(s: Small, rng: np.random.Generator) -> Small:
    """One property of one link, of both directions, or of all links."""
    i, j = rng.integers(len(s.places), size=2).tolist()
    name, options = _pick(
        rng, (("bytes_per_s", RATES), ("latency_s", DELAYS), ("channel", CHANNELS))
    )
    value, how = _pick(rng, options), rng.random()
    return replace(s, ways=tuple(
        tuple(
            way._replace(**{name: value})
            if how < 0.2 or (a, b) == (i, j) or (how < 0.6 and (b, a) == (i, j)) else way
            for b, way in enumerate(row)
        )
        for a, row in enumerate(s.ways)
    ))  # fmt: skip


def _change_bar(s: Small, rng: np.random.Generator) -> Small:
    """Forbid an op a device, or allow it again."""
    pair = int(rng.integers(len(s.ops))), int(rng.integers(len(s.places)))
    return replace(s, barred=tuple(sorted({*s.barred} ^ {pair})))


def _change_whole(s: Small, rng: np.random.Generator) -> Small:
    """The host, the backward pass, or all seconds or bytes scaled."""
    how, factor = int(rng.integers(4)), _pick(rng, (2, 3, 10))
    if how == 0:
        return replace(s, host=int(rng.integers(len(s.places))))
    if how == 1:
        first = _pick(rng, (len(s.ops), len(s.ops), len(s.ops) // 2))
        return replace(s, backward_from=first)
    if how == 2:
        tensors = tuple((maker, factor * size) for maker, size in s.tensors)
        is_large = max((size for _, size in tensors), default=0) > 10**6
        return s if is_large else replace(s, tensors=tensors)
    rows = tuple(tuple(x if x is None else round(x / 2, 6) for x in row) for row in s.seconds)
    return replace(s, seconds=rows)


def _add_op(s: Small, rng: np.random.Generator) -> Small:
    """Another op behind the others, which reads some of them."""
    n = len(s.ops)
    makers = rng.integers(len(s.tensors), size=int(rng.integers(3))) if s.tensors else ()
    return replace(
        s, ops=(*s.ops, Op(weight_bytes=_pick(rng, BYTES))),
        seconds=(*s.seconds, tuple(_pick(rng, SECONDS) for _ in s.places)),
        tensors=(*s.tensors, (n, _pick(rng, BYTES))),
        uses=tuple(sorted({*s.uses, *((int(t), n) for t in makers)})),
        backward_from=s.backward_from + (s.backward_from >= n),
    )  # fmt: skip


def without_op(s: Small, op: int) -> Small:
    """The problem without one of its ops and its tensors."""
    s = _without_tensors(s, op)
    return replace(
        s, ops=s.ops[:op] + s.ops[op + 1 :], seconds=s.seconds[:op] + s.seconds[op + 1 :],
        barred=tuple((o - (o > op), d) for o, d in s.barred if o != op),
        tensors=tuple((maker - (maker > op), size) for maker, size in s.tensors),
        uses=tuple((t, o - (o > op)) for t, o in s.uses if o != op),
        backward_from=s.backward_from - (s.backward_from > op),
    )  # fmt: skip


def without_place(s: Small, place: int) -> Small:
    """The problem without one of its devices; the host is the first one where it was that."""

    def moved(d: int) -> int:
        return -1 if d == place else d - (d > place)

    def cut(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return row[:place] + row[place + 1 :]

    return replace(
        s, host=max(0, moved(s.host)), seconds=tuple(cut(row) for row in s.seconds),
        barred=tuple((o, moved(d)) for o, d in s.barred if d != place),
        places=tuple(p._replace(caches_on=moved(p.caches_on)) for p in cut(s.places)),
        ways=tuple(cut(row) for row in cut(s.ways)),
    )  # fmt: skip


def _drop_op(s: Small, rng: np.random.Generator) -> Small:
    return without_op(s, int(rng.integers(len(s.ops))))


def _add_place(s: Small, rng: np.random.Generator) -> Small:
    """A copy of a device, with its seconds and links."""
    like = int(rng.integers(len(s.places)))
    if len(s.places) >= MOST_DEVICES:
        return without_place(s, like)
    rows = [(*row, row[like]) for row in s.ways]
    return replace(
        s, seconds=tuple((*row, row[like]) for row in s.seconds),
        places=(*s.places, s.places[like]), ways=(*rows, rows[like]),
    )  # fmt: skip


STEPS: tuple[Callable[[Small, np.random.Generator], Small], ...] = (
    _change_seconds, _change_seconds, _change_op, _change_tensor, _change_use, _change_place,
    _change_way, _change_bar, _change_whole, _add_op, _drop_op, _add_place,
)  # fmt: skip


def changed(small: Small, rng: np.random.Generator, most_ops: int) -> Small:
    """The problem after one to four random steps; sound, and of `most_ops` ops at most."""
    while True:
        child = small
        for _ in range(int(rng.integers(1, 5))):
            if child.ops and child.places:
                child = _pick(rng, STEPS)(child, rng)
        if child != small and len(child.ops) <= most_ops and is_sound(child):
            return child


def simpler(small: Small) -> Iterator[Small]:
    """Sound problems that are this one with something taken away, the largest things first."""
    yield from filter(is_sound, (without_place(small, d) for d in range(len(small.places))))
    yield from filter(is_sound, (without_op(small, op) for op in range(len(small.ops))))
    plain: list[Small] = [replace(small, barred=(), backward_from=len(small.ops), host=0)]
    plain += [
        replace(small, uses=small.uses[:k] + small.uses[k + 1 :]) for k in range(len(small.uses))
    ]
    for at, place in enumerate(small.places):
        for key, value in Place()._asdict().items():
            places = _with(small.places, at, place._replace(**{key: value}))
            plain.append(replace(small, places=places))
    for at, op in enumerate(small.ops):
        for key, value in Op()._asdict().items():
            plain.append(replace(small, ops=_with(small.ops, at, op._replace(**{key: value}))))
    d = len(small.places)
    for i, j in itertools.permutations(range(d), 2):
        for key, value in Way()._asdict().items():
            row = _with(small.ways[i], j, small.ways[i][j]._replace(**{key: value}))
            plain.append(replace(small, ways=_with(small.ways, i, row)))
    for t, (maker, size) in enumerate(small.tensors):
        if size > 1:
            plain.append(replace(small, tensors=_with(small.tensors, t, (maker, 1))))
    yield from (x for x in plain if x != small and is_sound(x))


MOST_TRIED = 200_000
"""Placements with their orders that `optimum` simulates at most."""
MOST_TEAMS_TRIED = 3000


def optimum(problem: Problem) -> float | None:
    """The least value of all placements that fit, inf where none does; None where they are too
    many to try. Orders of ops are tried where the objective heeds them, replica groups where the
    problem allows them."""
    devices = _placements(problem, MOST_TRIED)
    if devices is None:
        return None
    found = [values(problem, devices)]
    if objective_of(problem).ordered:
        orders = _orders(problem, MOST_TRIED // len(devices))
        if orders is None:
            return None
        both = np.repeat(devices, len(orders), axis=0), np.tile(orders, (len(devices), 1))
        found.append(values(problem, *both))
    least = min(float(v[over == 0].min(initial=np.inf)) for v, over in found)
    if not may_replicate(problem):
        return least
    groups = [teams for teams in partitions(range(problem.num_devices)) if teams]
    if len(groups) * len(devices) > MOST_TEAMS_TRIED:
        return None
    work = ~problem.graph.is_io
    for teams in groups:
        behind = [d for team in teams for d in team[1:]]
        for device in devices[~np.isin(devices[:, work], behind).any(axis=1)]:
            if _may_serve(problem, device, teams):
                scored = score_of(problem, Assignment(device, teams=teams))
                least = min(least, scored.value_s) if scored.feasible else least
    return least


def _placements(problem: Problem, most: int) -> Int[np.ndarray, "B N"] | None:
    """Every placement that keeps groups together and ops where they may run; None for too many."""
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    if np.prod([float(len(row)) for row in choices]) > most:
        return None
    return np.array(list(itertools.product(*choices)), dtype=np.int64)[:, problem.group]


def _orders(problem: Problem, most: int) -> Int[np.ndarray, "B N"] | None:
    """Ranks of every topological order of the ops; None for too many.

    An order in which ops start is topological and, as ranks, starts them so again: no other ranks
    make another schedule."""
    n, (src, dst) = problem.num_ops, problem.graph.edges
    before = [set(src[dst == op].tolist()) for op in range(n)]
    found: list[list[int]] = []
    stack: list[list[int]] = [[]]
    while stack:
        order = stack.pop()
        if len(order) == n:
            found.append(order)
            if len(found) > most:
                return None
            continue
        done = set(order)
        stack += [[*order, op] for op in range(n) if op not in done and before[op] <= done]
        if len(stack) > 50 * most + 1000:
            return None
    return np.argsort(np.array(found, dtype=np.int64), axis=1)


def _may_serve(problem: Problem, device: Int[np.ndarray, "N"], teams: Teams) -> bool:
    """True if every member of a group may run the ops of its first."""
    work = ~problem.graph.is_io
    return all(problem.allowed[work & (device == team[0])][:, list(team)].all() for team in teams)
