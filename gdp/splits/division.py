"""Ops of a decoder that devices can divide, and the units in which they do.

Two products follow each other without anything between them that needs a whole row: the columns of
the first and the rows of the second are divided, and the sums of the second are added up (Shoeybi
et al. 2019, arXiv 1909.08053). So are queries, keys and values with attention between them and the
product behind it, by heads; gate and up with down, by columns; experts by columns or as a whole;
linear attention (gated delta nets, Yang et al. 2024, arXiv 2412.06464) by heads, with its states;
the embedding and the head by the vocabulary. Down-projections to a latent (DeepSeek), indexers of
sparse attention, routers and norms stay whole on every member. A graph with heavy products of
another kind is refused.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.errors import ModelError
from gdp.graph.linear_attention import CONVOLUTION, KEY_HEADS, VALUE_HEADS
from gdp.graph.op_graph import INPUT, OUTPUT, WEIGHT_BLOCK, OpGraph
from gdp.graph.sparse import INDEXER
from gdp.ops.llamacpp import DRAFT, PROJECTOR
from gdp.ops.rule import ATTENTION, EXPERTS, GATHER, LINEAR, PRODUCT
from gdp.ops.table import ELEMENTWISE_OPS, VIEWS, kernel_of

_CHEAP = VIEWS | ELEMENTWISE_OPS
_ENDS = (INPUT, OUTPUT, "argmax")
"""Ops between the tokens of one step and the next, where no way of activations goes on."""
_SUMS = frozenset(("add", "Add"))
_REPLACES = VIEWS | {"index_put", "masked_fill", "where", "clone"}
_FEW_OPS = 40
"""Of a norm between two products, and more."""
_SMALL = 0.02
"""Share of all weights that ops of no known pattern may hold, whole on every member."""


class Role(IntEnum):
    """Part of an op that each member has."""

    WHOLE = 0
    COLUMN = 1  # a product, of which columns are divided: it reads everything
    ROW = 2  # a product, of which rows are divided: it makes a part of a sum
    INNER = 3  # between these, where all is divided
    ATTEND = 4  # attention, whose keys may have fewer heads than its queries
    LOOK_UP = 5  # a table, of which each member looks up what it holds
    SOME_ROWS = 6  # the rows of whole experts, read and made
    ADDS_ROWS = 7  # such rows, read and added up


class Pieces(StrEnum):
    """Kinds of pieces that are not divided further."""

    HEADS = "heads"
    KEYS = "heads of keys"
    BOTH = "heads and keys"  # of one product that makes queries, keys and values
    COLUMNS = "columns"
    EXPERTS = "experts"
    VOCABULARY = "vocabulary"


class Unit(NamedTuple):
    """A number of pieces."""

    kind: Pieces
    total: int
    keys: int = 0  # heads of keys, of kinds that have heads
    step: int = 1  # pieces that a block of quantised weights holds together


class Assigned(NamedTuple):
    """Role and unit of every op in one mode."""

    role: Int[np.ndarray, "N"]
    unit: Int[np.ndarray, "N"]  # index into `Division.units`; -1 where the role is WHOLE


@dataclass(frozen=True, eq=False)
class Division:
    """A graph and the ways to divide it."""

    graph: OpGraph
    units: tuple[Unit, ...]
    columns: Assigned  # experts divided by columns
    experts: Assigned  # experts divided as a whole
    partial: tuple[int, ...]  # ops whose output the members add up
    gathered: tuple[int, ...]  # ops whose parts of the output are collected
    whole_keys: frozenset[int]  # attentions whose caches do not belong to heads

    @property
    def has_experts(self) -> bool:
        """True where whole experts are a way of their own."""
        return bool((self.columns.role != self.experts.role).any())


def division_of(graph: OpGraph) -> Division:
    """The ways to divide a decoder.

    Raises:
        ModelError: It has no layers that are known to be divisible, or other heavy ones as well.
    """
    found = _Search(graph)
    for op, kind in enumerate(graph.op_types):
        if found.alone[op]:
            continue
        if kernel_of(kind) == ATTENTION:
            found.divide_attention(op)
        elif kind == CONVOLUTION:
            found.divide_linear_attention(op)
    found.divide_experts()
    for op in np.flatnonzero(found.is_linear).tolist():
        if found.role[op] == Role.WHOLE:
            found.divide_mlp(op)
    found.divide_vocabulary()
    found.require_known()
    columns = Assigned(np.array(found.role), np.array(found.unit))
    experts = Assigned(columns.role.copy(), columns.unit.copy())
    for op, (role, unit) in found.by_expert.items():
        experts.role[op], experts.unit[op] = role, unit
    return Division(
        graph, stepped_units(found, graph), columns, experts, tuple(found.partial_ops()),
        tuple(found.gathered), frozenset(found.whole_keys),
    )  # fmt: skip


def stepped_units(found: "_Search", graph: OpGraph) -> tuple[Unit, ...]:
    """The units with the pieces that blocks of quantised weights hold together: of the columns of a
    product, or of the rows of one that adds."""
    steps = [1] * len(found.units)
    for op, detail in enumerate(graph.detail):
        block, role = detail.attributes.get(WEIGHT_BLOCK), found.role[op]
        if not isinstance(block, tuple) or role not in (Role.COLUMN, Role.ROW):
            continue
        unit, (columns, rows) = found.units[found.unit[op]], found.sizes(op)
        width, size = (columns, block[0]) if role == Role.COLUMN else (rows, block[1])
        # Gate and up, of one product, are two rows of columns.
        each = 1 if unit.kind == Pieces.COLUMNS else max(1, width // max(1, unit.total))
        steps[found.unit[op]] = math.lcm(
            steps[found.unit[op]], int(size) // math.gcd(int(size), each)
        )
    units = zip(found.units, steps, strict=True)
    return tuple(
        unit if unit.kind == Pieces.VOCABULARY else unit._replace(step=step) for unit, step in units
    )  # fmt: skip


def alone(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """Ops of parts of a GGUF graph with a separate file, each on one device: image encoder and
    draft model."""
    parts = (PROJECTOR, DRAFT, f"{DRAFT}.token_embd") if graph.source == "gguf" else ()
    return np.array([scope in parts for scope in graph.scope], dtype=bool)


def linear_products(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """Products with one matrix whose first axis is that of the columns."""
    kind = PRODUCT if graph.source == "gguf" else LINEAR
    return graph.has_kernel(kind) & np.array([
        len(detail.input_shapes) > 1 and bool(detail.output_shapes)
        and (graph.source != "gguf" or len(detail.input_shapes[1]) == 2)
        for detail in graph.detail
    ])  # fmt: skip


def _gguf_stacks(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """Products of experts of a GGUF file; `ModelError` for latent attention."""
    stacks = graph.has_kernel(PRODUCT) & np.array([
        len(detail.input_shapes) > 1 and len(detail.input_shapes[1]) == 3 for detail in graph.detail
    ])  # fmt: skip
    for op in np.flatnonzero(stacks & ~alone(graph)).tolist():
        if not graph.op_names[op].endswith("_exps"):
            raise ModelError(
                f"llama.cpp does not divide latent attention among GPUs, which {graph.name!r} has "
                f"in {graph.op_names[op]!r}"
            )
    return stacks


class _Search:
    """The roles found so far of the ops of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.makers, self.readers = graph.neighbours()
        self.is_linear = linear_products(graph)
        self.is_experts = graph.has_kernel(EXPERTS)
        if graph.source == "gguf":
            self.is_experts = _gguf_stacks(graph)
        self.alone = alone(graph)
        self.is_linear &= ~self.alone
        self.is_experts &= ~self.alone
        self.is_product = self.is_linear | self.is_experts
        self.indexes = [INDEXER in detail.attributes for detail in graph.detail]
        # Indexers' heads are whole everywhere, so that no way of divided activations meets them.
        kinds = zip(graph.op_types, self.indexes, strict=True)
        self.ends = [kind in _ENDS or indexes for kind, indexes in kinds]
        self.role: list[int] = [Role.WHOLE] * graph.num_ops
        self.unit = [-1] * graph.num_ops
        self.units: list[Unit] = []
        self.by_expert: dict[int, tuple[int, int]] = {}
        self.latent: set[int] = set()
        self.whole_keys: set[int] = set()
        self.of_states: set[int] = set()  # ops of linear attention, each of one head
        self.gathered: list[int] = []
        self.added_inside: set[int] = set()  # ops of experts behind their last product

    def number(self, unit: Unit) -> int:
        """Index of a unit."""
        if unit not in self.units:
            self.units.append(unit)
        return self.units.index(unit)

    def assign(self, ops: Collection[int], role: int, unit: Unit) -> None:
        """Give some ops a role."""
        index = self.number(unit)
        for op in ops:
            self.role[op], self.unit[op] = role, index

    def sizes(self, op: int) -> tuple[int, int]:
        """(columns, rows) of the weight of a linear product, or of those of experts."""
        detail = self.graph.detail[op]
        if len(detail.input_shapes[1]) == 3 and self.is_experts[op]:
            return detail.input_shapes[1][2], detail.input_shapes[1][1]
        return detail.output_shapes[0][-1], detail.input_shapes[0][-1]

    def reach(
        self, start: Collection[int], backward: bool, over_sums: bool = True
    ) -> tuple[set[int], set[int]]:
        """(ops on the ways from some ops to the next products with weights, those products), on
        request only up to sums of several tensors, such as those around a layer."""
        ways = self.makers if backward else self.readers
        seen, products, todo = set[int](), set[int](), list(start)
        while todo:
            for op in ways[todo.pop()]:
                if self.is_product[op]:
                    products.add(op)
                elif not over_sums and self.graph.op_types[op] in _SUMS and len(ways[op]) > 1:
                    continue
                elif op not in seen and not self.ends[op]:
                    seen.add(op)
                    todo.append(op)
        return seen, products

    def refuse(self, op: int, why: str) -> ModelError:
        """An error that names an op."""
        name = self.graph.scope[op] or self.graph.op_names[op]
        return ModelError(
            f"gdp does not know how engines divide {self.graph.name!r} among GPUs: {why} in "
            f"{name!r}"
        )

    def divide_attention(self, op: int) -> None:
        """Attention by heads, with the products before and behind it."""
        shapes = self.graph.detail[op].input_shapes
        if len(shapes) < 2 or len(shapes[0]) != 4:
            raise self.refuse(op, f"attention of shapes {shapes}")
        before, products = self.reach([op], backward=True)
        sources = {p: self.reach([p], backward=True, over_sums=False)[1] for p in products}
        latent = {p for p in products if any(p in sources[q] for q in products if q != p)}
        columns = products - latent
        behind, rows = self.reach([op], backward=False)
        if len(rows) != 1 or not columns:
            around = f"{len(columns)} products before it and {len(rows)} behind it"
            raise self.refuse(op, f"attention with {around}")
        row = rows.pop()
        # A gate on the output of attention is divided with its heads.
        more, gates = self.reach([row], backward=True)
        columns |= {p for p in gates if self.makers[p] == self.makers[next(iter(columns))]}
        units = self._head_units(op, columns)
        inside = (self.reach(columns, backward=False)[0] & (before | more | behind)) | {op}
        for column in columns:
            self.assign([column], Role.COLUMN, units[column])
        self._assign_inside(op, inside, units)
        self.assign([row], Role.ROW, next(u for u in units.values() if u.kind == Pieces.HEADS))
        before_columns = set().union(*(sources[column] for column in columns))
        indexers = [maker for maker in self.makers[op] if self.indexes[maker]]
        scores = self.reach(indexers, backward=True)[1] - latent
        served = columns | scores
        self.latent |= latent | scores | {p for p in before_columns if self._serves(p, served)}
        if latent:  # keys that all heads share
            self.whole_keys.add(op)

    def divide_linear_attention(self, convolution: int) -> None:
        """Shard linear attention behind a short convolution by heads, with the products of its
        input and the one behind it; other uses of a convolution stay whole."""
        rows = self.reach([convolution], backward=False)[1]
        if len(rows) != 1:
            return
        row = rows.pop()
        inside, columns = self.reach([row], backward=True)
        widths = [self.sizes(column)[0] for column in columns if self.is_linear[column]]
        heads, keys = self._state_heads(inside, widths)
        divides = keys and all(width % keys == 0 for width in (*widths, self.sizes(row)[1]))
        inputs = {tuple(self.makers[column]) for column in columns}
        if len(widths) < len(columns) or len(columns) < 2 or len(inputs) != 1 or not divides:
            return
        unit = Unit(Pieces.HEADS, heads, keys)
        self.assign(columns, Role.COLUMN, unit)
        self._assign_inside(-1, inside, {-1: unit})
        self.assign([row], Role.ROW, unit)
        self.of_states |= inside

    def _state_heads(self, inside: Collection[int], widths: Sequence[int]) -> tuple[int, int]:
        """(value heads, KV heads) of the recurrence, or the common divisor of all columns."""
        for op in inside:
            attributes: Mapping[str, Any] = self.graph.detail[op].attributes
            if KEY_HEADS in attributes:
                return int(attributes[VALUE_HEADS]), int(attributes[KEY_HEADS])
        common = math.gcd(*widths)
        return common, common

    def _serves(self, product: int, columns: Collection[int]) -> bool:
        """True for products that nothing reads but these columns, such as one to a latent."""
        seen, todo = set[int](), [product]
        while todo:
            for op in self.readers[todo.pop()]:
                if self.is_product[op]:
                    if op not in columns:
                        return False
                elif op not in seen and self.graph.op_types[op] not in _ENDS:
                    seen.add(op)
                    todo.append(op)
            if len(seen) > _FEW_OPS:  # the residual stream, which never ends
                return False
        return True

    def _head_units(self, op: int, columns: Collection[int]) -> dict[int, Unit]:
        """Unit of each product before an attention; those of queries and of attention by -1."""
        detail = self.graph.detail[op]
        shapes, made = detail.input_shapes, detail.output_shapes[0][-1]
        heads, size = shapes[0][1], shapes[0][3]
        widths = {column: self.sizes(column)[0] for column in columns}
        # Keys that are copied for each head before they are read count as often as they are made.
        keys = min(shapes[1][1] if len(shapes) > 2 else heads, min(widths.values()) // size)
        if not keys or heads % keys:
            raise self.refuse(op, f"attention of {heads} heads with {keys} of keys")
        units = {-1: Unit(Pieces.HEADS, heads, keys)}
        for column, width in widths.items():
            if keys < heads and width in (keys * size, keys * made):
                units[column] = Unit(Pieces.KEYS, keys, keys)
            elif width == heads * size + keys * (size + made):
                units[column] = Unit(Pieces.BOTH, heads + 2 * keys, keys)
            elif width % heads == 0:
                units[column] = units[-1]
            else:
                raise self.refuse(column, f"{width} columns for {heads} heads")
        return units

    def _assign_inside(self, op: int, inside: Collection[int], units: dict[int, Unit]) -> None:
        """Roles of the ops between the products before attention and the one behind it."""
        keys = next((u for u in units.values() if u.kind == Pieces.KEYS), None)
        for one in sorted(inside):
            units_in = {
                self.units[self.unit[m]].kind
                for m in self.makers[one]
                if self.role[m] != Role.WHOLE
            }
            if units_in:
                unit = keys if keys is not None and units_in == {Pieces.KEYS} else units[-1]
                self.assign([one], Role.ATTEND if one == op else Role.INNER, unit)

    def divide_mlp(self, row: int) -> None:
        """Shard a product by rows if its inputs are products of one tensor with only elementwise
        ops between, those by columns."""
        rows = self.sizes(row)[1]
        inside, columns, todo = set[int](), set[int](), [row]
        while todo:
            for op in self.makers[todo.pop()]:
                if self.is_linear[op]:
                    columns.add(op)
                elif self.graph.op_types[op] not in _CHEAP:
                    return
                elif op not in inside:
                    inside.add(op)
                    todo.append(op)
        inputs = {tuple(self.makers[column]) for column in columns}
        fits = all(self.sizes(column)[0] in (rows, 2 * rows) for column in columns)
        if len(inputs) == 1 and fits and all(self.role[c] == Role.WHOLE for c in columns):
            unit = Unit(Pieces.COLUMNS, rows)
            self.assign(columns, Role.COLUMN, unit)
            self.assign(inside, Role.INNER, unit)
            self.assign([row], Role.ROW, unit)

    def divide_experts(self) -> None:
        """Products of experts: the last of a module by rows, the others by columns; or all by
        experts."""
        blocks: dict[tuple[str, int], list[int]] = {}
        for op in np.flatnonzero(self.is_experts).tolist():
            blocks.setdefault((self.graph.scope[op], int(self.graph.phase[op])), []).append(op)
        for (scope, phase), products in blocks.items():
            mine = [
                op for op, own in enumerate(self.graph.scope)
                if (own == scope or own.startswith(f"{scope}.")) and self.graph.phase[op] == phase
            ]  # fmt: skip
            self._divide_block(products, mine)

    def _divide_block(self, products: list[int], mine: list[int]) -> None:
        row = products[-1]
        shapes = self.graph.detail[row].input_shapes
        experts, rows = shapes[1][0], shapes[1][1]
        for column in products[:-1]:
            if self.graph.detail[column].input_shapes[1][2] not in (rows, 2 * rows):
                raise self.refuse(column, f"experts of other widths than {rows}")
        unit, whole = Unit(Pieces.COLUMNS, rows), Unit(Pieces.EXPERTS, experts)
        between = self.reach(products[:-1], False)[0] & self.reach([row], True)[0]
        self.assign(products[:-1], Role.COLUMN, unit)
        self.assign(between, Role.INNER, unit)
        self.assign([row], Role.ROW, unit)
        self.added_inside |= self.reach([row], False)[0] & set(mine)
        number, tokens = self.number(whole), shapes[0][0]
        for op in mine:
            made, read = (
                [s for s in group if len(s) > 1 and s[0] == tokens and s[-1] > 1]
                for group in (self.graph.detail[op].output_shapes,
                              self.graph.detail[op].input_shapes)
            )  # fmt: skip
            if op in products or made:
                self.by_expert[op] = Role.SOME_ROWS, number
            elif read or (op in self.added_inside and self.graph.op_types[op] == "sum"):
                self.by_expert[op] = Role.ADDS_ROWS, number

    def divide_vocabulary(self) -> None:
        """The table of tokens, and the product that makes the logits."""
        graph = self.graph
        ends = {i for i, kind in enumerate(graph.op_types) if kind in ("argmax", OUTPUT)}
        tokens = {i for i, kind in enumerate(graph.op_types) if kind in ("argmax", INPUT)}
        for op, kind in enumerate(graph.op_types):
            shapes = graph.detail[op].input_shapes
            if kind == "embedding" and tokens & self._read_as_they_are(op) and len(shapes[0]) == 2:
                self.assign([op], Role.LOOK_UP, Unit(Pieces.VOCABULARY, shapes[0][0]))
            elif self.is_linear[op] and self.role[op] == Role.WHOLE:
                way, products = self.reach([op], backward=False)
                at_end = any(r in ends for o in (*way, op) for r in self.readers[o])
                if not products and at_end:
                    pieces = Unit(Pieces.VOCABULARY, self.sizes(op)[0])
                    self.assign([op], Role.COLUMN, pieces)
                    beside = graph.is_buffer & (graph.colocate == graph.colocate[op])
                    self.assign(np.flatnonzero(beside).tolist(), Role.SOME_ROWS, pieces)
                    self.gathered.append(op)

    def _read_as_they_are(self, op: int) -> set[int]:
        """The ops whose numbers one reads, also where some are replaced, as those of images are."""
        found, todo = set[int](), [op]
        while todo:
            for maker in self.makers[todo.pop()]:
                if maker not in found:
                    found.add(maker)
                    todo += [maker] if self.graph.op_types[maker] in _REPLACES else []
        return found

    def require_known(self) -> None:
        """Raise `ModelError` where heavy ops, or caches, have no role."""
        graph = self.graph
        role = np.array(self.role)
        if not (role == Role.ROW).any():
            raise ModelError(
                f"gdp does not know how engines divide {graph.name!r} among GPUs: it has no "
                "attention or feed-forward layers of a form that is known"
            )
        spared = np.zeros(graph.num_ops, dtype=bool)
        spared[list(self.latent)] = True
        spared |= graph.rests | self.alone
        if graph.source == "gguf":  # the embedding is on the processor
            spared |= graph.has_kernel(GATHER)
        whole = (role == Role.WHOLE) & ~spared
        held = np.where(whole, graph.weight_bytes - graph.cache_bytes, 0)
        if held.sum() > _SMALL * (graph.weight_bytes - graph.cache_bytes).sum():
            heaviest = int(held.argmax())
            raise self.refuse(heaviest, f"an unknown use of {graph.op_types[heaviest]}")
        keeps = (graph.cache_bytes > 0) & ~graph.rests & ~self.alone & ~np.array(self.indexes)
        for op in np.flatnonzero((role == Role.WHOLE) & keeps).tolist():
            if not any(self.role[p] == Role.COLUMN for p in self.reach([op], backward=False)[1]):
                raise self.refuse(op, f"a state that {graph.op_types[op]} keeps")

    def partial_ops(self) -> Iterator[int]:
        """Ops whose output is a part of a sum on each member and that others read whole: products
        by rows, or sums of several, such as of shared and routed experts."""
        partial = [False] * self.graph.num_ops
        for op, role in enumerate(self.role):
            # What several ops read, such as the sum that goes around a layer, is added up first.
            parts = [m for m in self.makers[op] if partial[m] and len(self.readers[m]) == 1]
            kind = self.graph.op_types[op]
            begins = role in (Role.ROW, Role.LOOK_UP) or self._sums_heads(op)
            if begins or (parts and op in self.added_inside):
                partial[op] = True
            elif parts and kind in _SUMS:
                partial[op] = len(parts) == len(self.makers[op])
            elif parts and kind in ("mul", "view", "reshape"):
                partial[op] = len(parts) == 1
        for op in np.flatnonzero(partial).tolist():
            if len(self.readers[op]) != 1 or not partial[self.readers[op][0]]:
                yield op

    def _sums_heads(self, op: int) -> bool:
        """True for reductions over all heads, such as in norms of all queries together."""
        detail = self.graph.detail[op]
        if self.role[op] != Role.INNER or self.graph.op_types[op] not in ("mean", "sum", "var"):
            return False
        if op in self.of_states:
            return False
        unit, shapes = self.units[self.unit[op]], detail.input_shapes
        if unit.kind not in (Pieces.HEADS, Pieces.KEYS) or not shapes or not shapes[0]:
            return False
        # Rows of all heads are joined in one axis; else heads have an axis of their own.
        return len(shapes[0]) < 4 and shapes[0][-1] % unit.total == 0 and shapes[0][-1] > unit.total
