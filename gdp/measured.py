"""Measured runs as a reward: what fine-tuning uses where the machine itself is the judge."""

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from gdp import api
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Assignment
from gdp.runtime.ort.pipeline import Pipeline
from gdp.sim.objectives import objective_of

SECONDS = 0.5  # of running, at least
WARM_UP = 2  # samples before the clock counts
BLOCKS = 3  # of completions in a row; their median counts
BLOCK = 8  # completions of one, at least: they come in bursts, and few tell no rate


class MeasuredReward:
    """Seconds of a placement of an ONNX model, executed on this machine's pinned cores."""

    def __init__(
        self,
        model: str,
        graph: OpGraph,
        posed: api.Posed,
        cluster: Cluster,
        *,
        dims: Sequence[str] = (),
        seconds: float = SECONDS,
        seed: int = 0,
    ) -> None:
        from gdp.runtime.ort.sessions import core_of_device
        from gdp.runtime.ort.source import load_source, randomised

        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds}")
        self.graph, self.posed, self.seconds, self.seed = graph, posed, seconds, seed
        self.cores = core_of_device(cluster)
        self.source = randomised(load_source(model, api.with_dims(dims)), seed)
        self.count = 0  # placements executed

    def __call__(self, assignment: Assignment) -> float:
        """Seconds of a sample alone (median), or per sample of the full pipeline."""
        from gdp.runtime.ort.run import prepare
        from gdp.runtime.ort.stages import Prediction, make_plan

        problem = self.posed.problem
        predict = Prediction(problem, assignment.device, self.posed.group_of)
        plan = make_plan(self.source.model, self.graph, predict, problem.objective)
        ready = prepare(self.source, self.graph, plan, self.cores, self.seed)
        self.count += 1
        full = objective_of(problem).pipelined
        slots = ready.slots if full else ready.slots[:1]
        with Pipeline(ready.stages, slots, ready.workers) as pipeline:
            pipeline.run(WARM_UP)
            fill = len(slots) if full else 0
            until_s = time.perf_counter() + self.seconds
            trace = pipeline.run(2 * fill + BLOCKS * BLOCK + 1, until_s)
        if not full:
            return trace.latency_s
        return steady_s(np.array(trace.finish_s)[fill:], max(trace.start_s))


def steady_s(finish_s: Float[np.ndarray, "S"], until_s: float) -> float:
    """Seconds per sample of a full pipeline: the median over blocks of completions in a row.

    Completions after `until_s`, when the last sample has entered, do not count.

    >>> steady_s(np.arange(31) * 0.5, 12.0)
    0.5
    """
    kept = np.sort(finish_s)
    kept = kept[kept <= max(until_s, kept[BLOCKS])]
    edges = np.linspace(0, len(kept) - 1, BLOCKS + 1).astype(int)
    return float(np.median(np.diff(kept[edges]) / np.diff(edges)))
