"""Kernels of a graph: the class and sizes of each op, from its type, shapes and bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.costs.measured.kernels import (
    ARITHMETIC,
    ENGINES,
    ENTERS_BYTES,
    KINDS,
    NUMBERS,
    Kernels,
)
from gdp.graph.groups import alike
from gdp.graph.latent import LATENT
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, OpDetail, OpGraph
from gdp.graph.request import DECODE
from gdp.ops.rule import ATTENTION, CONVOLUTION, EXPERTS, LINEAR, PRODUCT, SOFTMAX
from gdp.ops.table import ELEMENTWISE_OPS, REDUCTIONS, VIEWS, kernel_of

_PRODUCT, _BATCHED, _CONVOLUTION, _PROMPT, _TOKEN, _EXPERTS = range(6)  # of `KINDS`
_SIMPLE = REDUCTIONS | ELEMENTWISE_OPS | VIEWS
_NUMBERS: Mapping[object, str] = {
    "weights": "weights alone", "float8": "floats", "float4": "floats", "int8": "integers",
    "llm.int8": "integers",
}  # fmt: skip
"""Row of `NUMBERS` of each `WEIGHT_ARITHMETIC`."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "float8": 1, "int8": 1}
_PRECISE = frozenset(("float32", "float64"))
_BLOCK_SCALE_BYTES = 4 / 128**2
"""Of a weight: a scale in 32 bits for each block of 128 x 128, as of DeepSeek-V3 and others."""
_BITS = np.array([4.0, 8.0, 16.0, 32.0])
PASS_TOKENS = 8192.0
"""Most tokens of a pass of an engine where the request says none: of vLLM on an H100."""


@dataclass(frozen=True, eq=False)
class GraphKernels:
    """The kernels of a graph's ops, and the ops of which nothing of the kind was measured."""

    kernels: Kernels  # of all N ops
    row: Int[np.ndarray, "N"]  # ops of one row have equal kernels
    known: Bool[np.ndarray, "N"]
    # Of an engine: ops of a block of experts are one kernel, and so are products of one input.
    block: Int[np.ndarray, "N"]  # id of the block, -1 outside
    passes: Float[np.ndarray, "N"]  # of an engine, by its tokens a pass; 1 elsewhere
    exceeds: Bool[np.ndarray, "N"]  # of an engine's experts: a pass has more tokens than there are


def graph_kernels(graph: OpGraph, *, served: bool) -> GraphKernels:
    """The kernel of every op of a fused graph.

    Args:
        graph: Its FLOPs and bytes are the kernels', so that their roofline is the graph's.
        served: As an engine of language models computes it: what is stored in 8 or 4 bits is also
            multiplied so where its scheme casts activations, too, all of a block of experts is one
            call, and a router between products in 16 bits multiplies in 16 bits. O(N log N).
    """
    kinds, kind_of = graph.kinds
    work = kind_of, graph.flop, graph.memory_traffic_bytes, _read_weights(graph)
    first, row = alike(*work)  # layers of a model are alike
    narrow = served and type_of_products(graph) == "float16"
    at_once = (graph.request.pass_tokens if graph.request else 0) or PASS_TOKENS
    shapes = np.array([_shape(t, detail, narrow, at_once) for t, detail in kinds], dtype=float)
    column = _rows(_Shape(*shapes[kind_of[first]].T), _Work(*(x[first] for x in work[1:])), served)
    column = {name: values[row] for name, values in column.items()}
    kind, arithmetic = (column[name].astype(np.int64) for name in ("kind", "arithmetic"))
    simple = kind > _EXPERTS
    if (~simple & (kind >= 0) & (arithmetic > 0)).any():
        # A norm that computes in 32 bits between 16-bit products reads and writes 16 bits.
        arithmetic[simple] = ARITHMETIC.index("float16")
    precise = arithmetic == ARITHMETIC.index("float32")
    engine = np.where(precise, ENGINES.index("torch"), ENGINES.index("vllm"))
    held = np.minimum(column["held_bytes"], graph.memory_traffic_bytes)
    moved = column["moved_bytes"]
    kernels = Kernels(
        kind=np.maximum(kind, 0), engine=engine, arithmetic=arithmetic,
        stored_bits=column["stored_bits"], block_scaled=column["block_scaled"],
        b=column["b"], m=column["m"], n=column["n"], k=column["k"],
        flop=graph.flop.astype(float), held_bytes=held,
        moved_bytes=np.where(np.isnan(moved), graph.memory_traffic_bytes - held, moved),
        numbers=column["numbers"].astype(np.int64),
    )  # fmt: skip
    known, once = (kind >= 0) & ~graph.is_io, np.ones(graph.num_ops)
    if not served:
        none = np.zeros(graph.num_ops, dtype=bool)
        return GraphKernels(kernels, row, known, np.full(graph.num_ops, -1), once, none)
    block = _blocks(graph, kernels)
    moved, tokens = _of_calls(graph, kernels, block)
    exceeds = (kind == _EXPERTS) & (np.minimum(tokens, at_once) > column["experts"])
    tokens = np.where(kind == _EXPERTS, tokens, column["tokens"])
    passes = np.where(known, np.maximum(tokens / at_once, 1.0), 1.0)
    return GraphKernels(replace(kernels, moved_bytes=moved), row, known, block, passes, exceeds)


def _read_weights(graph: OpGraph) -> Int[np.ndarray, "N"]:
    """Bytes of weights that each op reads: its own, or in a step those that the same module holds
    for the prompt."""
    steps = (graph.phase == DECODE).tolist()
    if not any(steps):
        return graph.weight_bytes
    own = graph.weight_bytes.tolist()
    held = (graph.weight_bytes - graph.cache_bytes).tolist()
    shapes = [detail.input_shapes[1:2] for detail in graph.detail]
    modules = {
        (scope, shape): size
        for scope, shape, size, stepping in zip(graph.scope, shapes, held, steps, strict=True)
        if size > 0 and shape and scope and not stepping
    }
    read = [
        size or (modules.get((scope, shape), 0) if stepping else 0)
        for size, scope, shape, stepping in zip(own, graph.scope, shapes, steps, strict=True)
    ]
    return np.array(read, dtype=np.int64)


def type_of_products(graph: OpGraph) -> str | None:
    """Type of arithmetic, as of `ARITHMETIC`, in which a graph multiplies; None where nowhere."""
    heavy = (PRODUCT, LINEAR, CONVOLUTION, EXPERTS)
    types = {detail.dtype for t, detail in graph.kinds[0] if kernel_of(t) in heavy}
    if not types:
        return None
    return "float32" if types <= _PRECISE else "float16"


class _Shape(NamedTuple):
    """Shapes, type and attributes of ops in numbers, a row for each op. What nothing but the work
    of an op tells is not here."""

    kind: Any = -1  # that the shapes allow, index into `KINDS`; -1: none of products
    wide: Any = 0.0  # 1 where it computes in 32 bits or more
    # Sizes as of `Kernels`; the inner size of a product as its shapes say it, 0 of a convolution.
    b: Any = 1.0
    m: Any = 1.0
    n: Any = 1.0
    k: Any = 0.0
    # Elements made by a product; of a layer of attention those that a cache holds.
    elements: Any = 1.0
    sure: Any = 0.0  # 1 where the second factor has the columns and the inner size
    item_bytes: Any = 2.0
    used: Any = 1.0  # part of the weights that is read
    share: Any = 1.0  # part of the bytes that are no activations
    around_bytes: Any = 0.0  # of queries and results of attention
    tokens: Any = 0.0  # of a product, or of prompts that attend, as far as they are of several
    told: Any = 0  # index into `NUMBERS`
    eights: Any = 0.0  # 1 where its scheme casts to 8 bits
    always_narrow: Any = 0.0  # 1 where its scheme multiplies narrow numbers in every runtime
    # Read as an element-wise op or a reduction:
    simple_kind: Any = -1
    is_simple: Any = 0.0
    columns: Any = 1.0  # of the largest tensor, and its elements
    largest: Any = 1.0
    made_columns: Any = 1.0  # of the result
    made: Any = 1.0


class _Work(NamedTuple):
    """FLOPs and bytes of the same ops."""

    flop: Float[np.ndarray, "R"]
    traffic: Float[np.ndarray, "R"]
    weights: Int[np.ndarray, "R"]


_Columns = dict[str, Any]
"""Arrays of the fields of `Kernels`, by name."""


def _shape(op_type: str, detail: OpDetail, narrow: bool, at_once: float) -> _Shape:
    """The numbers of ops of one type and detail; a `narrow` product in 32 bits is one in 16."""
    out = detail.output_shapes[0] if detail.output_shapes else ()
    shapes, size, dtype = detail.input_shapes, math.prod(out), detail.dtype
    kernel = kernel_of(op_type)
    multiplies = kernel in (PRODUCT, LINEAR)
    if narrow and multiplies and dtype == "float32":
        dtype = "bfloat16"
    first = max([out, *shapes], key=math.prod, default=())
    kind = "elementwise"
    if kernel == SOFTMAX:
        kind = "softmax"
    elif op_type in REDUCTIONS and size != math.prod(first):
        kind = "normalisation"
    told = detail.attributes.get(WEIGHT_ARITHMETIC)
    shape = _Shape(
        wide=dtype in _PRECISE, item_bytes=_ITEM_BYTES.get(dtype, 2),
        told=NUMBERS.index(_NUMBERS.get(told, "not told")), eights=told in ("float8", "int8"),
        always_narrow=told == "llm.int8", simple_kind=KINDS.index(kind),
        is_simple=op_type in _SIMPLE, columns=first[-1] if first else 1.0, largest=math.prod(first),
        made_columns=out[-1] if out else 1.0, made=size,
    )  # fmt: skip
    if multiplies and len(shapes) > 1 and size:
        return _product(shape, shapes, out)
    ranks = [len(each) for each in (out, *shapes[:2])]
    if kernel == CONVOLUTION and size and len(ranks) > 2 and min(ranks) > 2:
        channels = shapes[1][0] if op_type != "conv_general_dilated" else 0
        groups = max(1, shapes[0][1] // max(shapes[1][1], 1)) if channels else 1
        n = max(channels // groups, 1) if channels else out[-1]
        if groups > 1 and n == 1 and shapes[1][1] == 1:
            return shape._replace(is_simple=1.0)  # depthwise: no product, bytes alone
        m = max(size / groups / n, 1.0)
        return shape._replace(kind=_CONVOLUTION, b=groups, m=m, n=n, elements=size)
    if kernel == EXPERTS and len(shapes) > 1 and len(shapes[1]) == 3 and size and all(shapes[1]):
        experts, k, n = (float(x) for x in shapes[1])
        rows = size / n
        working = experts * (1.0 - (1.0 - 1.0 / experts) ** max(rows, 1.0))
        # Of fewer rows than experts the graph counts an expert for each, of more all of them.
        return shape._replace(
            kind=_EXPERTS, b=working, m=max(rows / working, 1.0), n=n, k=k,
            used=working / experts, share=working / min(experts, max(rows, 1.0)),
        )  # fmt: skip
    if kernel == ATTENTION and len(shapes) > 2 and all(len(s) == 4 and all(s) for s in shapes[:3]):
        return _attention(shape, detail, out, at_once)
    return shape


def _product(shape: _Shape, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> _Shape:
    """A product; a batch that meets one matrix is more rows."""
    size, columns = math.prod(out), float(out[-1]) if out else 1.0
    whole = float(shapes[0][-1]) if shapes[0] else 1.0
    rows, batch = size / columns, 1.0
    if min(len(shapes[0]), len(shapes[1])) >= 3 and math.prod(shapes[1][:-2]) != 1:
        batch = float(math.prod(out[:-2]))
    return shape._replace(
        kind=_PRODUCT if batch == 1 else _BATCHED, b=batch, m=rows / batch, n=columns, k=whole,
        elements=size, tokens=rows if batch == 1 else 0.0,
        sure=sorted(shapes[1][-2:]) == sorted((columns, whole)),
    )  # fmt: skip


def _attention(shape: _Shape, detail: OpDetail, out: tuple[int, ...], at_once: float) -> _Shape:
    shapes = detail.input_shapes
    batch, heads, queries, size = (float(x) for x in shapes[0])
    keys, seen = float(shapes[1][1]), float(shapes[1][2])
    if detail.attributes.get(LATENT):  # one row for keys and values, not two
        size = float(shapes[1][3]) / 2
    kind = "token attention" if queries * 4 <= seen and queries <= 4 else "prompt attention"
    around = (4 if shape.wide else 2) * (math.prod(shapes[0]) + math.prod(out))
    return shape._replace(
        kind=KINDS.index(kind), b=batch * keys, m=queries * heads / keys, n=seen, k=size,
        around_bytes=around, elements=max(2.0 * batch * keys * seen * size, 1.0),
        tokens=batch * min(queries, at_once),
    )  # fmt: skip


def _rows(shape: _Shape, work: _Work, served: bool) -> _Columns:
    """Columns of `Kernels`; of kind -1 where nothing like it was measured."""
    products = np.isin(shape.kind, (_PRODUCT, _BATCHED))
    none = (shape.kind < 0) | (products & (work.flop <= 0))
    simple = none & ((shape.is_simple > 0) | (work.flop * 4 < work.traffic))
    wide = (shape.wide > 0) | (none & ~simple)
    zeros, sizes = np.zeros(len(none)), ("b", "m", "n", "k")
    column: _Columns = {name: np.where(none, 1.0, getattr(shape, name)) for name in sizes}
    column |= {
        "kind": np.where(none, np.where(simple, shape.simple_kind, -1), shape.kind),
        "arithmetic": np.where(wide, ARITHMETIC.index("float32"), ARITHMETIC.index("float16")),
        "stored_bits": np.where(wide, 32.0, 16.0), "held_bytes": zeros.copy(),
        "block_scaled": zeros.copy(), "moved_bytes": zeros + math.nan, "numbers": zeros.copy(),
        "tokens": shape.tokens, "experts": shape.b / shape.used,
    }  # fmt: skip
    for which, changed in (
        (~none & (products | (shape.kind == _CONVOLUTION)), _with_inner_size),
        (~none & np.isin(shape.kind, (_PRODUCT, _EXPERTS)), partial(_with_weights, served=served)),
        (np.isin(shape.kind, (_PROMPT, _TOKEN)), _with_cache),
        (simple, _with_rows),
    ):
        if which.any():
            part = {name: values[which] for name, values in column.items()}
            of = _Shape(*(x[which] for x in shape)), _Work(*(x[which] for x in work))
            for name, values in changed(part, *of).items():
                column[name][which] = values
    return column


def _with_inner_size(row: _Columns, shape: _Shape, work: _Work) -> _Columns:
    inner = np.maximum(work.flop / (2.0 * shape.elements), 1.0)
    # What is fused adds a few FLOP to each element, and unpacking two to each weight, which are as
    # many as the product's own where one row is multiplied.
    near = (shape.k / inner > 0.75) & (shape.k / inner <= 1.01) | (shape.sure > 0)
    return {"k": np.where(near & (row["kind"] != _CONVOLUTION), shape.k, inner)}


def _with_weights(row: _Columns, shape: _Shape, work: _Work, served: bool) -> _Columns:
    """Products with the bits of their stored weights: from their bytes where the op holds them, of
    which a part is used, else from a share of the bytes that activations leave."""
    b, m, n, k = (row[name] for name in ("b", "m", "n", "k"))
    elements, wide = b * n * k, shape.wide > 0
    moved = shape.item_bytes * b * m * (k + n)
    left = (work.traffic - moved) * shape.share
    held = np.where(work.weights > 0, work.weights * shape.used, left)
    stored = np.minimum(8.0 * held / elements, 32.0)
    activations = stored < 2.0  # both factors are
    held = np.where(activations, elements * shape.item_bytes, held)
    bits = _nearest_bits(np.where(activations, 8.0 * shape.item_bytes, stored))
    narrow = ~wide & np.isin(bits, (4.0, 8.0)) & (served | (shape.always_narrow > 0))
    eights = (bits == 8.0) | (shape.eights > 0)
    numbers = np.where(eights, ARITHMETIC.index("float8"), ARITHMETIC.index("float4"))
    scaled = np.abs(held / elements - bits / 8 - _BLOCK_SCALE_BYTES) < _BLOCK_SCALE_BYTES / 50
    return {
        "arithmetic": np.where(narrow, numbers, row["arithmetic"]), "stored_bits": bits,
        "held_bytes": np.minimum(held, work.traffic), "block_scaled": scaled,
        "moved_bytes": np.where(row["kind"] == _EXPERTS, moved, math.nan), "numbers": shape.told,
    }  # fmt: skip


def _nearest_bits(stored: Float[np.ndarray, "R"]) -> Float[np.ndarray, "R"]:
    return _BITS[np.abs(np.log(_BITS / stored[:, None])).argmin(axis=1)]


def _with_cache(row: _Columns, shape: _Shape, work: _Work) -> _Columns:
    held = np.maximum(work.traffic - shape.around_bytes, 0.0)
    bits, stored = row["stored_bits"], 8.0 * held / shape.elements
    bits[stored > 0] = _nearest_bits(stored[stored > 0])
    return {"stored_bits": bits, "held_bytes": held}


def _with_rows(row: _Columns, shape: _Shape, work: _Work) -> _Columns:
    """Element-wise ops and reductions, as rows of the largest tensor."""
    item_bytes = row["stored_bits"] / 8
    some = shape.largest * item_bytes > work.traffic  # of a table some rows are read
    columns = np.where(some, shape.made_columns, shape.columns)
    elements = np.maximum(np.where(some, shape.made, shape.largest), 1.0)
    # Unknown shapes: one read and one write of each.
    untold = work.traffic > 5 * elements * item_bytes
    columns = np.maximum(np.where(untold, 1024.0, columns), 1.0)
    elements = np.where(untold, work.traffic / (2 * item_bytes), elements)
    reads = np.clip(work.traffic / item_bytes / elements - 1.0, 1.0, 4.0)
    return {"m": np.maximum(elements / columns, 1.0), "n": columns, "k": reads}


def _blocks(graph: OpGraph, kernels: Kernels) -> Int[np.ndarray, "N"]:
    """Ops of one scope that hold grouped products, of each phase apart, and products with weights
    that read one input, such as those of queries, keys and values."""
    keys = list(zip(graph.scope, graph.phase.tolist(), strict=True))
    grouped = kernels.kind == KINDS.index("experts")
    scopes = {key for key, part in zip(keys, grouped.tolist(), strict=True) if part and key[0]}
    ids = {key: i for i, key in enumerate(sorted(scopes))}
    block = np.array([ids.get(key, -1) for key in keys], dtype=np.int64).reshape(graph.num_ops)
    readers: dict[tuple[int, float, float], list[int]] = {}
    weighted = (kernels.kind == KINDS.index("product")) & (kernels.held_bytes > 0)
    block[weighted] = -1  # a product with weights of its own beside the experts
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        m, k = float(kernels.m[op]), float(kernels.k[op])
        # A smaller tensor belongs to ops that are fused with the product.
        if weighted[op] and graph.tensor_bytes[tensor] >= m * k:
            readers.setdefault((tensor, m, k), []).append(op)
    count = len(ids)
    for ops in readers.values():
        if len(ops) > 1 and (block[ops] < 0).all():
            block[ops] = count
            count += 1
    return block


def _of_calls(
    graph: OpGraph, kernels: Kernels, block: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
    """(bytes that kernels move beside weights, tokens of grouped products): as measured, the one
    call of a block of experts reads and writes each token once, however many experts it meets."""
    moved, tokens = kernels.moved_bytes.copy(), np.zeros(graph.num_ops)
    grouped = np.flatnonzero((kernels.kind == _EXPERTS) & (block >= 0))
    last = dict(zip(block[grouped].tolist(), grouped.tolist(), strict=True))
    fewest = {own: float(kernels.b[op] * kernels.m[op]) for own, op in last.items()}
    for op in np.flatnonzero(np.isin(block, [*last])).tolist():
        out, own = (*graph.detail[op].output_shapes, ())[0], int(block[op])
        if out and out[-1] == kernels.n[last[own]]:
            fewest[own] = min(fewest[own], math.prod(out[:-1]))
    moved[grouped] = 0.0
    for own, op in last.items():
        enters = ENTERS_BYTES[kernels.arithmetic[op]]
        moved[op], tokens[op] = (enters + 2.0) * fewest[own] * kernels.n[op], fewest[own]
    return moved, tokens
