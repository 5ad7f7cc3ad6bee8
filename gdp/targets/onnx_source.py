"""Models as they are executed: the nodes and names of the imported graph, with weights.

Models that carry no weights get seeded random ones, so that a wrong cut cannot go unnoticed. Light
models make theirs with `ConstantOfShape`: every channel is equal, and many wrong cuts compute the
same numbers. Real models are left alone.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from gdp.base.errors import ModelError
from gdp.importers.onnx.spec import foreign_data
from gdp.targets.onnx_inputs import bodies, constant_tensors, values_read


@dataclass(frozen=True)
class Source:
    """A model to execute: functions inlined, a unique name on every node."""

    model: onnx.ModelProto
    folder: Path  # what the files of external weights are relative to
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)  # handed over in memory
    # Products with quantised weights take floats as they are, where the runtime would round them
    # to 8 bits in some pieces and not in others.
    exact: bool = False


def load_source(spec: str | os.PathLike[str], dims: Mapping[str, int] | None = None) -> Source:
    """The model of an .onnx path or `onnx:NAME`, prepared as the graph of `load_onnx` describes it.

    Raises `ModelError` when it cannot be read, or as `require_weights` does.
    """
    import onnx_ir as ir

    from gdp.importers.onnx.model import prepare
    from gdp.importers.onnx.spec import resolve_spec

    path = resolve_spec(spec)
    model = ir.to_proto(prepare(spec, dims))
    require_weights(path, external_locations(model))
    # Folding leaves inputs that no node reads; a session would require them.
    read = {name for node in model.graph.node for name in values_read(node)}
    read |= {value.name for value in model.graph.output}
    kept = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return Source(model, path.parent)


def randomised(source: Source, seed: int) -> Source:
    """The source with seeded random weights if it carries none; see `randomise_weights`."""
    weights = randomise_weights(source.model, seed)
    if not weights:
        return source
    return Source(with_weights(source.model, weights), source.folder, weights)


# (op type, input position) of sure weights.
_WEIGHT_SLOTS = {
    ("Conv", 1), ("ConvTranspose", 1), ("Gemm", 1), ("MatMul", 1), ("MatMul", 0),
    ("BatchNormalization", 1),
}  # fmt: skip
_VARIANCE_SLOT = ("BatchNormalization", 4)
# (op type, input position) of scales.
_SCALE_SLOTS = {
    ("BatchNormalization", 1), ("InstanceNormalization", 1), ("LayerNormalization", 1),
    ("GroupNormalization", 1), ("Mul", 0), ("Mul", 1), ("Div", 1),
}  # fmt: skip
_PASS_THROUGH = {"Unsqueeze", "Squeeze", "Reshape", "Identity", "Transpose", "Flatten", "Cast"}

Reader = tuple[onnx.NodeProto, int]


def randomise_weights(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Values for every `ConstantOfShape` weight of a light model; empty for any other model.

    Matrices and filters are normal with variance 1 / fan-in (LeCun et al. 1998, "Efficient
    BackProp", equation 16), scales uniform in [0.5, 1], variances uniform in [0.5, 1.5], the rest
    normal with standard deviation 0.1. Wider draws let residual networks grow from block to block,
    until a softmax at the end is 0 or 1 whatever the cut.
    """
    graph = model.graph
    constant = {  # one-dimensional integers, which may be shapes
        name: onnx.numpy_helper.to_array(t).tolist()
        for name, t in constant_tensors(graph).items()
        if t.data_type == onnx.TensorProto.INT64
        and len(t.dims) == 1
        and t.data_location != onnx.TensorProto.EXTERNAL
    }
    makers = {n.output[0]: n for n in graph.node if n.op_type == "ConstantOfShape"}
    makers = {name: n for name, n in makers.items() if n.input[0] in constant and _is_float(n)}
    readers: dict[str, list[Reader]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, position))
    users = {name: _final_readers(name, readers) for name in makers}
    if not any((n.op_type, k) in _WEIGHT_SLOTS for pairs in users.values() for n, k in pairs):
        return {}
    rng = np.random.default_rng(seed)
    return {
        name: _draw(rng, tuple(constant[node.input[0]]), users[name])
        for name, node in makers.items()
        if users[name]
    }


def with_weights(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model with these values as initialisers whose data a session is given in memory.

    A model holds at most 2 GB, so the values themselves stay outside.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    kept = [n for n in result.graph.node if not (n.output and n.output[0] in weights)]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    for name, values in weights.items():
        stub = result.graph.initializer.add(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype),
            dims=values.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        stub.external_data.add(key="location", value=IN_MEMORY)
    return result


IN_MEMORY = "given in memory"
"""Location of initialisers whose data the session is handed."""


def external_locations(model: onnx.ModelProto) -> list[str]:
    """The files that hold weights of a model, those of subgraphs too, relative to its folder."""
    locations: dict[str, None] = {}
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            locations[entries.get("location", "")] = None
    return [location for location in locations if location != IN_MEMORY]


def require_weights(path: Path, locations: Iterable[str]) -> None:
    """Raise `ModelError` where a file with weights of the model at `path` is missing, or is not
    surely the model's own.

    A file of other weights may be named in a model by someone who cannot read it, and end up in an
    export: so it lies in the model's folder, is no link, and has no second name (a hard link),
    whether it is to be executed or exported.
    """
    for location in locations:
        file = path.parent / location
        if not file.exists():
            raise ModelError(
                f"{path}: its weights are missing, no file {str(file)!r}; "
                "fetch it: placing needs no weights, executing and exporting do"
            )
        if fault := foreign_data(path.parent, location):
            raise ModelError(
                f"{path}: its weights in {str(file)!r} {fault}, so that they may be another's; "
                "copy the file to where the model names it"
            )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every stored tensor: initialisers and attributes, of subgraphs as well."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for body in bodies(attribute):
                yield from _tensors(body)


def _is_float(node: onnx.NodeProto) -> bool:
    kinds = [a.t.data_type for a in node.attribute if a.name == "value"]
    return (kinds or [onnx.TensorProto.FLOAT])[0] == onnx.TensorProto.FLOAT


def _final_readers(name: str, readers: Mapping[str, list[Reader]]) -> list[Reader]:
    """Who reads a value, looking through nodes that only reshape it."""
    final: list[Reader] = []
    for node, position in readers.get(name, []):
        if node.op_type in _PASS_THROUGH and position == 0:
            final += _final_readers(node.output[0], readers)
        else:
            final.append((node, position))
    return final


def _draw(rng: np.random.Generator, shape: tuple[int, ...], users: list[Reader]) -> np.ndarray:
    node, position = users[0]
    if min(shape, default=1) < 0:
        raise ModelError(f"weight of node {node.name!r} has a negative dimension: {shape}")
    if (node.op_type, position) in _SCALE_SLOTS:
        values = (1 + rng.random(shape, dtype=np.float32)) / 2
    elif (node.op_type, position) == _VARIANCE_SLOT:
        values = rng.random(shape, dtype=np.float32) + np.float32(0.5)
    else:
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(_deviation(node, position, shape))
    return values


def _deviation(node: onnx.NodeProto, position: int, shape: tuple[int, ...]) -> float:
    if len(shape) < 2 or (node.op_type, position) not in _WEIGHT_SLOTS:
        return 0.1
    if node.op_type == "MatMul":
        fan_in = shape[-2] if position == 1 else shape[-1]
    elif node.op_type == "Gemm":
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        fan_in = shape[1] if transposed else shape[0]
    else:
        fan_in = int(np.prod(shape[1:]))
    return float(1 / np.sqrt(max(fan_in, 1)))
