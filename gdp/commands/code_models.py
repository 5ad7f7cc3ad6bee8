"""Models that are code: the function or module behind a spec, and what runtimes need of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdp.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.models import Model, Traceable, is_gguf, is_onnx, is_traced, spec_of, traced_model

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.pytorch.model import TorchModel


def model_label(model: Model) -> str:
    """Name of a model in messages."""
    return model.name if isinstance(model, OpGraph | Traceable) else str(model)


def require_executable(model: Model) -> None:
    """Raise `ModelError` for a graph without anything to execute; traces nothing."""
    known = is_onnx(model) or is_traced(model) or is_gguf(model)
    if not (known or isinstance(model, Traceable)):
        raise ModelError(
            f"{model_label(model)!r} holds a graph only; `gdp run` needs an ONNX file, a GGUF "
            "file, a JAX function or a PyTorch module"
        )


def executable_model(model: Model) -> "tuple[str, Model | JaxModel | TorchModel]":
    """Kind of a model ("onnx", "gguf", "jax" or "torch"), and what runtimes of it execute.

    Raises:
        ModelError: if the model is a graph without anything to execute.
    """
    require_executable(model)
    if is_onnx(model):
        return "onnx", model
    if is_gguf(model):
        return "gguf", spec_of(model)
    from gdp.importers.jax.trace import JaxModel

    code = model if isinstance(model, Traceable) else traced_model(spec_of(model))
    if isinstance(code, OpGraph):
        raise ModelError(
            f"{model!r} returns a graph only; return (function, arguments) to execute it"
        )
    return "jax" if isinstance(code, JaxModel) else "torch", code


def _torch_model(model: Model | None) -> "TorchModel | None":
    from gdp.importers.pytorch.model import TorchModel

    code = traced_model(spec_of(model)) if model is not None and is_traced(model) else model
    return code if isinstance(code, TorchModel) else None


def torch_module(model: Model | None) -> Any:
    """The PyTorch module of a spec or a traced model, None for other models."""
    code = _torch_model(model)
    return None if code is None else code.unwrapped


def torch_boundaries(model: Model | None, graph: OpGraph, whole: Sequence[str]) -> dict[int, str]:
    """Ops where a PyTorch program can be cut, with the module path whose call begins there.

    See `gdp.importers.pytorch.model`.

    Raises:
        ModelError: if the model is no PyTorch module for inference, or not that of the graph.
    """
    from gdp.importers.pytorch.model import boundaries

    code = _torch_model(model)
    if code is None:
        raise ModelError(
            "torch.distributed.pipelining cuts PyTorch modules: give python:package.module:function"
            " or hf:CONFIG"
        )
    if code.options.get("held"):
        raise ModelError(f"{code.name}: a pipeline of torch holds no caches between its samples")
    recorded = code.record()
    if recorded.graph.digest != graph.digest:
        raise ModelError(f"{code.name}: the module has changed since {graph.name!r} was traced")
    return boundaries(recorded, whole)
