"""Where a module's program can be cut in the order of its code: at the calls of its submodules."""

from collections.abc import Collection

import numpy as np

from gdp.constraints import outermost
from gdp.graph.op_graph import OUTPUT
from gdp.importers.pytorch.listing import module_calls
from gdp.importers.pytorch.model import Recorded


def boundaries(recorded: Recorded, whole: Collection[str] = ()) -> dict[int, str]:
    """The first op behind the beginning of a call, and the path of the module that is called; of
    several that begin there, the outermost.

    Modules that are called more than once are left out, as a split at their beginning is one at
    every call; so are modules inside of `whole` paths. Before the first boundary are all that read
    an input of the model, behind the last one all that make an output: pipelines are fed at their
    first stage, and answer at their last.
    """
    graph = recorded.graph
    nodes = [node for node in recorded.program.graph.nodes if node.op == "call_function"]
    op_of = {
        node: recorded.op_of[op]
        for node, op in recorded.listing.op_of.items()
        if op in recorded.op_of
    }
    begins: dict[str, int] = {}  # position of the first node of each module
    again: set[str] = set()
    for position, node in enumerate(nodes):
        for path, call in module_calls(node):
            begins.setdefault(path, position)
            if call:
                again.add(path)
    # The first op at or behind each position.
    following = np.full(len(nodes) + 1, graph.num_ops)
    for position in reversed(range(len(nodes))):
        own = op_of.get(nodes[position], graph.num_ops)
        following[position] = min(following[position + 1], own)
    first, last = _span(recorded)
    found: dict[int, str] = {}
    for path in sorted(begins, key=lambda p: (p.count("."), p)):
        op = int(following[begins[path]])
        kept = outermost(path, whole) in (None, path)
        if path and path not in again and kept and first < op <= last:
            found.setdefault(op, path)
    return dict(sorted(found.items()))


def _span(recorded: Recorded) -> tuple[int, int]:
    """The last op that reads an input of the model, or the first op where none does; and the first
    op that makes an output."""
    graph = recorded.graph
    src, dst = graph.edges
    own = np.flatnonzero(~graph.is_io)
    outputs = np.array([kind == OUTPUT for kind in graph.op_types])
    reads = dst[graph.is_io[src]]
    makes = src[outputs[dst] & ~graph.is_io[src]]
    return int(reads.max(initial=own.min())), int(makes.min(initial=own.max()))
