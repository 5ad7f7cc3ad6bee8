"""Values of a model that differ when it is cut and run again.

Other fusions add up in another order. A quantiser turns such a last digit into a whole step of its
scale, and whatever is computed from it may be off by as much; a random operator draws anew.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from gdp.runtime.compare import Repeatable
from gdp.runtime.ort.inputs import bodies, constant_tensors

_RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial", "Sampling",
}  # fmt: skip
# Random in training mode, by the input that says so.
_TRAINING = {"Dropout": 2, "BiasDropout": 4, "BitmaskDropout": 2, "BitmaskBiasDropout": 4}


def repeatable(model: onnx.ModelProto) -> Repeatable:
    """Values that depend on random operators or quantisers of a model."""
    from gdp.exporters.ort_cut import values_read

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


_SMALL = 1 << 16  # elements: scales of every channel, not weights
