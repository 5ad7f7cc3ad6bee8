"""The graph of a language model as an engine that serves it computes it, vLLM for one.

Attention is fused (`gdp.graph.attention`), prompts are worked through in chunks of so many tokens,
of which each passes through all layers before the next, and logits are made of the last token of
each sequence alone. Linear attention is one kernel (`gdp.graph.linear_attention`), and steps attend
over latents where the model has them (`gdp.graph.latent`). Keys and values may be stored in fewer
bits than they are computed in.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.graph.attention import CAUSAL, FUSED, with_fused_attention
from gdp.graph.generation import CACHE_AT
from gdp.graph.latent import with_absorbed_latents
from gdp.graph.linear_attention import with_fused_states
from gdp.graph.op_graph import INPUT, OUTPUT, UNREAD, OpDetail, OpGraph
from gdp.graph.sparse import index_share, with_indexers, with_picked_keys
from gdp.ops.rule import GATHER, LINEAR
from gdp.ops.table import ELEMENTWISE_OPS, VIEWS, kernel_of

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Served(NamedTuple):
    """A phase of a language model that an engine computes."""

    tokens: int  # of each sequence: those of the prompt, 1 for a step of decoding
    batch: int  # sequences
    at_once: int  # the most tokens in one pass of the engine, over all sequences
    cache_bits: int = 0  # of each number in the caches of attention; 0: as it is computed


def served(graph: OpGraph, phase: Served) -> OpGraph:
    """The graph of one phase, whose first output are the logits, as an engine computes it."""
    graph = with_indexers(with_fused_states(with_fused_attention(graph)))
    if phase.tokens == 1:
        graph = with_absorbed_latents(graph)
    graph = with_picked_keys(_with_stored_caches(graph, phase.cache_bits), phase.tokens)
    if phase.tokens > 1:
        graph = _with_last_logits(_with_earlier_keys(graph, phase.tokens), phase.tokens)
    return _in_chunks(graph, -(-phase.tokens * phase.batch // phase.at_once))


def _with_earlier_keys(graph: OpGraph, tokens: int) -> OpGraph:
    """The graph with FLOPs of causal attention for the keys that each query sees: T (T + 1) / 2
    pairs of T tokens, as kernels skip the blocks that are hidden."""
    causal = np.array([
        kind == FUSED and bool(detail.attributes.get(CAUSAL))
        for kind, detail in zip(graph.op_types, graph.detail, strict=True)
    ])  # fmt: skip
    return replace(graph, flop=graph.flop * np.where(causal, (tokens + 1) / (2 * tokens), 1.0))


def _with_stored_caches(graph: OpGraph, bits: int) -> OpGraph:
    """The graph with keys and values in so many bits, which attention unpacks as it reads them."""
    computed = np.array([8 * _ITEM_BYTES.get(detail.dtype, 4) for detail in graph.detail])
    attends = graph.has_type((FUSED,)) & (bits > 0)
    share = np.where(attends, np.minimum(bits / computed, 1.0), index_share(graph))
    cache = np.ceil(graph.cache_bytes * share).astype(np.int64)
    saved = graph.cache_bytes - cache
    return replace(
        graph, cache_bytes=cache, weight_bytes=graph.weight_bytes - saved,
        memory_traffic_bytes=np.maximum(graph.memory_traffic_bytes - saved, 0.0),
        detail=tuple(map(_with_cache_share, graph.detail, share.tolist())),
    )  # fmt: skip


def _with_cache_share(detail: OpDetail, share: float) -> OpDetail:
    """An op's detail with its cache at every context in a share of the bytes."""
    sizes: Any = detail.attributes.get(CACHE_AT)
    if sizes is None or share == 1.0:
        return detail
    less = tuple(math.ceil(size * share) for size in sizes)
    return replace(detail, attributes={**detail.attributes, CACHE_AT: less})


def _with_last_logits(graph: OpGraph, tokens: int) -> OpGraph:
    """The graph with the product that makes the logits, and what follows it, for one token of each
    sequence; as it is where they are so already, or are made in another way."""
    makers = np.bincount(graph.use_op, minlength=graph.num_ops)
    outputs = [op for op, kind in enumerate(graph.op_types) if kind == OUTPUT]
    if not outputs:
        return graph
    op, chain = outputs[0], []
    while True:
        sources = graph.producer[graph.use_tensor[graph.use_op == op]]
        if len(sources) != 1:
            return graph
        op = int(sources[0])
        shapes = graph.detail[op].output_shapes
        if not shapes or len(shapes[0]) != 3 or shapes[0][1] != tokens or makers[op] != 1:
            return graph
        chain.append(op)
        if kernel_of(graph.op_types[op]) == LINEAR:
            break
        if graph.op_types[op] not in VIEWS | ELEMENTWISE_OPS:
            return graph
    share = np.ones(graph.num_ops)
    share[chain] = 1 / tokens
    moved = np.maximum(graph.memory_traffic_bytes - graph.weight_bytes, 0.0)
    return replace(
        graph,
        flop=graph.flop * share,
        memory_traffic_bytes=graph.memory_traffic_bytes - moved * (1 - share),
        tensor_bytes=np.ceil(graph.tensor_bytes * share[graph.producer]).astype(np.int64),
    )


def _in_chunks(graph: OpGraph, count: int) -> OpGraph:
    """The graph computed in so many chunks: each holds its part of the tensors, and reads the
    weights once more."""
    if count < 2:
        return graph
    still = graph.has_type((INPUT, OUTPUT, UNREAD))
    return replace(
        graph,
        chunks=np.where(still, 1, graph.chunks * count),
        memory_traffic_bytes=graph.memory_traffic_bytes + (count - 1) * _weights_read(graph),
    )


def _weights_read(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """Bytes of weights that each op reads in one pass: all that it holds but its caches. Ops that
    gather rows read those of their tokens, however these are divided."""
    gathers = graph.has_kernel(GATHER)
    held = (graph.weight_bytes - graph.cache_bytes).astype(float)
    return np.where(gathers | (graph.memory_traffic_bytes < held), 0.0, held)
