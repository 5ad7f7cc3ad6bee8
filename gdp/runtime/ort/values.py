"""Arrays in and out of OrtValues, of the types that NumPy itself lacks too (bfloat16, 4 bits)."""

import ctypes
from typing import Any

import numpy as np
import onnx


def to_array(value: Any) -> np.ndarray:
    """A copy of an OrtValue's tensor: its memory may be written again."""
    kind = value.element_type()
    if onnx.helper.tensor_dtype_to_np_dtype(kind).isbuiltin == 1:
        return np.array(value.numpy())
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    tensor = onnx.TensorProto(data_type=kind, dims=value.shape(), raw_data=raw)
    return np.array(onnx.numpy_helper.to_array(tensor))


def from_array(array: np.ndarray) -> Any:
    """An OrtValue of a tensor; its memory is the array's own where NumPy knows the type."""
    from gdp.runtime.ort.telemetry import ort

    if array.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(array)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
