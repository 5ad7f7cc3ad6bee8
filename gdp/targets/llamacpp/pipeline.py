"""Prompts of llama.cpp whose micro-batches go through the GPUs of a layer split as a pipeline.

Pull request 6017 of ggml-org/llama.cpp: where all blocks lie whole on two GPUs or more, a GPU
computes a micro-batch while the next GPU computes the one before it.
"""

import numpy as np

from gdp.ops.llamacpp import DRAFT
from gdp.ops.rule import GATHER
from gdp.question.prepare import Prediction

OVERLAPS = 0.88
"""Share of the seconds that a perfect pipeline saves. Of 66 pairs of llama-bench rows (prompts of
2, 8 and 16 micro-batches on 2, 4 and 6 cards against one, seven kinds of card, May 2024) 0.85 in
the median, 0.69 to 0.94 by kind of card; 0.88 to 0.94 of 8B on four cards, 0.1 to 0.5 of 70B in 4
bits, which is not explained (`docs/benchmarks/llamacpp.md`)."""


def saved_s(predicted: Prediction) -> float:
    """Seconds by which a prompt ends before the sum of its ops, which predictions count.

    C micro-batches through stages of s_d seconds for all of them take the first one's way, and the
    slowest stage for each further one: sum(s) / C + (C - 1) / C max(s), so that
    (C - 1) / C (sum(s) - max(s)) are saved, of which `OVERLAPS` is. Nothing is saved where one GPU
    has all blocks, a processor has some, or GPUs divide ops.
    """
    problem, where = predicted.problem, predicted.assignment.device
    graph = problem.graph
    drafts = np.array([scope.startswith(DRAFT) for scope in graph.scope])
    computes = ~graph.is_io & (graph.chunks > 1) & ~drafts
    holds = ~graph.is_io & (graph.weight_bytes > 0) & ~drafts
    holds &= ~graph.has_kernel(GATHER)  # the embedding
    stages = np.unique(where[holds])
    if (
        predicted.assignment.splits or not computes.any() or len(stages) < 2
        or problem.cluster.is_cpu[stages].any()
    ):  # fmt: skip
        return 0.0
    per_op = problem.cluster.op_dispatch_s
    at = np.flatnonzero(computes)
    stage_s = np.bincount(where[at], problem.compute_s[at, where[at]] + per_op[where[at]])
    count = int(graph.chunks[at].max())
    return float(OVERLAPS * (count - 1) / count * (stage_s.sum() - stage_s.max()))
