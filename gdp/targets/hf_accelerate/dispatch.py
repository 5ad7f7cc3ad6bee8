"""A PyTorch module on the devices of its placement, moved there by the hooks of accelerate."""

import functools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gdp.base.errors import MissingExtraError, ModelError, PlacementError
from gdp.base.units import format_bytes
from gdp.base.version import install_command
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import beginning
from gdp.placement.device_maps import longest_holder
from gdp.placement.placement import Placement
from gdp.question.question import Question
from gdp.targets.hf_accelerate.device_map import device_map
from gdp.targets.torch_devices import require_devices, torch_names

SIZE_TOLERANCE = 0.25
"""Share by which the weights of a module may differ in bytes from those that were placed: what
quantised modules keep beside their weights. Another dtype or size is a factor."""
_BLOCK = re.compile(r"^(.*?)(?:^|(?<=\.))\d+(?=\.|$)")
"""Up to the first number of a module path, with the list of blocks as group 1."""


def dispatch(module: Any, question: Question, placement: Placement) -> Any:
    """Move a module to the devices of a placement of the question; returns the module.

    Raises:
        PlacementError: The module is not the one that was placed, or an op would read from two
            devices.
        ClusterError: The placement uses a device that this machine lacks.
        ModelError: The weights of the module are on the meta device.
    """
    graph, machine = question.graph, question.cluster
    _require_weights(module, graph)
    held = device_map(graph, placement, machine, module)
    entries = {path: "cpu" if where == "cpu" else f"cuda:{where}" for path, where in held.items()}
    # accelerate takes parameters of the module itself, beside its parts, to the main device.
    weighty = graph.weight_bytes > 0
    own = weighty & np.array([not scope for scope in graph.scope])
    main = torch_names(machine)[int(placement.device[np.argmax(own if own.any() else weighty)])]
    _require_moved(graph, entries, main)
    require_devices(machine, np.unique(placement.device[graph.weight_bytes > 0]).tolist())
    import torch

    try:
        from accelerate.big_modeling import dispatch_model
        from accelerate.hooks import remove_hook_from_submodules
    except ImportError:
        raise MissingExtraError(
            f"gdp.on_devices needs accelerate: {install_command('torch')}"
        ) from None
    remove_hook_from_submodules(module)  # of an earlier call
    # To accelerate "cpu" means weights that stream, a torch.device that the CPU computes.
    devices: dict[str, Any] = {path: torch.device(name) for path, name in entries.items()}
    # Layers of a cache lie where transformers made them.
    skipped: list[str] = sorted(getattr(module, "_skip_keys_device_placement", None) or ())
    with warnings.catch_warnings():
        # Of entries that are parameters of the module itself, which accelerate takes all the same.
        warnings.filterwarnings("ignore", message="The following device_map keys do not match any")
        # Without hooks a module on one device would leave moving its inputs to the caller.
        return dispatch_model(
            module, devices, torch.device(main), skip_keys=skipped or None, force_hooks=True
        )


def _require_weights(module: Any, graph: OpGraph) -> None:
    """Raise `PlacementError` where a module is not the one that was placed, as far as paths and
    bytes of its weights tell, `ModelError` where it has no weights yet."""
    parts = dict(module.named_modules(remove_duplicate=False))
    own = graph.weight_bytes > graph.cache_bytes
    read = {graph.scope[op] for op in np.flatnonzero(own)}
    if strange := sorted(read - parts.keys()):
        raise _of_another(graph, f"it has weights in {strange[0]!r}, which the module lacks")
    lists = {match[1] for path in read if (match := _BLOCK.match(path))}
    blocks = {match[0] for path in read if (match := _BLOCK.match(path))}
    for path in parts:
        block = _BLOCK.match(path)
        if block and block[1] in lists and block[0] not in blocks and parts[path].state_dict():
            raise _of_another(graph, f"it has no weights in {path!r}, as the module has")
    ops = graph.weight_holders(np.flatnonzero(own))
    planned = int((graph.weight_bytes - graph.cache_bytes)[ops].sum())
    # An op may read the weights of a part that is not called itself.
    sizes = [_bytes_below([parts[path] for path in read], deep) for deep in (False, True)]
    if all(abs(size - planned) > SIZE_TOLERANCE * planned for size in sizes):
        raise _of_another(
            graph, f"it has {format_bytes(planned)} of weights, the module has "
            f"{format_bytes(sizes[0])} there",
        )  # fmt: skip
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ModelError(
            "weights of the module are on the meta device; load them first, or load it with "
            "from_pretrained(device_map=...) and the exported map"
        )


def _of_another(graph: OpGraph, why: str) -> PlacementError:
    return PlacementError(f"the placement is of another model, {graph.name!r}: {why}")


def _bytes_below(parts: Iterable[Any], deep: bool) -> int:
    """Bytes of the distinct weights of some modules, with those of their children where `deep`."""
    tensors = {
        id(tensor): tensor
        for part in parts
        for tensor in (*part.parameters(recurse=deep), *part.buffers(recurse=deep))
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _require_moved(graph: OpGraph, entries: Mapping[str, str], main: str) -> None:
    """Raise `PlacementError` where an op between the parts of a split module would read from two
    devices: hooks move the inputs of modules, not those of ops."""
    src, dst = graph.edges
    first = np.searchsorted(dst, np.arange(graph.num_ops + 1))
    where: list[str | None] = [main] * graph.num_ops
    paths = sorted(entries)

    @functools.cache
    def parts(scope: str) -> tuple[str | None, set[str]]:
        """The entry that holds a module, and the devices of entries below it."""
        holder = longest_holder(scope, entries)
        below = beginning(paths, f"{scope}." if scope else "")
        return holder, {entries[p] for p in below if p != holder}

    for op in np.flatnonzero(~graph.is_io).tolist():
        scope = graph.scope[op]
        holder, inside = parts(scope)
        if holder is not None and not inside - {entries[holder]}:
            where[op] = entries[holder]
            continue
        reads = {where[s] for s in src[first[op] : first[op + 1]].tolist()} - {None}
        if graph.weight_bytes[op]:
            reads.add(main if holder is None else entries[holder])
        if len(reads) > 1:
            raise PlacementError(
                f"op {graph.op_names[op]!r} of module {scope!r} reads from "
                f"{' and '.join(sorted(map(str, reads)))}, and only inputs of whole modules are "
                "moved: place again with target='accelerate', or granularity='layer' beside it"
            )
        where[op] = next(iter(reads), None)
