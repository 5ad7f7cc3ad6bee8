"""One pass of a denoiser that several equal cards compute together: sequence parallelism.

Each card holds all weights and its part of the tokens. Around attention, Ulysses exchanges tokens
for heads by all-to-alls (Jacobs et al. 2023, arXiv 2309.14509); a ring passes keys and values on
while it attends to those at hand (Liu et al. 2023, arXiv 2310.01889). Both together are USP (Fang
and Zhao 2024, arXiv 2405.07719), as xDiT and diffusers' `ContextParallelConfig` have them. The pair
of classifier-free guidance goes to two cards, where a model has one, and copies of the whole
pipeline each make their share of a batch.
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

HOST = 1.5
"""Times that launches take the processes of several GPUs on one host, to those of one process."""
EXCHANGE_HOST_S, RING_HOST_S, RING_STEP_HOST_S = 400e-6, 100e-6, 200e-6
"""Host seconds of a layer's four all-to-alls, of its ring, and of each step of the ring. Chosen
by hand with `HOST` on passes of eight GPUs, which wait for the host, of five image models on H100
and B200 (ML.ENERGY; `benchmarks.measured_world media` prints the errors)."""
COPIES, MERGES = 16, 12
"""Bytes read and written for each byte of queries of a card: by the permutations around the
all-to-alls of queries, keys, values and results, and to merge the results of a step of a ring."""
COPY_SHARE = 0.6
"""Of its bandwidth that a device reaches at such copies."""


class ParallelDegrees(NamedTuple):
    """Cards of each kind of sequence parallelism; their product is the number of cards."""

    ulysses: int = 1
    ring: int = 1
    guidance: int = 1  # 2: each of the pair on cards of its own
    copies: int = 1  # each makes an equal share of the batch

    @property
    def sequence(self) -> int:
        """Cards that divide the tokens of one sample."""
        return self.ulysses * self.ring

    @property
    def cards(self) -> int:
        """All of them."""
        return self.sequence * self.guidance * self.copies

    def __str__(self) -> str:
        words = [f"Ulysses {self.ulysses}"] * (self.ulysses > 1)
        words += [f"ring {self.ring}"] * (self.ring > 1)
        words += ["guidance on two halves"] * (self.guidance > 1)
        words += [f"{self.copies} copies"] * (self.copies > 1)
        return " x ".join(words) or "one card"


def degrees_for(graph: OpGraph, cards: int, guided: bool, batch: int = 1) -> list[ParallelDegrees]:
    """All degrees for a number of cards: Ulysses divides the heads of every attention, copies the
    batch."""
    heads = [d.input_shapes[0][1] for d in attentions(graph)]
    found = []
    for copies in range(1, math.gcd(cards, batch) + 1):
        for guidance in (1, 2) if guided else (1,):
            rest, uneven = divmod(cards, guidance * copies)
            if uneven or batch % copies:
                continue
            for ulysses in (n for n in range(1, rest + 1) if rest % n == 0):
                if all(h % ulysses == 0 for h in heads):
                    found.append(ParallelDegrees(ulysses, rest // ulysses, guidance, copies))
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


def rank_graph(graph: OpGraph, degrees: ParallelDegrees) -> OpGraph:
    """The graph as one card computes it: its share of the tokens, all weights."""
    tokens, batch = degrees.sequence, degrees.guidance * degrees.copies
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


def _shared(
    op_type: str, detail: OpDetail, own: ParallelDegrees, tokens: int, batch: int
) -> OpDetail:
    def shared(shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 3:
            return shape
        return (_part(shape[0], batch), _part(shape[1], tokens), *shape[2:])

    shapes = detail.input_shapes
    if kernel_of(op_type) == ATTENTION and len(shapes) > 2 and len(shapes[0]) == 4:
        queries, keys = (batch, own.ulysses, own.ring), (batch, own.ulysses, 1)
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


class ExchangeSeconds(NamedTuple):
    """Seconds of one call for each other, beside the cards' own kernels and launches."""

    card_s: float
    host_s: float


def exchange(
    graph: OpGraph, degrees: ParallelDegrees, cluster: Cluster, cards: list[int]
) -> ExchangeSeconds:
    """Seconds of all-to-alls, of rings and of their copies in all layers of one call.

    Args:
        graph: Of the whole call, on one card.
        degrees: Of parallelism.
        cluster: The machine as it was named.
        cards: Its devices, as many as the degrees; neighbours share a group of Ulysses.
    """
    if degrees.sequence == 1:
        return ExchangeSeconds(0.0, 0.0)
    card_s = 0.0
    copied = COPY_SHARE * cluster.devices[cards[0]].bytes_per_s
    layers = attentions(graph)
    for detail in layers:
        # Bytes of a card's tokens in 16 bits.
        queries, keys = (2.0 * math.prod(s) / degrees.cards for s in detail.input_shapes[:2])
        if degrees.ulysses > 1:
            group = cards[: degrees.ulysses]
            for size in (queries, keys, keys, queries):
                card_s += float(collective_s(cluster, group, "all_to_all", size))
            card_s += COPIES * queries / copied
        if degrees.ring > 1:
            pair = [cards[0], cards[degrees.ulysses]]
            card_s += (degrees.ring - 1) * (
                float(collective_s(cluster, pair, "send", 2 * keys)) + MERGES * queries / copied
            )
    own_s = EXCHANGE_HOST_S * (degrees.ulysses > 1)
    own_s += (RING_HOST_S + RING_STEP_HOST_S * (degrees.ring - 1)) * (degrees.ring > 1)
    return ExchangeSeconds(card_s, own_s * len(layers))
