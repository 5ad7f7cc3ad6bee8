"""Tiny ONNX files made by hand, for the tests of the importer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, INT64, INT32, INT8, UINT8, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.BOOL,
)

node = helper.make_node


def value(name: str, shape: Sequence[int | str | None] | None, dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Sequence[str | Any],
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    value_info: Sequence[Any] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model. An input is a shape, or a (dtype, shape) pair; an output a name or a value info."""
    infos = [
        value(name, spec[1], spec[0]) if isinstance(spec, tuple) else value(name, spec)
        for name, spec in inputs.items()
    ]
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        infos,
        [value(out, None) if isinstance(out, str) else out for out in outputs],
        [numpy_helper.from_array(data, name) for name, data in (weights or {}).items()],
        value_info=list(value_info),
    )
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(name, version) for name, version in (domains or {}).items()]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=ir_version, functions=list(functions)
    )


def save(folder: Path, made: onnx.ModelProto, name: str = "tiny.onnx") -> Path:
    path = folder / name
    path.write_bytes(made.SerializeToString())
    return path


def external(name: str, dtype: int, shape: Sequence[int], location: str) -> onnx.TensorProto:
    """A weight whose data lies in another file."""
    tensor = TensorProto(name=name, data_type=dtype, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)
