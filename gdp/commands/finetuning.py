"""The command `finetune`: a model and a cluster in, an adapted policy out; measured rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Assignment
from gdp.models import Model, is_onnx, load, spec_of, with_dims
from gdp.prepare import PreparedProblem, prepare_problem
from gdp.runtime.measure import Measuring, measure
from gdp.runtime.ort.pipeline import SideBySide
from gdp.runtime.statistics import PER_SLOT
from gdp.sim.objectives import objective_of

SECONDS = 1.0
"""The cap of measuring one placement, warming up and filling the pipeline on top: a hundred samples
of models that take up to 10 ms each. The best few are measured several times more."""


class MeasuredReward:
    """Seconds of a placement of an ONNX model, executed on pinned cores of this machine."""

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
        from gdp.runtime.ort.run import cut_plan, prepare
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


if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig, Finetuned


class FinetuneOptions(TypedDict, total=False):
    """Keyword arguments of `finetune` beyond its own."""

    dims: Sequence[str]
    costs: CostModel | str | Path | None
    constraints: Constraints | None
    seed: int
    force: bool
    progress: Callable[[int, dict[str, float]], None] | None


def finetune(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    reward: Literal["simulated", "measured"] = "simulated",
    config: "FinetuneConfig | None" = None,
    **tuning: Unpack[FinetuneOptions],
) -> "Finetuned":
    """Adapt the policy to one model on one cluster.

    Args:
        model: Model to place; ONNX where rewards are measured.
        cluster: Machine to place it on.
        objective: Name of the objective, such as "latency" or "throughput".
        out: Folder for the checkpoint, which `gdp.place` takes.
        checkpoint: Policy to start from; None is the shipped one.
        reward: "simulated", or "measured" by executing placements on this machine.
        config: Settings of the training; None is `FinetuneConfig()`.
        **tuning: dims, costs, constraints, seed, force and progress; see `FinetuneOptions` and
            `gdp.learn.finetune.finetune`, which takes a problem.

    Returns:
        The adapted policy, its best placement, and the values of that (`value_s`) and of the
        start (`start_s`).

    Raises:
        TargetError: if `out` holds anything but a policy, unless force.
        ModelError: if rewards are measured and the model is not ONNX.
    """
    from gdp.learn.finetune import finetune as tune

    if unknown := tuning.keys() - FinetuneOptions.__annotations__:
        raise TypeError(f"finetune() got unexpected keywords: {', '.join(sorted(unknown))}")
    if reward not in ("simulated", "measured"):
        raise ValueError(f"reward must be simulated or measured, got {reward!r}")
    if reward == "measured" and not is_onnx(model):
        raise ModelError(f"--reward measured executes ONNX models, got {spec_of(model)!r}")
    dims, seed = tuning.get("dims", ()), tuning.get("seed", 0)
    graph, machine = load(model, with_dims(dims)), load_cluster(cluster)
    prepared = prepare_problem(
        graph,
        machine,
        objective,
        costs=tuning.get("costs"),
        constraints=tuning.get("constraints"),
    )
    judge = None
    if reward == "measured":
        judge = MeasuredReward(spec_of(model), graph, prepared, machine, dims=dims, seed=seed)
    return tune(
        prepared.problem, checkpoint, out=out, force=tuning.get("force", False), reward=judge,
        config=config, seed=seed, progress=tuning.get("progress"),
    )  # fmt: skip
