"""The data of small constant values: the arithmetic that exporters do on shapes and axes.

Only what depends on no graph input, or on its shape alone, is computed here; anything else, or
anything larger than `KNOWN_ELEMENTS`, stays unknown.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gdp.ops.onnx_view import (
    KNOWN_ELEMENTS,
    Inferred,
    NodeView,
    Tensor,
    TensorList,
)

_PLAIN = {
    ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
    ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
    ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE,
}  # fmt: skip
_INTEGERS = {ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64}

Arrays = list[np.ndarray]


def can_evaluate(view: NodeView) -> bool:
    """True where `evaluate` has a rule for a node and the data that the rule reads."""
    if view.domain != "" or view.op_type not in _RULES or "broadcast" in view.attributes:
        return False  # before operator set 7, broadcasting followed an attribute of its own
    return view.op_type in _BY_SHAPE or all(
        data is not None
        for data, fact in zip(view.known, view.inputs, strict=True)
        if fact is not None
    )


def evaluate(view: NodeView, inferred: Sequence[Inferred]) -> Arrays | None:
    """The outputs of a node as data, None where they are unknown, large or of no use to shapes.

    `inferred` are the outputs by shape inference: their sizes are known before anything is
    computed, so that no node costs more than `KNOWN_ELEMENTS` an output.
    """
    sizes = [_most_elements(view, guess) for guess in inferred] or [None]
    if any(size is None or size > KNOWN_ELEMENTS for size in sizes):
        return None
    try:
        with np.errstate(all="ignore"):
            # Without elements there is nothing to compute, though what a rule makes on its way
            # there may be large: x[1000, 1] + y[1, 1000] + z[1, 0].
            arrays = _empty(inferred) if not any(sizes) else _RULES[view.op_type](view)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, MemoryError):
        return None  # a malformed node: shape inference names what is wrong with it
    if arrays is None or any(array.size > KNOWN_ELEMENTS for array in arrays):
        return None
    return arrays


def _most_elements(view: NodeView, guess: Inferred) -> int | None:
    """Upper bound on the elements of an output; None where nothing bounds them."""
    if isinstance(guess, Tensor):
        return guess.elements
    if view.op_type in _AT_MOST:
        return _AT_MOST[view.op_type](view)
    if isinstance(guess, TensorList) or guess.shape is None:
        return None
    sizes = [size for size in guess.shape if size is not None]
    return math.prod(sizes) if len(sizes) == len(guess.shape) else None


def _empty(inferred: Sequence[Inferred]) -> Arrays | None:
    arrays: Arrays = []
    for guess in inferred:
        if isinstance(guess, TensorList) or not guess.shape or guess.dtype not in _PLAIN:
            return None
        arrays.append(np.empty([size or 0 for size in guess.shape], guess.dtype.numpy()))
    return arrays


def tensor_data(tensor: ir.TensorProtocol | None) -> np.ndarray | None:
    """The data of a small stored tensor.

    External data is read only for integers, which may be the operand of a Reshape, and only if
    its file is there.
    """
    if tensor is None or tensor.size > KNOWN_ELEMENTS or tensor.dtype not in _PLAIN:
        return None
    if isinstance(tensor, ir.ExternalTensor) and (
        tensor.dtype not in _INTEGERS or not _is_file(tensor)
    ):
        return None
    try:
        return tensor.numpy()
    except Exception:  # a file cut short or data of the wrong length: as good as missing
        return None


def _is_file(tensor: ir.ExternalTensor) -> bool:
    from pathlib import Path

    return Path(tensor.path).is_file()


def _shape(view: NodeView) -> Arrays | None:
    fact = view.inputs[0]
    if not isinstance(fact, Tensor):
        return None
    start, end = view.attribute("start", 0), view.attribute("end")
    return [np.array(fact.shape[start:end], dtype=np.int64)]


def _size(view: NodeView) -> Arrays | None:
    fact = view.inputs[0]
    return [np.array(fact.elements, dtype=np.int64)] if isinstance(fact, Tensor) else None


def _constant(view: NodeView) -> Arrays | None:
    for name, attribute in view.attributes.items():
        if name == "value":
            data = tensor_data(attribute.value)
            return None if data is None else [data]
        if name in ("value_int", "value_ints"):
            return [np.array(attribute.value, dtype=np.int64)]
        if name in ("value_float", "value_floats"):
            return [np.array(attribute.value, dtype=np.float32)]
    return None


def _constant_of_shape(view: NodeView) -> Arrays | None:
    shape = [int(size) for size in _in(view, 0)]
    value = view.attribute("value")
    fill = np.zeros(1, np.float32) if value is None else tensor_data(value)
    return None if fill is None else [np.full(shape, fill.reshape(-1)[0], dtype=fill.dtype)]


def _range(view: NodeView) -> Arrays:
    start, limit, delta = _range_terms(view)
    return [np.arange(start, limit, delta, dtype=_in(view, 0).dtype)]


def _range_elements(view: NodeView) -> int | None:
    """Inference counts for some types only, and in 64 bits that wrap."""
    start, limit, delta = (term.item() for term in _range_terms(view))
    try:
        return max(math.ceil((limit - start) / delta), 0)
    except (ZeroDivisionError, OverflowError, ValueError):
        return None


def _range_terms(view: NodeView) -> list[Any]:  # NumPy scalars
    return [_in(view, i).reshape(-1)[0] for i in range(3)]


def _cast(view: NodeView) -> Arrays | None:
    dtype = ir.DataType(view.attribute("to"))
    return [_in(view, 0).astype(dtype.numpy())] if dtype in _PLAIN else None


def _cast_like(view: NodeView) -> Arrays:
    return [_in(view, 0).astype(_in(view, 1).dtype)]


def _gather(view: NodeView) -> Arrays:
    where, axis = _in(view, 1).astype(np.int64), view.attribute("axis", 0)
    return [np.asarray(np.take(_in(view, 0), where, axis=axis))]


def _gather_nd(view: NodeView) -> Arrays | None:
    if view.attribute("batch_dims", 0):
        return None
    return [np.asarray(_in(view, 0)[tuple(np.moveaxis(_in(view, 1), -1, 0))])]


def _scatter_nd(view: NodeView) -> Arrays | None:
    if view.attribute("reduction", "none") != "none":
        return None
    out = _in(view, 0).copy()
    out[tuple(np.moveaxis(_in(view, 1), -1, 0))] = _in(view, 2)
    return [out]


def _concat(view: NodeView) -> Arrays:
    return [np.concatenate([d for d in view.known if d is not None], axis=view.attribute("axis"))]


def _slice(view: NodeView) -> Arrays | None:
    data = _in(view, 0)
    starts, ends = view.ints("starts", 1), view.ints("ends", 2)
    if starts is None or ends is None:
        return None
    axes, steps = view.ints("axes", 3), view.ints("steps", 4)
    slices = [slice(None)] * data.ndim
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        step = 1 if steps is None else steps[i]
        # Going backwards past the first element, NumPy wants None where ONNX has a large negative.
        end = None if step < 0 and ends[i] < -data.shape[axis] else ends[i]
        slices[axis] = slice(starts[i], end, step)
    return [data[tuple(slices)]]


def _squeeze(view: NodeView) -> Arrays:
    axes = view.ints("axes", 1)
    return [np.squeeze(_in(view, 0), axis=None if axes is None else tuple(axes))]


def _unsqueeze(view: NodeView) -> Arrays | None:
    axes = view.ints("axes", 1)
    return None if axes is None else [np.expand_dims(_in(view, 0), tuple(axes))]


def _reshape(view: NodeView) -> Arrays | None:
    data, shape = _in(view, 0), view.ints("shape", 1)
    if shape is None:
        return None
    if not view.attribute("allowzero", 0):
        shape = [data.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return [data.reshape(shape)]


def _flatten(view: NodeView) -> Arrays:
    data, axis = _in(view, 0), view.attribute("axis", 1)
    rows = math.prod(data.shape[: axis if axis >= 0 else data.ndim + axis])
    return [data.reshape(rows, data.size // rows if rows else 0)]


def _transpose(view: NodeView) -> Arrays:
    return [np.transpose(_in(view, 0), view.attribute("perm"))]


def _expand(view: NodeView) -> Arrays:
    data, shape = _in(view, 0), [int(size) for size in _in(view, 1)]
    return [data * np.ones(shape, dtype=data.dtype)]


def _tile(view: NodeView) -> Arrays:
    return [np.tile(_in(view, 0), [int(count) for count in _in(view, 1)])]


def _split(view: NodeView) -> Arrays | None:
    data, axis = _in(view, 0), view.attribute("axis", 0)
    sizes = view.ints("split", 1)
    if sizes is None:
        size = -(-data.shape[axis] // view.num_outputs)
        sizes = [size] * view.num_outputs
    return list(np.split(data, np.cumsum(sizes)[:-1], axis=axis))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    # ONNX rounds integer quotients towards zero, NumPy down.
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), dtype=a.dtype)


def _mod(view: NodeView) -> Arrays:
    rule = np.fmod if view.attribute("fmod", 0) else np.mod
    return [np.asarray(rule(_in(view, 0), _in(view, 1)))]


def _fold(rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[NodeView], Arrays]:
    """An operator of one or more inputs that combines them from the left."""

    def apply(view: NodeView) -> Arrays:
        total = _in(view, 0)
        for data in view.known[1:]:
            if data is not None:
                total = np.asarray(rule(total, data))
        return [total]

    return apply


def _each(rule: Callable[[np.ndarray], np.ndarray]) -> Callable[[NodeView], Arrays]:
    return lambda view: [np.asarray(rule(_in(view, 0)), dtype=_in(view, 0).dtype)]


def _reduce(rule: Callable[..., np.ndarray]) -> Callable[[NodeView], Arrays]:
    def apply(view: NodeView) -> Arrays:
        data, axes = _in(view, 0), view.ints("axes", 1)
        if not axes and view.attribute("noop_with_empty_axes", 0):
            return [data]
        kept = bool(view.attribute("keepdims", 1))
        axis = tuple(axes) if axes else None
        return [np.asarray(rule(data, axis=axis, keepdims=kept), dtype=data.dtype)]

    return apply


def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.power(a, b), dtype=a.dtype)


def _in(view: NodeView, index: int) -> np.ndarray:
    data = view.known[index]
    if data is None:
        raise ValueError("a required input is left out")
    return data


_BY_SHAPE = {"Shape", "Size"}
# Of operators whose output's size depends on data, for which inference may leave it open.
_AT_MOST: dict[str, Callable[[NodeView], int | None]] = {
    "NonZero": lambda view: _in(view, 0).size * max(_in(view, 0).ndim, 1),
    "Range": _range_elements,
}
_RULES: dict[str, Callable[[NodeView], Arrays | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "Concat": _concat,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Split": _split,
    "Identity": _each(lambda a: a),
    "Add": _fold(np.add),
    "Sub": _fold(np.subtract),
    "Mul": _fold(np.multiply),
    "Div": _fold(_divide),
    "Mod": _mod,
    "Pow": _fold(_power),
    "Min": _fold(np.minimum),
    "Max": _fold(np.maximum),
    "Sum": _fold(np.add),
    "And": _fold(np.logical_and),
    "Or": _fold(np.logical_or),
    "Xor": _fold(np.logical_xor),
    "Equal": _fold(np.equal),
    "Less": _fold(np.less),
    "LessOrEqual": _fold(np.less_equal),
    "Greater": _fold(np.greater),
    "GreaterOrEqual": _fold(np.greater_equal),
    "Not": _each(np.logical_not),
    "Neg": _each(np.negative),
    "Abs": _each(np.abs),
    "Sign": _each(np.sign),
    "Floor": _each(np.floor),
    "Ceil": _each(np.ceil),
    "Round": _each(np.round),
    "Sqrt": _each(np.sqrt),
    "Reciprocal": _each(np.reciprocal),
    "Where": lambda view: [np.asarray(np.where(_in(view, 0), _in(view, 1), _in(view, 2)))],
    "NonZero": lambda view: [np.array(np.nonzero(np.atleast_1d(_in(view, 0))), dtype=np.int64)],
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
}
