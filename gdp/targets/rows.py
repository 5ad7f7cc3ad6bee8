"""Costs of the layers of a question in a pipeline, and the plans that are simulated of its rows.

The simulator judges a row as any other placement. The memory that tensors take is known once a plan
is simulated, so rows with less and less memory for weights are tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import InfeasibleError
from gdp.cluster.types import Cluster, fullness, nearly_full
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import EQUAL, LayerCosts
from gdp.placement.placement import Placement
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.question.prepare import problem_of
from gdp.question.question import Question
from gdp.question.result import Result, with_placement
from gdp.sim.objectives import Score
from gdp.splits.members import Divided

MEMORY_SHARES = (0.0, 0.5, 1.0)
"""Of the bytes that tensors may take, kept free of weights; tried in this order."""
FINE_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Such shares where the first plan that fits is taken: with fewer of them, a little more memory led
from a plan that just fits to one that keeps half of that free."""
ROOMY = 0.75
"""A plan on one device that is no fuller stays there: other devices would add transfers for room
that nobody misses."""
SPREAD = "spread evenly"
"""Begins the note of a plan that was taken for its room."""


def layer_costs(
    question: Question, block: Int[np.ndarray, "N"], parts: Divided | None = None,
    usable: Sequence[int] | None = None,
) -> LayerCosts:  # fmt: skip
    """Seconds, weights and crossing bytes of all stretches of blocks.

    Args:
        question: Of its parts graph, cluster, costs and constraints count.
        block: Of each op, ascending with them.
        parts: The graph as splits divide it; seconds and bytes are those of a member.
        usable: Devices that get stretches; by default all that compute.
    """
    whole, cluster = question.graph, question.cluster
    # Stretches pay their dispatch as the stages of a pipeline do.
    problem = problem_of(replace(question, objective="throughput"), keep_apart=block, parts=parts)
    graph = whole if parts is None else parts.graph
    if usable is None:
        usable = np.flatnonzero(cluster.computes).tolist()
    flat = arrays_of(problem)
    count = int(block.max()) + 1
    per_op = np.where(problem.allowed, flat.compute_s, np.inf)
    per_op[flat.is_io] = 0.0
    seconds = by_piece(problem, block, per_op)
    # Sums of stretches; what is not allowed would make all behind it inf minus inf.
    never = np.isinf(seconds)
    total = _prefix_sums(np.where(never, 0.0, seconds))
    stretch_s = total[None] - total[:, None] + flat.segment_s
    stretch_s[_prefix_sums(never)[None] > _prefix_sums(never)[:, None]] = np.inf
    stretch_s[np.tril_indices(count + 1)] = np.inf
    crosses = ~graph.is_io[graph.producer[graph.use_tensor]] & ~graph.is_io[graph.use_op]
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor[crosses], block[graph.use_op[crosses]])
    cut = np.arange(count + 1)
    open_at = (block[graph.producer] < cut[:, None]) & (cut[:, None] <= last)
    op_bytes = np.bincount(graph.producer, graph.held_bytes, graph.num_ops)
    block_bytes = np.bincount(block, op_bytes, count)
    return LayerCosts(
        whole, cluster, block, stretch_s, _weight_bytes(graph, block, count),
        (open_at * graph.sent_bytes).sum(axis=1),
        (open_at * graph.repeats[graph.producer]).sum(axis=1), block_bytes.astype(np.int64),
        tuple(usable), () if parts is None else parts.splits,
    )  # fmt: skip


def by_piece(
    problem: Problem, piece: Int[np.ndarray, "N"], seconds: Float[np.ndarray, "M D"]
) -> Float[np.ndarray, "K D"]:
    """Seconds of fused ops, summed by the pieces of a model in which its ops are."""
    piece_of = np.zeros(problem.num_ops, dtype=np.int64)
    piece_of[problem.origin.group_of] = piece
    total = np.zeros((int(piece.max()) + 1, problem.num_devices))
    np.add.at(total, piece_of, seconds)
    return total


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """Sum of the first k rows, for every k."""
    return np.concatenate([np.zeros_like(values[:1], dtype=float), values.cumsum(axis=0)])


def _weight_bytes(graph: OpGraph, block: np.ndarray, count: int) -> Int[np.ndarray, "C C"]:
    """Weight bytes of every stretch; a weight that several ops read counts once."""
    own = np.bincount(block, graph.weight_bytes, count)
    total = _prefix_sums(own[:, None])[:, 0]
    held = total[None] - total[:, None]
    seen: dict[int, int] = {}
    for op in np.flatnonzero(graph.weight_bytes):
        weight, here = int(graph.weight_id[op]), int(block[op])
        if weight in seen:
            held[: seen[weight] + 1, here + 1 :] -= graph.weight_bytes[op]
        seen[weight] = here
    return held.astype(np.int64)


def balance_memory(result: Result, placements: Iterable[Placement | None]) -> Result:
    """The result, or one of some placements that is as fast and leaves a larger share of its memory
    free on the fullest device; simplicity 0 allows none that is slower at all."""
    question = result.question
    graph, cluster, simplicity = question.graph, question.cluster, question.simplicity
    slack = 0.0 if simplicity == 0.0 else EQUAL
    limit_s = result.value_s * (1 + slack)
    before = fullest(cluster, result.score)
    used = np.unique(result.placement.device[graph.weight_bytes > 0])
    if result.placement.teams or (len(used) < 2 and before <= ROOMY):
        return result
    best, least = None, before
    for placement in filter(None, placements):
        score = solve.simulate(question, placement)
        full = fullest(cluster, score)
        if score.feasible and score.value_s <= limit_s and full < least:
            best, least = (placement, score), full
    if best is None:
        return result
    cost = max(best[1].value_s / result.value_s - 1, 0.0) if result.value_s else 0.0
    note = (
        f"{SPREAD}: the fullest device is {least:.0%} full instead of {before:.0%}, which costs "
        f"{cost:.2%}: simplicity 0 answers the fastest plan"
    )
    return in_place_of(result, *best, note)


def in_place_of(result: Result, placement: Placement, score: Score, *notes: str) -> Result:
    """The result with another plan, and without the notes of how full the one before is."""
    cluster = result.question.cluster
    before, full = (nearly_full(cluster, s.peak_bytes.tolist()) for s in (result.score, score))
    kept = [note for note in result.notes if note != before and not note.startswith(SPREAD)]
    return with_placement(result, placement, score, (*kept, *notes, *([full] if full else [])))


def fullest(cluster: Cluster, score: Score) -> float:
    """Share of its memory that a plan takes on the fullest device."""
    return max(fullness(cluster, score.peak_bytes.tolist()))


def first_feasible(
    question: Question, placements: Iterable[Placement | None], reason: str, method: str
) -> Result:
    """The first placement that fits in memory, its bound unproven (`solve.proven`);
    `InfeasibleError` where none does, with the reason that is given where there is no placement at
    all."""
    for placement in placements:
        if placement is None:
            continue
        result = solve.evaluate(question, placement, solve.UNPROVEN)
        if result.score.feasible:
            return replace(result, method=method)
        reason = str(result.score)
    raise misfit(question, reason)


def misfit(question: Question, reason: str) -> InfeasibleError:
    """The error that no plan fits, with the reason."""
    return InfeasibleError(
        f"{question.graph.name!r} does not fit on cluster {question.cluster.name!r}: {reason}"
    )
