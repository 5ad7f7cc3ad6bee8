"""Code that is traced: functions and modules with example arguments, whoever traces them."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdp.base.errors import GdpError, ModelError

if TYPE_CHECKING:
    from gdp.graph.op_graph import OpGraph
    from gdp.importers.program import Traced


@runtime_checkable
class Traceable(Protocol):
    """A function or module with its example arguments, ready to be traced or executed."""

    @property
    def name(self) -> str:
        """Name of the graph."""
        ...

    def trace(self) -> "Traced":
        """The graph, with its estimates and assumptions."""
        ...


def trace_of(model: object, spec: str) -> "Traced":
    """The trace of a model; raises `ModelError`, which names the spec where there is one."""
    if not isinstance(model, Traceable):
        raise ModelError(
            "a model is a path, onnx:NAME, python:package.module:function, hf:CONFIG, a graph "
            f"(gdp.load, gdp.trace) or a traced model, not of type {type(model).__name__}"
        )
    try:
        return model.trace()
    except ModelError as error:
        if not spec or spec in str(error):
            raise
        raise ModelError(f"{spec!r}: {error}") from error  # a graph knows its own name alone
    except GdpError:
        raise
    except Exception as error:
        raise ModelError(f"{spec or model.name!r} cannot be traced: {named(error)}") from error


def reported(trace: "Traced") -> "OpGraph":
    """The graph of a trace, after warnings of its estimates."""
    from gdp.importers.program import report

    report(trace)
    return trace.graph


def named(error: BaseException) -> str:
    """An exception of somebody else's code, with its kind: messages alone may be just a key."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
