"""The command `finetune`: a model and a cluster in, an adapted policy out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdp.api.ask import ask
from gdp.cluster.file import Machine
from gdp.costs.base import CostModel
from gdp.placement.constraints import Constraints
from gdp.question.models import Model, with_dims
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question

if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig, Finetuned


def finetune(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    config: "FinetuneConfig | None" = None,
    dims: Sequence[str] = (),
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int, dict[str, float]], None] | None = None,
) -> "Finetuned":
    """Adapt the policy to one model on one cluster.

    Args:
        model: Model to place.
        cluster: Machine to place it on.
        objective: Name of the objective, such as "latency" or "throughput".
        out: Folder for the checkpoint, which `gdp.place` takes.
        checkpoint: Policy to start from; None is the shipped one.
        config: Settings of the training; None is `FinetuneConfig()`.
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        costs: As in `gdp.place`.
        constraints: As in `gdp.place`.
        seed: Of the training.
        force: Write over, or among, files in `out` that are no policy.
        progress: Called with the step and its metrics.

    Returns:
        The adapted policy, its best placement, and the values of that (`value_s`) and of the
        start (`start_s`).

    Raises:
        TargetError: if `out` holds anything but a policy, unless force.
    """
    question = ask(
        model, cluster, objective=objective, dims=with_dims(dims),
        costs=costs, checkpoint=checkpoint, constraints=constraints,
    )  # fmt: skip
    return finetuned(question, out=out, config=config, seed=seed, force=force, progress=progress)


def finetuned(
    question: Question,
    *,
    out: str | Path | None = None,
    config: "FinetuneConfig | None" = None,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int, dict[str, float]], None] | None = None,
) -> "Finetuned":
    """Adapt the policy to the problem of a question; see `finetune`."""
    from gdp.learn.finetune import finetune as tune

    return tune(
        prepare_problem(question), question.checkpoint, out=out, force=force, config=config,
        seed=seed, progress=progress,
    )  # fmt: skip
