"""A prompt that one device reads and tokens that another one writes, of one request."""

import itertools
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from gdp.api.generation import phases_s
from gdp.base.errors import PlacementError
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.types import Cluster, overflow_bytes
from gdp.graph.generation import steps_of
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import make_placement
from gdp.question.prepare import once_of, prepare_placement
from gdp.question.question import Question
from gdp.question.result import Result

WORTH_TELLING = 1.1
"""Times that a request has to be faster."""


def phases_apart(result: Result) -> str:
    """Seconds of a request whose prompt another device reads than the one that writes its tokens,
    both with all weights, in a sentence; "" where that gains less than `WORTH_TELLING`.

    seconds = first token on one + caches over the link + steps on the other

    Pairs are of devices of unlike kinds that each hold the whole model, those of one memory both.
    Most are ruled out by arithmetic and bandwidth alone; of the others both phases are simulated.
    """
    question, limit_s = result.question, result.score.latency_s / WORTH_TELLING
    graph, cluster = question.graph, question.cluster
    steps, caches = steps_of(graph), int(graph.cache_bytes[~graph.is_buffer].sum())
    devices = _first_of_kinds(cluster)
    reads_s, writes_s = _least_s(graph, cluster)
    alone: dict[int, tuple[float, float, Int[np.ndarray, "D"]] | None] = {}
    best = limit_s, -1, -1
    for a, b in itertools.permutations(devices, 2):
        if reads_s[a] + steps * writes_s[b] >= best[0]:
            continue
        for d in {a, b} - alone.keys():
            alone[d] = _alone(question, d)
        reader, writer = alone[a], alone[b]
        if reader is None or writer is None or overflow_bytes(cluster, reader[2] + writer[2]):
            continue
        way_s = cluster.link_latency_s[a, b] + caches / cluster.link_bytes_per_s[a, b]
        best = min(best, (reader[0] + float(way_s) + steps * writer[1], a, b))
    seconds, a, b = best
    if a < 0:
        return ""
    held = graph.weight_holders(np.flatnonzero(~graph.is_buffer))
    weights = int((graph.weight_bytes - graph.cache_bytes)[held].sum())
    names = cluster.device_names
    return (
        f"were the prompt read by {names[a]} and the tokens written by {names[b]}, each with all "
        f"weights ({format_bytes(weights)} more), the request would take {format_seconds(seconds)},"
        f" {result.score.latency_s / seconds:.2f} times as fast: no runtime that gdp plans for "
        "does that for a single request"
    )


def _first_of_kinds(cluster: Cluster) -> list[int]:
    """The first device of each kind that computes."""
    kinds: dict[str, int] = {}
    for d in np.flatnonzero(cluster.computes & ~cluster.streams).tolist():
        kinds.setdefault(cluster.devices[d].kind, d)
    return list(kinds.values())


def _least_s(
    graph: OpGraph, cluster: Cluster
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "D"]]:
    """(seconds of the prompt's arithmetic, seconds in which a step's bytes are read), by device."""
    once = graph.repeats == 1
    moved = graph.memory_traffic_bytes[~once].sum()
    dtypes, which = np.unique([x.dtype for x in graph.detail], return_inverse=True)
    flop = np.bincount(which[once], graph.flop[once], len(dtypes))
    speeds = np.array([[d.speed(str(x)) for x in dtypes] for d in cluster.devices])
    return (flop / speeds).sum(axis=1), np.array([moved / d.bytes_per_s for d in cluster.devices])


def _alone(question: Question, d: int) -> tuple[float, float, Int[np.ndarray, "D"]] | None:
    """(seconds to the first token, seconds of a step, bytes by device) of a whole request on a
    device; None where it cannot compute it."""
    graph, cluster = question.graph, question.cluster
    once = once_of(question)
    place = np.where(graph.is_io, cluster.host, d)
    try:
        whole = prepare_placement(question, make_placement(graph, cluster, place))
        phases = prepare_placement(
            replace(question, graph=once, objective="latency"), make_placement(once, cluster, place)
        )
    except PlacementError:
        return None
    return *phases_s(phases, once), whole.score().peak_bytes
