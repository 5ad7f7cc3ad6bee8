"""The user's constraints on a placement: pins, forbidden devices, ops kept together."""

import fnmatch
import functools
import operator
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from jaxtyping import Bool, Int

from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.base.files.reading import Kind, read_toml
from gdp.cluster.types import Cluster
from gdp.graph.groups import components, merge_ids
from gdp.graph.op_graph import OpGraph

_KIND = Kind("constraints file", ValueError)


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ops or scopes that match the glob run on one of the devices."""

    match: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Constraints:
    """Demands on a placement. Globs match op names and module paths, as in fnmatch."""

    pins: tuple[Pin, ...] = ()
    forbid: tuple[Pin, ...] = ()  # ops that match stay off these devices
    together: tuple[str, ...] = ()  # all ops that match one glob share a device
    replicas: bool = True  # a pipeline for throughput may give a stage several devices in turn
    # Module paths: what lies in or below each shares a device, as do ops that read one weight.
    whole: tuple[str, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A constraints file."""

    pin: list[Pin] = []
    forbid: list[Pin] = []
    together: list[str] = []
    replicas: bool = True
    whole: list[str] = []


def read_constraints(path: str | os.PathLike[str]) -> Constraints:
    """The constraints of a TOML file; raises `ValueError` naming the key at fault."""
    entry = read_toml(path, _KIND, _File)
    return Constraints(
        tuple(entry.pin), tuple(entry.forbid), tuple(entry.together), entry.replicas,
        tuple(entry.whole),
    )  # fmt: skip


def parse_pin(text: str) -> Pin:
    """A pin from `GLOB=DEVICE[,DEVICE...]`; raises `ValueError` when it has no `=`.

    >>> parse_pin("encoder/*=gpu0,gpu1")
    Pin(match='encoder/*', devices=('gpu0', 'gpu1'))
    """
    match, separator, names = text.rpartition("=")
    devices = tuple(name.strip() for name in names.split(",") if name.strip())
    if not separator or not match or not devices:
        raise ArgumentError(f"{text!r} must look like GLOB=DEVICE, such as 'encoder/*=gpu0'")
    return Pin(match, devices)


def merge(parts: Sequence[Constraints]) -> Constraints:
    """All demands of several sources."""
    return Constraints(
        pins=tuple(pin for part in parts for pin in part.pins),
        forbid=tuple(pin for part in parts for pin in part.forbid),
        together=tuple(glob for part in parts for glob in part.together),
        replicas=all(part.replicas for part in parts),
        whole=tuple(path for part in parts for path in part.whole),
    )


class Names:
    """Names and scopes of a graph's ops, sorted, so that of many globs each is compared with the
    texts alone that begin and end as it does. A glob costs O(log N + texts compared)."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph

    @functools.cached_property
    def _ops(self) -> dict[str, list[int]]:
        """Ops by name and by scope."""
        found: dict[str, list[int]] = {name: [op] for op, name in enumerate(self._graph.op_names)}
        for op, scope in enumerate(self._graph.scope):
            if scope:
                found.setdefault(scope, []).append(op)
        return found

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._ops)

    @functools.cached_property
    def _backwards(self) -> list[str]:
        return sorted(text[::-1] for text in self._ops)

    def matching(self, glob: str, demand: str = "") -> Int[np.ndarray, "M"]:
        """The ops whose name or scope matches; raises `ValueError` when there is none, which names
        the demand that has the glob."""
        ops = {op for text in self._texts(glob) for op in self._ops[text]}
        if not ops:
            where = f"{demand}: " if demand else ""
            raise ArgumentError(
                f"{where}no op or scope of graph {self._graph.name!r} matches {glob!r}; "
                "`gdp inspect --ops` lists the names"
            )
        return np.array(sorted(ops), dtype=np.int64)

    def _texts(self, glob: str) -> list[str]:
        special = [i for i, letter in enumerate(glob) if letter in "*?[]"]
        if not special:
            return [glob] if glob in self._ops else []
        begin = beginning(self._sorted, glob[: special[0]])
        end = beginning(self._backwards, glob[special[-1] + 1 :][::-1])
        fewer = begin if len(begin) <= len(end) else [text[::-1] for text in end]
        if "[" not in glob:  # most texts lack what stands between two stars
            longest = max(re.split("[*?]", glob), key=len)
            fewer = [text for text in fewer if longest in text]
        return fnmatch.filter(fewer, glob)


def beginning(texts: list[str], head: str) -> list[str]:
    """The sorted texts that begin so."""
    cut = operator.itemgetter(slice(len(head)))
    return texts[bisect_left(texts, head) : bisect_right(texts, head, key=cut)]


def allowed_mask(
    constraints: Constraints, graph: OpGraph, cluster: Cluster
) -> Bool[np.ndarray, "N D"]:
    """Mask of the devices that the user allows for each op.

    Raises `ValueError` for an unknown device or a glob that matches nothing, and `InfeasibleError`
    naming the demands that leave an op no device.
    """
    allowed = np.ones((graph.num_ops, cluster.num_devices), dtype=bool)
    demands: list[tuple[str, Int[np.ndarray, "M"]]] = []
    names = Names(graph)
    for pin, demand in [(p, "pin") for p in constraints.pins] + [
        (p, "forbid") for p in constraints.forbid
    ]:
        listed = np.zeros(cluster.num_devices, dtype=bool)
        for device in pin.devices:
            if device not in cluster.device_names:
                raise ArgumentError(
                    f"{demand} {pin.match!r} names device {device!r}; cluster "
                    f"{cluster.name!r} has {', '.join(cluster.device_names)}"
                )
            listed[cluster.device_names.index(device)] = True
        ops = names.matching(pin.match, demand)
        # A catch-all glob does not move the model's inputs and outputs off the host.
        ops = ops[~graph.is_io[ops]]
        allowed[ops] &= listed if demand == "pin" else ~listed
        demands.append((f"{demand} {pin.match}={','.join(pin.devices)}", ops))
        empty = ops[~allowed[ops].any(axis=1)]
        if empty.size:
            of_it = [text for text, theirs in demands if empty[0] in theirs]
            raise InfeasibleError(
                f"{' and '.join(of_it)} leave op {graph.op_names[empty[0]]!r} no device; "
                "relax one of them"
            )
    return allowed


def together_ids(constraints: Constraints, graph: OpGraph) -> Int[np.ndarray, "N"] | None:
    """Ids that ops kept together share, or None without such demands."""
    if not constraints.together and not constraints.whole:
        return None
    ids, names = np.arange(graph.num_ops), Names(graph)
    tied = [names.matching(glob, "together") for glob in constraints.together]
    if tied := [ops for each in tied if (ops := each[~graph.is_io[each]]).size]:
        first = [np.full(len(ops), ops[0]) for ops in tied]
        ids = components(np.concatenate(first), np.concatenate(tied), graph.num_ops)
    if constraints.whole:
        ids = merge_ids(ids, whole_labels(constraints, graph))
        held = np.flatnonzero(graph.weight_bytes > 0)
        weight = np.arange(graph.num_ops) + graph.num_ops
        weight[held] = graph.weight_id[held]
        ids = merge_ids(ids, weight)
    return ids


def whole_labels(constraints: Constraints, graph: OpGraph) -> Int[np.ndarray, "N"]:
    """Labels of ops: one for each module that stays whole (the outermost of nested ones), one of
    its own for every other op."""
    roots = set(constraints.whole)
    first: dict[str, int] = {}
    labels = np.arange(graph.num_ops)
    for op, scope in enumerate(graph.scope):
        root = outermost(scope, roots)
        if root is not None and not graph.is_io[op]:
            labels[op] = first.setdefault(root, op)
    return labels


def streamed_bytes(graph: OpGraph, constraints: Constraints) -> int:
    """Bytes that stream at most at once: the largest module that stays whole, each weight once,
    and the tensors that one op reads and makes."""
    labels = whole_labels(constraints, graph)
    first = graph.weight_holders()
    weights = np.bincount(labels[first], graph.weight_bytes[first])
    tensors = np.bincount(graph.use_op, graph.held_bytes[graph.use_tensor], graph.num_ops)
    tensors += np.bincount(graph.producer, graph.held_bytes, graph.num_ops)
    return int(weights.max(initial=0) + tensors.max(initial=0))


def whole_borders(constraints: Constraints, graph: OpGraph) -> Int[np.ndarray, "N"]:
    """Labels like `whole_labels`, except that all ops outside such modules share one."""
    labels, roots = whole_labels(constraints, graph), set(constraints.whole)
    inside = np.array([outermost(scope, roots) is not None for scope in graph.scope], dtype=bool)
    return np.where(inside & ~graph.is_io, labels, graph.num_ops)


def outermost(scope: str, roots: Collection[str]) -> str | None:
    """The shortest of the module paths that contain or equal a module; None if there is none.

    >>> outermost("layers.1.mlp", {"layers.1", "layers.1.mlp", "layers"})
    'layers'
    """
    parts = scope.split(".") if scope else []
    paths = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return next((path for path in paths if path in roots), None)
