"""Models that run on the devices of their placement: PyTorch modules, JAX functions and training
steps."""

import sys
from typing import Any

from gdp.base.errors import ArgumentError, PlacementError
from gdp.cluster.file import Machine
from gdp.costs.base import roofline
from gdp.importers.pytorch.export import import_torch
from gdp.placement.placement import DIVIDED, Placed, Placement
from gdp.question.models import Model
from gdp.question.question import Question, question_about


def on_devices(
    module: Any, placed: Placed, model: Model | None = None, cluster: Machine | None = None
) -> Any:
    """Put a model on the devices of its placement: a PyTorch module, a JAX function, a training
    step in JAX.

    A module is moved in place; its `forward`, and `generate` of transformers' models, work as
    before. Hooks of accelerate move the inputs of every part to its device, and results to the
    device of the inputs. A device that is a CPU computes there; nothing streams. Called again with
    another placement, it moves the module there.

    A JAX function becomes a callable of its arguments that are not weights
    (`gdp.targets.jax.placed.PlacedFunction`), a training step one of state and batch
    (`gdp.targets.jax.placed.PlacedStep`): a jitted function per piece, weights and state on the
    devices of their ops, transfers by `jax.device_put`.

    Args:
        module: A `torch.nn.Module` with its weights; or, as a function behind `python:` returns
            them, `(function, arguments)` or `(function, arguments, options)` of JAX, whose weights
            are arrays.
        placed: Result, placement, device map, or file of one.
        model: Model that was placed, of a module; None for the one that the placement remembers.
            Graphs and traced modules have to be given.
        cluster: Cluster of the placement; None for the one that it remembers.

    Returns:
        The module itself, a `PlacedFunction`, or a `PlacedStep`.

    Raises:
        PlacementError: The placement is of another model, offloads weights, has replicated stages,
            or parts one module's own ops.
        ClusterError: The placement uses a device that this machine lacks.
        ModelError: The weights of the module are on the meta device, those of a function are
            shapes, or JAX cannot trace it.
        ArgumentError: No module is given, or the cluster is not known.
        MissingExtraError: torch or accelerate is not installed.

    Example:
        >>> result = gdp.place("hf:llama", "cpu+2xt4", target="accelerate")  # doctest: +SKIP
        >>> placed = gdp.on_devices(llama, result)  # doctest: +SKIP
        >>> placed.generate(**inputs)  # doctest: +SKIP
        >>> placed = gdp.on_devices((forward, (params, x)), result)  # doctest: +SKIP
        >>> y = placed(x)  # doctest: +SKIP
    """
    # Where things are asks for no times, so that changed costs do not matter.
    if isinstance(module, tuple):
        from gdp.targets.jax.placed import placed_callable, traced

        model, recorded = traced(module)
        question, placement = question_about(placed, recorded.graph, cluster, costs=roofline)
        _require_held(question, placement)
        return placed_callable(model, recorded, question, placement)
    # Nothing can be a module before torch was imported.
    if "torch" not in sys.modules or not isinstance(module, import_torch().nn.Module):
        raise ArgumentError(
            f"a torch.nn.Module or (JAX function, arguments) is needed, got {type(module).__name__}"
        )
    from gdp.targets.hf_accelerate.dispatch import dispatch

    question, placement = question_about(placed, model, cluster, costs=roofline)
    _require_held(question, placement)
    return dispatch(module, question, placement)


def _require_held(question: Question, placement: Placement) -> None:
    """Raise `PlacementError` for weights off the devices, and for stages on several."""
    if question.cluster.streams[placement.device].any():
        raise PlacementError(
            "the placement offloads weights, and gdp.on_devices keeps all on devices: place again "
            "with offload='none', or load the exported map with accelerate"
        )
    if placement.splits:
        raise PlacementError(f"gdp.on_devices cannot hold this placement: {DIVIDED}")
    if placement.teams:
        raise PlacementError(
            "the placement has replicated stages, and a module runs one sample at a time: place "
            "again with gdp.Constraints(replicas=False)"
        )
