"""Linear attention as engines compute it: the recurrence of a gated delta net as one kernel.

The fallback of transformers spells the rule out (Yang et al. 2024, arXiv 2412.06464): a prompt in
chunks with a loop over the rows of each, some hundred ops a layer, a token by a dozen that pass its
states through memory. Engines have a kernel for either (flash-linear-attention; vLLM's
`layers/fla`), which reads queries, keys, values, gates and states once; so they have for the scans
of Mamba 2, which lie between a convolution and one product as well.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from gdp.graph.attention import Flow
from gdp.graph.fuse import contracted
from gdp.graph.op_graph import OpGraph
from gdp.ops.rule import LINEAR

CONVOLUTION = "conv1d"
"""Type of the short convolution before the rule."""
RULE = "gated_delta_rule"
"""Type of fused ops."""
VALUE_HEADS, KEY_HEADS = "value_heads", "key_heads"
"""Attributes of fused ops."""


def with_fused_states(graph: OpGraph) -> OpGraph:
    """The graph with the recurrence of every gated delta net as one op, which has the FLOPs of all
    and moves what comes in, its states twice, and what goes out."""
    if CONVOLUTION not in graph.op_types:
        return graph
    flow = Flow(graph)
    group_of = np.arange(graph.num_ops)
    heads: dict[str, tuple[int, int]] = {}
    for op in np.flatnonzero(graph.has_type((CONVOLUTION,))).tolist():
        inside = _recurrence(graph, flow, op)
        if inside and flow.is_convex(inside):
            # What the others read is made before the last of them.
            group_of[list(inside)] = max(inside)
            heads |= dict.fromkeys((graph.op_names[i] for i in inside), _heads(graph, inside))
    if not heads:
        return graph
    whole = contracted(graph, np.unique(group_of, return_inverse=True)[1].reshape(-1))
    fused = np.array([name in heads for name in whole.op_names])
    detail = tuple(
        replace(
            own, dtype="bfloat16",
            attributes={**own.attributes, VALUE_HEADS: heads[name][0], KEY_HEADS: heads[name][1]},
        )
        if name in heads else own
        for name, own in zip(whole.op_names, whole.detail, strict=True)
    )  # fmt: skip
    return replace(
        whole,
        op_types=tuple(
            RULE if is_fused else kind
            for kind, is_fused in zip(whole.op_types, fused.tolist(), strict=True)
        ),
        memory_traffic_bytes=whole.memory_traffic_bytes + np.where(fused, whole.cache_bytes, 0),
        detail=detail,
    )


def _recurrence(graph: OpGraph, flow: Flow, convolution: int) -> set[int]:
    """Ops of the convolution's module between it and the norm before the product behind it, and
    those that they alone read; none where that is no gated delta net."""
    scope, is_linear = graph.scope[convolution], graph.has_kernel(LINEAR)

    def way(backward: bool, start: int) -> tuple[set[int], set[int]]:
        ends, seen, todo = set[int](), {start}, [start]
        while todo:
            for op in (flow.makers if backward else flow.readers)[todo.pop()]:
                if is_linear[op]:
                    ends.add(op)
                elif op not in seen:
                    seen.add(op)
                    todo.append(op)
        return seen - {start}, ends

    behind, rows = way(False, convolution)
    if not scope or len(rows) != 1:
        return set()
    before = way(True, rows.pop())[0]
    inside = {op for op in behind & before if graph.scope[op] == scope}
    todo = list(inside)
    while todo:
        for op in flow.makers[todo.pop()]:
            alone = all(reader in inside for reader in flow.readers[op])
            mine = graph.scope[op] == scope and op != convolution and op in before
            if mine and alone and op not in inside and not is_linear[op]:
                inside.add(op)
                todo.append(op)
    states = any(graph.op_types[op] == "matmul" or graph.cache_bytes[op] for op in inside)
    return inside if states and len(inside) > 1 else set()


def _heads(graph: OpGraph, inside: Collection[int]) -> tuple[int, int]:
    """(heads of values, heads of keys), from the copies of keys for each head of values, or where
    nothing is copied from the widest op over heads."""
    for op in sorted(inside):
        detail = graph.detail[op]
        if graph.op_types[op] == "repeat_interleave" and len(detail.input_shapes[0]) == 4:
            return detail.output_shapes[0][-2], detail.input_shapes[0][-2]
    shapes = [s for op in inside for s in graph.detail[op].output_shapes if len(s) > 3]
    heads = max(shapes, key=len)[1] if shapes else 1
    return heads, heads
