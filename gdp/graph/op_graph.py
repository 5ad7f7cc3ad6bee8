"""Dataflow graphs: ops, tensors, FLOPs and bytes, without any device.

Axes used throughout gdp: N ops, T tensors, E uses (one tensor read by one op), D devices,
B placements.
"""

import functools
import hashlib
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from gdp.base.errors import ModelError
from gdp.graph.groups import distinct, indexed, inverse
from gdp.graph.request import PHASES, UNKNOWN_GROWTH, CacheGrowth, Request
from gdp.graph.source import Source, source_by_ops
from gdp.ops.table import kernel_of

INPUT = "Input"
"""Op type of a graph input: no work, fixed to the cluster's host."""
UNREAD = "Unread"
"""Type of ops that hold weights which no op reads."""
BUFFER = "Buffer"
"""Type of ops that hold room which a runtime reserves where another op is, and compute nothing."""
OUTPUT = "Output"
"""Op type of a graph output: no work, fixed to the cluster's host, makes no tensor."""

SAMPLING_OPS = ("next_token", "step/next_token")
"""Names of the sampling ops of a request, of its prefill and of each decode step."""

MAX_BYTES = 1 << 53
"""Bytes of all weights, or of all tensors, of a graph: 9 PB. Up to here sums are exact as float64
and as int64, those of a thousand samples in flight too; beyond, they would wrap and seem to fit."""

MAX_REPEATS = 1 << 31
"""Runs of one op in a sample, and parts of one run."""

MAX_SENT_BYTES = 1 << 62
"""Bytes of all tensors in all runs of a sample: whole numbers of 64 bits hold their sums."""

T = TypeVar("T")
Attribute = int | float | str | tuple[int, ...] | tuple[float, ...]


def is_storable(value: Attribute) -> bool:
    """True where graph files, which are JSON, hold an attribute: finite, whole numbers in 64 bits.
    Importers leave others out, such as the -inf of a mask."""
    if isinstance(value, tuple):
        return all(map(is_storable, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


@dataclass(frozen=True)
class OpDetail:
    """Types, shapes and attributes of one op, which cost models may read."""

    dtype: str = "float32"  # of the arithmetic: float64/32/16, bfloat16, int8, ...
    input_shapes: tuple[tuple[int, ...], ...] = ()  # weights included
    output_shapes: tuple[tuple[int, ...], ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @functools.cached_property
    def key(self) -> Hashable:
        """All of it; equal keys are of equal details."""
        attributes = tuple(sorted(self.attributes.items()))
        return self.dtype, self.input_shapes, self.output_shapes, attributes


WEIGHT_ARITHMETIC = "weight_arithmetic"
"""Attribute of an op with quantised weights: what their kernels multiply, as the scheme says.
"weights": 16 bits, to which the weights are unpacked; "float8", "float4", "int8": activations are
cast to such numbers, too; "llm.int8": as bitsandbytes does it, in every runtime."""


WEIGHT_BLOCK = "weight_block"
"""Attribute of an op with quantised weights: (columns, rows) of a block whose numbers share a scale
or a word, which no division cuts."""


ARCHITECTURE = "architecture"
"""Attribute of the op that holds the tokens of a GGUF model: `general.architecture` of its file."""


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A dataflow graph with its ops in topological order. Frozen; arrays are read-only.

    Graph inputs are ops of type `INPUT` and graph outputs are ops of type `OUTPUT`: they do no
    work and sit on the cluster's host, so that the first and last transfer are ordinary ones.
    A tensor has one producer and any number of uses; a tensor that nothing reads is allowed.
    """

    name: str
    op_names: tuple[str, ...]
    op_types: tuple[str, ...]
    flop: Float[np.ndarray, "N"]
    memory_traffic_bytes: Float[np.ndarray, "N"]  # read and written, weights included
    weight_bytes: Int[np.ndarray, "N"]  # parameters, optimizer state and constants the op holds
    weight_id: Int[np.ndarray, "N"]  # ops that share a tied weight share an id
    tensor_bytes: Int[np.ndarray, "T"]  # of one run of its producer
    producer: Int[np.ndarray, "T"]  # [t]: the op that makes t, ascending
    use_tensor: Int[np.ndarray, "E"]  # (tensor, op) pairs, each once, sorted by op, then tensor
    use_op: Int[np.ndarray, "E"]
    colocate: Int[np.ndarray, "N"]  # ops with one id must share a device
    is_backward: Bool[np.ndarray, "N"]
    scope: tuple[str, ...]  # module path of each op, "" where unknown
    detail: tuple[OpDetail, ...]
    tensor_names: tuple[str, ...]
    cache_bytes: Int[np.ndarray, "N"]  # of weight_bytes, what one request fills: keys and values
    repeats: Int[np.ndarray, "N"]  # runs of the op in one sample; more than 1 in a generation
    # Parts that one run is computed in, one after the other: the micro-batches of a prompt.
    chunks: Int[np.ndarray, "N"]
    phase: Int[np.ndarray, "N"]  # of `gdp.graph.request.PHASES`
    source: Source  # kind of model that the graph was made of
    request: Request | None = None  # that the graph computes; None: a single phase
    growth: CacheGrowth = UNKNOWN_GROWTH  # of the caches with the context of the request

    def __post_init__(self) -> None:
        for violation in _violations(self):
            raise ModelError(f"graph {self.name!r}: {violation}")
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_ops(self) -> int:
        """N, inputs and outputs of the graph included."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """T, tensors that nothing reads included."""
        return len(self.tensor_bytes)

    @property
    def num_uses(self) -> int:
        """E, the (tensor, op) pairs."""
        return len(self.use_tensor)

    def weight_holders(
        self, ops: Int[np.ndarray, "M"] | None = None, owner: Int[np.ndarray, "N"] | None = None
    ) -> Int[np.ndarray, "W"]:
        """One op for every distinct weight, sorted by owner and weight id.

        Of the ops that hold a weight it is the one with the most bytes, as the largest is what a
        device holds where they disagree; of equal ones the first.

        Args:
            ops: Those that are asked about; None: all.
            owner: Of every op, such as its device: a weight has one holder for each. None: one.
        """
        ops = np.arange(self.num_ops) if ops is None else ops
        key = self.weight_id if owner is None else np.stack([self.weight_id, owner])
        order = ops[np.lexsort((-self.weight_bytes[ops], *np.atleast_2d(key)[:, ops]))]
        keys = np.atleast_2d(key)[:, order]
        return order[np.append(True, (np.diff(keys) != 0).any(axis=0))[: len(order)]]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that an answer depends on: the identity a placement carries.

        The graph's own name, those of its tensors and its source, which the ops tell, are left out,
        as are the phases of a request, which names tell; of ids which ops share one counts alone.
        """
        return self._digest(frozenset())

    def _digest(self, left_out: frozenset[str]) -> str:
        """The digest without some attributes of ops."""
        sha = hashlib.sha256(self.earlier_digest.encode())
        for ids in (self.weight_id, self.colocate):
            _, first, which = np.unique(ids, return_index=True, return_inverse=True)
            sha.update(first[which].astype(np.int64).tobytes())
        sha.update(self.is_backward.astype(np.uint8).tobytes())
        sha.update(np.ascontiguousarray(self.cache_bytes, dtype=np.int64).tobytes())
        sha.update("\0".join(self.scope).encode())
        if self.request is None and self.phase.any():
            sha.update(self.phase.tobytes())
        text: dict[int, str] = {}
        details = list(self.detail)
        if self.request is not None:
            sampling = OpDetail(attributes=_as_attributes(self.request, self.growth))
            for name in self.op_index.keys() & SAMPLING_OPS:
                details[self.op_index[name]] = sampling
        for detail in details:
            if id(detail) not in text:
                known = sorted(x for x in detail.attributes.items() if x[0] not in left_out)
                shapes = detail.input_shapes, detail.output_shapes
                text[id(detail)] = repr((detail.dtype, shapes, known))
        sha.update("\0".join(text[id(detail)] for detail in details).encode())
        return sha.hexdigest()

    @functools.cached_property
    def earlier_digest(self) -> str:
        """Digest in placements of earlier versions: of names, structure, FLOPs and bytes alone."""
        sha = hashlib.sha256()
        sha.update("\0".join(self.op_names).encode())
        sha.update("\0".join(self.op_types).encode())
        for array in (self.flop, self.memory_traffic_bytes, self.weight_bytes, self.tensor_bytes):
            sha.update(np.ascontiguousarray(array, dtype=np.float64).tobytes())
        for array in (self.producer, self.use_tensor, self.use_op, self.colocate):
            sha.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        for array in (self.repeats, self.chunks):
            if (array != 1).any():
                sha.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return sha.hexdigest()

    @property
    def digests(self) -> tuple[str, ...]:
        """Its digest, and those by which files of earlier versions know it."""
        left_out = (
            {WEIGHT_BLOCK, ARCHITECTURE}, {WEIGHT_BLOCK, ARCHITECTURE, WEIGHT_ARITHMETIC}
        )  # fmt: skip
        before = dict.fromkeys(self._digest(frozenset(names)) for names in left_out)
        return self.digest, *before, self.earlier_digest

    @functools.cached_property
    def op_index(self) -> dict[str, int]:
        """The index of each op by its name."""
        return {name: index for index, name in enumerate(self.op_names)}

    @functools.cached_property
    def kinds(self) -> tuple[list[tuple[str, OpDetail]], Int[np.ndarray, "N"]]:
        """(type and detail of ops that differ in either, its index for each op): layers of a model
        are identical."""
        keys = [detail.key for detail in self.detail]
        which = np.array(indexed(zip(self.op_types, keys, strict=True))[1], dtype=np.int64)
        first = np.unique(which, return_index=True)[1].tolist()
        return [(self.op_types[i], self.detail[i]) for i in first], which

    def has_type(self, types: Collection[str]) -> Bool[np.ndarray, "N"]:
        """True for ops of one of these types."""
        kinds, which = self.kinds
        return np.array([kind in types for kind, _ in kinds], dtype=bool)[which]

    def has_kernel(self, *kernels: str) -> Bool[np.ndarray, "N"]:
        """True for ops whose kernel is of one of these classes, of `OpRule.kernel`."""
        return self.has_type({kind for kind, _ in self.kinds[0] if kernel_of(kind) in kernels})

    @functools.cached_property
    def fusions(self) -> dict[bytes, Any]:
        """The last fusions of the graph by the labels of its ops, kept by `gdp.graph.fuse`."""
        return {}

    @functools.cached_property
    def is_io(self) -> Bool[np.ndarray, "N"]:
        """True for graph inputs and outputs."""
        return self.has_type((INPUT, OUTPUT))

    @functools.cached_property
    def held_bytes(self) -> Int[np.ndarray, "T"]:
        """Bytes of each tensor in memory while it is alive: of one part of one run."""
        held = -(-self.tensor_bytes // self.chunks[self.producer])
        held.setflags(write=False)
        return held

    @functools.cached_property
    def sent_bytes(self) -> Int[np.ndarray, "T"]:
        """Bytes of each tensor over a link in one sample: of all runs of its producer."""
        sent = self.tensor_bytes * self.repeats[self.producer]
        sent.setflags(write=False)
        return sent

    @functools.cached_property
    def rests(self) -> Bool[np.ndarray, "N"]:
        """True for ops that only hold weights or room: they read, compute and make nothing."""
        return self.has_type((UNREAD, BUFFER))

    @functools.cached_property
    def is_buffer(self) -> Bool[np.ndarray, "N"]:
        """True for ops that hold room beside weights and caches."""
        return self.has_type((BUFFER,))

    @functools.cached_property
    def edges(self) -> tuple[Int[np.ndarray, "E"], Int[np.ndarray, "E"]]:
        """(source op, destination op) of every use."""
        return self.producer[self.use_tensor], self.use_op

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """By op, the makers of the tensors that it reads, and the readers of those that it makes;
        an op for each use."""
        makers: list[list[int]] = [[] for _ in range(self.num_ops)]
        readers: list[list[int]] = [[] for _ in range(self.num_ops)]
        for maker, reader in zip(*(ends.tolist() for ends in self.edges), strict=True):
            makers[reader].append(maker)
            readers[maker].append(reader)
        return makers, readers


def _as_attributes(request: Request, growth: CacheGrowth) -> dict[str, Attribute]:
    """A request in a digest, where it stands as attributes of the sampling ops."""
    plain: dict[str, Attribute] = {**request.sizes()}
    if growth.tokens:
        plain |= {"cache_tokens": growth.tokens, "longest_context": growth.longest}
    flags = {"served": request.is_served, "drafts": request.is_draft}
    return plain | {name: 1 for name, holds in flags.items() if holds}


class GraphBuilder:
    """An `OpGraph` under construction: ops, the tensors that they make, and who reads these.

    >>> b = GraphBuilder()
    >>> x = b.make_tensor(b.add_op("a", "Relu"), 4)
    >>> b.add_op("b", "Relu", reads=[x])
    1
    >>> b.build("g").num_uses
    1
    """

    def __init__(self) -> None:
        self.op_types: list[str] = []
        self.tensors: list[tuple[int, int]] = []  # producer, bytes
        self._tensor_names: list[str] = []
        self._uses: list[tuple[int, int]] = []
        self._ops: list[tuple[Any, ...]] = []

    def add_op(
        self,
        name: str,
        op_type: str,
        *,
        reads: Iterable[int] = (),
        flop: float = 0.0,
        traffic_bytes: float = 0.0,
        weight_bytes: int = 0,
        weight_id: int | None = None,
        colocate: int | None = None,
        is_backward: bool = False,
        scope: str = "",
        detail: OpDetail = OpDetail(),
        cache_bytes: int = 0,
        repeats: int = 1,
        chunks: int = 1,
    ) -> int:
        """Append an op that reads some tensors; its index. Ids that are None are its own."""
        op = len(self._ops)
        ids = [op if i is None else i for i in (weight_id, colocate)]
        given = (name, flop, traffic_bytes, weight_bytes, *ids, is_backward, scope, detail)
        self._ops.append((*given, cache_bytes, repeats, chunks))
        self.op_types.append(op_type)
        self._uses += [(tensor, op) for tensor in reads]
        return op

    def make_tensor(self, op: int, size_bytes: int, name: str | None = None) -> int:
        """Append a tensor that an op makes; its index."""
        self._tensor_names.append(f"t{len(self.tensors)}" if name is None else name)
        self.tensors.append((op, size_bytes))
        return len(self.tensors) - 1

    def build(self, name: str, source: Source | None = None) -> OpGraph:
        """The graph; raises `ModelError` where it has a cycle or sizes that no model has."""
        names, flop, traffic, weights, weight_id, colocate, backward, scope, detail, *more = (
            zip(*self._ops, strict=True) if self._ops else ((),) * 12
        )
        return make_graph(
            name, names, self.op_types, self.tensors, self._uses, flop=flop,
            memory_traffic_bytes=traffic, weight_bytes=weights, weight_id=weight_id,
            colocate=colocate, is_backward=backward, scope=scope, detail=detail,
            tensor_names=self._tensor_names, cache_bytes=more[0], repeats=more[1],
            chunks=more[2], source=source,
        )  # fmt: skip


def make_graph(
    name: str,
    op_names: Sequence[str],
    op_types: Sequence[str],
    tensors: Sequence[tuple[int, int]] | Int[np.ndarray, "T 2"],
    uses: Sequence[tuple[int, int]] | Int[np.ndarray, "U 2"],
    *,
    flop: Sequence[float] | np.ndarray | None = None,
    memory_traffic_bytes: Sequence[float] | np.ndarray | None = None,
    weight_bytes: Sequence[int] | np.ndarray | None = None,
    weight_id: Sequence[int] | np.ndarray | None = None,
    colocate: Sequence[int] | np.ndarray | None = None,
    is_backward: Sequence[bool] | np.ndarray | None = None,
    scope: Sequence[str] | None = None,
    detail: Sequence[OpDetail] | None = None,
    tensor_names: Sequence[str] | None = None,
    cache_bytes: Sequence[int] | np.ndarray | None = None,
    repeats: Sequence[int] | np.ndarray | None = None,
    chunks: Sequence[int] | np.ndarray | None = None,
    phase: Sequence[int] | np.ndarray | None = None,
    source: Source | None = None,
    request: Request | None = None,
    growth: CacheGrowth = UNKNOWN_GROWTH,
) -> OpGraph:
    """An `OpGraph` from lists in any order: ops are sorted topologically, uses deduplicated.

    `tensors` holds (producer op, bytes) pairs and `uses` (tensor, op) pairs, both by index into
    the lists given. What is left out is zero, of its own for ids, 1 for `repeats` and `chunks`, and
    told by the ops for `source`. Raises `ModelError` on a cycle, naming an op on it.

    >>> g = make_graph("g", ["a", "b"], ["Relu", "Relu"], [(0, 4), (1, 4)], [(0, 1)])
    >>> g.num_ops, g.num_uses
    (2, 1)
    """
    n, t = len(op_names), len(tensors)
    producer, size_bytes = np.array(tensors, dtype=np.int64).reshape(-1, 2).T
    pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
    order, by_producer, producer, use_tensor, use_op = _in_order(name, op_names, producer, pairs)
    zeros, own = np.zeros(n), np.arange(n)
    if source is None:
        source = source_by_ops(op_types, (each.attributes for each in detail or ()))
    return OpGraph(
        name=name,
        op_names=picked(op_names, order),
        op_types=picked(op_types, order),
        flop=_filled(flop, zeros, float)[order],
        memory_traffic_bytes=_filled(memory_traffic_bytes, zeros, float)[order],
        weight_bytes=_filled(weight_bytes, zeros, np.int64)[order],
        weight_id=_filled(weight_id, own, np.int64)[order],
        tensor_bytes=size_bytes[by_producer],
        producer=producer,
        use_tensor=use_tensor,
        use_op=use_op,
        colocate=_filled(colocate, own, np.int64)[order],
        is_backward=_filled(is_backward, zeros, bool)[order],
        scope=picked([""] * n if scope is None else scope, order),
        detail=picked([OpDetail()] * n if detail is None else detail, order),
        tensor_names=picked(tensor_names or [f"t{i}" for i in range(t)], by_producer),
        cache_bytes=_filled(cache_bytes, zeros, np.int64)[order],
        repeats=_filled(repeats, zeros + 1, np.int64)[order],
        chunks=_filled(chunks, zeros + 1, np.int64)[order],
        phase=_filled(phase, zeros, np.int8)[order],
        source=source,
        request=request,
        growth=growth,
    )


def _filled(
    values: Sequence | np.ndarray | None, default: np.ndarray, dtype: type
) -> Shaped[np.ndarray, "N"]:
    return (default if values is None else np.asarray(values)).astype(dtype)


def picked(values: Sequence[T], order: Int[np.ndarray, "M"]) -> tuple[T, ...]:
    """The values at these indices."""
    if len(order) == len(values) and (order[:-1] < order[1:]).all():  # all of them as they are
        return tuple(values)
    return tuple(map(values.__getitem__, order.tolist()))


def _in_order(
    name: str, op_names: Sequence[str], producer: Int[np.ndarray, "T"],
    pairs: Int[np.ndarray, "U 2"],
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Order of the ops (topological) and of the tensors (by producer, so that an op's tensors are
    contiguous), as given; producers [T], tensors [E] and ops [E, ascending] of each use, once."""
    n, t = len(op_names), len(producer)
    if t and (producer.min() < 0 or producer.max() >= n):
        raise ModelError(f"graph {name!r}: a tensor's producer lies outside 0..{n - 1}")
    if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= t or pairs[:, 1].max() >= n):
        raise ModelError(f"graph {name!r}: a use names a tensor or op that does not exist")
    key = distinct(pairs[:, 0] * n + pairs[:, 1])
    pairs = np.stack([key // max(n, 1), key % max(n, 1)], axis=1)
    order = topological_order(n, producer[pairs[:, 0]], pairs[:, 1])
    if len(order) < n:
        stuck = op_names[int(np.setdiff1d(np.arange(n), order)[0])]
        raise ModelError(f"graph {name!r} has a cycle through or before op {stuck!r}")
    position = inverse(order)
    made_by = position[producer] if t else producer
    by_producer = np.lexsort((np.arange(t), made_by))
    use_op, use_tensor = position[pairs[:, 1]], inverse(by_producer)[pairs[:, 0]]
    by_op = np.lexsort((use_tensor, use_op))
    return order, by_producer, made_by[by_producer], use_tensor[by_op], use_op[by_op]


def topological_order(
    num_ops: int, src: Int[np.ndarray, "E"], dst: Int[np.ndarray, "E"]
) -> Int[np.ndarray, "M"]:
    """The ops in topological order, smallest index first among the ready; M < N on a cycle.

    An order that is already topological comes back unchanged. O((N + E) log N).

    >>> topological_order(3, np.array([2, 0]), np.array([0, 1]))
    array([2, 0, 1])
    """
    import heapq

    if np.all(src < dst):
        return np.arange(num_ops)
    by_src = np.argsort(src, kind="stable")
    first = np.searchsorted(src[by_src], np.arange(num_ops + 1))
    sorted_dst = dst[by_src].tolist()
    missing = np.bincount(dst, minlength=num_ops).tolist()
    ready = [op for op in range(num_ops) if missing[op] == 0]
    order: list[int] = []
    while ready:
        op = heapq.heappop(ready)
        order.append(op)
        for reader in sorted_dst[first[op] : first[op + 1]]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    return np.array(order, dtype=np.int64)


def _violations(graph: OpGraph) -> list[str]:
    """Everything that is wrong with a graph's arrays, one line each."""
    n, t, e = graph.num_ops, graph.num_tensors, graph.num_uses
    violations: list[str] = []
    if n == 0:
        violations.append("it has no ops; nothing can be placed")
    lengths = {
        "op_types": n, "flop": n, "memory_traffic_bytes": n, "weight_bytes": n, "weight_id": n,
        "colocate": n, "is_backward": n, "scope": n, "detail": n, "producer": t,
        "tensor_names": t, "use_op": e, "cache_bytes": n, "repeats": n, "chunks": n,
        "phase": n,
    }  # fmt: skip
    for key, wanted in lengths.items():
        if len(getattr(graph, key)) != wanted:
            violations.append(f"{key} has {len(getattr(graph, key))} entries, {wanted} wanted")
    if violations:
        return violations
    for key in ("flop", "memory_traffic_bytes", "weight_bytes", "tensor_bytes"):
        values = getattr(graph, key)
        if len(values) and not (np.isfinite(values).all() and (values >= 0).all()):
            violations.append(f"{key} has a negative or non-finite entry")
    for key in ("repeats", "chunks"):
        values = getattr(graph, key)
        if (values < 1).any() or (values > MAX_REPEATS).any():
            violations.append(f"{key} has an entry below 1 or above {MAX_REPEATS}")
    if (graph.phase < 0).any() or (graph.phase >= len(PHASES)).any():
        violations.append(f"phase has an entry below 0 or above {len(PHASES) - 1}")
    if (graph.cache_bytes < 0).any() or (graph.cache_bytes > graph.weight_bytes).any():
        violations.append("cache_bytes has an entry below 0 or above its weight_bytes")
    for key in ("weight_bytes", "tensor_bytes"):
        total = float(getattr(graph, key).sum(dtype=np.float64))
        if total > MAX_BYTES:
            violations.append(
                f"{key} are {total:.3g} bytes in all, more than the {MAX_BYTES:.3g} that gdp sums "
                "exactly; a size is wrong"
            )
    sent = float((graph.tensor_bytes * graph.repeats[graph.producer].astype(np.float64)).sum())
    if sent > MAX_SENT_BYTES:
        violations.append(
            f"tensor_bytes times repeats are {sent:.3g} bytes in all, more than the "
            f"{MAX_SENT_BYTES:.3g} that whole numbers of 64 bits hold; repeats is wrong"
        )
    with np.errstate(over="ignore"):
        for key in ("flop", "memory_traffic_bytes"):
            if not np.isfinite(getattr(graph, key).sum()):
                violations.append(f"{key} have no finite sum")
    if len(set(graph.op_names)) < n:
        seen: set[str] = set()
        twice = next(x for x in graph.op_names if x in seen or seen.add(x))
        violations.append(f"op name {twice!r} appears twice")
    src, dst = graph.edges
    if len(src) and (src >= dst).any():
        violations.append("ops are not in topological order")
    if (np.diff(graph.producer) < 0).any():
        violations.append("tensors are not in the order of their producers")
    if (np.diff(graph.use_op * max(t, 1) + graph.use_tensor) <= 0).any():
        violations.append("uses are not sorted by op and tensor, or one appears twice")
    return violations
