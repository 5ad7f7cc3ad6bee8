"""Plans that other tools make, beside the answer: among its candidates, or instead of it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gdp.base.errors import GdpError, PlacementError
from gdp.base.units import format_seconds
from gdp.bounds.work import divided_pass_s
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.placement.constraints import allowed_mask, together_ids
from gdp.placement.placement import Placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result, with_placement
from gdp.sim.objectives import Objective, Score, find_objective

SAME = 0.005
"""Values that differ by a smaller share are called equal."""


class Peer(NamedTuple):
    """Another tool's way to place."""

    name: str  # of its row among the candidates
    title: str  # in sentences
    plan: Callable[[], Placement | None]  # None: nothing to compare with


def beside(result: Result, peer: Peer, streamed_bytes: int = 0) -> Result:
    """The result with the peer's plan among its candidates, and a note that compares the two.

    A plan that fits, keeps the constraints and is faster becomes the answer. Where it streams
    weights it keeps `streamed_bytes` free for them, as the result does.
    """
    started_s, question = time.perf_counter(), result.question
    try:
        placement = peer.plan()
        if placement is None:
            return result
        placement = _renamed(placement, question.cluster)
        if streamed_bytes:
            placement = replace(placement, streamed_bytes=streamed_bytes)
        score = solve.simulate(question, placement)
    except GdpError as error:
        row = Candidate(peer.name, None, None, None, False, time.perf_counter() - started_s,
                        str(error))  # fmt: skip
        return replace(result, candidates=(*result.candidates, row))
    refusal = "" if score.feasible else str(score)
    refusal = refusal or broken_constraint(placement, question)
    row = Candidate(
        peer.name, score.latency_s, score.period_s, score.value_s, not refusal,
        time.perf_counter() - started_s, refusal,
    )  # fmt: skip
    result = replace(result, candidates=(*result.candidates, row))
    objective = find_objective(question.objective)
    if not refusal and score.value_s < result.value_s:
        ratio = result.value_s / score.value_s
        gain = f"{ratio:.{1 if ratio >= 1.1 else 3}f} {objective.compared} the searched plan"
        note = f"{peer.title}, {gain}"
        return replace(with_placement(result, placement, score, (note,)), method=peer.name)
    note = compared(result.score, score, peer.title, objective)
    return replace(result, notes=(*result.notes, note))


def _renamed(placement: Placement, cluster: Cluster) -> Placement:
    """The placement with a cluster's device names; unchanged if it uses another device."""
    names = {name: d for d, name in enumerate(cluster.device_names)}
    strange = {placement.device_names[d] for d in np.unique(placement.device)} - set(names)
    if not strange:
        number = np.array([names.get(name, 0) for name in placement.device_names])
        device = number[placement.device]
        return replace(placement, device_names=cluster.device_names, device=device)
    if cluster.streams.any():
        raise PlacementError(f"it uses {min(strange)}, which the question leaves out")
    return placement


def broken_constraint(placement: Placement, question: Question) -> str:
    """Why a peer's plan is no answer to the question; "" where it is one."""
    graph, cluster, constraints = question.graph, question.cluster, question.constraints
    if placement.device_names != cluster.device_names:
        return "it offloads weights that need not be offloaded"
    device, allowed = placement.device, allowed_mask(constraints, graph, cluster)
    if not allowed[np.arange(graph.num_ops), device].all():
        return "the constraints forbid it"
    together = together_ids(constraints, graph)
    if together is not None and any(
        len(np.unique(device[together == g])) > 1 for g in np.unique(together)
    ):
        return "it splits modules that stay whole"
    return ""


def compared(own: Score, other: Score, title: str, row: Objective) -> str:
    """Comparison of a placement with that of another tool, in a sentence."""
    if not other.feasible:
        return f"{title} does not fit: {other.overflow_bytes / 2**30:.2f} GiB over device memory"
    ratio = other.value_s / own.value_s
    if abs(ratio - 1) < SAME:
        return f"as {'fast' if row.unit == 's' else 'good'} as {title}"
    return f"{ratio:.{1 if ratio >= 1.1 else 2}f} {row.compared} {title}"


TENSOR_PARALLEL = (
    "plans are of whole ops: splitting each layer over N GPUs, which --for vllm plans, reads their "
    "memories at once, in at least bytes / (N * bandwidth) a token"
)


def tensor_parallel_note(graph: OpGraph, cluster: Cluster) -> str:
    """Bound of tensor parallelism over all GPUs, in a sentence; "" where there is one GPU."""
    if len(cluster.gpus) < 2:
        return ""
    least_s = format_seconds(divided_pass_s(graph, cluster))
    what = "a step of decoding" if (graph.repeats > 1).any() else "a pass"
    return f"{TENSOR_PARALLEL}: {len(cluster.gpus)} GPUs take at least {least_s} for {what} here"
