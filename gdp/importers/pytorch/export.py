"""Exports modules with `torch.export`: on fake tensors, so that no weight is ever allocated."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gdp.errors import MissingExtraError, ModelError


def import_torch() -> Any:
    """The torch module; raises `MissingExtraError` where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError(
            "PyTorch models need torch: pip install 'gdp-placement[torch]'"
        ) from None
    return torch


def exported(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    *,
    label: str,
    train: bool = False,
) -> Any:
    """The module as an `ExportedProgram` of functional ATen ops.

    Parameters and inputs may be real, fake, or on the meta device. Ops that write in place are
    replaced by ones that do not, and their results stand for what they wrote. Raises `ModelError`
    with torch's own words where the module cannot be exported.
    """
    torch = import_torch()
    from torch.export import export

    with warnings.catch_warnings(), torch.set_grad_enabled(train):
        warnings.simplefilter("ignore")
        try:
            given, named = _beside_weights(module, tuple(args), dict(kwargs))
            program = export(module, given, named, dynamic_shapes=dynamic_shapes, strict=False)
            if any(map(_writes, _all_nodes(program.graph_module))):
                program = program.run_decompositions({})
        except ModelError:
            raise
        except Exception as error:
            said = str(error).strip().splitlines()
            raise ModelError(
                f"{label}: torch.export failed: {type(error).__name__}: {said[0] if said else ''}"
            ) from error
    return program


def _beside_weights(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs where the module's weights are: only shapes are needed of either."""
    import torch
    from torch.utils._pytree import tree_map

    devices = {p.device for p in (*module.parameters(), *module.buffers())}
    if len(devices) != 1:
        return args, kwargs
    (device,) = devices

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        if device.type == "meta":
            return leaf.to("meta")
        if leaf.device.type == "meta":
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return leaf

    return tree_map(moved, (args, kwargs))


def _all_nodes(graph_module: Any) -> list[Any]:
    return [
        node
        for part in graph_module.modules()
        if hasattr(part, "graph")
        for node in part.graph.nodes
    ]


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable
