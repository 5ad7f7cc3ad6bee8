"""Runs the uncut model for reference, and compares what the pieces computed with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from gdp.errors import ModelError
from gdp.graph import INPUT, OpGraph
from gdp.runtime.ort_sessions import make_session
from gdp.runtime.ort_source import Source

RELATIVE_TOLERANCE = 1e-4
"""Of the largest magnitude in a tensor: other fusions add up in another order."""


@dataclass(frozen=True)
class Comparison:
    """How far tensors are from the reference."""

    equal: bool  # every tensor within the tolerance
    max_abs_diff: float
    max_relative_diff: float  # of the largest magnitude in the tensor
    worst: str  # the tensor of the largest relative difference
    tensors: int


def make_inputs(model: onnx.ModelProto, graph: OpGraph, seed: int) -> dict[str, np.ndarray]:
    """Seeded values for every input: normal floats; integers 0 or 1, which any vocabulary and mask
    allow; true booleans."""
    held = {i.name for i in model.graph.initializer}
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type.elem_type
        if value.type.WhichOneof("value") != "tensor_type" or kind == onnx.TensorProto.STRING:
            raise ModelError(f"input {value.name!r} is no numeric tensor; it cannot be made up")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        shape = _input_shape(value, graph)
        if dtype == np.bool_:
            found[value.name] = np.ones(shape, dtype=dtype)
        elif np.issubdtype(dtype, np.integer):
            found[value.name] = rng.integers(2, size=shape).astype(dtype)
        else:
            found[value.name] = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
    return found


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


def reference_values(
    source: Source, names: Sequence[str], feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[dict[str, Any]]:
    """Of each feed, the named tensors of the uncut model as OrtValues."""
    from gdp.runtime.ort import ort

    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in outputs
    )
    session = make_session(model, source)
    wanted = {value.name for value in session.get_inputs()}
    found = []
    for feed in feeds:
        values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in feed.items() if n in wanted}
        made = session.run_with_ort_values(list(names), values)
        found.append(dict(zip(names, made, strict=True)))
    return found


def compare(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> Comparison:
    """The largest differences over the tensors of `expected`."""
    worst, max_abs, max_relative = "", 0.0, 0.0
    for name, array in expected.items():
        difference, relative = _difference(array, found[name])
        max_abs = max(max_abs, difference)
        if relative > max_relative or not worst:
            worst, max_relative = name, relative
    return Comparison(
        max_relative <= RELATIVE_TOLERANCE, max_abs, max_relative, worst, len(expected)
    )


def merge_comparisons(parts: Sequence[Comparison]) -> Comparison:
    """The worst of several comparisons."""
    worst = max(parts, key=lambda part: part.max_relative_diff)
    return Comparison(
        all(part.equal for part in parts),
        max(part.max_abs_diff for part in parts),
        worst.max_relative_diff,
        worst.worst,
        sum(part.tensors for part in parts),
    )


def _difference(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The largest absolute difference, and its share of the largest magnitude."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return np.inf, np.inf
    if expected.size == 0:
        return 0.0, 0.0
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(a)
    # Infinities and NaNs must be the same ones in the same places.
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf, np.inf
    difference = float(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)).max())
    if difference == 0.0:
        return 0.0, 0.0
    if expected.dtype.kind in "biu":  # integers and booleans are equal or wrong
        return difference, np.inf
    scale = float(np.abs(a[finite]).max())
    return difference, difference / scale if scale else np.inf
