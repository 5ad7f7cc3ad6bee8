"""A placement as a Hugging Face `device_map`: module path to device."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.types import Cluster
from gdp.costs.offload import KINDS
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.targets.modules import torch_module
from gdp.targets.target import ExportJob


def device_map(
    graph: OpGraph, placement: Placement, cluster: Cluster, module: Any = None
) -> dict[str, int | str]:
    """Module path to accelerator number, "cpu" or "disk", as few entries as say it, in the order in
    which a PyTorch `module` defines its parts; without one, in the order of their first ops.

    Only modules that hold weights count: accelerate moves modules, and activations follow. With
    accelerators in the cluster, "cpu" means offload: weights stream to accelerator 0 at every use.
    Weights of a PyTorch `module` that no op reads lie where those tied to them do, or on the first
    device. Parameters of the model's own, beside its parts, are entries by their names, which come
    first: accelerate takes them to the first device of the map. Raises `PlacementError` when the
    graph has no module paths, or when one module's weights lie on several devices (`gdp place --for
    accelerate` keeps modules whole).
    """
    holders: dict[str, set[int]] = {}
    for op in np.flatnonzero(graph.weight_bytes > 0):
        holders.setdefault(graph.scope[op], set()).add(int(placement.device[op]))
    if not holders.keys() - {""} and module is None:
        raise PlacementError(
            f"graph {graph.name!r} has no module paths; place the PyTorch module itself, or export "
            "it with torch.onnx.export(dynamo=True), which records them"
        )
    mixed = sorted(path for path, devices in holders.items() if len(devices) > 1)
    if mixed:
        raise PlacementError(
            f"{len(mixed)} modules have weights on several devices, first "
            f"{mixed[0] or 'the model itself'!r}; place the model again with --for accelerate"
        )
    owner = {path: next(iter(devices)) for path, devices in holders.items()}
    if len(owner) > 1 and "" in owner and cluster.streams[owner[""]]:
        raise PlacementError(
            "accelerate streams no parameters of the model itself, beside its modules; place the "
            "model again with --for accelerate"
        )
    names = hugging_face_names(cluster)
    if module is not None:
        owner |= _unread(module, owner, min(owner.values(), key=lambda d: str(names[d])))
    own = {} if len(set(owner.values())) == 1 else _own_entries(owner, names, module)
    merged = {path: names[device] for path, device in _merged(owner, not own).items()}
    order = _in_order(merged, graph, module)
    if cluster.streams.any() and 0 in merged.values():
        # The first accelerator of the map computes what is offloaded; the plan has 0 for that.
        first = next(path for path in order if merged[path] == 0)
        order = [first, *(path for path in order if path != first)]
    return own | {path: merged[path] for path in order}


def _own_entries(
    owner: dict[str, int], names: Sequence[int | str], module: Any
) -> dict[str, int | str]:
    """Entries of the tensors that a model holds beside its parts, which leave the owners: an entry
    of the whole model would take all its parts along."""
    if "" not in owner:
        return {}
    device = names[owner.pop("")]
    if module is None:
        raise PlacementError(
            "parameters of the model itself, beside its modules, go by names that the PyTorch "
            "module knows: export the placement of that"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    return dict.fromkeys(sorted(name for name, _ in tensors if "." not in name), device)


def _in_order(paths: Collection[str], graph: OpGraph, module: Any) -> list[str]:
    """Module paths in the order of their definition in a PyTorch module, else of their first ops;
    a module before its parts."""
    if module is not None:
        known = [path for path, _ in module.named_modules(remove_duplicate=False)]
    else:
        known = list(dict.fromkeys(graph.scope))
    position = {"": -1}
    for i, path in enumerate(known):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            position.setdefault(".".join(parts[:depth]), i)
    return sorted(paths, key=lambda path: (position.get(path, len(known)), path.count(".")))


def hugging_face_names(cluster: Cluster) -> list[int | str]:
    """Names of devices: numbers of accelerators in order, "cpu" for CPUs, and for offloading where
    weights rest."""
    names: list[int | str] = []
    targets = {kind: target for target, kind in KINDS.items()}
    for device, number in zip(cluster.devices, numbers_on_machine(cluster), strict=True):
        names.append(targets.get(device.kind, "cpu" if number is None else number))
    return names


def _unread(module: Any, owner: Mapping[str, int], default: int) -> dict[str, int]:
    """The modules that hold weights which no op reads, with a device for each."""
    tensors: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        tensors.setdefault(id(tensor), []).append(name.rpartition(".")[0])
    for name, tensor in module.named_buffers(remove_duplicate=False):
        tensors.setdefault(id(tensor), []).append(name.rpartition(".")[0])
    unread: dict[str, int] = {}
    for paths in tensors.values():
        tied = [owner[path] for path in paths if path in owner]
        for path in paths:
            if path not in owner:
                inside = [d for p, d in owner.items() if p.startswith(f"{path}.")]
                unread.setdefault(path, (tied or inside or [default])[0])
    return unread


def _merged(owner: Mapping[str, int], to_root: bool) -> dict[str, int]:
    """The owners with every subtree of one device written once, at its root; that of the whole
    model only with `to_root`."""
    below: dict[str, set[int]] = {}
    for path, device in owner.items():
        parts = path.split(".")
        for depth in range(0 if to_root else 1, len(parts) + 1):
            below.setdefault(".".join(parts[:depth]), set()).add(device)
    kept: dict[str, int] = {}
    for path in sorted(below, key=lambda p: (p.count("."), p)):
        parts = path.split(".") if path else []
        above = [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]
        # accelerate follows the longest entry that a module's path begins with.
        inherited = next((kept[ancestor] for ancestor in above if ancestor in kept), None)
        devices = below[path]
        if len(devices) > 1:  # a module may hold weights itself while its children lie elsewhere
            devices = {owner[path]} if path in owner else set[int]()
        if devices - {inherited}:
            (kept[path],) = devices
    return kept


def export_accelerate(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
    *,
    module: Any = None,
) -> list[Path]:
    """Write `device_map.json` into the folder; see `gdp.base.files.writing` for `overwrite`.

    Raises `PlacementError` also where everything is offloaded: without an accelerator in the map
    accelerate would compute on the CPU.
    """
    entries = device_map(graph, placement, cluster, module)
    if set(entries.values()) <= set(KINDS) and cluster.streams.any():
        raise PlacementError(
            "every weight is offloaded, and a map without an accelerator has accelerate compute on "
            "the CPU; call accelerate.cpu_offload(model, execution_device=0), or disk_offload"
        )
    with new_contents(output, "export to accelerate", overwrite) as folder:
        (folder / "device_map.json").write_bytes(indented_json(entries) + b"\n")
    return [output / "device_map.json"]


def export(job: ExportJob) -> list[Path]:
    """Write the device map of a placement; see `export_accelerate`."""
    return export_accelerate(*job.plan, module=torch_module(job.question.model))
