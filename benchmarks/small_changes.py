"""Steps from one small problem to another: random changes, and things taken away."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.small_problems import (
    BYTES,
    CHANNELS,
    DELAYS,
    MOST_DEVICES,
    OFFLOAD,
    RATES,
    SECONDS,
    Op,
    Place,
    Small,
    Way,
    is_sound,
    pick,
    with_item,
)
from gdp.graph.op_graph import INPUT, OUTPUT


def _change_op(s: Small, rng: np.random.Generator) -> Small:
    """One property of one op."""
    at = int(rng.integers(len(s.ops)))
    name, options = pick(rng, (
        ("kind", ("Op", INPUT, OUTPUT)), ("weight_bytes", BYTES), ("cache_bytes", BYTES),
        ("weight", (-1, 0, 1)), ("together", (-1, -1, 0, 1)), ("repeats", (1, 1, 2, 5)),
        ("chunks", (1, 1, 2, 5)),
    ))  # fmt: skip
    op = s.ops[at]._replace(**{name: pick(rng, options)})
    s = replace(s, ops=with_item(s.ops, at, op))
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
        value = pick(rng, SECONDS) if rng.random() < 0.7 else float(rng.integers(1, 100)) / 10
    how = rng.random()
    if how < 0.15 and value is not None:
        rows = tuple(with_item(row, place, value) for row in s.seconds)
    elif how < 0.5 and value is not None:
        rows = with_item(s.seconds, op, tuple(value for _ in s.places))
    else:
        rows = with_item(s.seconds, op, with_item(s.seconds[op], place, value))
    return replace(s, seconds=rows)


def _change_tensor(s: Small, rng: np.random.Generator) -> Small:
    """Its bytes, or another one."""
    if not s.tensors or rng.random() < 0.2:
        maker = int(rng.integers(len(s.ops)))
        return replace(s, tensors=(*s.tensors, (maker, pick(rng, BYTES))))
    at = int(rng.integers(len(s.tensors)))
    return replace(s, tensors=with_item(s.tensors, at, (s.tensors[at][0], pick(rng, BYTES))))


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
    name, options = pick(rng, (
        ("memory_bytes", (0, 10, 20, 40, held, max(1, held // 2), int(rng.integers(1, 80)))),
        ("memory_bytes", tuple(max(1, s.places[at].memory_bytes + k) for k in (-3, -1, 1, 3))),
        ("dispatch_s", DELAYS), ("dispatch_per", ("op", "segment")), ("pool", ("", "ram", "ram")),
        ("processor", ("", "socket", "socket")), ("caches_on", (-1, *range(d))),
        ("kind", ("cpu", "gpu", OFFLOAD, OFFLOAD)),
    ))  # fmt: skip
    place = s.places[at]._replace(**{name: pick(rng, options)})
    places = with_item(s.places, at, place)
    if place.pool:  # a shared memory has one size
        places = tuple(
            p._replace(memory_bytes=place.memory_bytes) if p.pool == place.pool else p
            for p in places
        )
    return replace(s, places=places)


def _change_way(s: Small, rng: np.random.Generator) -> Small:
    """One property of one link, of both directions, or of all links."""
    i, j = rng.integers(len(s.places), size=2).tolist()
    name, options = pick(
        rng, (("bytes_per_s", RATES), ("latency_s", DELAYS), ("channel", CHANNELS))
    )
    value, how = pick(rng, options), rng.random()
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
    how, factor = int(rng.integers(4)), pick(rng, (2, 3, 10))
    if how == 0:
        return replace(s, host=int(rng.integers(len(s.places))))
    if how == 1:
        first = pick(rng, (len(s.ops), len(s.ops), len(s.ops) // 2))
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
        s, ops=(*s.ops, Op(weight_bytes=pick(rng, BYTES))),
        seconds=(*s.seconds, tuple(pick(rng, SECONDS) for _ in s.places)),
        tensors=(*s.tensors, (n, pick(rng, BYTES))),
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
                child = pick(rng, STEPS)(child, rng)
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
            places = with_item(small.places, at, place._replace(**{key: value}))
            plain.append(replace(small, places=places))
    for at, op in enumerate(small.ops):
        for key, value in Op()._asdict().items():
            plain.append(replace(small, ops=with_item(small.ops, at, op._replace(**{key: value}))))
    d = len(small.places)
    for i, j in itertools.permutations(range(d), 2):
        for key, value in Way()._asdict().items():
            row = with_item(small.ways[i], j, small.ways[i][j]._replace(**{key: value}))
            plain.append(replace(small, ways=with_item(small.ways, i, row)))
    for t, (maker, size) in enumerate(small.tensors):
        if size > 1:
            plain.append(replace(small, tensors=with_item(small.tensors, t, (maker, 1))))
    yield from (x for x in plain if x != small and is_sound(x))
