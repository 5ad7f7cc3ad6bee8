"""The command `finetune`: a model and a cluster in, an adapted policy out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from gdp.cluster.file import Machine, load_cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.models import Model, load, with_dims
from gdp.prepare import prepare_problem

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
    config: "FinetuneConfig | None" = None,
    **tuning: Unpack[FinetuneOptions],
) -> "Finetuned":
    """Adapt the policy to one model on one cluster.

    Args:
        model: Model to place.
        cluster: Machine to place it on.
        objective: Name of the objective, such as "latency" or "throughput".
        out: Folder for the checkpoint, which `gdp.place` takes.
        checkpoint: Policy to start from; None is the shipped one.
        config: Settings of the training; None is `FinetuneConfig()`.
        **tuning: dims, costs, constraints, seed, force and progress; see `FinetuneOptions` and
            `gdp.learn.finetune.finetune`, which takes a problem.

    Returns:
        The adapted policy, its best placement, and the values of that (`value_s`) and of the
        start (`start_s`).

    Raises:
        TargetError: if `out` holds anything but a policy, unless force.
    """
    from gdp.learn.finetune import finetune as tune

    if unknown := tuning.keys() - FinetuneOptions.__annotations__:
        raise TypeError(f"finetune() got unexpected keywords: {', '.join(sorted(unknown))}")
    prepared = prepare_problem(
        load(model, with_dims(tuning.get("dims", ()))),
        load_cluster(cluster),
        objective,
        costs=tuning.get("costs"),
        constraints=tuning.get("constraints"),
    )
    return tune(
        prepared.problem, checkpoint, out=out, force=tuning.get("force", False), config=config,
        seed=tuning.get("seed", 0), progress=tuning.get("progress"),
    )  # fmt: skip
