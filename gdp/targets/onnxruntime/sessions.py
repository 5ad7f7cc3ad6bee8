"""ONNX Runtime sessions on pinned CPU cores, and arrays as OrtValues."""

import ctypes
import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gdp.base.cores import usable_cores
from gdp.base.errors import ClusterError, ModelError
from gdp.cluster.types import CORE_KIND, Cluster
from gdp.targets.onnx_source import Source, external_locations


def core_of_device(cluster: Cluster) -> tuple[int, ...]:
    """The core that each device of a cluster stands for: `core3` is core 3.

    Raises `ClusterError` for a device that is no core, or a core that this process may not use.
    """
    usable = usable_cores()
    cores = []
    for device in cluster.devices:
        match = re.fullmatch(r"core([0-9]+)", device.name)
        if device.kind != CORE_KIND or match is None:
            raise ClusterError(
                f"device {device.name!r} of kind {device.kind!r} cannot be executed here: ONNX "
                f"Runtime runs devices of kind {CORE_KIND!r} named core0, core1, ... "
                "(cluster 2xcpu-core)"
            )
        if int(match[1]) not in usable:
            raise ClusterError(
                f"device {device.name!r}: this process may use cores "
                f"{', '.join(map(str, usable))}; leave the device out of the cluster"
            )
        cores.append(int(match[1]))
    return tuple(cores)


def can_pin() -> bool:
    """True if this platform pins threads to cores (Linux does, macOS and Windows do not)."""
    return hasattr(os, "sched_setaffinity")


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling thread, and the threads it starts, on these cores."""
    if not can_pin():
        yield
        return
    before = usable_cores()
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def make_session(
    model: onnx.ModelProto,
    source: Source,
    *,
    threads: int = 1,
    optimised: Path | None = None,
    profile: Path | None = None,
) -> Any:
    """An `onnxruntime.InferenceSession` of a source's model, or of a part of it.

    Args:
        model: The source's model, or a part that was cut from it.
        source: Source that holds the weights.
        threads: Threads of one kernel.
        optimised: File for the optimised form of the model.
        profile: Beginning of the file name of measured kernel times.
    """
    from gdp.targets.onnxruntime.telemetry import ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3  # errors; warnings repeat for every piece of a model
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
        # Weights in a file of their own: protobuf cannot hold 2 GB, and nobody reads them.
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights.bin"
        )
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if external_locations(model):
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(source.folder)
        )
    if source.exact:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    held = [i.name for i in model.graph.initializer if i.name in source.weights]
    values = [ort.OrtValue.ortvalue_from_numpy(source.weights[name]) for name in held]
    if held:
        options.add_external_initializers(held, values)
    try:
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises a dozen classes of its own, most undocumented
        reason = " ".join(str(error).split())
        raise ModelError(f"ONNX Runtime rejects {model.graph.name!r}: {reason}") from None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the libraries that execute the model."""
    from gdp.targets.onnxruntime.telemetry import ort

    return {"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__}


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
    from gdp.targets.onnxruntime.telemetry import ort

    if array.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(array)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
