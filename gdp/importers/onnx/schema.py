"""Single nodes by the onnx package: shapes by its schemas, small constants by its reference
implementation.

Of values only what depends on no graph input, or on its shape alone, is computed: the arithmetic
that exporters do on shapes and axes. Anything larger than `KNOWN_ELEMENTS` stays unknown.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import checker, defs, shape_inference

from gdp.base.errors import ModelError
from gdp.importers.onnx.read import one_line
from gdp.importers.onnx.spec import foreign_data
from gdp.ops.onnx_view import (
    KNOWN_ELEMENTS,
    Fact,
    Inferred,
    NodeView,
    Partial,
    Tensor,
    TensorList,
    broadcast,
)
from gdp.ops.rule import names

# Domains whose operators the onnx package defines.
STANDARD_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")

# Schemas that came without an inference function; their first output is like their first input.
_LIKE_FIRST_INPUT = {"GroupNormalization", "MeanVarianceNormalization", "BatchNormalization"}
_BROADCAST_TO_BOOL = {"GreaterOrEqual", "LessOrEqual"}


class SchemaInference:
    """Infers the outputs of nodes; equal nodes are inferred once."""

    def __init__(self, opsets: dict[str, int]) -> None:
        self.opsets = [
            onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()
        ]
        self._cache: dict[tuple, list[Inferred]] = {}

    def __call__(self, view: NodeView) -> list[Inferred]:
        """Type and shape of each output; an empty `Partial` where the schema infers nothing.

        Raises `ModelError` when the operator does not exist or rejects its inputs.
        """
        key = _key(view)
        if key is not None and key in self._cache:
            return self._cache[key]
        inferred = self._infer(view)
        if key is not None:
            self._cache[key] = inferred
        return inferred

    def _infer(self, view: NodeView) -> list[Inferred]:
        schema = find_schema(view.op_type, view.version, view.domain)
        if schema is None:
            raise ModelError(
                f"node {view.name!r}: operator set {view.version} of domain "
                f"{view.domain or 'ai.onnx'!r} has no operator {view.op_type!r}; "
                "check its spelling and the model's opset_import"
            )
        unknown: list[Inferred] = [Partial()] * view.num_outputs
        if not schema.has_type_and_shape_inference_function:
            return [*_without_function(view), *unknown][: view.num_outputs]
        _check_outputs(view)
        node = node_proto(view)
        facts = zip(node.input, view.inputs, strict=True)
        types = {name: _to_proto(fact) for name, fact in facts if fact is not None}
        data = {  # `ascontiguousarray` would make a vector of a scalar
            name: onnx.numpy_helper.from_array(np.asarray(known, order="C"), name)
            for name, known in zip(node.input, view.known, strict=True)
            if name and known is not None
        }
        try:
            inferred = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=self.opsets
            )
            return [
                _from_proto(inferred[name]) if name in inferred else Partial()
                for name in node.output
            ]
        except (
            shape_inference.InferenceError, checker.ValidationError, ValueError, RuntimeError,
        ) as error:  # fmt: skip
            raise ModelError(
                f"node {view.name!r} ({view.op_type}) does not fit its inputs: "
                f"{_reason(error)}; its inputs are {_spell(view.inputs)}"
            ) from None


def _check_outputs(view: NodeView) -> None:
    """The library's rule for Split ends the process where the two disagree."""
    wanted = view.attribute("num_outputs") if view.op_type == "Split" else None
    if wanted is not None and wanted != view.num_outputs:
        raise ModelError(
            f"node {view.name!r} (Split) has num_outputs {wanted} and {view.num_outputs} outputs"
        )


@functools.lru_cache(maxsize=2048)
def find_schema(op_type: str, version: int, domain: str) -> defs.OpSchema | None:
    """The schema that holds at an operator set version, None where there is none."""
    try:
        return defs.get_schema(op_type, max_inclusive_version=version, domain=domain)
    except defs.SchemaError:
        return None


def _key(view: NodeView) -> tuple | None:
    """Key of nodes with equal inference results; None if attributes cannot be compared by value."""
    attributes = []
    for name, attribute in view.attributes.items():
        value = attribute.value
        if isinstance(value, list):
            value = tuple(value)
        if not isinstance(value, int | float | str | tuple):
            return None
        attributes.append((name, value))
    try:
        return (
            view.domain, view.op_type, view.version, view.num_outputs, tuple(attributes),
            view.inputs,
            tuple(None if d is None else (d.dtype.str, d.shape, d.tobytes()) for d in view.known),
            hash(tuple(attributes)),
        )  # fmt: skip
    except TypeError:
        return None


def node_proto(view: NodeView) -> onnx.NodeProto:
    """The node under neutral value names: i0, i1, ... and o0, o1, ..."""
    node = onnx.NodeProto(op_type=view.op_type, domain=view.domain)
    node.input.extend("" if fact is None else f"i{i}" for i, fact in enumerate(view.inputs))
    node.output.extend(f"o{i}" for i in range(view.num_outputs))
    for attribute in view.attributes.values():
        ir.serde.serialize_attribute_into(node.attribute.add(), from_=attribute)
    return node


def _to_proto(fact: Fact) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if isinstance(fact, TensorList):
        inner = proto.sequence_type.elem_type.tensor_type
        inner.elem_type = int(fact.runs[0][0].dtype) if fact.runs else int(ir.DataType.FLOAT)
        return proto
    proto.tensor_type.elem_type = int(fact.dtype)
    shape = proto.tensor_type.shape
    shape.SetInParent()  # a scalar has a shape without dimensions
    for size in fact.shape:
        shape.dim.add().dim_value = size
    return proto


def _from_proto(proto: onnx.TypeProto) -> Partial:
    if not proto.HasField("tensor_type"):
        return Partial()
    tensor = proto.tensor_type
    dtype = ir.DataType(tensor.elem_type)
    if not tensor.HasField("shape"):
        return Partial(dtype)
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    return Partial(dtype, tuple(None if size is None or size < 0 else size for size in sizes))


def _without_function(view: NodeView) -> list[Inferred]:
    first = view.tensor(0)
    if first is None:
        return []
    if view.op_type in _LIKE_FIRST_INPUT:
        return [first]
    if view.op_type in _BROADCAST_TO_BOOL:
        shapes = [fact.shape for fact in view.inputs if isinstance(fact, Tensor)]
        return [Tensor(ir.DataType.BOOL, broadcast(*shapes))]
    return [Partial(first.dtype)]


def _reason(error: Exception) -> str:
    """The message of the C++ side without its prefix and its node's neutral names."""
    text = one_line(str(error))
    return text.rpartition("[ShapeInferenceError] ")[2].rpartition("[TypeInferenceError] ")[2]


def _spell(inputs: tuple[Fact | None, ...]) -> str:
    return ", ".join(
        "left out" if fact is None
        else f"{fact.count} tensors" if isinstance(fact, TensorList)
        else f"{fact.dtype.name.lower()}{list(fact.shape)}"
        for fact in inputs
    )  # fmt: skip


# Data of small constant values


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
        if arrays is None or any(
            array.size > KNOWN_ELEMENTS or ir.DataType.from_numpy(array.dtype) not in _PLAIN
            for array in arrays
        ):
            return None
    except Exception:  # a malformed node: shape inference names what is wrong with it
        return None
    return arrays


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
    its file is there and the model's own: sizes shall tell nothing of another file.
    """
    if tensor is None or tensor.size > KNOWN_ELEMENTS or tensor.dtype not in _PLAIN:
        return None
    if isinstance(tensor, ir.ExternalTensor) and (
        tensor.dtype not in _INTEGERS or foreign_data(Path(tensor.base_dir), str(tensor.location))
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
