"""The one place that imports ONNX Runtime, with its telemetry switched off."""

import importlib
import os

# Read once, when the library is loaded: from then on it would send events to its makers, and keep
# a device id and a database in the user's cache folder (Privacy.md of the wheel).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

# For a program that had imported it before gdp: what can still be switched off.
ort.disable_telemetry_events()

__all__ = ["ort", "own_errors"]


def own_errors() -> tuple[type[Exception], ...]:
    """The exceptions of ONNX Runtime, which have no common base and no documentation."""
    native = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    kinds = (kind for kind in vars(native).values() if isinstance(kind, type))
    return tuple(kind for kind in kinds if issubclass(kind, Exception))
