"""The command `finetune`: a model and a cluster in, an adapted policy out; measured rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from gdp.cluster.file import Machine, load_cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.errors import ArgumentError, of_kind
from gdp.graph.groups import first_members
from gdp.methods.base import Assignment, Search
from gdp.models import Model, load, with_dims
from gdp.prepare import PreparedProblem, prepare_problem

if TYPE_CHECKING:
    from gdp.learn.finetune import FinetuneConfig, Finetuned
    from gdp.policy.policy import Policy


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
    runs: int = 10,
    config: "FinetuneConfig | None" = None,
    **tuning: Unpack[FinetuneOptions],
) -> "Finetuned":
    """Adapt the policy to one model on one cluster.

    With measured rewards the policy's placements are executed on this machine, `runs` of them; the
    costs learned from each (see `gdp.tune`) are what the simulator rewards with in between.

    Args:
        model: Model to place; one that a runtime executes where rewards are measured.
        cluster: Machine to place it on.
        objective: Name of the objective, such as "latency" or "throughput".
        out: Folder for the checkpoint, which `gdp.place` takes.
        checkpoint: Policy to start from; None is the shipped one.
        reward: "simulated", or "measured" by executing placements on this machine.
        runs: Placements to execute at most where rewards are measured.
        config: Settings of the training; None is `FinetuneConfig()`. Where rewards are measured its
            evaluations are spent before each run.
        **tuning: dims, costs, constraints, seed, force and progress; see `FinetuneOptions` and
            `gdp.learn.finetune.finetune`, which takes a problem.

    Returns:
        The adapted policy, its best placement, and the values of that (`value_s`) and of the
        start (`start_s`), measured where rewards are.

    Raises:
        TargetError: if `out` holds anything but a policy, unless force.
        ModelError: if rewards are measured and no runtime executes the model.
    """
    from gdp.learn.finetune import FinetuneConfig
    from gdp.learn.finetune import finetune as tune

    if unknown := tuning.keys() - FinetuneOptions.__annotations__:
        raise TypeError(f"finetune() got unexpected keywords: {', '.join(sorted(unknown))}")
    if reward not in ("simulated", "measured"):
        raise ArgumentError(f"reward must be simulated or measured, got {reward!r}")
    if reward == "measured":
        config = of_kind(config, FinetuneConfig, "config")
        return _measured(model, cluster, objective, runs, checkpoint, out, config, tuning)
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


def _measured(
    model: Model, cluster: Machine, objective: str, runs: int, checkpoint: str | Path | None,
    out: str | Path | None, config: "FinetuneConfig", tuning: FinetuneOptions,
) -> "Finetuned":  # fmt: skip
    """The loop of `gdp.tune` with the policy, fine-tuned anew before each run, as the placer."""
    from gdp.commands.tuning import tune
    from gdp.learn.finetune import check_checkpoint_writable, save_finetuned
    from gdp.policy.method import load as loaded_policy
    from gdp.policy.policy import keep_placement

    if out is not None:
        check_checkpoint_writable(out, checkpoint, force=tuning.get("force", False))
    placer = _PolicyPlacer(loaded_policy(checkpoint), config, tuning.get("progress"))
    tuned = tune(
        model, cluster, objective=objective, runs=runs, dims=tuning.get("dims", ()),
        costs=tuning.get("costs"), constraints=tuning.get("constraints"), placer=placer,
        search=Search(tuning.get("seed", 0)),
    )  # fmt: skip
    first = first_members(placer.prepared.group_of)
    placed = tuned.placement
    best = Assignment(placed.device[first], placed.rank[first], placed.teams)
    policy = replace(placer.policy, placed=keep_placement(placer.prepared.problem, best))
    if out is not None:
        save_finetuned(policy, Path(out), config, placer.history, placer.start)
    return replace(
        placer.last, policy=policy, assignment=best, value_s=tuned.value_s,
        start_s=tuned.rounds[0].measured_s, start_evaluations=0, evaluations=placer.evaluations,
        history=placer.history,
    )  # fmt: skip


class _PolicyPlacer:
    """Places by fine-tuning a policy further, from the best measured placement."""

    def __init__(
        self, policy: "Policy", config: "FinetuneConfig",
        progress: Callable[[int, dict[str, float]], None] | None,
    ) -> None:  # fmt: skip
        self.policy, self.start = policy, policy.name
        self.config, self.progress = config, progress
        self.history: list[dict[str, float]] = []
        self.evaluations = 0

    def __call__(
        self, prepared: PreparedProblem, start: Assignment | None, seed: int
    ) -> Assignment:
        from gdp.learn.finetune import finetune

        # A round asks for one from the best placement and one from scratch: the policy starts
        # from scratch once.
        if start is None and self.evaluations:
            return self.last.assignment
        before = self.evaluations

        def progress(at: int, numbers: dict[str, float]) -> None:
            row = numbers | {"evaluations": before + numbers["evaluations"]}
            self.history.append(row)
            if self.progress is not None:
                self.progress(len(self.history) - 1, row)

        self.prepared, self.last = prepared, finetune(
            prepared.problem, self.policy, start=start, config=self.config, seed=seed,
            progress=progress,
        )  # fmt: skip
        if self.last.interrupted:
            raise KeyboardInterrupt
        self.evaluations += self.last.evaluations
        self.policy = replace(self.last.policy, name=f"{self.start}, fine-tuned", placed=None)
        return self.last.assignment
