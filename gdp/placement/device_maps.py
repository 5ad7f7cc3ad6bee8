"""Maps from op names or module paths to devices: those of gdp, and `device_map`s of accelerate.

accelerate numbers its accelerators, and beside numbers "cpu" and "disk" mean that weights rest
there and stream to the first accelerator at every use. Its maps cover every parameter, not every
op: an op without weights runs where its inputs are.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.base.files.reading import Kind, read_bytes
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import Constraints, streamed_bytes

OFFLOAD_NAMES = {"cpu": "cpu offload", "disk": "disk offload"}
"""Device that stands for each place of offloaded weights; see `gdp.costs.offload`."""
_KIND = Kind("device map", PlacementError)
_NUMBER = re.compile(r"^(?:[a-z]+:)?(\d+)$")
"""Of an accelerator: 1, "1" or "cuda:1"."""

DeviceMap = Mapping[str, str] | Mapping[str, int] | Mapping[str, str | int]


class MappedOps(NamedTuple):
    """A device map, applied to a graph."""

    device_names: tuple[str, ...]  # the cluster's, then those of offloaded weights
    device: Int[np.ndarray, "N"]
    streamed_bytes: int  # that cross to the main device at once; 0 where nothing is offloaded


def read_device_map(path: str | os.PathLike[str]) -> dict[str, str | int] | None:
    """The device map in a JSON file; None where the file holds anything else, or is unreadable."""
    try:
        entries: Any = msgspec.json.decode(read_bytes(path, _KIND))
    except (PlacementError, msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(entries, dict) or not entries or "schema" in entries:
        return None
    plain = all(isinstance(d, str | int) and not isinstance(d, bool) for d in entries.values())
    return entries if plain else None


def apply_device_map(graph: OpGraph, cluster: Cluster, entries: Mapping[str, Any]) -> MappedOps:
    """Devices of all ops: by name of the op, else by the longest module path that holds it.

    "" holds all. Inputs and outputs of the model are on the host unless they are named.

    An op without weights and without an entry, of a module that the map splits (in accelerate's
    maps of any module), is where the largest tensor that it reads is made.

    Raises:
        PlacementError: an op with weights is left out, a device is unknown, or a key names nothing.
    """
    names, index = _devices(cluster, entries)
    scopes = {path for path in entries if path not in graph.op_index}
    foreign = is_accelerate(cluster, entries)
    split, deepest = {path.rpartition(".")[0] for path in scopes}, max(map(len, graph.scope))
    split |= {p[:i] for p in split for i, c in enumerate(p[: deepest + 1]) if c == "."}
    split |= {""} if scopes else set()
    used: set[str] = set()
    main = next((index[d] for d in entries.values() if d not in OFFLOAD_NAMES), cluster.host)
    device = np.full(graph.num_ops, cluster.host)
    unnamed: list[int] = []
    for op, (name, scope) in enumerate(zip(graph.op_names, graph.scope, strict=True)):
        key = name if name in entries else longest_holder(scope, scopes)
        if key is not None and (name in entries or not graph.is_io[op]):
            device[op] = index[entries[key]]
            used.add(key)
        elif graph.weight_bytes[op] and foreign and not scope and not graph.is_io[op]:
            device[op] = main  # parameters of the model itself, which such maps list by name
        elif not graph.is_io[op]:
            if graph.weight_bytes[op] or not (foreign or scope in split):
                raise PlacementError(f"the map leaves out op {name!r} of module {scope!r}")
            unnamed.append(op)
    idle = sorted(entries.keys() - used - {""})
    # Maps of accelerate list modules that no op runs, too.
    if idle and not (foreign and len(idle) < len(entries.keys() - {""})):
        raise PlacementError(f"the map names {idle[0]!r}, which graph {graph.name!r} does not have")
    offloads = len(names) > cluster.num_devices
    _follow_inputs(graph, device, unnamed, index[next(iter(entries.values()))])
    _share(graph, device, unnamed)
    whole = tuple({s for s, b in zip(graph.scope, graph.weight_bytes, strict=True) if s and b})
    reserved = streamed_bytes(graph, Constraints(whole=whole)) if offloads else 0
    return MappedOps(names, device, reserved)


def is_accelerate(cluster: Cluster, entries: Mapping[str, Any]) -> bool:
    """True for a map with numbers of accelerators."""
    return any(
        device not in cluster.device_names and _NUMBER.match(str(device))
        for device in entries.values()
    )


def _devices(
    cluster: Cluster, entries: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Names of all devices, and the index of each value of the map."""
    own = {name: d for d, name in enumerate(cluster.device_names)}
    numbers = {n: d for d, n in enumerate(cluster.accelerator_numbers) if n is not None}
    foreign, values = is_accelerate(cluster, entries), set(entries.values())
    offloads = [t for t in OFFLOAD_NAMES if t in values and OFFLOAD_NAMES[t] not in own]
    names = (*cluster.device_names, *(OFFLOAD_NAMES[t] for t in offloads if foreign))
    index: dict[Any, int] = {}
    for value in sorted(values, key=str):
        number = _NUMBER.match(str(value))
        if foreign and value in OFFLOAD_NAMES:
            index[value] = names.index(OFFLOAD_NAMES[value])
        elif value in own:
            index[value] = own[value]
        elif number and int(number[1]) in numbers:
            index[value] = numbers[int(number[1])]
        elif value == "cpu" and None in cluster.accelerator_numbers:
            index[value] = cluster.accelerator_numbers.index(None)
        else:
            known = [*own, *sorted(numbers)] if foreign else own
            raise PlacementError(
                f"the map names device {value!r}; cluster {cluster.name!r} has "
                f"{', '.join(map(str, known))}"
            )
    return names, index


def longest_holder(scope: str, paths: Collection[str]) -> str | None:
    """The longest of some module paths that contain a scope.

    >>> longest_holder("layers.1.mlp", {"layers.1", "layers.1.m", "layers"})
    'layers.1'
    """
    ends = [i for i, letter in enumerate(scope) if letter in "./"]
    return next((scope[:i] for i in (len(scope), *ends[::-1], 0) if scope[:i] in paths), None)


def _follow_inputs(
    graph: OpGraph, device: Int[np.ndarray, "N"], ops: list[int], default: int
) -> None:
    """Put each of the ops, ascending, where its largest input is made; on `default` where it reads
    nothing but inputs of the model."""
    first = np.searchsorted(graph.use_op, np.arange(graph.num_ops + 1))
    for op in ops:
        read = graph.use_tensor[first[op] : first[op + 1]]
        computed = read[~graph.is_io[graph.producer[read]]]
        if len(computed):
            # Of equal tensors, such as the two of a residual sum, the one that is made last.
            largest = computed[::-1][np.argmax(graph.tensor_bytes[computed][::-1])]
            device[op] = device[graph.producer[largest]]
        else:
            device[op] = default


def _share(graph: OpGraph, device: Int[np.ndarray, "N"], ops: list[int]) -> None:
    """Put each of the ops where those are that must share its device: the first one that has an
    entry, else the first of all."""
    leader: dict[int, int] = {}
    without = set(ops)
    for op in sorted(range(graph.num_ops), key=without.__contains__):
        leader.setdefault(int(graph.colocate[op]), op)
    for op in ops:
        device[op] = device[leader[int(graph.colocate[op])]]
