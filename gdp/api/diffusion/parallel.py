"""One pass of a denoiser that several equal cards compute together: sequence parallelism.

Each card holds all weights and its part of the tokens. Around attention, Ulysses exchanges tokens
for heads by all-to-alls (Jacobs et al. 2023, arXiv 2309.14509); a ring passes keys and values on
while it attends to those at hand (Liu et al. 2023, arXiv 2310.01889). Both together are USP (Fang
and Zhao 2024, arXiv 2405.07719), as xDiT and diffusers' `ContextParallelConfig` have them. The pair
of classifier-free guidance goes to two cards, where a model has one.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gdp.cluster.types import Cluster
from gdp.costs.measured.collectives import collective_s
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.ops.rule import ATTENTION
from gdp.ops.table import kernel_of

A2A_HOST_S, RING_HOST_S, JOIN_HOST_S = 200e-6, 400e-6, 0.0
"""Host seconds of an all-to-all, of a step of a ring, and of the joined result of a pass. See
`benchmarks/measured_world/media.py`."""


class Degrees(NamedTuple):
    """Cards of each kind of sequence parallelism; their product is the number of cards."""

    ulysses: int = 1
    ring: int = 1
    guidance: int = 1  # 2: each of the pair on cards of its own

    @property
    def cards(self) -> int:
        """All of them."""
        return self.ulysses * self.ring * self.guidance

    def __str__(self) -> str:
        words = [f"Ulysses {self.ulysses}"] * (self.ulysses > 1)
        words += [f"ring {self.ring}"] * (self.ring > 1)
        words += ["guidance on two halves"] * (self.guidance > 1)
        return " x ".join(words) or "one card"


def degrees_for(graph: OpGraph, cards: int, guided: bool) -> list[Degrees]:
    """All degrees for a number of cards: Ulysses divides the heads of every attention."""
    heads = [d.input_shapes[0][1] for d in attentions(graph)]
    found = []
    for guidance in (1, 2) if guided else (1,):
        rest = cards // guidance
        if rest * guidance != cards:
            continue
        for ulysses in (n for n in range(1, rest + 1) if rest % n == 0):
            if all(h % ulysses == 0 for h in heads):
                found.append(Degrees(ulysses, rest // ulysses, guidance))
    return found


def attentions(graph: OpGraph) -> list[OpDetail]:
    """Details of the attention between tokens of the image itself, of each layer: those that read
    as many keys as queries, or more; not those to a prompt alone."""
    found = []
    for op_type, detail in zip(graph.op_types, graph.detail, strict=True):
        shapes = detail.input_shapes
        layers = kernel_of(op_type) == ATTENTION and len(shapes) > 2 and len(shapes[0]) == 4
        if layers and shapes[1][2] >= shapes[0][2]:
            found.append(detail)
    return found


def rank_graph(graph: OpGraph, degrees: Degrees) -> OpGraph:
    """The graph as one card computes it: its share of the tokens, all weights."""
    tokens, batch = degrees.ulysses * degrees.ring, degrees.guidance
    n = degrees.cards
    held = np.where(graph.is_io, 0, graph.weight_bytes)
    moved = np.maximum(graph.memory_traffic_bytes - held, 0.0)
    detail = tuple(
        _shared(op_type, d, degrees, tokens, batch)
        for op_type, d in zip(graph.op_types, graph.detail, strict=True)
    )
    scale = np.where(graph.is_io, 1.0, 1.0 / n)
    return replace(
        graph, flop=graph.flop * scale, memory_traffic_bytes=held + moved * scale, detail=detail,
        tensor_bytes=np.maximum(graph.tensor_bytes // n, 1),
    )  # fmt: skip


def _shared(op_type: str, detail: OpDetail, own: Degrees, tokens: int, batch: int) -> OpDetail:
    def shared(shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 3:
            return shape
        return (_part(shape[0], batch), _part(shape[1], tokens), *shape[2:])

    shapes = detail.input_shapes
    if kernel_of(op_type) == ATTENTION and len(shapes) > 2 and len(shapes[0]) == 4:
        queries = (own.guidance, own.ulysses, own.ring)
        keys = (own.guidance, own.ulysses, 1)
        inputs = [_divided(shapes[0], queries), *(_divided(s, keys) for s in shapes[1:3])]
        outputs = [_divided(s, queries) for s in detail.output_shapes]
        return replace(detail, input_shapes=(*inputs, *shapes[3:]), output_shapes=tuple(outputs))
    weights = shapes[1:2] if len(shapes) > 1 and len(shapes[1]) == 2 else ()
    rest = shapes[1 + len(weights) :]
    return replace(
        detail,
        input_shapes=(*map(shared, shapes[:1]), *weights, *map(shared, rest)),
        output_shapes=tuple(map(shared, detail.output_shapes)),
    )  # fmt: skip


def _divided(shape: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    return (*(_part(size, n) for size, n in zip(shape, by, strict=False)), *shape[len(by) :])


def _part(size: int, count: int) -> int:
    return max(1, math.ceil(size / count))


def exchange_s(graph: OpGraph, degrees: Degrees, cluster: Cluster, cards: list[int]) -> float:
    """Seconds of one pass in which cards wait for tensors of each other.

    Args:
        graph: Of the whole pass, on one card.
        degrees: Of parallelism.
        cluster: The machine as it was named.
        cards: Its devices, as many as the degrees; neighbours share a group of Ulysses.
    """
    seconds = 0.0
    for detail in attentions(graph):
        queries, keys = detail.input_shapes[0], detail.input_shapes[1]
        item = 2.0
        rows = item * math.prod(queries) / degrees.guidance / degrees.ring
        other = item * math.prod(keys) / degrees.guidance / degrees.ring
        if degrees.ulysses > 1:
            group = cards[: degrees.ulysses]
            for size in (rows, other, other, rows):
                seconds += float(collective_s(cluster, group, "all_to_all", size / degrees.ulysses))
            seconds += 4 * A2A_HOST_S
        if degrees.ring > 1:
            group = [cards[i * degrees.ulysses] for i in range(degrees.ring)]
            share = 2 * other / degrees.ulysses
            pair = group[:2]
            seconds += (degrees.ring - 1) * max(
                float(collective_s(cluster, pair, "send", share)), RING_HOST_S
            )
    return seconds
