"""Operator fusion of a runtime, learned from profiles.

Every runtime has its own fusions, and they change with each release. A profile records the ops of
each kernel; fused and unfused edges are counted by local context, from the most to the least
specific, and the counts predict the kernels of other graphs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.costs.profile import ProfiledModel
from gdp.graph.groups import components as connected
from gdp.graph.op_graph import OpGraph

ALIAS = {"Sum": "Add"}
"""Types between which runtimes make no difference."""
_MIN_COUNT = (1, 2, 2, 1)  # observations that a level needs to be believed


@dataclass(frozen=True)
class FusionTable:
    """Shares of same-kernel edges and of cost-free ops by context. Axes: K contexts."""

    key: Int[np.ndarray, "K"]  # sorted hashes of context
    yes: Float[np.ndarray, "K"]
    count: Float[np.ndarray, "K"]

    def share(self, keys: Sequence[int]) -> float | None:
        """The share of yes at the most specific context that was seen; None where none was."""
        for level, key in enumerate(keys):
            at = int(np.searchsorted(self.key, key))
            if at < len(self.key) and self.key[at] == key and self.count[at] >= _MIN_COUNT[level]:
                return float(self.yes[at] / self.count[at])
        return None


def learn_fusions(models: Iterable[ProfiledModel]) -> FusionTable:
    """Counts of fused edges and free ops in the kernels of profiled models."""
    tally: dict[int, list[float]] = {}

    def add(keys: Sequence[int], answer: bool) -> None:
        for key in keys:
            entry = tally.setdefault(key, [0.0, 0.0])
            entry[0] += answer
            entry[1] += 1.0

    for model in models:
        kernel = kernel_ids(model)
        context = _Context(model.graph)
        for src, dst in context.edges():
            if kernel[src] >= 0 and kernel[dst] >= 0:
                add(context.edge_keys(src, dst), bool(kernel[src] == kernel[dst]))
        for op in np.flatnonzero(~model.graph.is_io).tolist():
            add(context.op_keys(op), bool(kernel[op] < 0))
    keys = np.array(sorted(tally), dtype=np.int64)
    return FusionTable(
        keys,
        np.array([tally[int(k)][0] for k in keys]),
        np.array([tally[int(k)][1] for k in keys]),
    )


def kernel_ids(model: ProfiledModel) -> Int[np.ndarray, "N"]:
    """The measured kernel of every op, -1 for ops that cost nothing; kernels that share ops (a
    layout change and the kernel it serves) are one."""
    ids = np.full(model.graph.num_ops, -1, dtype=np.int64)
    for k, kernel in enumerate(model.kernels):
        for op in kernel.ops:
            if ids[op] < 0:
                ids[op] = k
    return ids


def kernel_groups(graph: OpGraph, table: FusionTable) -> Int[np.ndarray, "N"]:
    """The kernel of every op by dense id, -1 for inputs, outputs and ops that cost nothing."""
    context = _Context(graph)
    fused = [e for e in context.edges() if (table.share(context.edge_keys(*e)) or 0.0) > 0.5]
    src, dst = np.array(fused, np.int64).reshape(-1, 2).T
    whole = connected(src, dst, graph.num_ops)
    free = graph.is_io.copy()
    for op in np.flatnonzero(~graph.is_io).tolist():
        free[op] = (table.share(context.op_keys(op)) or 0.0) > 0.5
    ids = np.full(graph.num_ops, -1, dtype=np.int64)
    ids[~free] = np.unique(whole[~free], return_inverse=True)[1]
    return ids


def lead_ops(
    graph: OpGraph, kernel: Int[np.ndarray, "N"], work_s: Float[np.ndarray, "N"]
) -> Int[np.ndarray, "K"]:
    """The costliest op of every kernel; where equal, the first."""
    inside = np.flatnonzero(kernel >= 0)
    order = inside[np.lexsort((-inside, work_s[inside], kernel[inside]))]
    last = np.append(np.diff(kernel[order]) != 0, True) if len(order) else np.zeros(0, bool)
    return order[last]


class _Context:
    """Surroundings of each op that decide fusions."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        n = graph.num_ops
        types = [ALIAS.get(t, t) for t in graph.op_types]
        self.types = types
        self.after: list[list[int]] = [[] for _ in range(n)]
        readers: list[list[str]] = [[] for _ in range(n)]
        makers: list[list[str]] = [[] for _ in range(n)]
        src, dst = graph.edges
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            self.after[a].append(b)
            readers[a].append(types[b])
            makers[b].append(types[a])
        self.fan_out, self.fan_in = [[len(x) for x in side] for side in (readers, makers)]
        self.read_by = [",".join(sorted(x)) for x in readers]
        self.reads = [",".join(sorted(x)) for x in makers]
        self.form = [f"{types[i]}{_form(graph, i, self.fan_in[i])}" for i in range(n)]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Edges between ops that are neither graph inputs nor outputs."""
        io = self.graph.is_io
        for a, readers in enumerate(self.after):
            if not io[a]:
                for b in readers:
                    if not io[b]:
                        yield a, b

    def edge_keys(self, a: int, b: int) -> list[int]:
        """Hashes of an edge and its surroundings, from the most to the least specific."""
        types = self.types
        wide = f"{self.reads[a]}>{self.form[a]}>{self.read_by[a]}|{self.reads[b]}>{self.form[b]}"
        # Fusions of normalisations and activations span several ops: look one further.
        further = ",".join(sorted(self.read_by[c] for c in self.after[b]))
        return [
            _hash("E0", wide, self.read_by[b], further),
            _hash("E1", wide, self.read_by[b]),
            _hash("E2", self.form[a], self.read_by[a], self.form[b], self.read_by[b]),
            _hash("E3", types[a], str(self.fan_out[a]), types[b], str(self.fan_in[b])),
        ]

    def op_keys(self, op: int) -> list[int]:
        """Hashes of an op and its surroundings, from the most to the least specific."""
        return [
            _hash("O0", self.reads[op], self.form[op], self.read_by[op]),
            _hash("O1", self.form[op], self.read_by[op]),
            _hash("O2", self.form[op]),
            _hash("O3", self.types[op]),
        ]


def _form(graph: OpGraph, op: int, reads: int) -> str:
    """Properties of the op itself that decide fusions: constants, rank, grouping."""
    detail = graph.detail[op]
    shapes = detail.input_shapes
    parts = [str(reads), str(len(shapes))]
    if shapes and detail.output_shapes:
        parts.append("r" + str(len(detail.output_shapes[0])))
        smallest = min(int(np.prod(s)) for s in shapes)
        parts.append("s" if smallest == 1 else "b" if len({*shapes}) > 1 else "e")
    if graph.op_types[op] == "Conv" and len(shapes) > 1 and len(shapes[1]) > 1:
        group = int(detail.attributes.get("group", 1))  # type: ignore[arg-type]
        cout, cin = shapes[1][0], shapes[1][1] * group
        plain = "1" if group == 1 else "d" if group == cin == cout else "g"
        parts.append(f"{plain}{cout % 8 == 0:d}{cin % 8 == 0:d}{cin < 8:d}")
    if graph.op_types[op] == "Transpose":
        perm = detail.attributes.get("perm", ())
        parts.append("".join(map(str, perm)) if isinstance(perm, tuple) else "")
    return "/".join(parts)


def _hash(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def components(
    kernels: Sequence[Sequence[int]], group: Int[np.ndarray, "N"]
) -> tuple[list[list[int]], Mapping[int, int]]:
    """Measured kernels and predicted groups joined where they share ops.

    Returns the measured kernels of each component, and the component of each predicted group.
    """
    count = len(kernels)
    pairs = [
        (k, count + group[op]) for k, ops in enumerate(kernels) for op in ops if group[op] >= 0
    ]
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    ids = connected(src, dst, count + int(group.max(initial=-1)) + 1).tolist()
    members: list[list[int]] = [[] for _ in range(max(ids[:count], default=-1) + 1)]
    for k, component in enumerate(ids[:count]):
        members[component].append(k)
    return members, {g: number for g, number in enumerate(ids[count:]) if number < len(members)}
