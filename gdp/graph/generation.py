"""A request to a language model as one graph: its prefill, then a decode step for each token.

The ops of the prefill come first, then those of one decode step, each of which says by `repeats`
how often it runs (`OpGraph.phase` tells which is which); the token that was sampled last leads from
the one to the other. Ops of one module share a device in both phases, as the module lies in one
place; so its weights count once, and its cache, of the length that it has at the end, lies where it
is read.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.graph.groups import merge_ids
from gdp.graph.op_graph import INPUT, OUTPUT, SAMPLING_OPS, OpDetail, OpGraph, make_graph, picked
from gdp.graph.request import DECODE, PREFILL, UNKNOWN_GROWTH, CacheGrowth, Request

CACHE_AT = "cache_at"
"""Attribute of an op of a step that has a cache: its bytes at each context of a `CacheGrowth`."""
_NAMED = ", context "
"""Between the name of a graph and the context that its caches are reserved for."""


def generation_graph(
    name: str, prefill: OpGraph, step: OpGraph, request: Request,
    full_cache: float | CacheGrowth = 1.0,
) -> OpGraph:  # fmt: skip
    """The graph of a request, from the graph of its prompt and that of one step of decoding.

    Args:
        name: of the graph.
        prefill: Reads the prompt; its outputs are the logits.
        step: Reads one token, its first input, with the cache of the mean context; its ops may
            repeat in it.
        request: How many tokens are read and written.
        full_cache: Bytes of a full cache per byte of the step's; or the contexts at which the ops
            of the step say them one by one, as a window or a state of a fixed size does not grow.

    Raises:
        ModelError: A graph has no input or output.
    """
    both, n = (prefill, step), prefill.num_ops
    take = n + step.num_ops  # the sampling op of the prefill, and behind it that of the steps
    tensors, uses, gone, work = _flow(prefill, step)
    kept = [op for op in range(take + 2) if op not in gone]
    number = {op: i for i, op in enumerate(kept)}
    made = [x for x, (op, _) in enumerate(tensors) if op not in gone]
    position = {x: i for i, x in enumerate(made)}
    growth = full_cache if isinstance(full_cache, CacheGrowth) else UNKNOWN_GROWTH
    full = step.cache_bytes
    if isinstance(full_cache, CacheGrowth):
        full = np.array([_bytes_at(step, op)[0] for op in range(step.num_ops)], dtype=np.int64)
    else:
        full = np.round(full * full_cache).astype(np.int64)
    held, weight_id, cached = _weights(prefill, step, full)
    names = [f"step/{own}" for own in step.op_names]

    def joint(arrays: Sequence[Sequence[Any] | np.ndarray], *more: Any) -> list[Any]:
        lists = (x.tolist() if isinstance(x, np.ndarray) else x for x in arrays)
        values = [*itertools.chain.from_iterable(lists), *more]
        return [values[op] for op in kept]

    return make_graph(
        name,
        joint([prefill.op_names, names], *SAMPLING_OPS),
        joint([g.op_types for g in both], "argmax", "argmax"),
        [(number[tensors[x][0]], tensors[x][1]) for x in made],
        [(position[x], number[op]) for x, op in uses if x in position and op in number],
        flop=joint([g.flop for g in both], work, work),
        memory_traffic_bytes=joint([g.memory_traffic_bytes for g in both], work, work),
        weight_bytes=joint([held], 0, 0),
        weight_id=joint([weight_id], take, take + 1),
        cache_bytes=joint([cached], 0, 0),
        colocate=joint([_together(prefill, step)], take, take),
        repeats=joint([[1] * n, request.steps * step.repeats], request.steps, request.steps),
        chunks=joint([g.chunks for g in both], 1, 1),
        is_backward=joint([g.is_backward for g in both], False, False),
        scope=joint([g.scope for g in both], "", ""),
        detail=joint([g.detail for g in both], *[OpDetail()] * 2),
        phase=joint([[PREFILL] * n, [DECODE] * step.num_ops], PREFILL, DECODE),
        source=prefill.source, request=request, growth=growth,
    )  # fmt: skip


def _flow(
    prefill: OpGraph, step: OpGraph
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], set[int], float]:
    """(producer and bytes of every tensor, its uses, ops that give way to the sampling ops, work of
    one of these). Ops of the step are numbered behind the prompt's, sampling ops last: outputs of
    the prompt and the token input of the step are gone."""
    outputs, n, t = _of_kind(prefill, OUTPUT, "prompt"), prefill.num_ops, prefill.num_tensors
    first, last = _of_kind(step, INPUT, "step")[0], _of_kind(step, OUTPUT, "step")
    take = n + step.num_ops
    token, tokens = int(np.flatnonzero(step.producer == first)[0]), t + step.num_tensors
    logits = [
        int(g.use_tensor[g.use_op == op][0]) for g, op in ((prefill, outputs[0]), (step, last[0]))
    ]
    uses = _pairs(prefill.use_tensor, prefill.use_op)
    uses += _pairs(step.use_tensor + t, step.use_op + n)
    uses = [(tokens if x == token + t else x, op) for x, op in uses]
    uses = [(tokens + 1 if op - n in last else x, op) for x, op in uses]
    uses += [(logits[0], take), (logits[1] + t, take + 1)]
    # What reads nothing, such as positions, is made anew in every step: it waits for the token.
    reads = np.bincount(step.use_op, minlength=step.num_ops)
    uses += [
        (tokens, int(op) + n) for op in np.flatnonzero((reads == 0) & ~step.is_io & ~step.rests)
    ]
    tensors = _pairs(prefill.producer, prefill.tensor_bytes)
    tensors += _pairs(step.producer + n, step.tensor_bytes)
    tensors += [(op, int(step.tensor_bytes[token])) for op in (take, take + 1)]
    return tensors, uses, {*outputs.tolist(), int(first) + n}, float(step.tensor_bytes[logits[1]])


def _pairs(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(first.tolist(), second.tolist(), strict=True))


def _of_kind(graph: OpGraph, kind: str, phase: str) -> Int[np.ndarray, "K"]:
    """The ops of one kind; raises `ModelError` where there are none."""
    ops = np.flatnonzero(graph.has_type((kind,)))
    if not ops.size:
        raise ModelError(f"graph {graph.name!r} of the {phase} has no {kind.lower()}")
    return ops


def with_context(graph: OpGraph, tokens: int) -> OpGraph:
    """The graph of a request whose caches are reserved for so many tokens of each sequence, 0 for
    no change; predicted times are the same.

    Raises:
        ModelError: These are fewer tokens than the request has, or the graph does not say how its
            caches grow.
    """
    if not tokens:
        return graph
    request = graph.request
    if request is None or not graph.growth.is_known:
        raise ModelError(
            f"graph {graph.name!r} does not say how its caches grow with the context; load a "
            "request to an hf: or .gguf model"
        )
    least = request.prompt + request.new
    if tokens < least:
        raise ModelError(
            f"a context of {tokens} tokens holds no request of {request.prompt} + {request.new}: "
            f"ask for a context of {least} or more, or for fewer tokens"
        )
    cache = _cache_bytes(graph, tokens)
    return replace(
        graph, name=f"{graph.name.partition(_NAMED)[0]}{_NAMED}{tokens}", cache_bytes=cache,
        weight_bytes=graph.weight_bytes - graph.cache_bytes + cache,
        request=request._replace(context=tokens),
    )  # fmt: skip


def cached_share(graph: OpGraph, tokens: int) -> float:
    """Bytes of the caches at so many tokens of each sequence, as a share of those that are held.

    Raises:
        ModelError: The graph does not say how its caches grow.
    """
    if not graph.growth.is_known:
        raise ModelError(f"graph {graph.name!r} does not say how its caches grow with the context")
    return float(_cache_bytes(graph, tokens).sum() / graph.cache_bytes.sum())


def _cache_bytes(graph: OpGraph, tokens: int) -> Int[np.ndarray, "N"]:
    """Bytes of the caches at a context."""
    contexts = graph.growth.tokens
    k = int(np.clip(np.searchsorted(contexts, tokens), 1, len(contexts) - 1))
    share = (tokens - contexts[k - 1]) / (contexts[k] - contexts[k - 1])
    cache = graph.cache_bytes.copy()
    for op in np.flatnonzero(cache).tolist():
        sizes = _bytes_at(graph, op)
        if len(sizes) == len(contexts):
            cache[op] = round(sizes[k - 1] + share * (sizes[k] - sizes[k - 1]))
    return cache


def _bytes_at(graph: OpGraph, op: int) -> tuple[int, ...]:
    """Bytes of the cache of an op at the contexts of its graph; those that it has where it does not
    say them."""
    sizes: Any = graph.detail[op].attributes.get(CACHE_AT)
    return sizes if isinstance(sizes, tuple) and sizes else (int(graph.cache_bytes[op]),)


def joined_caches(
    graph: OpGraph, group_of: Int[np.ndarray, "N"], lead: Int[np.ndarray, "M"]
) -> list[OpDetail]:
    """Details of groups of ops, those of their lead, which say how the caches of all grow."""
    sizes: dict[int, dict[int, tuple[int, ...]]] = {}
    for op in np.flatnonzero(graph.cache_bytes).tolist():
        if CACHE_AT in graph.detail[op].attributes:
            own = sizes.setdefault(int(group_of[op]), {})
            own[int(graph.weight_id[op])] = _bytes_at(graph, op)
    details = list(picked(graph.detail, lead))
    for group, rows in sizes.items():
        at = tuple(map(sum, zip(*rows.values(), strict=True)))
        more = {**details[group].attributes, CACHE_AT: at}
        details[group] = replace(details[group], attributes=more)
    return details


def steps_of(graph: OpGraph) -> int:
    """Decode steps of a request; 1 for graphs of one phase."""
    return int(graph.repeats[graph.repeats > 1].min(initial=graph.repeats.max(initial=1)))


def single_step(graph: OpGraph) -> OpGraph:
    """The graph of the prefill and the first decode step."""
    return replace(graph, repeats=np.maximum(graph.repeats // steps_of(graph), 1))


def _weights(
    prefill: OpGraph, step: OpGraph, cache: Int[np.ndarray, "S"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Bytes, ids and cache bytes of the ops of both phases. The prompt's ops hold what their module
    has of weights, a step's ops its full cache, and what the prompt does not read of the module."""
    held = prefill.weight_bytes - prefill.cache_bytes
    room: dict[str, int] = {}
    for op in _once_per_scope(prefill):
        room[prefill.scope[op]] = room.get(prefill.scope[op], 0) + int(held[op])
    more = np.zeros(step.num_ops, dtype=np.int64)
    for op in _once_per_scope(step):
        size, scope = int(step.weight_bytes[op] - step.cache_bytes[op]), step.scope[op]
        shared = min(size, room.get(scope, 0))
        room[scope] = room.get(scope, 0) - shared
        more[op] = size - shared
    ids = [np.unique(graph.weight_id, return_inverse=True)[1] for graph in (prefill, step)]
    own = ids[1].max(initial=0) + 1 + np.arange(step.num_ops)
    ids[1] = np.where((more > 0) & (cache == 0) | (cache > 0) & (more == 0), ids[1], own)
    return (
        np.concatenate([held, more + cache]),
        np.concatenate([ids[0], ids[1] + prefill.num_ops]),
        np.concatenate([np.zeros_like(held), cache]),
    )


def _once_per_scope(graph: OpGraph) -> list[int]:
    """Ops that hold weights, one for every weight of a module."""
    seen = {
        (graph.scope[op], int(graph.weight_id[op])): op
        for op in np.flatnonzero(graph.weight_bytes).tolist()
    }
    return sorted(seen.values())


def _together(prefill: OpGraph, step: OpGraph) -> Int[np.ndarray, "N"]:
    """Ids of ops that share a device: those of one module that holds weights or caches, in either
    phase. Ops of modules that hold none are free, each in its phase."""
    own = np.concatenate([prefill.colocate, step.colocate + prefill.colocate.max() + 1])
    holding = {
        scope
        for graph in (prefill, step)
        for scope, held in zip(graph.scope, graph.weight_bytes, strict=True)
        if held
    }
    index: dict[str, int] = {}
    module: list[int] = []
    for graph in (prefill, step):
        for scope, held, io in zip(graph.scope, graph.weight_bytes, graph.is_io, strict=True):
            free = io or scope not in holding or not (scope or held)
            key = f"\0{len(module)}" if free else scope
            module.append(index.setdefault(key, len(index)))
    return merge_ids(own, np.array(module))
