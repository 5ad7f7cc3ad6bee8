"""Shape inference of single nodes by the operator schemas that the onnx package carries."""

import functools

import numpy as np
import onnx
import onnx_ir as ir
from onnx import checker, defs, shape_inference

from gdp.errors import ModelError
from gdp.importers.onnx.read import one_line
from gdp.ops.onnx_view import (
    Fact,
    Inferred,
    NodeView,
    Partial,
    Tensor,
    TensorList,
    broadcast,
)

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
        found = self._infer(view)
        if key is not None:
            self._cache[key] = found
        return found

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
    """Equal for nodes that must infer alike; None where attributes cannot be compared by value."""
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
