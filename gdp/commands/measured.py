"""Measured runs as a reward: what fine-tuning uses where the machine itself is the judge."""

from collections.abc import Sequence

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Assignment
from gdp.models import with_dims
from gdp.prepare import PreparedProblem
from gdp.runtime.measure import Measuring, measure
from gdp.runtime.ort.pipeline import SideBySide
from gdp.runtime.statistics import PER_SLOT
from gdp.sim.objectives import objective_of

SECONDS = 1.0
"""The cap of measuring one placement, warming up and filling the pipeline on top: a hundred samples
of models that take up to 10 ms each. The best few are measured several times more."""


class MeasuredReward:
    """Seconds of a placement of an ONNX model, executed on this machine's pinned cores."""

    def __init__(
        self,
        model: str,
        graph: OpGraph,
        prepared: PreparedProblem,
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
        self.graph, self.prepared, self.seconds, self.seed = graph, prepared, seconds, seed
        self.cores = core_of_device(cluster)
        self.source = randomised(load_source(model, with_dims(dims)), seed)
        self.count = 0  # placements executed

    def __call__(self, assignment: Assignment) -> float:
        """Seconds of a sample alone (median), or per sample of the full pipeline: measured as
        `gdp run` measures, until the rate is precise or `seconds` are over."""
        from gdp.runtime.ort.run import prepare
        from gdp.runtime.ort.stages import cut_plan
        from gdp.runtime.plan import Prediction

        problem = self.prepared.problem
        predict = Prediction(problem, assignment.device, self.prepared.group_of)
        plan = cut_plan(self.source.model, self.graph, predict, problem.objective)
        ready = prepare(self.source, self.graph, plan, self.cores, self.seed)
        self.count += 1
        full = objective_of(problem).pipelined
        with ready.pipeline() if full else ready.one_at_a_time() as pipeline:
            # Time enough to count full pipelines, of models slower than predicted too.
            full_s = 4 * PER_SLOT * pipeline.num_slots * (plan.period_s if full else 0.0)
            contenders = {"the placement": SideBySide((pipeline,))}
            measuring = Measuring(max(self.seconds, full_s), self.seed)
            found = measure(contenders, measuring)["the placement"]
        return 1.0 / found.throughput_per_s if full else found.latency_s
