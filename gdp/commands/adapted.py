"""Fine-tuning as every other library call: a model and a cluster in, an adapted policy out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from gdp.cluster.load import Machine, load_cluster
from gdp.commands.measured import MeasuredReward
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.errors import ModelError
from gdp.models import Model, is_onnx, load, spec_of, with_dims
from gdp.prepare import prepare_problem

if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig, Finetuned


class Tuning(TypedDict, total=False):
    """What else a fine-tuning is asked for."""

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
    **tuning: Unpack[Tuning],
) -> "Finetuned":
    """Adapt the policy to one model on one cluster; with `out`, write a checkpoint for `place`.

    `reward` is the simulator, or the execution of each placement on this machine (ONNX models).
    The result says where it started (`start_s`) and what it ended with (`value_s`). For the other
    arguments see `gdp.learn.finetune.finetune`, which takes a problem.
    """
    from gdp.learn.finetune import finetune as tune

    if unknown := tuning.keys() - Tuning.__annotations__:
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
