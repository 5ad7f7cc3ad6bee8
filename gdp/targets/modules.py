"""Modules of a model that stay whole, and places between modules where its program can be cut."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gdp.base.errors import ArgumentError, ModelError
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import outermost
from gdp.question.models import Model, is_traced, spec_of, traced_model
from gdp.question.question import Question

if TYPE_CHECKING:
    from gdp.importers.pytorch.model import TorchModel

GRANULARITIES = ("op", "module", "layer")
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
"""Up to the first number of a module path: one element of a list of layers."""


def with_whole_modules(question: Question) -> Question:
    """The question with the modules that its granularity keeps whole among its constraints."""
    whole = modules_kept(question)
    if not whole:
        return question
    constraints = question.constraints
    together = replace(constraints, whole=tuple({*constraints.whole, *whole}))
    return replace(question, constraints=together)


def modules_kept(question: Question) -> tuple[str, ...]:
    """Paths of the modules that the granularity of a question keeps whole; none for "op"."""
    granularity = question.granularity or "op"
    module = torch_module(question.model) if granularity != "op" else None
    return whole_modules(module, question.graph, granularity)


def whole_modules(module: Any, graph: OpGraph, granularity: str) -> tuple[str, ...]:
    """Paths of the modules that stay in one piece; `module` is the PyTorch module, or None.

    "module": those that hold weights themselves and those whose class a PyTorch model names in
    `_no_split_modules`; "layer": each element of a list of layers in addition; "op": none.
    """
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"no granularity {granularity!r}; there are {', '.join(GRANULARITIES)}")
    if granularity == "op":
        return ()
    holders = {s for s, b in zip(graph.scope, graph.weight_bytes, strict=True) if s and b}
    paths = holders if module is None else set(kept_modules(module))
    if granularity == "layer":
        paths |= {match[0] for scope in graph.scope if (match := _BLOCK.match(scope))}
    return tuple(sorted(path for path in paths if outermost(path, paths) == path))


def kept_modules(module: Any) -> Iterable[str]:
    """Paths of modules that accelerate cannot split: with weights of their own, or named by the
    model in `_no_split_modules`."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if path and (own or type(part).__name__ in classes):
            yield path


def torch_model(model: Model | None) -> "TorchModel | None":
    """The traced PyTorch program of a spec or a model, None for other models."""
    from gdp.importers.pytorch.model import TorchModel

    code = traced_model(spec_of(model)) if model is not None and is_traced(model) else model
    return code if isinstance(code, TorchModel) else None


def torch_module(model: Model | None) -> Any:
    """The PyTorch module of a spec or a traced model, None for other models."""
    code = torch_model(model)
    return None if code is None else code.unwrapped


def torch_boundaries(
    model: Model | None, graph: OpGraph, whole: Sequence[str]
) -> tuple[dict[int, str], str]:
    """Ops where a PyTorch program can be cut, with the module path whose call begins there; where
    there are none, why.

    See `gdp.importers.pytorch.model`.

    Raises:
        ModelError: if the model is no PyTorch module for inference, or not that of the graph.
    """
    from gdp.importers.pytorch.model import boundaries, uncut_reason

    code = torch_model(model)
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
    cuts = boundaries(recorded, whole)
    return cuts, "" if cuts else uncut_reason(recorded)
