"""Sparse attention as engines compute it: an indexer scores all keys, attention reads the best.

The code of transformers makes scores of every head of an indexer, and of the best keys a mask over
all of them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1; GLM-5). Engines have one kernel for the
scores, which reads keys in 8 bits with a scale for each token, and attend to the rows that were
picked, over latents in prompts, too (vLLM's `v1/attention/backends/mla/flashmla_sparse.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.graph.attention import CAUSAL, FUSED, Flow, needed_ops, without_uses
from gdp.graph.fuse import contracted
from gdp.graph.latent import LATENT
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.ops.rule import LINEAR
from gdp.ops.table import VIEWS, kernel_of

INDEXER = "indexer"
"""Attribute of the scores that pick keys: numbers of a key, in 8 bits, that is kept for them."""
_PICKED, _ROW = "picked", "latent_row"
"""Attributes of attention: the most keys that a query reads; numbers of a latent and its row."""
_ITEM_BYTES, _SCALE_BYTES, _SCORE_BYTES, _INDEX_BYTES = 2, 4, 4, 4
_CASTS = VIEWS | {"_to_copy", "cat"}


class _Indexer(NamedTuple):
    """The ops before an attention that pick its keys."""

    inside: frozenset[int]  # its ops, from the scores to the mask
    scores: int  # the product of queries and keys
    picked: int


def with_indexers(graph: OpGraph) -> OpGraph:
    """The graph of a phase with fused attention, of which each indexer is one op."""
    if "topk" not in graph.op_types:
        return graph
    flow, group_of = Flow(graph), np.arange(graph.num_ops)
    own, picked_bytes = dict[str, OpDetail](), dict[str, int]()
    for op in np.flatnonzero(graph.has_type((FUSED,))).tolist():
        found = _indexer(graph, flow, op)
        if found is None or not flow.is_convex({*found.inside}):
            continue
        group_of[list(found.inside)] = max(found.inside)
        batch, tokens, heads, size = graph.detail[found.scores].input_shapes[0]
        keys = graph.detail[found.scores].output_shapes[0][-1]
        shapes = (batch, tokens * heads, size), (batch, size, keys)
        scored = OpDetail("bfloat16", shapes, ((batch, tokens * heads, keys),), {INDEXER: size})
        names = [graph.op_names[i] for i in found.inside]
        own |= dict.fromkeys(names, scored)
        picked_bytes |= dict.fromkeys(names, _INDEX_BYTES * batch * tokens * found.picked)
        more = {_PICKED: found.picked, _ROW: _latent_row(graph, flow, op)}
        attends = graph.detail[op]
        own[graph.op_names[op]] = replace(attends, attributes={**attends.attributes, **more})
    if not own:
        return graph
    masks = flow.of_positions[graph.producer] & (graph.tensor_bytes > 0)
    indexes = np.array([name in picked_bytes for name in graph.op_names])
    bare = without_uses(graph, indexes[graph.use_op] & masks[graph.use_tensor])
    whole = needed_ops(contracted(bare, np.unique(group_of, return_inverse=True)[1].reshape(-1)))
    types, detail = list(whole.op_types), list(whole.detail)
    for op, name in enumerate(whole.op_names):
        if name in own:
            more = own[name].attributes
            detail[op] = replace(own[name], attributes={**detail[op].attributes, **more})
            types[op] = "matmul" if INDEXER in more else types[op]
    most = [picked_bytes.get(name, np.iinfo(np.int64).max) for name in whole.op_names]
    tensors = np.minimum(whole.tensor_bytes, np.array(most)[whole.producer])
    return replace(whole, op_types=tuple(types), detail=tuple(detail), tensor_bytes=tensors)


def _indexer(graph: OpGraph, flow: Flow, attends: int) -> _Indexer | None:
    """The indexer of an attention; None where its mask is not made of the best scores."""
    ways, products, todo = set[int](), list[int](), [attends]
    while todo:
        for op in flow.makers[todo.pop()]:
            if op in ways or kernel_of(graph.op_types[op]) == LINEAR or graph.weight_bytes[op]:
                continue
            ways.add(op)
            todo.append(op)
            if graph.op_types[op] == "matmul" and len(graph.detail[op].input_shapes[0]) == 4:
                products.append(op)
    picks = [op for op in ways if graph.op_types[op] == "topk"]
    if len(picks) != 1 or len(products) != 2:
        return None
    scores = min(products)
    inside = flow.between(ways | {attends}, {scores}, attends) - {attends}
    todo = list(inside)
    while todo:  # casts and caches of keys, and masks, that nothing else reads
        for op in flow.makers[todo.pop()]:
            alone = all(reader in inside for reader in flow.readers[op])
            plain = graph.op_types[op] in _CASTS and graph.weight_bytes[op] <= graph.cache_bytes[op]
            if op not in inside and alone and (plain or flow.of_positions[op]):
                inside.add(op)
                todo.append(op)
    return _Indexer(frozenset(inside), scores, graph.detail[picks[0]].output_shapes[0][-1])


def _latent_row(graph: OpGraph, flow: Flow, attends: int) -> tuple[int, int]:
    """(numbers of a latent, those with the part that is rotated) that a prompt's keys and values
    are made of; zeros where attention makes them otherwise."""
    shapes, value = graph.detail[attends].input_shapes, graph.detail[attends].output_shapes[0][-1]
    heads, key = shapes[0][1], shapes[0][-1]
    for op in flow.makers[attends]:
        made = graph.detail[op]
        latent = made.input_shapes[0] if made.input_shapes else ()
        if kernel_of(graph.op_types[op]) == LINEAR and len(latent) == 4:
            each = made.output_shapes[0][-1] // heads  # of a head: its values and unrotated keys
            return latent[-1], latent[-1] + key - (each - value)
    return 0, 0


def index_share(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """Bytes of the keys that indexers keep, as a share of those in 16 bits; 1 of other ops."""
    sizes: list[Any] = [detail.attributes.get(INDEXER) for detail in graph.detail]
    each = [(n + _SCALE_BYTES) / (_ITEM_BYTES * n) if n else 1.0 for n in sizes]
    return np.array(each)


def with_picked_keys(graph: OpGraph, tokens: int) -> OpGraph:
    """The graph of a phase of so many tokens a sequence, in which indexers and attention have the
    arithmetic and bytes of engines' kernels."""
    flop, traffic = graph.flop.copy(), graph.memory_traffic_bytes.copy()
    details = list(graph.detail)
    for op, detail in enumerate(graph.detail):
        attributes: Mapping[str, Any] = detail.attributes
        if INDEXER in attributes:
            details[op], flop[op], traffic[op] = _scored(detail, tokens)
        elif _PICKED in attributes and tokens == 1:
            (queries, *seen), (made, *_) = detail.input_shapes[:3], detail.output_shapes
            keys = seen[0][2]
            fewer = min(attributes[_PICKED], keys)
            around = min(_ITEM_BYTES * (math.prod(queries) + math.prod(made)), traffic[op])
            flop[op] *= fewer / keys
            traffic[op] = around + fewer / keys * (traffic[op] - around)
            shapes = queries, *((*shape[:2], fewer, shape[3]) for shape in seen)
            details[op] = replace(detail, input_shapes=shapes)
        elif _PICKED in attributes and all(attributes[_ROW]):
            details[op], flop[op], traffic[op] = _over_latents(detail, tokens)
    return replace(graph, flop=flop, memory_traffic_bytes=traffic, detail=tuple(details))


def _scored(detail: OpDetail, tokens: int) -> tuple[OpDetail, float, float]:
    """(detail, FLOPs, bytes) of an indexer, whose queries see no later keys; scores are written and
    read again, in 32 bits."""
    (batch, rows, size), (*_, keys) = detail.input_shapes
    seen = keys if tokens == 1 else (tokens + 1) / 2
    key_bytes = batch * keys * (size + _SCALE_BYTES)
    scores = batch * tokens * seen
    wide = math.ceil(seen)
    own = replace(
        detail, input_shapes=((batch, rows, size), (batch, size, wide)),
        output_shapes=((batch, rows, wide),),
    )  # fmt: skip
    moved = batch * rows * size + key_bytes + 2 * _SCORE_BYTES * scores
    return own, 2.0 * batch * rows * seen * size, float(moved)


def _over_latents(detail: OpDetail, tokens: int) -> tuple[OpDetail, float, float]:
    """(detail, FLOPs, bytes) of attention in a prompt whose queries each read their own rows."""
    attributes: dict[str, Any] = {k: v for k, v in detail.attributes.items() if k != CAUSAL}
    most, (width, row) = attributes[_PICKED], attributes[_ROW]
    batch, heads = detail.input_shapes[0][:2]
    alone = min(most, tokens)  # queries that see so few keys that all are picked
    seen = (alone * (alone + 1) / 2 + (tokens - alone) * most) / tokens
    queries, keys = batch * tokens, math.ceil(seen)
    shapes = (queries, heads, 1, row), (queries, 1, keys, row), (queries, 1, keys, width)
    moved = float(_ITEM_BYTES * queries * (heads * (row + width) + seen * row))
    own = replace(
        detail, input_shapes=shapes, output_shapes=((queries, heads, 1, width),),
        attributes={**attributes, LATENT: 1},
    )  # fmt: skip
    return own, 2.0 * queries * heads * seen * (row + width), moved
