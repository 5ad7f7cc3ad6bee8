"""Prompts of llama.cpp whose micro-batches go through the GPUs of a layer split as a pipeline.

Pull request 6017 of ggml-org/llama.cpp: where all blocks lie whole on two GPUs or more, a GPU
computes a micro-batch while the next GPU computes the one before it.
"""

import numpy as np

from gdp.prepare import Prediction


def saved_s(predicted: Prediction) -> float:
    """Seconds by which a prompt ends before the sum of its ops, which predictions count.

    C micro-batches through stages of s_d seconds for all of them take the first one's way, and the
    slowest stage for each further one: sum(s) / C + (C - 1) / C max(s), so that
    (C - 1) / C (sum(s) - max(s)) are saved. Nothing is saved where one GPU has all blocks, a
    processor has some, or GPUs divide ops.
    """
    problem, where = predicted.problem, predicted.assignment.device
    graph, devices = problem.graph, problem.cluster.devices
    computes = ~graph.is_io & (graph.chunks > 1)
    holds = ~graph.is_io & (graph.weight_bytes > 0)
    holds &= np.array([kind != "Gather" for kind in graph.op_types])  # the embedding
    stages = np.unique(where[holds])
    if (
        predicted.assignment.splits or not computes.any() or len(stages) < 2
        or any(devices[d].is_cpu for d in stages)
    ):  # fmt: skip
        return 0.0
    per_op = np.array([d.dispatch_s if d.dispatch_per == "op" else 0.0 for d in devices])
    at = np.flatnonzero(computes)
    stage_s = np.bincount(where[at], problem.compute_s[at, where[at]] + per_op[where[at]])
    count = int(graph.chunks[at].max())
    return float((count - 1) / count * (stage_s.sum() - stage_s.max()))
