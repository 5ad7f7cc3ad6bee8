"""Kernels of a graph: the class and sizes of each op, from its type, shapes and bytes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from gdp.costs.measured.kernels import ARITHMETIC, ENGINES, KINDS, NUMBERS, Kernels
from gdp.graph.generation import STEP
from gdp.graph.latent import LATENT
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, OpDetail, OpGraph
from gdp.ops.table import ELEMENTWISE_OPS, REDUCTIONS, VIEWS

PRODUCTS = frozenset(
    ["linear", "mm", "bmm", "matmul", "mv", "addmm", "baddbmm", "addbmm", "addmv", "einsum",
     "dot_general", "MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "FusedGemm", "QLinearMatMul",
     "Einsum"]
)  # fmt: skip
CONVOLUTIONS = frozenset(
    ["conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
     "conv_transpose3d", "Conv", "ConvTranspose", "FusedConv", "ConvInteger", "QLinearConv",
     "conv_general_dilated"]
)  # fmt: skip
EXPERTS = frozenset(["_grouped_mm", "grouped_mm", "grouped_mm_fallback"])
ATTENTION = frozenset(
    ["scaled_dot_product_attention", "Attention", "MultiHeadAttention", "GroupQueryAttention"]
)
SOFTMAX = frozenset(
    ["softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "Softmax"]
)
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


@dataclass(frozen=True, eq=False)
class GraphKernels:
    """The kernels of a graph's ops, and the ops of which nothing of the kind was measured."""

    kernels: Kernels  # of all N ops
    row: Int[np.ndarray, "N"]  # ops of one row have equal kernels
    known: Bool[np.ndarray, "N"]
    # Of an engine: ops of a block of experts are one kernel, and so are products of one input.
    block: Int[np.ndarray, "N"]  # id of the block, -1 outside


def graph_kernels(graph: OpGraph, *, served: bool) -> GraphKernels:
    """The kernel of every op of a fused graph.

    Args:
        graph: Its FLOPs and bytes are the kernels', so that their roofline is the graph's.
        served: As an engine of language models computes it: what is stored in 8 or 4 bits is also
            multiplied so where its scheme casts activations, too, all of a block of experts is one
            call, and a router between products in 16 bits multiplies in 16 bits. O(N).
    """
    made: dict[tuple, int] = {}  # layers of a model are alike
    narrowed: dict[int, OpDetail] = {}
    rows: list[_Row] = []
    which = np.empty(graph.num_ops, dtype=np.int64)
    flop, traffic = graph.flop.tolist(), graph.memory_traffic_bytes.tolist()
    weights = _read_weights(graph)
    narrow = served and type_of_products(graph) == "float16"
    for op, op_type in enumerate(graph.op_types):
        detail = graph.detail[op]
        if narrow and op_type in PRODUCTS and detail.dtype == "float32":
            detail = narrowed.setdefault(id(detail), replace(detail, dtype="bfloat16"))
        key = (op_type, id(detail), flop[op], traffic[op], weights[op])
        if key not in made:
            made[key] = len(rows)
            rows.append(_kernel(op_type, detail, flop[op], (traffic[op], weights[op]), served))
        which[op] = made[key]
    numbers = np.fromiter(itertools.chain.from_iterable(rows), float)
    table = numbers.reshape(len(rows), len(_Row._fields)).T[:, which]
    column = _Row(*table)  # of arrays
    kind, arithmetic = (x.astype(np.int64) for x in (column.kind, column.arithmetic))
    simple = np.isin(kind, [KINDS.index(name) for name in _SIMPLE_KINDS])
    if (~simple & (kind >= 0) & (arithmetic > 0)).any():
        # A norm that computes in 32 bits between 16-bit products reads and writes 16 bits.
        arithmetic[simple] = ARITHMETIC.index("float16")
    precise = arithmetic == ARITHMETIC.index("float32")
    engine = np.where(precise, ENGINES.index("torch"), ENGINES.index("vllm"))
    held = np.minimum(column.held_bytes, graph.memory_traffic_bytes)
    known = kind >= 0
    kernels = Kernels(
        kind=np.maximum(kind, 0), engine=engine, arithmetic=arithmetic,
        stored_bits=column.stored_bits, block_scaled=column.block_scaled,
        b=column.b, m=column.m, n=column.n, k=column.k,
        flop=graph.flop.astype(float), held_bytes=held,
        moved_bytes=np.where(
            np.isnan(column.moved_bytes), graph.memory_traffic_bytes - held, column.moved_bytes
        ),
        numbers=column.numbers.astype(np.int64),
    )  # fmt: skip
    block = _blocks(graph, kernels) if served else np.full(graph.num_ops, -1)
    return GraphKernels(kernels, which, known & ~graph.is_io, block)


def _read_weights(graph: OpGraph) -> list[int]:
    """Bytes of weights that each op reads: its own, or in a step those that the same module holds
    for the prompt."""
    own = graph.weight_bytes.tolist()
    if not any(name.startswith(STEP) for name in graph.op_names):
        return own
    held = (graph.weight_bytes - graph.cache_bytes).tolist()
    shapes = [detail.input_shapes[1:2] for detail in graph.detail]
    steps = [name.startswith(STEP) for name in graph.op_names]
    modules = {
        (scope, shape): size
        for scope, shape, size, stepping in zip(graph.scope, shapes, held, steps, strict=True)
        if size > 0 and shape and scope and not stepping
    }
    return [
        size or (modules.get((scope, shape), 0) if stepping else 0)
        for size, scope, shape, stepping in zip(own, graph.scope, shapes, steps, strict=True)
    ]


def type_of_products(graph: OpGraph) -> str | None:
    """Type of arithmetic, as of `ARITHMETIC`, in which a graph multiplies; None where nowhere."""
    heavy = PRODUCTS | CONVOLUTIONS | EXPERTS
    types = {d.dtype for d, t in zip(graph.detail, graph.op_types, strict=True) if t in heavy}
    if not types:
        return None
    return "float32" if types <= _PRECISE else "float16"


_SIMPLE_KINDS = ("normalisation", "softmax", "elementwise")


class _Row(NamedTuple):
    """Fields of one of the `Kernels`; of kind -1 where nothing like it was measured."""

    kind: Any
    arithmetic: Any
    stored_bits: Any
    b: Any = 1.0
    m: Any = 1.0
    n: Any = 1.0
    k: Any = 1.0
    held_bytes: Any = 0.0
    block_scaled: Any = 0.0
    moved_bytes: Any = math.nan  # all but what is held where it is not said
    numbers: Any = 0


def _kernel(
    op_type: str, detail: OpDetail, flop: float, bytes_: tuple[float, float], served: bool
) -> _Row:
    """The kernel of an op; its bytes are those that move, and those of weights."""
    traffic = bytes_[0]
    out = detail.output_shapes[0] if detail.output_shapes else ()
    shapes = detail.input_shapes
    wide = detail.dtype in _PRECISE
    size = math.prod(out)
    if op_type in PRODUCTS and len(shapes) > 1 and size and flop > 0:
        row = _product(shapes, out, flop)
        return _weighted(
            "product" if row[0] == 1 else "batched product", row, detail, bytes_, served
        )
    if op_type in CONVOLUTIONS and len(shapes) > 1 and size and len(shapes[1]) > 2:
        channels = shapes[1][0] if op_type != "conv_general_dilated" else 0
        groups = max(1, shapes[0][1] // max(shapes[1][1], 1)) if channels else 1
        n = max(channels // groups, 1) if channels else out[-1]
        m = max(size / groups / n, 1.0)
        k = max(flop / (2.0 * size), 1.0)
        return _Row(KINDS.index("convolution"), *_type(wide), groups, m, n, k)
    if op_type in EXPERTS and len(shapes) > 1 and len(shapes[1]) == 3 and size:
        experts, k, n = (float(x) for x in shapes[1])
        rows = size / n
        working = experts * (1.0 - (1.0 - 1.0 / experts) ** max(rows, 1.0))
        row = (working, max(rows / working, 1.0), n, k)
        # Of fewer rows than experts the graph counts an expert for each, of more all of them.
        share = working / min(experts, max(rows, 1.0))
        return _weighted("experts", row, detail, bytes_, served, working / experts, share)
    if op_type in ATTENTION and len(shapes) > 2 and all(len(s) == 4 for s in shapes[:3]):
        return _attention(shapes, out, detail, traffic)
    if op_type in _SIMPLE or flop * 4 < traffic:
        return _simple(op_type, shapes, out, wide, traffic)
    return _Row(-1, *_type(True))


def _type(wide: bool) -> tuple[int, float]:
    return (ARITHMETIC.index("float32"), 32.0) if wide else (ARITHMETIC.index("float16"), 16.0)


def _product(
    shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], flop: float
) -> tuple[float, float, float, float]:
    """(batch, rows, columns, inner size); a batch that meets one matrix is more rows."""
    size, columns = math.prod(out), float(out[-1]) if out else 1.0
    inner = max(flop / (2.0 * size), 1.0)
    whole = float(shapes[0][-1]) if shapes[0] else 1.0
    # What is fused adds a few FLOP to each element, and unpacking two to each weight, which are as
    # many as the product's own where one row is multiplied.
    if 0.75 < whole / inner <= 1.01 or sorted(shapes[1][-2:]) == sorted((columns, whole)):
        inner = whole
    rows = size / columns
    if min(len(shapes[0]), len(shapes[1])) < 3 or math.prod(shapes[1][:-2]) == 1:
        return 1.0, rows, columns, inner
    batch = float(math.prod(out[:-2]))
    return batch, rows / batch, columns, inner


def _weighted(
    kind: str, row: tuple[float, float, float, float], detail: OpDetail,
    bytes_: tuple[float, float], served: bool, used: float = 1.0, share: float = 1.0,
) -> _Row:  # fmt: skip
    """A product with the bits of its stored weights: from their bytes where the op holds them, of
    which a part is used, else from a share of the bytes that activations leave."""
    b, m, n, k = row
    wide = detail.dtype in _PRECISE
    arithmetic, bits = _type(wide)
    if kind == "batched product":
        return _Row(KINDS.index(kind), arithmetic, bits, b, m, n, k)
    item, elements = _ITEM_BYTES.get(detail.dtype, 2), b * n * k
    traffic, weights = bytes_
    moved = item * b * m * (k + n)
    held = weights * used if weights > 0 else (traffic - moved) * share
    stored = min(8.0 * held / elements, 32.0)
    if stored < 2.0:  # both factors are activations
        held, stored = elements * item, 8.0 * item
    bits = float(_BITS[np.abs(np.log(_BITS / stored)).argmin()])
    told = detail.attributes.get(WEIGHT_ARITHMETIC)
    if (served or told == "llm.int8") and not wide and bits in (4.0, 8.0):
        narrow = "float8" if bits == 8.0 or told in ("float8", "int8") else "float4"
        arithmetic = ARITHMETIC.index(narrow)
    scaled = abs(held / elements - bits / 8 - _BLOCK_SCALE_BYTES) < _BLOCK_SCALE_BYTES / 50
    held = min(held, traffic)
    return _Row(
        KINDS.index(kind), arithmetic, bits, b, m, n, k, held, float(scaled),
        moved if kind == "experts" else math.nan, NUMBERS.index(_NUMBERS.get(told, "not told")),
    )  # fmt: skip


def _attention(
    shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], detail: OpDetail, traffic: float
) -> _Row:
    batch, heads, queries, size = (float(x) for x in shapes[0])
    keys, seen = float(shapes[1][1]), float(shapes[1][2])
    if detail.attributes.get(LATENT):  # one row for keys and values, not two
        size = float(shapes[1][3]) / 2
    kind = "token attention" if queries * 4 <= seen and queries <= 4 else "prompt attention"
    arithmetic, bits = _type(detail.dtype in _PRECISE)
    around = bits / 8 * (math.prod(shapes[0]) + math.prod(out))
    held = max(traffic - around, 0.0)
    stored = 8.0 * held / max(2.0 * batch * keys * seen * size, 1.0)
    if stored > 0:
        bits = float(_BITS[np.abs(np.log(_BITS / stored)).argmin()])
    return _Row(
        KINDS.index(kind), arithmetic, bits, batch * keys, queries * heads / keys, seen, size,
        held,
    )  # fmt: skip


def _simple(
    op_type: str,
    shapes: Sequence[tuple[int, ...]],
    out: tuple[int, ...],
    wide: bool,
    traffic: float,
) -> _Row:
    arithmetic, bits = _type(wide)
    kind = "elementwise"
    first = max([out, *shapes], key=math.prod, default=())
    if op_type in SOFTMAX:
        kind = "softmax"
    elif op_type in REDUCTIONS and math.prod(out) != math.prod(first):
        kind = "normalisation"
    if math.prod(first) * bits / 8 > traffic:  # of a table some rows are read
        first = out
    columns, elements = float(first[-1]) if first else 1.0, max(float(math.prod(first)), 1.0)
    if traffic > 5 * elements * bits / 8:  # shapes that nobody told: one read and one write of each
        columns, elements = 1024.0, traffic / (bits / 4)
    reads = min(max(traffic / (bits / 8) / elements - 1.0, 1.0), 4.0)
    columns = max(columns, 1.0)
    rows = max(elements / columns, 1.0)
    return _Row(KINDS.index(kind), arithmetic, bits, 1.0, rows, columns, reads)


def _blocks(graph: OpGraph, kernels: Kernels) -> Int[np.ndarray, "N"]:
    """Ops of one scope that hold grouped products, of each phase apart, and products with weights
    that read one input, such as those of queries, keys and values."""
    steps = [name.startswith(STEP) for name in graph.op_names]
    keys = list(zip(graph.scope, steps, strict=True))
    grouped = kernels.kind == KINDS.index("experts")
    scopes = {key for key, is_part in zip(keys, grouped.tolist(), strict=True) if is_part}
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
