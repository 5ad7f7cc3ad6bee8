"""The data of small constant values: the arithmetic that exporters do on shapes and axes.

Only what depends on no graph input, or on its shape alone, is computed here, by the reference
implementation of the onnx package; anything else, or anything larger than `KNOWN_ELEMENTS`, stays
unknown.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from gdp.importers.onnx.schema import node_proto
from gdp.ops.onnx_view import KNOWN_ELEMENTS, Inferred, NodeView, Tensor, TensorList
from gdp.ops.rule import names

_PLAIN = {
    ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
    ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
    ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE,
}  # fmt: skip
_INTEGERS = {ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64}

Arrays = list[np.ndarray]


def can_evaluate(view: NodeView) -> bool:
    """True where `evaluate` computes the operator of a node and has the data that it reads."""
    if view.domain != "" or view.op_type not in COMPUTED or "broadcast" in view.attributes:
        return False  # before operator set 7, broadcasting followed an attribute of its own
    return view.op_type in _WITHOUT_DATA or all(
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
            # Without elements there is nothing to compute, though what an operator makes on its
            # way there may be large: x[1000, 1] + y[1, 1000] + z[1, 0].
            arrays = _empty(inferred) if not any(sizes) else _computed(view)
        if arrays is None or any(_is_odd(array) for array in arrays):
            return None
    except Exception:  # a malformed node: shape inference names what is wrong with it
        return None
    return arrays


def _is_odd(array: np.ndarray) -> bool:
    return array.size > KNOWN_ELEMENTS or ir.DataType.from_numpy(array.dtype) not in _PLAIN


def _computed(view: NodeView) -> Arrays | None:
    if view.op_type in _WITHOUT_DATA:
        return _WITHOUT_DATA[view.op_type](view)
    from onnx.reference import ReferenceEvaluator

    node = node_proto(view)
    given = [name for name in node.input if name]
    opset = onnx.helper.make_opsetid("", view.version)
    function = onnx.helper.make_function("", "node", given, node.output, [node], [opset])
    data = [array for array in view.known if array is not None]
    feeds = dict(zip(given, data, strict=True))
    outputs = ReferenceEvaluator(function).run(None, feeds, attributes={})
    return [np.asarray(output) for output in outputs]  # pyright: ignore[reportArgumentType]


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
        tensor.dtype not in _INTEGERS or not Path(tensor.path).is_file()
    ):
        return None
    try:
        return tensor.numpy()
    except Exception:  # a file cut short or data of the wrong length: as good as missing
        return None


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


def _range_elements(view: NodeView) -> int | None:
    """Inference counts for some types only, and in 64 bits that wrap."""
    try:
        start, limit, delta = (view.known[i].reshape(-1)[0].item() for i in range(3))  # type: ignore[union-attr]
        return max(math.ceil((limit - start) / delta), 0)
    except (ArithmeticError, LookupError, ValueError):
        return None


def _nonzero_elements(view: NodeView) -> int | None:
    data = view.data(0)
    return None if data is None else data.size * max(data.ndim, 1)


_WITHOUT_DATA: dict[str, Callable[[NodeView], Arrays | None]] = {
    "Shape": _shape, "Size": _size, "Constant": _constant,
}  # fmt: skip
# Of operators whose output's size depends on data, for which inference may leave it open.
_AT_MOST = {"NonZero": _nonzero_elements, "Range": _range_elements}
COMPUTED = frozenset(_WITHOUT_DATA) | names(
    "ConstantOfShape Range Cast CastLike Gather GatherND ScatterND Concat Slice Squeeze Unsqueeze "
    "Reshape Flatten Transpose Expand Tile Split Identity Add Sub Mul Div Mod Pow Min Max Sum And "
    "Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Not Neg Abs Sign Floor Ceil Round Sqrt "
    "Reciprocal Where NonZero ReduceProd ReduceSum ReduceMax ReduceMin"
)
"""Operators of the standard whose outputs are computed where their inputs are known."""
