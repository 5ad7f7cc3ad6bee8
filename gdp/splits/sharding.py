"""The graph of one of the devices that divide the layers of a decoder, and their exchanges.

The graph has the ops of the whole one, in their order, with the member's part of weights, caches,
FLOPs, traffic, tensors and shapes, so that every cost model reads it as any other graph. A member
reads everything that its columns multiply, and makes everything that its rows add to.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import ModelError
from gdp.graph.generation import CACHE_AT
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.splits.division import Division, Pieces, Role, Unit, linear_products

_OF_HEADS = (Pieces.HEADS, Pieces.KEYS, Pieces.BOTH)
BLOCK = 32
"""Columns that stay together where shares differ: of these, quantised weights share a scale."""


class Shares(NamedTuple):
    """Shares of the members of a split, and how experts are divided."""

    parts: tuple[int, ...]  # in proportion to each other
    experts: bool = False  # each member has whole experts, not columns of all

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.parts)

    @property
    def is_even(self) -> bool:
        """True where all members have one share."""
        return len(set(self.parts)) == 1


def in_whole_units(rates: Sequence[float], units: int) -> tuple[int, ...]:
    """Units of each member in proportion to its rate, at least one, by largest remainders.

    >>> in_whole_units([7.0, 3.0], 10), in_whole_units([100.0, 1.0], 4)
    ((7, 3), (3, 1))
    """
    wanted = [max(1.0, units * rate / sum(rates)) for rate in rates]
    own = [int(size) for size in wanted]
    while sum(own) != units:
        step = 1 if sum(own) < units else -1
        gains = [step * (w - o) for w, o in zip(wanted, own, strict=True)]
        gains = [g if o + step >= 1 else -np.inf for g, o in zip(gains, own, strict=True)]
        own[int(np.argmax(gains))] += step
    return tuple(own)


class Exchange(NamedTuple):
    """A collective of all members behind an op."""

    op: int
    operation: str  # "all_reduce" or "all_gather"
    size_bytes: int  # of the whole tensor, in one run of the op
    parts: int  # that it is sent in, one after the other


def member_graph(division: Division, shares: Shares, rank: int) -> OpGraph:
    """The graph of the member `rank`; where there is but one the whole graph.

    Weights and caches of the members add up to those of the graph, except for those that each has:
    of norms, routers, latents, and of heads of keys where there are more members. O(N).

    Raises:
        ModelError: The layers do not divide so in whole units.
    """
    graph = division.graph
    if shares.size == 1:
        return graph
    plan = division.experts if shares.experts else division.columns
    used = set(plan.unit.tolist())  # columns of experts are none where experts are whole

    def span_of(index: int, unit: Unit) -> tuple[int, int, int]:
        return unit_span(unit, shares, rank) if index in used else (0, 1, 1)

    spans = [span_of(i, unit) for i, unit in enumerate(division.units)]
    start, stop, count = (
        np.array([*(span[k] for span in spans), (0, 1, 1)[k]])[plan.unit] for k in range(3)
    )
    part = (stop - start) / count
    role = plan.role
    held = graph.weight_bytes - graph.cache_bytes
    of_keys = (
        span_of(i, Unit(Pieces.KEYS, u.keys, u.keys) if u.kind in _OF_HEADS else u)
        for i, u in enumerate(division.units)
    )
    keys = np.array([*((last - first) / all_ for first, last, all_ in of_keys), 1.0])[plan.unit]
    keys[list(division.whole_keys)] = 1.0
    cached = np.where(np.isin(role, (Role.ATTEND, Role.INNER)), keys, 1.0)
    cache = np.round(graph.cache_bytes * cached).astype(np.int64)
    splits = np.isin(role, (Role.COLUMN, Role.ROW, Role.LOOK_UP, Role.SOME_ROWS))
    weights = np.where(splits, held * stop // count - held * start // count, held)
    flop = np.where(np.isin(role, (Role.WHOLE, Role.LOOK_UP)), 1.0, part)
    makes = np.isin(role, (Role.COLUMN, Role.INNER, Role.ATTEND, Role.SOME_ROWS))
    makes[list(division.gathered)] = False  # each member has the parts of all
    made = np.where(makes, part, 1.0)[graph.producer]
    return replace(
        graph,
        flop=graph.flop * flop,
        memory_traffic_bytes=_traffic(graph, role, part, keys),
        weight_bytes=weights + cache,
        cache_bytes=cache,
        tensor_bytes=np.ceil(graph.tensor_bytes * made).astype(np.int64),
        detail=_details(division, role, plan.unit, spans, cached),
    )


def exchanges(division: Division) -> tuple[Exchange, ...]:
    """The collectives in one run of each op, whatever the number of members and their mode."""
    graph = division.graph
    made = np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops)
    return tuple(
        Exchange(op, operation, int(made[op]), int(graph.chunks[op]))
        for operation, ops in (("all_reduce", division.partial), ("all_gather", division.gathered))
        for op in ops
    )


def unit_span(unit: Unit, shares: Shares, rank: int) -> tuple[int, int, int]:
    """(first piece of a member, the one behind its last, pieces in all)."""
    kind, count, keys, together = unit
    if kind in _OF_HEADS:
        heads = count if kind == Pieces.HEADS else count - 2 * keys if kind == Pieces.BOTH else keys
        own = {
            Pieces.KEYS: _heads(keys, keys, shares, rank),
            Pieces.HEADS: _heads(heads, keys, shares, rank),
        }
        if kind in own:
            return *_whole_blocks(shares, own[kind], together, unit.kind), count
        q, k = (_whole_blocks(shares, span, together, Pieces.HEADS) for span in
                (own[Pieces.HEADS], own[Pieces.KEYS]))  # fmt: skip
        return q[0] + 2 * k[0], q[0] + 2 * k[0] + q[1] - q[0] + 2 * (k[1] - k[0]), count
    if kind == Pieces.COLUMNS and shares.is_even and count % shares.size:
        raise _undivided(shares, f"{count} columns of a feed-forward layer")
    exact = count % sum(shares.parts) == 0
    step = 1 if exact or kind != Pieces.COLUMNS or count % BLOCK else BLOCK
    if not shares.is_even and count % math.lcm(step, together) == 0:
        step = math.lcm(step, together)
    own_span = _cut(count, step, shares.parts, rank)
    return *_whole_blocks(shares, own_span, together, kind), count


def _whole_blocks(
    shares: Shares, span: tuple[int, int], together: int, kind: Pieces
) -> tuple[int, int]:
    """The span, unless it cuts a block of quantised weights."""
    if (span[1] - span[0]) % together:
        raise ModelError(
            f"{shares.size} GPUs would have {span[1] - span[0]} {kind.value} each, and blocks of "
            f"the quantised weights hold {together} of them together"
        )
    return span


def _heads(heads: int, keys: int, shares: Shares, rank: int) -> tuple[int, int]:
    """Heads of a rank: whole groups of one KV head, or part of a group with a copy of its head."""
    if shares.size <= keys:
        if shares.is_even and keys % shares.size:
            raise _undivided(shares, f"{keys} heads of keys")
        first, last = _cut(keys, 1, shares.parts, rank)
        return first * heads // keys, last * heads // keys
    if not shares.is_even or shares.size % keys:
        raise _undivided(shares, f"{keys} heads of keys")
    if heads == keys:
        return (first := rank * keys // shares.size), first + 1
    if heads % shares.size:
        raise _undivided(shares, f"{heads} heads")
    return rank * heads // shares.size, (rank + 1) * heads // shares.size


def _cut(count: int, step: int, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """The member's part of `count` pieces, in whole steps as near to its share as can be."""
    ends = [0, *itertools.accumulate(parts)]
    at = [round(count * end / ends[-1] / step) * step for end in ends]
    if any(a >= b for a, b in itertools.pairwise(at)):
        raise ModelError(
            f"shares {':'.join(map(str, parts))} leave a member without a piece of {count}; give "
            "it a larger one"
        )
    return at[rank], at[rank + 1]


def _undivided(shares: Shares, what: str) -> ModelError:
    return ModelError(f"{shares.size} GPUs do not divide {what} evenly")


def _traffic(
    graph: OpGraph, role: Int[np.ndarray, "N"], part: Float[np.ndarray, "N"],
    keys: Float[np.ndarray, "N"],
) -> Float[np.ndarray, "N"]:  # fmt: skip
    """Bytes moved by a rank: all inputs of columns, all outputs of rows, its share of the rest."""
    n, whole = graph.num_ops, graph.memory_traffic_bytes
    read = np.bincount(graph.use_op, graph.tensor_bytes[graph.use_tensor], n)
    made = np.bincount(graph.producer, graph.tensor_bytes, n)
    # Logits are made of the last token alone, of which weights tell where they are known.
    held = graph.weight_bytes * graph.chunks
    most = np.where(graph.weight_bytes > 0, np.maximum(whole - made - held, 0.0), whole - made)
    read = np.minimum(read, np.maximum(most, 0.0))
    kept = np.select(
        [role == Role.COLUMN, np.isin(role, (Role.ROW, Role.ADDS_ROWS))], [read, made], 0.0
    )
    kept = np.minimum(kept, whole)
    moved = kept + (whole - kept) * part
    moved = np.where(np.isin(role, (Role.WHOLE, Role.LOOK_UP)), whole, moved)
    for op in np.flatnonzero(role == Role.ATTEND).tolist():
        detail = graph.detail[op]
        item = made[op] / max(math.prod(detail.output_shapes[0]), 1)
        queries = min(item * math.prod(detail.input_shapes[0]) + made[op], whole[op])
        moved[op] = queries * part[op] + (whole[op] - queries) * keys[op]
    return moved


def _details(
    division: Division, role: Int[np.ndarray, "N"], unit: Int[np.ndarray, "N"],
    spans: Sequence[tuple[int, int, int]], cached: Float[np.ndarray, "N"],
) -> tuple[OpDetail, ...]:  # fmt: skip
    """Shapes of the rank's ops; ops of one detail with identical shards share the new one."""
    made: dict[tuple[int, ...], OpDetail] = {}
    details = []
    kinds = [own.kind for own in division.units]
    sizes = {
        span[2]: span[1] - span[0]
        for span, own in zip(spans, division.units, strict=True)
        if own.kind in (Pieces.HEADS, Pieces.KEYS)
    }
    is_linear = linear_products(division.graph)
    for op, detail in enumerate(division.graph.detail):
        if role[op] == Role.WHOLE:
            details.append(detail)
            continue
        index = int(unit[op])
        key = id(detail), int(role[op]), index
        if key not in made:
            first, last, count = spans[index]
            shapes = _Shapes(
                int(role[op]), kinds[index], last - first, count, sizes, bool(is_linear[op])
            )
            made[key] = shapes.of(detail, float(cached[op]))
        details.append(made[key])
    return tuple(details)


class _Shapes(NamedTuple):
    """Shapes of a member's op, from those of the whole one."""

    role: int
    kind: str
    own: int  # pieces of the member
    total: int  # in all
    heads: dict[int, int]  # own heads by all heads
    is_linear: bool

    def of(self, detail: OpDetail, cached: float) -> OpDetail:
        """The detail of a member's op."""
        read, made = detail.input_shapes, detail.output_shapes
        if self.role == Role.LOOK_UP:
            read = (self._axis(read[0], 0), *read[1:])
        elif self.role == Role.COLUMN:
            axis = 0 if self.is_linear else -1
            read = (read[0], *(self._axis(s, axis if len(s) > 1 else 0) if self._fits(s, axis, made)
                               else s for s in read[1:]))  # fmt: skip
            made = tuple(self._axis(s, -1) for s in made)
        elif self.role == Role.ROW:
            read = (self._axis(read[0], -1), self._axis(read[1], -1 if self.is_linear else -2),
                    *read[2:])  # fmt: skip
        elif self.role == Role.SOME_ROWS:
            # Experts and the rows that they get lie along the first axis.
            read, made = (tuple(self._axis(s, 0) for s in group) for group in (read, made))
        elif self.role == Role.ADDS_ROWS:
            read = tuple(self._axis(s, 0) for s in read)
        else:
            read, made = (tuple(self._inner(s) for s in group) for group in (read, made))
        attributes: dict[str, Any] = dict(detail.attributes)
        if isinstance(sizes := attributes.get(CACHE_AT), tuple):
            attributes[CACHE_AT] = tuple(round(size * cached) for size in sizes)
        return OpDetail(detail.dtype, read, made, attributes)

    def _axis(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """A shape whose axis has the member's part."""
        if not shape:
            return shape
        axis %= len(shape)
        size = max(1, round(shape[axis] * self.own / self.total))
        return *shape[:axis], size, *shape[axis + 1 :]

    def _fits(self, shape: tuple[int, ...], axis: int, made: tuple[tuple[int, ...], ...]) -> bool:
        """True for weights and biases of the columns, not for offsets of groups of rows."""
        return len(shape) > 1 or (self.is_linear and shape == made[0][-1:])

    def _inner(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with the member's heads, or its part of the last axis."""
        if self.kind in (Pieces.HEADS, Pieces.KEYS):
            if len(shape) > 3 and shape[1] == 1:  # what all heads share, such as a latent
                return shape
            for axis in range(1, len(shape)):
                if len(shape) > 3 and shape[axis] in self.heads:
                    return *shape[:axis], self.heads[shape[axis]], *shape[axis + 1 :]
        if not shape or shape[-1] < self.total:
            return shape
        return self._axis(shape, -1)
