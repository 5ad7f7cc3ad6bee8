"""The module tree of a placed model, and the level of it that is worth a table."""

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gdp.reports.view import PlacementView, module_path

FEW = 24
"""Groups that a table or a set of colours can show."""


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
