"""A placement as a Hugging Face `device_map`: module path to device."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from gdp.errors import PlacementError
from gdp.graph import OpGraph
from gdp.placement import Placement
from gdp.targets import OWN, Permit, new_contents


def device_map(graph: OpGraph, placement: Placement) -> dict[str, int | str]:
    """Module path to accelerator number or "cpu", as few entries as say it.

    Only modules that hold weights count: accelerate moves modules, and activations follow. Raises
    `PlacementError` when the graph has no module paths, or when one module's weights lie on several
    devices (`--together 'PATH*'` keeps it whole).
    """
    holders: dict[str, set[int]] = {}
    for op in np.flatnonzero(graph.weight_bytes > 0):
        if graph.scope[op]:
            holders.setdefault(graph.scope[op], set()).add(int(placement.device[op]))
    if not holders:
        raise PlacementError(
            f"graph {graph.name!r} has no module paths; export the model with torch.onnx.export("
            "dynamo=True), which records them"
        )
    mixed = sorted(path for path, devices in holders.items() if len(devices) > 1)
    if mixed:
        raise PlacementError(
            f"{len(mixed)} modules have weights on several devices, first {mixed[0]!r}; place the "
            f"model again with --together '{mixed[0]}*'"
        )
    owner = {path: next(iter(devices)) for path, devices in holders.items()}
    names = _hugging_face_names(placement.device_names)
    return {path: names[device] for path, device in _merged(owner).items()}


def _hugging_face_names(device_names: tuple[str, ...]) -> list[int | str]:
    """Accelerators are numbered in order, every CPU is "cpu"."""
    names: list[int | str] = []
    for name in device_names:
        is_cpu = name.startswith(("cpu", "core"))
        names.append("cpu" if is_cpu else sum(isinstance(n, int) for n in names))
    return names


def _merged(owner: Mapping[str, int]) -> dict[str, int]:
    """The owners with every subtree of one device written once, at its root."""
    below: dict[str, set[int]] = {}
    for path, device in owner.items():
        parts = path.split(".")
        for depth in range(len(parts) + 1):
            below.setdefault(".".join(parts[:depth]), set()).add(device)
    kept: dict[str, int] = {}
    for path in sorted(below, key=lambda p: (p.count("."), p)):
        parts = path.split(".") if path else []
        covered = any(".".join(parts[:depth]) in kept for depth in range(len(parts)))
        if len(below[path]) == 1 and not covered:
            kept[path] = next(iter(below[path]))
        elif path in owner and not covered:
            # The module holds weights itself while its children lie elsewhere.
            kept[path] = owner[path]
    return kept


def export_accelerate(
    graph: OpGraph,
    placement: Placement,
    output: Path,
    permit: Permit = OWN,
) -> list[Path]:
    """Write `device_map.json` into the folder; see `gdp.targets` for `permit`."""
    data = msgspec.json.encode(device_map(graph, placement))
    with new_contents(output, "export to accelerate", permit) as folder:
        (folder / "device_map.json").write_bytes(msgspec.json.format(data, indent=1) + b"\n")
    return [output / "device_map.json"]
