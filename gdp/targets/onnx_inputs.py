"""Seeded inputs for a model that nobody gave any, and its values that differ when it is cut.

Inputs are values that the operators accept. Other fusions add up in another order: a quantiser
turns such a last digit into a whole step of its scale, and whatever is computed from it may be off
by as much; a random operator draws anew.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from gdp.base.errors import ModelError
from gdp.graph.op_graph import INPUT, OpGraph
from gdp.measure.compare import Repeatable

# Operators that look their integers up in a tensor: (input of the indices, input of the tensor).
_LOOK_UP = {
    "Gather": [(1, 0)], "GatherElements": [(1, 0)], "GatherND": [(1, 0)], "Scatter": [(1, 0)],
    "ScatterElements": [(1, 0)], "ScatterND": [(1, 0)], "GatherBlockQuantized": [(1, 0)],
    "EmbedLayerNormalization": [(0, 2), (1, 4)],
}  # fmt: skip
_BY_COORDINATES = {"GatherND", "ScatterND"}  # an index for each of the first axes
# What hands integers on to where they are looked up, no larger than they were.
_HANDS_ON = {
    "Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand",
    "Slice", "Split", "Concat", "Tile", "Where", "Gather", "GatherElements", "GatherND", "Min",
    "Max", "Clip", "Abs", "Mul", "Sub", "Mod", "Div",
}  # fmt: skip
_RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial", "Sampling",
}  # fmt: skip
# Random in training mode, by the input that says so.
_TRAINING = {"Dropout": 2, "BiasDropout": 4, "BitmaskDropout": 2, "BitmaskBiasDropout": 4}
MADE_UP = "inputs that are made up (integers 0 and 1, normal floats)"
"""Name of `make_inputs` in messages."""
_SMALL = 1 << 16  # elements: scales of every channel, not weights


def make_inputs(model: onnx.ModelProto, graph: OpGraph, seed: int) -> dict[str, np.ndarray]:
    """Seeded values for every input: normal floats; integers 0 or 1, which any vocabulary and mask
    allow, and 0 where they are looked up along an axis of size 1; true booleans."""
    held = {i.name for i in model.graph.initializer}
    rng = np.random.default_rng(seed)
    bounds = _index_bounds(model.graph)
    feeds = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type.elem_type
        if value.type.WhichOneof("value") != "tensor_type" or kind == onnx.TensorProto.STRING:
            raise ModelError(f"input {value.name!r} is no numeric tensor; it cannot be made up")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        shape = _input_shape(value, graph)
        if dtype == np.bool_:
            feeds[value.name] = np.ones(shape, dtype=dtype)
        elif np.issubdtype(dtype, np.integer):
            drawn = np.minimum(rng.integers(2, size=shape), bounds.get(value.name, 2) - 1)
            feeds[value.name] = np.asarray(drawn, dtype)  # of one number, NumPy makes a scalar
        else:
            drawn = rng.standard_normal(shape, dtype=np.float32)
            feeds[value.name] = np.asarray(drawn, dtype)
    return feeds


def _input_shape(value: onnx.ValueInfoProto, graph: OpGraph) -> tuple[int, ...]:
    """The shape that the graph was imported with: it binds symbolic dimensions."""
    for op, (op_type, detail) in enumerate(zip(graph.op_types, graph.detail, strict=True)):
        named = graph.op_names[op] == value.name or any(
            graph.tensor_names[t] == value.name for t in np.flatnonzero(graph.producer == op)
        )
        if op_type == INPUT and named and detail.output_shapes:
            return detail.output_shapes[0]
    dims = value.type.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        raise ModelError(
            f"input {value.name!r} has an open dimension; bind it, for example --dim batch=1"
        )
    return tuple(dim.dim_value for dim in dims)


def _index_bounds(graph: onnx.GraphProto) -> dict[str, int]:
    """Smallest axis that each index value is looked up along."""
    shapes = dict(_known_shapes(graph))
    bounds: dict[str, int] = {}
    nodes = list(_all_nodes(graph))
    for node in reversed(nodes):  # readers before makers, so that one pass is enough
        if node.op_type in _HANDS_ON:
            output_bounds = [bounds[name] for name in node.output if name in bounds]
            for name in node.input if output_bounds else ():
                bounds[name] = min(bounds.get(name, min(output_bounds)), *output_bounds)
        for index, data in _LOOK_UP.get(node.op_type, ()):
            if max(index, data) < len(node.input) and node.input[data] in shapes:
                name = node.input[index]
                size = _looked_up(node, shapes[node.input[data]], shapes.get(name))
                bounds[name] = min(bounds.get(name, size), size)
    return {name: max(size, 1) for name, size in bounds.items()}


def _looked_up(node: onnx.NodeProto, data: list[int], indices: list[int] | None) -> int:
    """The size of the axis that a node's indices count, the smallest where they count several."""
    if node.op_type in _BY_COORDINATES:
        first = next((a.i for a in node.attribute if a.name == "batch_dims"), 0)
        count = indices[-1] if indices else len(data)
        return min(data[first : first + count], default=1)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    return data[axis] if -len(data) <= axis < len(data) else 1


def _known_shapes(graph: onnx.GraphProto) -> Iterator[tuple[str, list[int]]]:
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            yield value.name, [dim.dim_value for dim in kind.shape.dim]
    for tensor in graph.initializer:
        yield tensor.name, list(tensor.dims)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], list(attribute.t.dims)
            for body in bodies(attribute):
                yield from _known_shapes(body)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes in order, those of a node's subgraphs before it."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies(attribute):
                yield from _all_nodes(body)
        yield node


def bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The subgraphs that an attribute holds."""
    return [attribute.g] if attribute.HasField("g") else list(attribute.graphs)


def constant_tensors(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Initialisers and values of `Constant` nodes, by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            tensors.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return tensors


def repeatable(model: onnx.ModelProto) -> Repeatable:
    """Values that depend on random operators or quantisers of a model."""
    constants = _constants(model.graph)
    drawn: list[str] = []
    random: set[str] = set()
    step: dict[str, float] = {}
    for node in model.graph.node:
        read = values_read(node)
        if kinds := list(_random_kinds(node, constants)):
            drawn.append(f"{kinds[0]} {node.name!r}" if node.name else kinds[0])
        if kinds or not random.isdisjoint(read):
            random.update(node.output)
        quantises = "Quantize" in node.op_type or "QLinear" in node.op_type
        if quantises or not step.keys().isdisjoint(read):
            step.update(dict.fromkeys(node.output, _step(node, constants)))
    return Repeatable(tuple(drawn), frozenset(random) - {""}, step)


def _random_kinds(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Iterator[str]:
    """The random operators that a node is or holds in its subgraphs."""
    if node.op_type in _RANDOM:
        yield node.op_type
    if node.op_type in _TRAINING and _is_training(node, constants):
        yield f"{node.op_type} in training mode"
    for attribute in node.attribute:
        for body in bodies(attribute):
            inner_constants = {**constants, **_constants(body)}
            for inner in body.node:
                yield from _random_kinds(inner, inner_constants)


def _is_training(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> bool:
    place = _TRAINING[node.op_type]
    ratio = constants.get(node.input[place - 1]) if len(node.input) >= place else None
    if ratio is not None and not ratio.any():
        return False  # nothing is dropped
    if len(node.input) <= place or not node.input[place]:
        return False
    mode = constants.get(node.input[place])
    return mode is None or bool(mode.any())


def _step(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> float:
    """Change of a dequantised value when its integer changes by one."""
    if node.op_type != "DequantizeLinear" or len(node.input) < 2:
        return 0.0
    scale = constants.get(node.input[1])
    return 0.0 if scale is None or not scale.size else float(np.abs(scale.astype(float)).max())


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The data of small tensors inside the file."""
    return {
        name: onnx.numpy_helper.to_array(tensor)
        for name, tensor in constant_tensors(graph).items()
        if tensor.data_location != onnx.TensorProto.EXTERNAL
        and tensor.data_type != onnx.TensorProto.STRING
        and int(np.prod(tensor.dims)) <= _SMALL
    }


def values_read(node: onnx.NodeProto) -> list[str]:
    """The values a node reads, those that its control-flow bodies capture included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for body in bodies(attribute):
            local = {v.name for v in body.input} | {i.name for i in body.initializer}
            for inner in body.node:
                names += [name for name in values_read(inner) if name not in local]
                local.update(inner.output)
            names += [v.name for v in body.output if v.name not in local]
    return list(dict.fromkeys(names))
