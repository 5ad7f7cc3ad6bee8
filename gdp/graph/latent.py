"""Latent attention as engines decode it: its up-projection is multiplied into the queries.

The attention of DeepSeek keeps one latent row a token, from which the code of transformers makes
keys and values of every head, of all tokens, at every step. These products are linear, so engines
apply them to the queries and to the result (weights absorbed: DeepSeek-V2, arXiv 2405.04434,
section 2.1.2; vLLM's `v1/attention/backends/mla`): attention then has one head of keys, the latent
and the rotated part beside it, whose latent part are the values, too. Weights and arithmetic of
one token stay what they are; those of all earlier tokens are gone. Prompts are read as the code
says, with keys and values of every head, as engines read them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gdp.graph.attention import FUSED
from gdp.graph.generation import CACHE_AT
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.ops.rule import LINEAR
from gdp.ops.table import ELEMENTWISE_OPS, VIEWS, kernel_of

LATENT = "latent"
"""Attribute of attention whose values are a part of its keys."""
_BETWEEN = VIEWS | ELEMENTWISE_OPS | {"new_empty", "copy_", "cat", "split", "slice"}
"""Ops that carry keys and values from their product to attention."""


class _Latent(NamedTuple):
    """One attention over a latent."""

    attends: int
    product: int  # which makes keys and values
    cache: int  # the op that holds the latent rows
    inside: tuple[int, ...]  # ops between the product and attention


def with_absorbed_latents(graph: OpGraph) -> OpGraph:
    """The graph of a step whose attention is fused, with attention over latents; others as they
    are."""
    makers, _ = graph.neighbours()
    for op, kind in enumerate(graph.op_types):
        if kind == FUSED and (latent := _latent_of(graph, makers, op)):
            graph = _absorbed(graph, latent)
    return graph


def _latent_of(graph: OpGraph, makers: list[list[int]], op: int) -> _Latent | None:
    """The latent that one attention of one token a sequence reads; None where there is none."""
    shapes = graph.detail[op].input_shapes
    if len(shapes) < 3 or any(len(s) != 4 for s in shapes[:3]) or shapes[0][2] != 1:
        return None
    tokens, inside, todo, products = shapes[1][2], set[int](), [op], set[int]()
    while todo:
        for maker in makers[todo.pop()]:
            read = graph.detail[maker].input_shapes
            if kernel_of(graph.op_types[maker]) == LINEAR:
                if read and len(read[0]) > 2 and read[0][-2] == tokens > 1:
                    products.add(maker)
            elif maker not in inside and graph.op_types[maker] in _BETWEEN:
                inside.add(maker)
                todo.append(maker)
    if len(products) != 1:
        return None
    product = products.pop()
    (cache, *more) = makers[product] or [-1]
    if more or cache < 0 or not graph.cache_bytes[cache]:
        return None
    behind = {product}
    for one in sorted(inside):
        if behind & set(makers[one]):
            behind.add(one)
    return _Latent(op, product, cache, tuple(sorted(behind - {product})))


def _absorbed(graph: OpGraph, latent: _Latent) -> OpGraph:
    """The graph with one attention over its latent."""
    attends, product, cache, inside = latent
    detail = list(graph.detail)
    (batch, heads, _, key), (*_, tokens, _), *_ = detail[attends].input_shapes
    value = detail[attends].output_shapes[0][-1]
    width, made = detail[product].input_shapes[0][-1], detail[product].output_shapes[0][-1]
    row = width + key - (made // heads - value)  # with the part that is rotated
    (made_bytes,) = graph.tensor_bytes[graph.producer == product]
    item = made_bytes / (batch * tokens * made)
    flop, traffic = graph.flop.copy(), graph.memory_traffic_bytes.copy()
    weight, cached = graph.weight_bytes.copy(), graph.cache_bytes.copy()
    tensors = graph.tensor_bytes.copy()
    alone = np.array([product, *inside])
    moved = item * batch * tokens * (width + made)
    weights = max(traffic[product] - moved, 0.0)
    flop[alone] /= tokens
    traffic[alone] /= tokens
    traffic[product] = weights + moved / tokens
    fewer = np.isin(graph.producer, [*alone, cache])
    tensors[fewer] = np.ceil(tensors[fewer] / tokens).astype(np.int64)
    flop[attends] *= (row + width) / (key + value)
    traffic[attends] = item * batch * (heads * (row + width) + tokens * row)
    traffic[cache] = 2 * item * batch * width
    for array in (weight, cached):
        array[attends] += graph.cache_bytes[cache]
        array[cache] -= graph.cache_bytes[cache]
    one = (batch, 1, 1, width)
    detail[product] = replace(
        detail[product], input_shapes=(one, *detail[product].input_shapes[1:]),
        output_shapes=((batch, 1, 1, made),),
    )  # fmt: skip
    detail[attends] = replace(
        detail[attends],
        input_shapes=((batch, heads, 1, row), (batch, 1, tokens, row), (batch, 1, tokens, width)),
        output_shapes=((batch, heads, 1, width),),
        attributes=_with_caches(detail[attends], detail[cache]) | {LATENT: 1},
    )  # fmt: skip
    own = {k: v for k, v in detail[cache].attributes.items() if k != CACHE_AT}
    detail[cache] = replace(
        detail[cache], input_shapes=(one,), output_shapes=(one,), attributes=own
    )
    return replace(
        graph, flop=flop, memory_traffic_bytes=traffic, weight_bytes=weight, cache_bytes=cached,
        tensor_bytes=tensors, detail=tuple(detail),
    )  # fmt: skip


def _with_caches(attends: OpDetail, cache: OpDetail) -> dict[str, Any]:
    """Attributes of an attention that holds the caches of both ops."""
    attributes: dict[str, Any] = dict(attends.attributes)
    at: Any = cache.attributes.get(CACHE_AT)
    if at is not None:
        own: Any = attributes.get(CACHE_AT, (0,) * len(at))
        attributes[CACHE_AT] = tuple(a + b for a, b in zip(own, at, strict=True))
    return attributes
