"""Programs of any batch and number of tokens, from the traces of three sizes.

Every size in a traced program (a dimension, stored bytes, an argument) is taken for a line in the
tokens, or for a multiple of their square, times the batch or not. Three traces determine such a law
and check it once more: where one size follows none, as behind a window that ends between the traces
or where tokens are padded to chunks, there is no scaled program, and the model is traced at the
sizes that are asked for.
FLOPs and traffic are computed anew from the sizes, by the formulas of the table of operators
(`gdp.ops.aten`), which must give those of the three traces.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from gdp.importers.program import Op, Value
from gdp.importers.pytorch.repeated import Listed
from gdp.ops.rule import Shape
from gdp.ops.table import aten_cost

FEWEST_TOKENS = 16
"""Fewer are traced as they are: so short prompts have branches of their own in some models."""
_STEP = 4  # the tokens of the longest trace over those of the shortest


class Sizes(NamedTuple):
    """Sequences side by side, and tokens of each: those of the prompt, or of a step's cache."""

    batch: int
    tokens: int


class UnscalableError(Exception):
    """Programs that differ by more than their sizes; the message names the difference."""


def sizes_traced(tokens: int) -> tuple[Sizes, ...]:
    """Sizes of the programs from which that of `tokens` tokens is scaled; () for too few tokens.

    >>> sizes_traced(1024)
    (Sizes(batch=1, tokens=1024), Sizes(batch=3, tokens=2597), Sizes(batch=1, tokens=4096))
    """
    if tokens < FEWEST_TOKENS:
        return ()
    least = FEWEST_TOKENS
    while least * _STEP <= tokens:
        least *= _STEP
    # An odd number between them, which no chunk divides.
    between = (5 * least // 2) + 1 + least // 28
    return Sizes(1, least), Sizes(3, between | 1), Sizes(1, least * _STEP)


class _Law(NamedTuple):
    """The size of every program, from those of three."""

    traced: Sequence[Sizes]
    asked: Sizes

    def of(self, values: Sequence[Any]) -> Any:
        """A number, a text, or a tuple of them at the requested sizes."""
        first = values[0]
        if all(value == first for value in values):
            return first
        if all(isinstance(value, tuple) for value in values):
            return tuple(map(self.of, zip(*values, strict=True)))
        if not all(type(value) is int for value in values):
            raise UnscalableError(f"a value is {' and '.join(map(str, values))}")
        for own, batch in (((1, 1, 1), 1), ([s.batch for s in self.traced], self.asked.batch)):
            y = [Fraction(value, b) for value, b in zip(values, own, strict=True)]
            x = [size.tokens for size in self.traced]
            slope = (y[2] - y[0]) / (x[2] - x[0])
            if y[1] == y[0] + slope * (x[1] - x[0]):
                scaled = batch * (y[0] + slope * (self.asked.tokens - x[0]))
            elif len({each / tokens**2 for each, tokens in zip(y, x, strict=True)}) == 1:  # a mask
                scaled = batch * y[0] / x[0] ** 2 * self.asked.tokens**2
            else:
                continue
            if scaled.denominator == 1:
                return int(scaled)
        raise UnscalableError(f"sizes {', '.join(map(str, values))} follow no law")


def scaled(programs: Sequence[Listed], traced: Sequence[Sizes], asked: Sizes) -> Listed:
    """A program of other sizes.

    Args:
        programs: Of the same model at the sizes `traced`, which `sizes_traced` gives.
        traced: Sizes of these programs.
        asked: Sizes of the result.

    Raises:
        UnscalableError: The programs differ by more than their sizes, or a size follows no law.
    """
    law, first = _Law(traced, asked), programs[0]
    _require_alike(programs)
    made: dict[int, Value] = {}
    sized: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}  # layers repeat

    def value(rows: Sequence[Value]) -> Value:
        one = rows[0]
        if id(one) not in made:
            key = tuple(row.dims for row in rows)
            if key not in sized:
                sized[key] = law.of(key)
            made[id(one)] = Value(
                sized[key], one.dtype, one.itemsize, one.maker, one.out, one.weight
            )
        return made[id(one)]

    def values(rows: Sequence[Sequence[Value]]) -> list[Value]:
        return [value(row) for row in zip(*rows, strict=True)]

    costs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    ops = []
    for rows in zip(*(program.ops for program in programs), strict=True):
        key = tuple(
            (op.op_type, op.flop, op.traffic_bytes, op.shapes, tuple(sorted(op.attributes.items())))
            for op in rows
        )
        if key not in costs:
            costs[key] = _cost(rows, law)
        shapes, attributes, flop, traffic = costs[key]
        ops.append(replace(
            rows[0], ins=values([op.ins for op in rows]), outs=values([op.outs for op in rows]),
            flop=flop, traffic_bytes=traffic, in_dims=tuple(shape.dims for shape in shapes[0]),
            attributes=dict(attributes), shapes=shapes,
        ))  # fmt: skip
    return replace(
        first, ops=ops, weights=values([p.weights for p in programs]),
        paths={path: value([p.paths[path] for p in programs]) for path in first.paths},
        caches=set(first.caches), estimated=set(first.estimated),
        assumptions=list(first.assumptions), cache_at={}, contexts=(),
    )  # fmt: skip


def with_growth(
    step: Listed, programs: Sequence[Listed], batch: int, tokens: int, longest: int
) -> Listed:
    """A scaled decode step whose caches grow with the context.

    Args:
        step: The scaled program.
        programs: Those that it was scaled from, the first for one sequence of the fewest tokens.
        batch: Sequences.
        tokens: Of the prompt and the new ones together.
        longest: Tokens that the model was made for; 0 where nothing says it.

    Raises:
        UnscalableError: The programs say other bytes of a cache at one context.
    """
    first = programs[0]
    if not first.contexts or tokens < first.contexts[0]:
        raise UnscalableError("its caches do not say how they grow")

    def bytes_at(leaf: int, at: int) -> int:
        return _between(first.contexts, first.cache_at[leaf], at)

    most = max(longest, 2 * tokens)
    contexts = (tokens, *(at for at in first.contexts[1:-1] if tokens < at < most), most)
    cache_at: dict[int, tuple[int, ...]] = {}
    for leaf in first.cache_at:
        several, one = (
            Fraction(other.cache_at[leaf][0], bytes_at(leaf, other.contexts[0]) or 1)
            for other in programs[1:]
        )
        if one != 1 or several not in (1, 3):
            raise UnscalableError(f"a cache grows by {one} and {several} times its own growth")
        times = 1 if several == 1 else batch
        cache_at[leaf] = tuple(times * bytes_at(leaf, at) for at in contexts)
    return replace(step, cache_at=cache_at, contexts=contexts)


def _between(contexts: Sequence[int], sizes: Sequence[int], at: int) -> int:
    """Bytes at a context, linear between those that are known and behind the last."""
    pairs = [*pairwise(zip(contexts, sizes, strict=True))]
    (x, low), (end, high) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return round(low + Fraction(high - low, end - x) * (at - x))


def _require_alike(programs: Sequence[Listed]) -> None:
    """Refuse programs of other ops, or of ops that read other things."""

    def form(program: Listed) -> list[Any]:
        weights = {id(value): number for number, value in enumerate(program.weights)}

        def reads(value: Value) -> tuple[int, ...]:
            return (value.maker, value.out, weights.get(id(value), -1))

        return [
            [[*map(reads, op.ins)], [(v.dtype, len(v.dims)) for v in op.outs], op.op_type,
             op.scope, op.dtype, op.name, op.backward, sorted(op.attributes)]
            for op in program.ops
        ]  # fmt: skip

    def parts(program: Listed) -> dict[str, object]:
        return {
            "ops": form(program),
            "weights": [(weight.dtype, weight.weight) for weight in program.weights],
            "paths": program.paths.keys(),
            "assumptions": (program.assumptions, program.estimated),
            "caches": (program.caches, program.cache_at.keys()),
            "state": bool(program.state),
        }

    first, *others = map(parts, programs)
    for name, part in first.items():
        if any(other[name] != part for other in others) or programs[0].state:
            raise UnscalableError(f"programs have other {name}")


def _cost(
    rows: Sequence[Op], law: _Law
) -> tuple[tuple[tuple[Shape, ...], ...], dict[str, Any], float, float]:
    """Shapes, attributes, FLOPs and traffic of an op at the requested sizes."""
    attributes = {key: law.of([op.attributes[key] for op in rows]) for key in rows[0].attributes}
    shapes = tuple(
        tuple(_shape(each, law) for each in zip(*(op.shapes[side] for op in rows), strict=True))
        for side in (0, 1)
    )
    if len({(op.flop, op.traffic_bytes, op.shapes) for op in rows}) == 1:
        return shapes, attributes, rows[0].flop, rows[0].traffic_bytes
    # Kernels of attention may have its formula, too.
    op_type, attention = rows[0].op_type, "scaled_dot_product_attention"
    for name in (op_type, attention) if "scaled_dot_product" in op_type else (op_type,):
        known = [aten_cost(name, op.attributes, *op.shapes) for op in rows]
        if any(a.traffic_bytes != op.traffic_bytes for a, op in zip(known, rows, strict=True)):
            continue
        # Torch counts some products by a formula of its own, in proportion to that of the table.
        times = {_ratio(op.flop, a.flop) for a, op in zip(known, rows, strict=True)}
        (share,) = times if len(times) == 1 else (None,)
        if share is not None:
            cost = aten_cost(name, attributes, *shapes)
            return shapes, attributes, float(share * Fraction(cost.flop)), cost.traffic_bytes
    raise UnscalableError(f"the cost of {rows[0].op_type} is by no formula")


def _ratio(flop: float, known: float) -> Fraction | None:
    """FLOPs over those of a formula; None where it has none and the op has."""
    if not known:
        return Fraction(0) if not flop else None
    return Fraction(flop) / Fraction(known) if math.isfinite(flop) else None


def _shape(each: Sequence[Shape], law: _Law) -> Shape:
    if len({shape.itemsize for shape in each}) > 1:
        raise UnscalableError("types differ")
    dims = law.of([shape.dims for shape in each])
    if all(replace(shape, stored_bytes=None).nbytes == shape.nbytes for shape in each):
        return Shape(dims, each[0].itemsize)  # all that is read is stored, whatever is beside it
    return Shape(dims, each[0].itemsize, law.of([shape.stored_bytes for shape in each]))
