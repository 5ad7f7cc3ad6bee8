"""Measured runs as a reward: what fine-tuning uses where the machine itself is the judge."""

from collections.abc import Sequence

import numpy as np

from gdp import api
from gdp.cluster import Cluster
from gdp.graph import OpGraph
from gdp.methods.base import Assignment
from gdp.runtime.ort_pipeline import Pipeline

WARM_UP = 2  # runs before the clock counts
FASTEST = 0.25  # the mean of this share of runs, the fastest, is what a placement takes


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
        runs: int = 12,
        seed: int = 0,
    ) -> None:
        from gdp.runtime.ort_sessions import core_of_device
        from gdp.runtime.ort_source import load_source, randomised

        self.graph, self.posed, self.runs, self.seed = graph, posed, runs, seed
        self.cores = core_of_device(cluster)
        self.source = randomised(load_source(model, api.with_dims(dims)), seed)
        self.count = 0  # placements executed

    def __call__(self, assignment: Assignment) -> float:
        """Latency, or seconds per sample of the full pipeline, as the problem's objective says."""
        from gdp.runtime.onnxruntime import prepare
        from gdp.runtime.ort_stages import Prediction, make_plan

        problem = self.posed.problem
        predict = Prediction(problem, assignment.device, self.posed.group_of)
        plan = make_plan(self.source.model, self.graph, predict, problem.objective)
        ready = prepare(self.source, self.graph, plan, self.cores, self.seed)
        self.count += 1
        if problem.objective == "throughput":
            with Pipeline(ready.stages, ready.slots, ready.workers) as full:
                fill = len(ready.slots) + 1
                full.run(WARM_UP + fill)
                trace = full.run(self.runs + fill)
                return 1.0 / trace.rate_per_s(fill, max(trace.start_s))
        with Pipeline(ready.stages, ready.slots[:1], ready.workers) as one:
            one.run(WARM_UP)
            trace = one.run(self.runs)
            took_s = np.sort(np.subtract(trace.finish_s, trace.start_s))
            return float(took_s[: max(1, int(FASTEST * self.runs))].mean())
