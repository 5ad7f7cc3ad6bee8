"""Models by path or name, as graphs."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

from gdp.errors import ModelError
from gdp.graph import OpGraph

ONNX_PREFIX, PYTHON_PREFIX = "onnx:", "python:"
GRAPH_SUFFIXES = (".json", ".json.gz", ".gdpgraph")


def is_onnx(spec: str | os.PathLike[str]) -> bool:
    """Whether a model is an ONNX file, which ONNX Runtime can execute."""
    text = str(spec)
    return text.startswith(ONNX_PREFIX) or text.endswith(".onnx")


def load(spec: str | os.PathLike[str], dims: Mapping[str, int] | None = None) -> OpGraph:
    """The graph of an .onnx path, `onnx:NAME`, a graph file, or `python:package.module:function`.

    `dims` binds symbolic dimensions of ONNX models. Raises `ModelError` when it cannot be read.
    """
    text = str(spec)
    if text.startswith(PYTHON_PREFIX):
        return _load_python(text)
    if is_onnx(spec):
        from gdp.importers.onnx import load_onnx

        return load_onnx(text, dict(dims or {}))
    if text.endswith(GRAPH_SUFFIXES):
        from gdp.graph_file import load_graph

        return load_graph(Path(text))
    if not Path(text).exists():
        raise ModelError(
            f"no model {text!r}: give an .onnx path, onnx:NAME, a graph file "
            f"({', '.join(GRAPH_SUFFIXES)}) or python:package.module:function"
        )
    # A file without a telling suffix: most exporters write ONNX.
    from gdp.importers.onnx import load_onnx

    return load_onnx(text, dict(dims or {}))


def python_function(spec: str) -> object:
    """What `python:package.module:function` returns when it is called."""
    module_name, separator, function_name = spec.removeprefix(PYTHON_PREFIX).rpartition(":")
    if not separator or not module_name or not function_name:
        raise ModelError(f"{spec!r} must look like python:package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"{spec!r}: module {module_name!r} cannot be imported: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{spec!r}: module {module_name!r} has no function {function_name!r}")
    return function()


def _load_python(spec: str) -> OpGraph:
    made = python_function(spec)
    if isinstance(made, OpGraph):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ModelError(
            f"{spec!r} must return a JAX function and a tuple of its example arguments, "
            f"got {type(made).__name__}"
        )
    from gdp.importers.jaxpr import trace

    function, arguments = made
    return trace(function, *arguments)
