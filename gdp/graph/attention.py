"""Attention as one kernel: the scores never exist, nor do masks that positions alone decide.

Engines that serve language models compute attention so whatever the model's code says (Dao et al.
2022, arXiv 2205.14135; paged caches: Kwon et al. 2023, arXiv 2309.06180). Code that spells it out
multiplies queries by keys, scales, masks, takes a softmax and multiplies by values. All that lies
between the two products becomes one op; copies on its way in (keys repeated for each head, keys
behind those of the cache) are read where they are.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from gdp.graph.fuse import contracted
from gdp.graph.op_graph import INPUT, OUTPUT, UNREAD, OpGraph, make_graph
from gdp.ops.rule import PRODUCT, SOFTMAX, names
from gdp.ops.table import ELEMENTWISE_OPS, REDUCTIONS, VIEWS, kernel_of

CAUSAL = "is_causal"
"""Attribute of ops whose queries see no later keys."""
FUSED = "scaled_dot_product_attention"
"""Type of fused ops: that of torch, whose kernel does the same."""
_BY_WEIGHTS = names("addmm addmv")
"""Products with a weight, also where a cast before them holds it."""
_COPIES = VIEWS | {"cat", "stack", "repeat", "repeat_interleave", "index_copy", "slice_scatter"}
_CHEAP = VIEWS | ELEMENTWISE_OPS | REDUCTIONS | {"max", "slice", "slice_copy", "split"}


def with_fused_attention(graph: OpGraph) -> OpGraph:
    """The graph with every attention as one op, and without masks that nothing else reads.

    Names, scopes, weights and caches stay those of the ops that are fused; FLOPs add up, and inner
    tensors cost neither memory nor traffic. What had such a mask has the attribute `CAUSAL`, as
    torch's own op has it. Of other ops nothing changes.
    """
    flow = Flow(graph)
    group_of = np.arange(graph.num_ops)
    for ops in _attentions(graph, flow):
        inside = flow.with_copies(ops)
        if flow.is_convex(inside):
            group_of[list(inside)] = min(inside)
    fused = np.bincount(group_of, minlength=graph.num_ops) > 1
    kinds = np.array(graph.op_types)
    attends = fused[group_of] | (kinds == FUSED)
    masks = flow.of_positions[graph.producer] & (graph.tensor_bytes > 0)
    drop = attends[graph.use_op] & masks[graph.use_tensor]
    unmasked = without_uses(graph, drop)
    whole = contracted(unmasked, np.unique(group_of, return_inverse=True)[1].reshape(-1))
    masked = np.bincount(group_of[graph.use_op[drop]], minlength=graph.num_ops) > 0
    return needed_ops(
        whole, {graph.op_names[i] for i in np.flatnonzero(fused[group_of])},
        {graph.op_names[i] for i in np.flatnonzero(masked[group_of])},
    )  # fmt: skip


class Flow:
    """Who makes and who reads the tensors of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.makers, self.readers = graph.neighbours()
        # Ops that neither an input nor a weight reaches: counts, positions, and masks of them.
        self.of_positions = constant = np.zeros(graph.num_ops, dtype=bool)
        for op in range(graph.num_ops):
            own = graph.op_types[op] not in (INPUT, OUTPUT, UNREAD) and not graph.weight_bytes[op]
            constant[op] = own and all(constant[maker] for maker in self.makers[op])

    def reached(self, start: int, backward: bool) -> tuple[set[int], set[int]]:
        """(ops from one to the products of activations before or behind it, those products)."""
        ways = self.makers if backward else self.readers
        seen, products, todo = {start}, set(), [start]
        while todo:
            for op in ways[todo.pop()]:
                if op in seen or op in products or self.of_positions[op]:
                    continue
                kind = self.graph.op_types[op]
                multiplies = kernel_of(kind) == PRODUCT and kind not in _BY_WEIGHTS
                if multiplies and not _holds_weights(self.graph, op):
                    products.add(op)
                elif kind in _CHEAP:
                    seen.add(op)
                    todo.append(op)
        return seen, products

    def between(self, ops: Collection[int], first: Collection[int], last: int) -> set[int]:
        """The part of the ops that lies on a way from one of `first` to `last`."""
        within = {*ops, *first}
        behind = set(first)
        for op in sorted(within):
            if any(maker in behind for maker in self.makers[op]):
                behind.add(op)
        before = {last}
        for op in sorted(within, reverse=True):
            if any(reader in before for reader in self.readers[op]):
                before.add(op)
        return behind & before

    def with_copies(self, ops: set[int]) -> set[int]:
        """The ops and the copies that they alone read: of keys and values, and of all that a cache
        holds of them."""
        inside, todo = set(ops), list(ops)
        while todo:
            for op in self.makers[todo.pop()]:
                copies = self.graph.op_types[op] in _COPIES and not _holds_weights(self.graph, op)
                if op in inside or not copies or self.of_positions[op]:
                    continue
                if all(reader in inside for reader in self.readers[op]):
                    inside.add(op)
                    todo.append(op)
        return inside

    def is_convex(self, inside: set[int]) -> bool:
        """True where no way leaves the ops and comes back."""
        outside: set[int] = set()
        for op in range(min(inside), max(inside) + 1):
            reads = self.makers[op]
            if op in inside:
                if any(maker in outside for maker in reads):
                    return False
            elif any(maker in inside or maker in outside for maker in reads):
                outside.add(op)
        return True


def _holds_weights(graph: OpGraph, op: int) -> bool:
    """True for weights; caches are none."""
    return bool(graph.weight_bytes[op] > graph.cache_bytes[op])


def _attentions(graph: OpGraph, flow: Flow) -> Iterator[set[int]]:
    """The ops of each attention, from the product that makes the scores to that of the values."""
    for op, kind in enumerate(graph.op_types):
        if kind == FUSED:
            yield {op}
        elif kernel_of(kind) == SOFTMAX:
            before, scores = flow.reached(op, backward=True)
            behind, values = flow.reached(op, backward=False)
            if not scores or not values:
                continue
            last = max(values)
            ways = flow.between(before | behind | values, scores, last)
            # Numbers that only the softmax reads, such as learned sinks, are read by the kernel.
            if op in ways:
                yield ways


def without_uses(graph: OpGraph, drop: Bool[np.ndarray, "E"]) -> OpGraph:
    """The graph less some uses, whose bytes their readers no longer move."""
    saved = np.bincount(
        graph.use_op[drop], graph.tensor_bytes[graph.use_tensor[drop]], graph.num_ops
    )
    traffic = np.maximum(graph.memory_traffic_bytes - saved, 0.0)
    uses = zip(graph.use_tensor[~drop].tolist(), graph.use_op[~drop].tolist(), strict=True)
    return _rebuilt(graph, list(uses), np.arange(graph.num_ops), traffic)


def needed_ops(
    graph: OpGraph, fused: Collection[str] = (), masked: Collection[str] = ()
) -> OpGraph:
    """The graph less the ops that no output needs and that hold nothing; `fused` names ops that are
    attention now, and `masked` those that had a mask of positions."""
    needed = graph.has_type((INPUT, OUTPUT, UNREAD))
    needed |= graph.weight_bytes > 0
    src, dst = graph.edges
    for edge in np.argsort(-dst, kind="stable"):
        needed[src[edge]] |= needed[dst[edge]]
    kept = np.flatnonzero(needed)
    number = np.cumsum(needed) - 1
    uses = [
        (tensor, int(number[op]))
        for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)
        if needed[op]
    ]
    detail = tuple(
        replace(d, attributes={**d.attributes, CAUSAL: 1}) if name in masked else d
        for name, d in zip(graph.op_names, graph.detail, strict=True)
    )
    return _rebuilt(replace(graph, detail=detail), uses, kept, graph.memory_traffic_bytes, fused)


def _rebuilt(
    graph: OpGraph, uses: list[tuple[int, int]], kept: Int[np.ndarray, "M"],
    traffic: np.ndarray, fused: Collection[str] = (),
) -> OpGraph:  # fmt: skip
    """Some ops of a graph with these uses of its tensors; `uses` has the new numbers of ops."""
    number = {op: i for i, op in enumerate(kept.tolist())}
    made = [t for t, op in enumerate(graph.producer.tolist()) if op in number]
    place = {t: i for i, t in enumerate(made)}
    types = [FUSED if graph.op_names[i] in fused else graph.op_types[i] for i in kept]
    return make_graph(
        graph.name, [graph.op_names[i] for i in kept], types,
        [(number[int(graph.producer[t])], int(graph.tensor_bytes[t])) for t in made],
        [(place[t], op) for t, op in uses],
        flop=graph.flop[kept], memory_traffic_bytes=traffic[kept],
        weight_bytes=graph.weight_bytes[kept], weight_id=graph.weight_id[kept],
        colocate=graph.colocate[kept], is_backward=graph.is_backward[kept],
        scope=[graph.scope[i] for i in kept], detail=[graph.detail[i] for i in kept],
        tensor_names=[graph.tensor_names[t] for t in made], cache_bytes=graph.cache_bytes[kept],
        repeats=graph.repeats[kept], chunks=graph.chunks[kept], phase=graph.phase[kept],
        source=graph.source, request=graph.request, growth=graph.growth,
    )  # fmt: skip
