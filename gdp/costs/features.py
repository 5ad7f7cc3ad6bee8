"""Features of a kernel for learned cost models: sizes, shapes, attributes, surroundings.

Sizes grow with the batch, and predicted seconds never fall as they grow; the rest is free.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.costs.kernels import ALIAS, lead_ops
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph
from gdp.ops.rule import CONVOLUTION, GATHER, PRODUCT, OpRule, names
from gdp.ops.table import ONNX, REDUCTIONS

# A device to add arithmetic and traffic up with; a learned model corrects whatever is off.
FLOP_PER_S, BYTES_PER_S, KERNEL_S = 1e11, 2e10, 1e-6
SIZES = (
    "log_roofline", "log_flop", "log_in_bytes", "log_out_bytes", "log_weight_bytes", "log_rows",
)  # fmt: skip
# A product with a bias runs in the same kernel, whatever the op is called.
_TREATED_AS = {**ALIAS, "Gemm": "MatMul"}
_LEARNED_BY_NAME = names(
    "FusedConv ConvInteger QLinearConv FusedMatMul TransposeMatMul FusedMatMulActivation FusedGemm "
    "QLinearMatMul"
)
"""Products and convolutions that the shipped networks learned by their names, without sizes."""
_POOLS = names("MaxPool AveragePool GlobalAveragePool GlobalMaxPool")
_PASSING = frozenset(
    {"Add", "Sum", "Mul", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "HardSigmoid", "Concat",
     "BatchNormalization", "Dropout", "Identity"}
)  # fmt: skip
"""Ops that work in the layout of their inputs."""


@dataclass(frozen=True, eq=False)
class KernelFeatures:
    """Features of the kernels of a graph. Axes: K kernels, S sizes, O other features."""

    lead_type: tuple[str, ...]
    member_types: tuple[tuple[str, ...], ...]  # without the lead
    size: Float[np.ndarray, "K S"]
    other: Float[np.ndarray, "K O"]
    lead: Int[np.ndarray, "K"]


def kernel_features(graph: OpGraph, kernel: Int[np.ndarray, "N"]) -> KernelFeatures:
    """The features of every kernel; `kernel` holds dense ids, -1 for ops in none. O(N + E)."""
    work_s = graph.flop / FLOP_PER_S + graph.memory_traffic_bytes / BYTES_PER_S
    # A view leads no kernel that holds arithmetic, however much it moves.
    lead = lead_ops(graph, kernel, work_s)
    count = len(lead)
    inside = np.flatnonzero(kernel >= 0)
    in_bytes, out_bytes, context = _boundary(graph, kernel, count)
    flop = np.bincount(kernel[inside], graph.flop[inside], count)
    weight = np.bincount(kernel[inside], graph.weight_bytes[inside].astype(float), count)
    # What an op reads of a large tensor (a gather) bounds its traffic, not the tensor's size.
    picks = np.array([_kernel(graph.op_types[op]) == GATHER for op in lead.tolist()], bool)
    read = np.minimum(in_bytes, np.where(picks, graph.memory_traffic_bytes[lead], np.inf))
    base = flop / FLOP_PER_S + (read + out_bytes + weight) / BYTES_PER_S + KERNEL_S
    rows = np.array([_rows(graph.op_types[op], graph.detail[op]) for op in lead.tolist()])
    size = np.column_stack(
        [
            np.log(base), np.log(flop + 1e3), np.log(read + 100.0),
            np.log(out_bytes + 100.0), np.log(weight + 100.0),
            np.log(rows + 1.0) if count else np.zeros(0),
        ]
    )  # fmt: skip
    members: list[list[int]] = [[] for _ in range(count)]
    for op in inside.tolist():
        members[int(kernel[op])].append(op)
    types = [_TREATED_AS.get(t, t) for t in graph.op_types]
    total_weight = math.log(float(graph.weight_bytes.sum()) + 1e5)
    other = [
        [
            *op_features(graph, op), *row,
            math.log(len(members[k])), min(len(members[k]) - 1, 3) / 3.0, total_weight,
        ]
        for k, (op, row) in enumerate(zip(lead.tolist(), context, strict=True))
    ]  # fmt: skip
    return KernelFeatures(
        lead_type=tuple(types[op] for op in lead.tolist()),
        member_types=tuple(
            tuple(types[op] for op in members[k] if op != lead[k]) for k in range(count)
        ),
        size=size.reshape(count, len(SIZES)),
        other=np.array(other).reshape(count, -1),
        lead=lead,
    )


@functools.cache
def num_other() -> int:
    """O, the number of features of a kernel without its sizes."""
    one = make_graph("one", ["op"], ["Add"], [], [])
    return kernel_features(one, np.zeros(1, np.int64)).other.shape[1]


def _boundary(
    graph: OpGraph, kernel: Int[np.ndarray, "N"], count: int
) -> tuple[Float[np.ndarray, "K"], Float[np.ndarray, "K"], list[list[float]]]:
    """Bytes that enter and that leave each kernel, each tensor once, and the layouts around it."""
    maker, reader = graph.edges
    across = (kernel[maker] != kernel[reader]) | (kernel[reader] < 0)
    blocked = _blocked(graph)
    size = graph.tensor_bytes[graph.use_tensor].astype(float)

    def distinct(side: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.flatnonzero(keep & (kernel[side] >= 0))
        pairs = np.column_stack([kernel[side][chosen], graph.use_tensor[chosen]])
        _, first = np.unique(pairs, axis=0, return_index=True)
        chosen = chosen[first]
        return kernel[side][chosen], chosen

    into, use_in = distinct(reader, across)
    out_of, use_out = distinct(maker, across)
    in_bytes = np.bincount(into, size[use_in], count).astype(float)
    out_bytes = np.bincount(out_of, size[use_out], count).astype(float)
    in_count = np.bincount(into, minlength=count)
    # Tensors without readers are written, too.
    unread = np.flatnonzero(np.bincount(graph.use_tensor, minlength=graph.num_tensors) == 0)
    unread = unread[kernel[graph.producer[unread]] >= 0]
    np.add.at(out_bytes, kernel[graph.producer[unread]], graph.tensor_bytes[unread].astype(float))
    plain_in = np.bincount(into, size[use_in] * ~blocked[maker[use_in]], count)
    plain_out = np.bincount(out_of, size[use_out] * ~blocked[reader[use_out]], count)
    context = np.column_stack(
        [
            plain_in / np.maximum(in_bytes, 1.0), plain_out / np.maximum(out_bytes, 1.0),
            np.minimum(in_count, 6) / 3.0,
        ]
    )  # fmt: skip
    return in_bytes, out_bytes, context.tolist()


def _blocked(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """Ops whose outputs are in a blocked layout: those that make it, and those that keep it."""
    # ONNX Runtime computes these in a blocked layout, so that their neighbours pay for a change.
    blocked = np.array([_kernel(t) == CONVOLUTION or t in _POOLS for t in graph.op_types], bool)
    makers, _ = graph.neighbours()
    for op, op_type in enumerate(graph.op_types):  # in topological order
        if op_type in _PASSING and makers[op]:
            blocked[op] = all(blocked[a] for a in makers[op])
    return blocked


def op_features(graph: OpGraph, op: int) -> list[float]:
    """Shape and attribute features of one op; zero where they do not apply."""
    detail, op_type = graph.detail[op], graph.op_types[op]
    return [
        *_conv_features(op_type, detail),
        *_product_features(op_type, detail, bool(graph.weight_bytes[op] > 0)),
        *_general_features(op_type, detail),
    ]


def _kernel(op_type: str) -> str:
    """Class of the kernel of an ONNX op as the networks read it."""
    return "" if op_type in _LEARNED_BY_NAME else ONNX.get(op_type, OpRule()).kernel


def _rows(op_type: str, detail: OpDetail) -> float:
    """Positions of a convolution, rows of a product, or elements: all proportional to the batch."""
    out = detail.output_shapes[0] if detail.output_shapes else ()
    if _kernel(op_type) == CONVOLUTION and len(out) > 2:
        return float(out[0] * math.prod(out[2:]))
    if _kernel(op_type) == PRODUCT and len(out) > 1:
        return float(math.prod(out[:-1]))
    return float(math.prod(out))


def _log(value: float) -> float:
    return math.log(max(value, 1.0))


def _fill(size: int, block: int) -> float:
    """Mean utilisation of blocks of a size: 1 where it divides.

    >>> _fill(12, 8)
    0.75
    """
    return size / (math.ceil(size / block) * block) if size > 0 else 1.0


def _numbers(detail: OpDetail, key: str) -> tuple[int, ...]:
    value = detail.attributes.get(key, ())
    values = value if isinstance(value, tuple) else (value,)
    return tuple(int(v) for v in values if isinstance(v, int | float))


def _conv_features(op_type: str, detail: OpDetail) -> list[float]:
    shapes, convolves = detail.input_shapes, _kernel(op_type) == CONVOLUTION
    if not convolves or len(shapes) < 2 or len(shapes[1]) < 3 or not detail.output_shapes:
        return [0.0] * 18
    out, weight = detail.output_shapes[0], shapes[1]
    group = (_numbers(detail, "group") or (1,))[0]
    cin, cout, taps = weight[1], weight[0], math.prod(weight[2:])
    stride = max(_numbers(detail, "strides") or (1,))
    dilation = max(_numbers(detail, "dilations") or (1,))
    pads = _numbers(detail, "pads")
    depthwise = group > 1 and cin == 1
    return [
        1.0, _log(taps), _log(cin), _log(cout / group), _log(group), math.log(stride),
        float(dilation > 1), float(depthwise), float(group > 1 and not depthwise),
        float(taps == 1), _fill(cin, 8), _fill(cout, 8), _fill(cout // group, 32),
        float(cin * group < 8), _log(out[-1]), _fill(out[-1], 6), float(len(out) == 3),
        float(any(pads)),
    ]  # fmt: skip


def _product_features(op_type: str, detail: OpDetail, holds: bool) -> list[float]:
    shapes, outs = detail.input_shapes, detail.output_shapes
    multiplies = _kernel(op_type) == PRODUCT
    if not multiplies or len(shapes) < 2 or not outs or not outs[0] or not shapes[0]:
        return [0.0] * 12
    out, left, right = outs[0], shapes[0], shapes[1]
    trans_a = (_numbers(detail, "transA") or (0,))[0]
    trans_b = (_numbers(detail, "transB") or (0,))[0]
    inner = left[0] if trans_a else left[-1]
    rows, columns = (out[-2] if len(out) > 1 else 1), out[-1]
    many = math.prod(out[:-2])
    if len(right) == 2:  # one matrix for the whole batch: the runtime folds the batch into rows
        rows, many = rows * many, 1
    return [
        1.0, _log(inner), _log(columns), _log(many), _log(rows), float(rows == 1),
        _fill(rows, 4), _fill(rows, 6), _fill(columns, 16), float(holds), float(trans_b),
        float(columns == 1),
    ]  # fmt: skip


def _general_features(op_type: str, detail: OpDetail) -> list[float]:
    shapes, outs = detail.input_shapes, detail.output_shapes
    first = shapes[0] if shapes else ()
    out = outs[0] if outs else ()
    largest = max([*map(math.prod, shapes), 1])
    full = [s for s in shapes if math.prod(s) == largest]
    spread = min([math.prod(s) for s in shapes] or [1])
    aligned = len(full) > 1
    last_row = any(math.prod(s) == (s[-1] if s else 1) for s in shapes) and spread > 1
    run, step, share = _access(op_type, first, out, detail)
    special = _SPECIAL.get(op_type)
    return [
        len(out) / 4.0, _log(out[-1] if out else 1), float(aligned), float(spread == 1),
        float(last_row and not aligned), len(shapes) / 4.0, len(outs) / 4.0,
        _log(run), _log(step), share, float(detail.dtype not in ("float32", "")),
        special(detail) if special else 0.0,
    ]  # fmt: skip


def _access(
    op_type: str, first: tuple[int, ...], out: tuple[int, ...], detail: OpDetail
) -> tuple[float, float, float]:
    """(elements that lie together, stride or length of the axis worked on, share that is used)."""
    if op_type == "Transpose":
        perm = _numbers(detail, "perm") or tuple(reversed(range(len(first))))
        return _transpose_access(first, perm)
    axis = _worked_axis(op_type, first, out, detail)
    if axis is None:
        return float(first[-1] if first else 1), 1.0, 1.0
    share = math.prod(out) / max(math.prod(first), 1)
    return float(math.prod(first[axis + 1 :])), float(first[axis]), min(share, 4.0)


def _transpose_access(first: tuple[int, ...], perm: tuple[int, ...]) -> tuple[float, float, float]:
    if len(perm) != len(first):
        return 1.0, 1.0, 1.0
    # Axes of length one do not count, and axes that stay neighbours are one.
    real = [axis for axis in perm if first[axis] > 1]
    order = sorted(real)
    runs = 1 + sum(order.index(b) != order.index(a) + 1 for a, b in itertools.pairwise(real))
    together, place = 1, len(order) - 1
    for axis in reversed(real):
        if place < 0 or axis != order[place]:
            break
        together *= first[axis]
        place -= 1
    step = math.prod(first[real[-1] + 1 :]) if real else 1
    return float(together), float(step), runs / 4.0


def _worked_axis(
    op_type: str, first: tuple[int, ...], out: tuple[int, ...], detail: OpDetail
) -> int | None:
    """The axis that a reduction, concatenation, slice or softmax works along."""
    if not first:
        return None
    if op_type in ("Softmax", "LogSoftmax", "Concat", "Gather", "Split", "LayerNormalization"):
        axis = (_numbers(detail, "axis") or (-1,))[0]
        return axis % len(first)
    if len(first) == len(out):
        changed = [i for i, (a, b) in enumerate(zip(first, out, strict=True)) if a != b]
        return changed[-1] if changed else None
    if op_type.startswith(("Reduce", "Arg")):
        axes = _numbers(detail, "axes") or _numbers(detail, "axis")
        return axes[-1] % len(first) if axes else None
    return None


def _pool_taps(detail: OpDetail) -> float:
    return _log(math.prod(_numbers(detail, "kernel_shape") or (1,)))


_SPECIAL: dict[str, Callable[[OpDetail], float]] = {
    "MaxPool": _pool_taps, "AveragePool": _pool_taps,
    "GroupNormalization": lambda detail: _log((_numbers(detail, "num_groups") or (1,))[0]),
}  # fmt: skip


def shares(features: KernelFeatures) -> Float[np.ndarray, "K 3"]:
    """Shares of arithmetic, traffic and launch in a kernel's reference time; rows sum to one."""
    flop, read, written, weights = (np.exp(features.size[:, i]) for i in (1, 2, 3, 4))
    parts = np.column_stack(
        [
            flop / FLOP_PER_S,
            (read + written + weights) / BYTES_PER_S,
            np.full(len(flop), KERNEL_S),
        ]
    )
    return parts / parts.sum(axis=1, keepdims=True)


TRANSFER_TERMS = 9


def transfer_design(
    features: KernelFeatures, seconds: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "K 9"]:
    """Regressors of the log ratio of two devices' times.

    Three shares, three classes (products, reductions, the rest), the log length within each class.
    """
    products = (CONVOLUTION, PRODUCT)
    heavy = np.array([_kernel(t) in products for t in features.lead_type], dtype=bool)
    reduction = ~heavy & np.array([t in REDUCTIONS for t in features.lead_type], dtype=bool)
    classes = np.column_stack([heavy, reduction, ~heavy & ~reduction]).astype(float)
    length = np.clip(np.log(seconds / 1e-4), -4.0, 4.0) / 4.0
    return np.concatenate([shares(features), classes, classes * length[:, None]], axis=1)
