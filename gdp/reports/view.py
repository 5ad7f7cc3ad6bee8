"""Simulated schedule of a placement, over ops with names that people know, and the model's modules
as a tree, with the level of it that is worth a table.

Axes: N ops of the model, M fused ops (what a runtime executes as one kernel), D devices.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Split, Teams
from gdp.problem.problem import Problem
from gdp.sim.schedule import Schedule

FEW = 24
"""Groups that a table or a set of colours can show."""
_MANY_LINKS = 3


@dataclass(frozen=True, eq=False)
class PlacementView:
    """A simulated placement and the model that it is of."""

    model: OpGraph
    problem: Problem  # over fused ops
    schedule: Schedule  # of one sample or training step
    device: Int[np.ndarray, "M"]
    teams: Teams = ()  # of replicated stages, whose members take samples in turn
    others: tuple[
        "PlacementView", ...
    ] = ()  # the ways of the samples that follow, until they repeat
    splits: tuple[Split, ...] = ()  # devices that compute each op together
    since_s: float = 0.0  # when this sample starts, where they are shown one after the other

    @property
    def ways(self) -> tuple["PlacementView", ...]:
        """One view for each way that a sample takes: this one, then those of other members."""
        return (self, *self.others)

    @property
    def end_s(self) -> float:
        """When the last of the ways ends; inf where one never does."""
        last = self.ways[-1]
        return last.since_s + last.schedule.latency_s

    @cached_property
    def leads(self) -> dict[int, int]:
        """The first device of its split, on which the ops are placed, of each further member."""
        return {d: split.devices[0] for split in self.splits for d in split.devices[1:]}

    @cached_property
    def busy_s(self) -> Float[np.ndarray, "D"]:
        """Seconds that each device works in all ways; members of a split as long as the first."""
        busy_s = np.sum([way.schedule.busy_s for way in self.ways], axis=0)
        for d, lead in self.leads.items():
            busy_s[d] = busy_s[lead]
        return busy_s

    @cached_property
    def ops_in(self) -> Int[np.ndarray, "M"]:
        """Number of the model's ops in each fused op; inputs and outputs count as none."""
        real = self.problem.origin.group_of[~self.model.is_io]
        return np.bincount(real, minlength=self.problem.num_ops)

    @cached_property
    def is_work(self) -> Bool[np.ndarray, "M"]:
        """True for kernels: all but the model's inputs and outputs."""
        return ~self.problem.graph.is_io

    def counts(self) -> tuple[Int[np.ndarray, "D"], Int[np.ndarray, "D"]]:
        """Ops of the model, and kernels that they are fused to, that each device runs."""
        ops, kernels = np.zeros((2, self.problem.num_devices), dtype=np.int64)
        for way in self.ways:
            mine = np.bincount(way.device, self.ops_in, len(ops)).astype(np.int64)
            ops = np.maximum(ops, mine)
            work = np.bincount(way.device[self.is_work], minlength=len(ops))
            kernels = np.maximum(kernels, work)
        for d, lead in self.leads.items():
            ops[d], kernels[d] = ops[lead], kernels[lead]
        return ops, kernels


def op_label(graph: OpGraph, op: int) -> str:
    """The module path of an op with its name, or the name alone if it contains the path.

    Exporters name ops after their module (`/encoder/layer.0/MatMul`), or number them.
    """
    name, scope = graph.op_names[op], graph.scope[op]
    if not scope or module_path(name)[: len(path := module_path(scope))] == path:
        return name
    return f"{scope} / {name}"


def module_path(scope: str) -> tuple[str, ...]:
    """The parts of a module path, which frameworks join by dots or by slashes.

    >>> module_path("/encoder/layer.0")
    ('encoder', 'layer', '0')
    """
    return tuple(part for part in re.split(r"[/.]", scope) if part)


def lanes(view: PlacementView) -> tuple[list[Int[np.ndarray, "_"]], list[str]]:
    """The lane of each transfer of each way, and the names of the lanes: one for each channel in
    use.

    Copies on a link without a channel overlap; each goes to the first lane of the link that is
    free.
    """
    index: dict[str, int] = {}
    return [_lanes(way, index) for way in view.ways], list(index)


def _lanes(view: PlacementView, index: dict[str, int]) -> Int[np.ndarray, "X"]:
    cluster, sent = view.problem.cluster, view.schedule.transfers
    channels, names = channel_names(cluster), cluster.device_names
    free_s: dict[tuple[int, int], list[float]] = {}
    lane = np.zeros(len(sent.tensor), dtype=np.int64)
    for k in np.argsort(sent.start_s, kind="stable").tolist():
        i, j = int(sent.source[k]), int(sent.destination[k])
        if cluster.queues[i, j]:
            name = channels[cluster.channel[i, j]]
        else:
            until_s = free_s.setdefault((i, j), [])
            free = (n for n, end_s in enumerate(until_s) if end_s <= sent.start_s[k])
            track = next(free, len(until_s))
            until_s[track : track + 1] = [float(sent.arrive_s[k])]
            name = f"{names[i]} → {names[j]}" + (f" ({track + 1})" if track else "")
        lane[k] = index.setdefault(name, len(index))
    return lane


def channel_names(cluster: Cluster) -> list[str]:
    """A name for each channel: the links that queue on it."""
    names: list[list[str]] = [[] for _ in range(cluster.num_channels)]
    for i, source in enumerate(cluster.device_names):
        for j, destination in enumerate(cluster.device_names):
            if cluster.queues[i, j]:
                names[int(cluster.channel[i, j])].append(f"{source} → {destination}")
    return [
        ", ".join(links)
        if len(links) <= _MANY_LINKS
        else f"{links[0]} and {len(links) - 1} more links"
        for links in names
    ]


@dataclass(frozen=True)
class ModuleTree:
    """Modules as a tree, parents before children; the root comes first, its own parent."""

    names: tuple[str, ...]
    parent: tuple[int, ...]
    module_of: Int[np.ndarray, "M"]  # of each kernel
    by_type: bool  # the model names no modules: op types stand in for them

    def path(self, module: int) -> str:
        """The names from below the root, joined by dots."""
        parts: list[str] = []
        while module:
            parts.append(self.names[module])
            module = self.parent[module]
        return ".".join(reversed(parts))


def module_tree(view: PlacementView) -> ModuleTree:
    """The tree of the kernels' module paths, children in the order of their first op."""
    graph = view.problem.graph
    by_type = not any(graph.scope[op] for op in np.flatnonzero(view.is_work))
    names, parent = [graph.name], [0]
    index: dict[tuple[str, ...], int] = {(): 0}
    module_of = np.zeros(graph.num_ops, dtype=np.int64)
    for op in np.flatnonzero(view.is_work).tolist():
        path = (graph.op_types[op],) if by_type else module_path(graph.scope[op])
        for length in range(1, len(path) + 1):
            if path[:length] not in index:
                index[path[:length]] = len(names)
                names.append(path[length - 1])
                parent.append(index[path[: length - 1]])
        module_of[op] = index[path]
    return ModuleTree(tuple(names), tuple(parent), module_of, by_type)


def layers(tree: ModuleTree, view: PlacementView) -> tuple[list[str], Int[np.ndarray, "M"]]:
    """Names of few groups of kernels, and the group of each kernel: the deepest level of the tree
    with at most `FEW` modules. Where that is one module of many alike, as of a deep stack of
    layers, the groups are their parts, whatever the layer: `model.layers.*.attention`.
    """
    depth = [0] * len(tree.names)
    for module in range(1, len(tree.names)):
        depth[module] = depth[tree.parent[module]] + 1
    used = np.unique(tree.module_of[view.is_work])
    best = np.zeros(len(tree.names), dtype=np.int64)
    for level in range(1, max(depth) + 1):
        ancestor = np.arange(len(tree.names))
        for module in range(1, len(tree.names)):
            if depth[module] > level:
                ancestor[module] = ancestor[tree.parent[module]]
        if len(np.unique(ancestor[used])) > FEW:
            break
        best = ancestor
    # Modules beside the stack, such as an embedding, do not make it worth showing as one.
    if len(np.unique(best[used])) <= 3 < len(used):
        names = [re.sub(r"(?<![^.])\d+(?![^.])", "*", tree.path(m)) for m in range(len(best))]
    else:
        names = [tree.path(m) for m in best.tolist()]
    labels, group = np.unique([name or "(no module)" for name in names], return_inverse=True)
    return labels.tolist(), group.reshape(-1)[tree.module_of]
