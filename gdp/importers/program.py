"""Programs listed op by op, whatever they were traced with, and the graphs made of them.

Values flow between ops; dead ops are dropped, weights are held by the ops that read them, and what
reads or updates a weight shares a device with it where that is asked for.
"""

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdp.base.errors import GdpError, ModelError, RefusedError, reason_of
from gdp.base.units import whole_number
from gdp.graph.generation import CACHE_AT
from gdp.graph.groups import components, merge_ids
from gdp.graph.op_graph import (
    INPUT,
    OUTPUT,
    Attribute,
    GraphBuilder,
    OpDetail,
    OpGraph,
    is_storable,
)
from gdp.graph.request import Request
from gdp.graph.source import Source
from gdp.importers.spec import LONGEST, ModelSpec
from gdp.ops.rule import Shape

_log = logging.getLogger(__name__)

Key = tuple[int, ...]
"""A weight: (leaf,), or (leaf, start, stop) for rows of it."""


@dataclass(eq=False, slots=True)
class Value:
    """An array of the program. Made by an op, or held as a weight, or neither: a constant."""

    dims: tuple[int, ...]
    dtype: str
    itemsize: int
    maker: int = -1  # op index
    out: int = 0  # which of the op's outputs
    weight: Key | None = None
    backward: bool = False  # depends on the gradient of the loss
    known: Any = None  # a literal or an array that the function closes over
    stored_bytes: int | None = None  # of a quantised weight, with its scales

    @property
    def nbytes(self) -> int:
        """Bytes as a dense array, or as a quantised weight is stored."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return math.prod(self.dims) * self.itemsize


@dataclass(eq=False, slots=True)
class Stacked:
    """An array whose rows along axis 0 exist one by one: the inputs and outputs of a loop."""

    rows: list[Value]
    whole: Value | None = None  # once something has read it as one array

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the whole array: rows first."""
        return (len(self.rows), *self.rows[0].dims)


@dataclass(eq=False, slots=True)
class Op:
    """One op before dead code is removed."""

    op_type: str
    scope: str
    ins: list[Value]
    outs: list[Value]
    flop: float
    traffic_bytes: float
    backward: bool
    dtype: str
    in_dims: tuple[tuple[int, ...], ...] = ()
    attributes: dict[str, Attribute] = field(default_factory=dict)
    name: str = ""
    waits_for: list[Value] = field(default_factory=list)  # read for their order in time only
    # Of all that it reads and makes, where its cost is of these alone.
    shapes: tuple[tuple[Shape, ...], tuple[Shape, ...]] = ((), ())


@dataclass
class ProgramOps:
    """Ops in the order of evaluation. Not frozen: an importer appends to it."""

    ops: list[Op] = field(default_factory=list)
    weights: list[Value] = field(default_factory=list)  # the leaves
    estimated: set[str] = field(default_factory=set)  # op types costed by the fallback
    assumptions: list[str] = field(default_factory=list)
    caches: set[int] = field(default_factory=set)  # the leaves that one request fills
    # Bytes of these at some contexts, where that is known.
    cache_at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    optimizer_starts: int | None = None  # index of the first op that updates weights


def attributes_of(params: dict[str, Any]) -> dict[str, Attribute]:
    """The parameters of a primitive that are plain numbers, texts or tuples of integers."""
    attributes: dict[str, Attribute] = {}
    for key, value in params.items():
        if isinstance(value, bool):
            attributes[key] = int(value)
        elif isinstance(value, int | float | str):
            attributes[key] = value
        elif isinstance(value, tuple | list) and value:
            flat = _flat(value)
            if flat is not None:
                attributes[key] = flat
    return {key: value for key, value in attributes.items() if is_storable(value)}


def _flat(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list):
        parts = [_flat(part) for part in value]
        return None if None in parts else tuple(i for part in parts for i in part or ())
    try:
        return (int(value),) if value == int(value) else None  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):  # int(inf)
        return None


@dataclass(frozen=True)
class Results:
    """Outputs and new state, which keep the ops that they need alive."""

    outputs: Sequence[Value] = ()  # made by `Output` ops, which the program lists
    # New values of weights, and the weights that they replace in place.
    state: Sequence[tuple[Value | Stacked, Value | Stacked]] = ()
    together: bool = False  # ops that read or update a weight share a device


def build(name: str, program: ProgramOps, results: Results, source: Source) -> OpGraph:
    """The graph of the ops that some output or new weight needs."""
    live = _live(program, results)
    number = {op: i for i, op in enumerate(live)}
    ops = [program.ops[i] for i in live]
    if all(op.op_type in (INPUT, OUTPUT) for op in ops):
        raise ModelError(
            f"model {name!r} has no ops: it returns its inputs and weights as they are; there is "
            "nothing to place"
        )
    keys = _weights_read(program, ops)
    weight_bytes, weight_id = _hold_weights(program, keys, results.together)
    cached = [
        min(sum(_key_bytes(program, k) for k in own if k[0] in program.caches), held)
        for own, held in zip(keys, weight_bytes, strict=True)
    ]
    colocate = _colocate(program, results, live, keys) if results.together else None
    backward = _backward(ops, number)
    builder = GraphBuilder()
    tensor: dict[tuple[int, int], int] = {}
    for i, (op, op_name) in enumerate(zip(ops, _names(ops), strict=True)):
        reads = [value for value in _read(op) if value.maker >= 0]
        for value in reads:
            key = (number[value.maker], value.out)
            if key not in tensor:
                tensor[key] = builder.make_tensor(key[0], value.nbytes)
        more = _cache_at(program, keys[i], cached[i])
        detail = OpDetail(
            dtype=op.dtype,
            input_shapes=op.in_dims,
            output_shapes=tuple(out.dims for out in op.outs),
            attributes={**op.attributes, **more} if more else op.attributes,
        )
        builder.add_op(
            op_name, op.op_type, reads=[tensor[number[v.maker], v.out] for v in reads],
            flop=float(op.flop), traffic_bytes=float(op.traffic_bytes),
            weight_bytes=weight_bytes[i], weight_id=weight_id[i],
            colocate=None if colocate is None else colocate[i], is_backward=backward[i],
            scope=op.scope, detail=detail, cache_bytes=cached[i],
        )  # fmt: skip
    return builder.build(name, source)


def live_ops(program: ProgramOps, results: Results) -> list[Op]:
    """The ops that some output or new weight needs, in order."""
    return [program.ops[i] for i in _live(program, results)]


def positions(graph: OpGraph, program: ProgramOps, results: Results) -> dict[int, int]:
    """The op of the graph that every live op of the program has become."""
    live = _live(program, results)
    names = _names([program.ops[i] for i in live])
    return {i: graph.op_index[name] for i, name in zip(live, names, strict=True)}


def _backward(ops: Sequence[Op], number: Mapping[int, int]) -> list[bool]:
    """True for ops that are marked so, and for constants that only such ops read."""
    marked = [op.backward and op.op_type not in (INPUT, OUTPUT) for op in ops]
    readers: list[list[int]] = [[] for _ in ops]
    constant = []
    for i, op in enumerate(ops):
        makers = [number[value.maker] for value in _read(op) if value.maker >= 0]
        for maker in makers:
            readers[maker].append(i)
        stored = op.op_type == INPUT or any(v.weight is not None for v in op.ins)
        constant.append(not stored and all(constant[maker] for maker in makers))
    for i in reversed(range(len(ops))):
        if constant[i] and readers[i] and all(marked[r] for r in readers[i]):
            marked[i] = True
    return marked


def _live(program: ProgramOps, results: Results) -> list[int]:
    """Indices of the ops that something needs, in order."""
    todo = [i for i, op in enumerate(program.ops) if op.op_type == OUTPUT]
    todo += [row.maker for value, _ in results.state for row in _rows(value)]
    seen: set[int] = set()
    while todo:
        op = todo.pop()
        if op >= 0 and op not in seen:
            seen.add(op)
            todo += [value.maker for value in _read(program.ops[op])]
    return sorted(seen)


def _read(op: Op) -> Iterable[Value]:
    return (*op.ins, *op.waits_for)


def _rows(value: Value | Stacked) -> list[Value]:
    return value.rows if isinstance(value, Stacked) else [value]


def _weights_read(program: ProgramOps, ops: Sequence[Op]) -> list[list[Key]]:
    """The weights that each op reads. Rows count as the whole weight where they overlap."""
    keys = [list(dict.fromkeys(v.weight for v in op.ins if v.weight is not None)) for op in ops]
    parts: dict[int, set[Key]] = {}
    for key in (key for weight_keys in keys for key in weight_keys):
        parts.setdefault(key[0], set()).add(key)
    whole = set()
    for leaf, weight_keys in parts.items():
        spans = sorted((key[1], key[2]) for key in weight_keys if len(key) == 3)
        overlap = any(b[0] < a[1] for a, b in itertools.pairwise(spans))
        if overlap or (leaf,) in weight_keys:
            whole.add(leaf)
    return [
        list(dict.fromkeys(key[:1] if key[0] in whole else key for key in weight_keys))
        for weight_keys in keys
    ]


def _key_bytes(program: ProgramOps, key: Key) -> int:
    leaf = program.weights[key[0]]
    return leaf.nbytes if len(key) == 1 else leaf.nbytes * (key[2] - key[1]) // leaf.dims[0]


def _hold_weights(
    program: ProgramOps, keys: Sequence[Sequence[Key]], together: bool
) -> tuple[list[int], list[int]]:
    """Bytes and weight id of every op, such that a device counts a weight once.

    Where the readers of a weight share a device, the first holds it. Otherwise the readers of a
    weight that several read share an id, and each has the bytes of all that they hold: of an
    embedding that is tied to a layer with a bias, the bias too. A reader of several such weights
    holds them all by itself, so that a device may count one of them twice, never too little.
    """
    readers: dict[Key, list[int]] = {}
    for op, weight_keys in enumerate(keys):
        for key in weight_keys:
            readers.setdefault(key, []).append(op)
    size = {key: _key_bytes(program, key) for key in readers}
    weight_bytes, weight_id = [0] * len(keys), list(range(len(keys)))
    if together:
        for key, ops in readers.items():
            weight_bytes[ops[0]] += size[key]
        return weight_bytes, weight_id
    for op, weight_keys in enumerate(keys):
        weight_bytes[op] = sum(size[key] for key in weight_keys)
    tied = {key for key, ops in readers.items() if len(ops) > 1}
    for key in sorted(tied):
        ops = [op for op in readers[key] if sum(k in tied for k in keys[op]) == 1]
        beside = sum(size[k] for op in ops for k in keys[op] if k != key)
        if beside > size[key]:
            # Holding the tied weight twice costs less than holding all else everywhere.
            ops = [op for op in ops if len(keys[op]) == 1]
            beside = 0
        for op in ops:
            weight_bytes[op], weight_id[op] = size[key] + beside, ops[0]
    return weight_bytes, weight_id


def _colocate(
    program: ProgramOps, results: Results, live: Sequence[int], keys: Sequence[Sequence[Key]]
) -> list[int]:
    """Ids such that all that reads or updates a weight shares a device: its state never moves."""
    num_ops = len(program.ops)
    node = {key: num_ops + i for i, key in enumerate(dict.fromkeys(itertools.chain(*keys)))}
    ties = [(node[key], op) for op, own in zip(live, keys, strict=True) for key in own]
    start = num_ops if program.optimizer_starts is None else program.optimizer_starts
    updates = [(weight, op) for weight, op in ties if op >= start]
    for op in live:
        # Numbers such as learning rates and norms serve all weights; arrays serve one.
        updates += [
            (value.maker, op)
            for value in (program.ops[op].ins if op >= start else ())
            if value.maker >= start and len(value.dims) and value.nbytes > value.itemsize
        ]
    for new, old in results.state:
        for row, kept in zip(_rows(new), _rows(old), strict=False):
            key = kept.weight if kept.weight in node else (kept.weight or ())[:1]
            if key in node and row.maker >= 0:
                updates.append((node[key], row.maker))
    updated = _components(updates, num_ops + len(node))
    # Ops that update together go to the first weight of theirs; without one they are free.
    first = {updated[weight]: weight for weight in reversed(node.values())}
    ties += [(first[part], one) for one, part in enumerate(updated) if part in first]
    labels = np.array(_components(ties, len(updated)))[list(live)]
    return merge_ids(labels, None).tolist()


def _components(pairs: Sequence[tuple[int, int]], count: int) -> list[int]:
    src, dst = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return components(src, dst, count).tolist()


def _names(ops: Sequence[Op]) -> list[str]:
    """Scope and type of each op, numbered where they repeat."""
    counts: dict[str, int] = {}
    taken: set[str] = set()
    names = []
    for op in ops:
        base = op.name or (f"{op.scope}/{op.op_type}" if op.scope else op.op_type)
        name, k = base, counts.get(base, 0)
        while name in taken:
            k += 1
            name = f"{base}.{k}"
        counts[base] = k
        taken.add(name)
        names.append(name)
    return names


def _cache_at(program: ProgramOps, keys: Sequence[Key], cached: int) -> dict[str, Attribute]:
    """Bytes of the caches that an op holds at the contexts for which that is known."""
    known = [k for k in keys if k[0] in program.cache_at] if cached else []
    if not known:
        return {}
    now = sum(_key_bytes(program, k) for k in known)
    at = [
        sum(_key_bytes(program, k) * size / program.weights[k[0]].nbytes for k, size in parts)
        for parts in (
            [(k, program.cache_at[k[0]][c]) for k in known]
            for c in range(len(program.cache_at[known[0][0]]))
        )
    ]
    return {CACHE_AT: tuple(round(size * min(cached, now) / now) for size in at)}


def spec_parts(
    text: str, form: str, keys: frozenset[str], prefix: str = ""
) -> tuple[str, Mapping[str, str]]:
    """(path, parameters) of a spec such as MODEL.gguf?batch=2&decode, less its prefix.

    Raises `ModelError`, which shows the `form`, where the path is missing or a key unknown.
    """
    spec = ModelSpec.of(text.removeprefix(prefix))
    unknown = sorted(spec.options.keys() - keys)
    if unknown or not spec.path:
        got = ", ".join(map(repr, unknown)) or "no path"
        raise ModelError(f"{text!r} must look like {form}, got {got}")
    return spec.path, spec.options


def batch_of(given: Mapping[str, str]) -> tuple[int, int, bool]:
    """(batch, sequence, decode) of a spec's parameters; raises `ModelError` for other values."""
    sizes = {"batch": given.get("batch", "1"), "sequence": given.get("sequence", "512")}
    for key, size in sizes.items():
        if whole_number(size) is None:
            raise ModelError(f"{key} must be a positive whole number below 2**31, got {size!r}")
    decode = given.get("decode", "0") in ("", "1", "true")
    return int(sizes["batch"]), int(sizes["sequence"]), decode


def request_tokens(given: Mapping[str, str]) -> Request:
    """The request of a spec's parameters, without tokens if they select one phase; raises
    `ModelError` for invalid values and for a phase together with a request."""
    optional = [key for key in ("requests", "context") if key in given]
    if not (optional or given.keys() & {"prompt", "new"}):
        return Request(0, 0)
    both = sorted(given.keys() & {"sequence", "decode"})
    if both:
        raise ModelError(f"a generation has its own tokens, prompt and new: leave out {both[0]}")
    sizes = {}
    for key in ("prompt", "new", *optional):
        size = given.get(key, "")
        if key == "context" and size == LONGEST:
            raise ModelError(
                "context=max is answered by gdp place and gdp fit, which know the machine; give "
                "the context in tokens here"
            )
        if (number := whole_number(size)) is None:
            raise ModelError(
                f"{key} must be a positive whole number below 2**31, got {size or 'nothing'!r}"
            )
        sizes[key] = number
    return Request(**sizes)


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Redirect prints of a user's code to stderr: stdout may be carrying a result as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def executed(label: str, inputs: str = "its inputs") -> Iterator[None]:
    """Context of the first run of an uncut model: what it raises is the model's own fault.

    Prints go to stderr, as in `users_code`. Raises `ModelError`, in one line, for any exception but
    one about gdp's input or too little memory for gdp itself.
    """
    try:
        with users_code():
            yield
    except RefusedError as error:
        raise ModelError(f"{label!r} does not run, uncut, on {inputs}: {error}") from error
    except (GdpError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{label!r} does not run, uncut, on {inputs}: {reason_of(error)}"
        ) from error


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph, and the costs and sizes in it that are not exact."""

    graph: OpGraph
    estimated: tuple[str, ...]  # primitives without a formula: one operation per output element
    assumptions: tuple[str, ...]
    parameters: int | None = None  # numbers in all of them, tied ones once, where that is known


def report(traced: Traced) -> None:
    """Log estimates and assumptions."""
    if traced.estimated:
        _log.warning(
            "%s: no cost formula for %s; one operation per output element is assumed",
            traced.graph.name, ", ".join(traced.estimated),
        )  # fmt: skip
    for assumption in traced.assumptions:
        _log.warning("%s: %s", traced.graph.name, assumption)
