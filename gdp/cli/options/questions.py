"""Options of a whole question: of a model and a machine, and of a placement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdp.cli.options.decorators import Decorator, pass_one
from gdp.cli.options.machines import ClusterOptions, cluster
from gdp.cli.options.models import ModelOptions, load_with_progress, model
from gdp.cli.options.searches import (
    ConstraintOptions,
    TrainedFiles,
    constraints,
    costs,
    own_objective,
    trained,
)

if TYPE_CHECKING:
    from gdp.placement.constraints import Constraints
    from gdp.placement.device_maps import DeviceMap
    from gdp.placement.placement import Placement
    from gdp.question.models import Model
    from gdp.question.question import Question


@dataclass(frozen=True)
class Asking:
    """Options of a question, without those of its search."""

    model: ModelOptions
    cluster: ClusterOptions
    objective: str | None  # None: latency
    trained: TrainedFiles
    constraints: ConstraintOptions

    def question(self, model: "Model | None" = None, **parts: Any) -> "Question":
        """The question with further parts; the model is loaded with its progress on stderr.

        Args:
            model: Instead of the one that was given.
            **parts: As `gdp.api.ask` takes them.

        Raises:
            GdpError: A file cannot be read, or a part is bad.
        """
        from gdp.api.ask import ask

        question = ask(
            model or self.model.spec, load=load_with_progress, **self.parts(), **parts
        )  # fmt: skip
        self.cluster.require_backend(question.graph)
        return question

    def parts(self) -> dict[str, Any]:
        """The question without its model, as the arguments of `gdp.api.ask`."""
        return {
            "cluster": self.cluster.load(), "dims": self.model.bound(),
            "objective": self.objective or "latency", "costs": self.trained.costs,
            "checkpoint": self.trained.checkpoint, "constraints": self.constraints.read(),
        }  # fmt: skip

    @property
    def files(self) -> tuple[str | None, ...]:
        """Files read in addition to the model."""
        trained = self.trained
        return (
            self.cluster.cluster, trained.checkpoint, trained.costs, self.constraints.constraints
        )  # fmt: skip


def asking(objective: Decorator) -> Decorator:
    """Pass a command `asking`, with this option of the objective."""
    return pass_one("asking", Asking, {
        "model": model, "cluster": cluster, "objective": objective, "trained": trained,
        "constraints": constraints,
    })  # fmt: skip


def read_placement(path: str) -> "Placement | DeviceMap":
    """The placement or device map of a file."""
    from gdp.placement.placement import read_placed

    return read_placed(path)


@dataclass(frozen=True)
class About:
    """Options of the question that a placement answers."""

    model: ModelOptions
    cluster: ClusterOptions
    objective: str | None  # None: that of the placement
    costs: str | None  # None: those of the placement

    def question(
        self, placement: str, given: str | None, demands: "Constraints | None" = None
    ) -> "tuple[Question, Placement]":
        """The question of a placement's file, and the placement.

        Args:
            placement: The file.
            given: Spec of the model; None for that of the placement.
            demands: Constraints that have to be those of the placement, or none.

        Raises:
            PlacementError: Other demands are given than the placement was made with.
        """
        from gdp.question.question import question_about

        read = read_placement(placement)
        record = getattr(read, "question", None)
        if record is not None and demands is not None:
            record.require_constraints(demands)
            demands = None
        question, placed = question_about(
            read, given, self.cluster.of(read), dims=self.model.bound(), objective=self.objective,
            costs=self.costs, constraints=demands, load=load_with_progress,
        )  # fmt: skip
        self.cluster.require_backend(question.graph)
        return question, placed


def about(kind: Decorator) -> Decorator:
    """Pass a command `about`, whose model is an argument or an option."""
    return pass_one("about", About, {
        "model": kind, "cluster": cluster, "objective": own_objective, "costs": costs,
    })  # fmt: skip
