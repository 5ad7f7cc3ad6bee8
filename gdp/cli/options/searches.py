"""Options that say what is asked of an answer: objective, search, costs, demands and runtime."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from gdp.cli.options.decorators import alone, option, pass_dataclass, prefix_errors
from gdp.targets.table import PLANNERS

if TYPE_CHECKING:
    from gdp.methods.base import Search
    from gdp.placement.constraints import Constraints

OFFLOADING = [name for name, row in PLANNERS.items() if row.offloads]
BY_MODULE = [name for name, row in PLANNERS.items() if row.by_module]


class ObjectiveChoice(click.Choice):
    """Objectives of the table, which is imported at the first use."""

    def __init__(self, *, general: bool) -> None:
        super().__init__(())
        self.general = general  # those alone that every method may place for

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the user may write."""
        from gdp.sim.objectives import OBJECTIVES, general_objectives

        return general_objectives() if self.general else tuple(OBJECTIVES)

    @choices.setter  # click.Choice sets it
    def choices(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, _: Sequence[str]
    ) -> None: ...


objective = click.option(
    "--objective", type=ObjectiveChoice(general=True), default="latency", show_default=True
)
own_objective = click.option(
    "--objective", type=ObjectiveChoice(general=True), default=None,
    help="Default: the one that the placement was made for, else latency.",
)  # fmt: skip
place_objective = click.option(
    "--objective", type=ObjectiveChoice(general=False), default="latency", show_default=True,
    help="docs/explanation/simulator.md says what each of them means.",
)  # fmt: skip


@dataclass(frozen=True)
class SearchOptions:
    """A search budget."""

    seconds: float = option(
        "--seconds", type=float, default=5.0, help="Search budget; not heeded beside --evaluations."
    )
    evaluations: int | None = option(
        "--evaluations",
        type=int,
        help="Budget in placements that the search simulates; no clock enters the answer. 1,000 of "
        "1,000 ops take 0.1 CPU s for a latency, 0.01 for a pipeline; heuristics add 0.7, programs "
        "where memory binds 10. The answer says how many CPU seconds it took.",
    )
    seed: int = option("--seed", type=int, default=0)
    chains: int | None = option(
        "--chains",
        type=click.IntRange(min=1),
        help="Searches side by side; answers depend on their number. Default: one a core, at most "
        "4, where --seconds end them; one with --evaluations.",
    )

    def search(self, progress: Callable[[float, float], None] | None = None) -> "Search":
        """The search budget; `progress` gets the share of it that is used and the best value."""
        from gdp.methods.base import Search

        try:
            return Search(
                self.seed, self.seconds, self.evaluations, chains=self.chains, progress=progress
            )
        except ValueError as error:  # begins with the field, which the option is called by
            raise ValueError(f"--{error}") from None


@dataclass(frozen=True)
class MethodOptions(SearchOptions):
    """A method with its budget, and the share of the best value that fewer cuts may cost."""

    method: str = option(
        "--method", default="auto", help="auto, or one of those that `gdp compare` lists."
    )
    simplicity: float | None = option(
        "--simplicity", type=float, metavar="PERCENT", default=None,
        help="Of the time, that fewer transfers and cuts may cost; 0: the best placement found. "
        "[default: 2 with --method auto, else 0]",
    )  # fmt: skip

    def search(self, progress: Callable[[float, float], None] | None = None) -> "Search":
        """The budget with the share that fewer cuts may cost, between 0 and 100 percent."""
        search, percent = super().search(progress), self.simplicity
        if percent is None:
            return search
        if not 0 <= percent < 100:
            raise ValueError(f"--simplicity must be at least 0 and below 100, got {percent:g}")
        return replace(search, simplicity=percent / 100)


@dataclass(frozen=True)
class TrainedFiles:
    """Trained policy and costs; None means the shipped ones."""

    checkpoint: str | None = option(
        "--checkpoint", metavar="CK", help="Policy checkpoint; default: the shipped one."
    )
    costs: str | None = option(
        "--costs",
        metavar="FILE",
        help="Folder of gdp calibrate, file of gdp tune --write-costs, shipped (without what was "
        "learned of this machine; default: with it), or datasheet (the roofline everywhere).",
    )


@dataclass(frozen=True)
class ConstraintOptions:
    """Demands on a placement."""

    pins: tuple[str, ...] = option(
        "--pin", multiple=True, metavar="GLOB=DEVICE", help="Fix ops to devices."
    )
    forbid: tuple[str, ...] = option(
        "--forbid", multiple=True, metavar="GLOB=DEVICE", help="Keep ops off devices."
    )
    together: tuple[str, ...] = option(
        "--together", multiple=True, metavar="GLOB", help="Keep ops on one device."
    )
    constraints: str | None = option(
        "--constraints", metavar="FILE", help="The same in a TOML file."
    )
    no_replicas: bool = option(
        "--no-replicas", is_flag=True,
        help="For throughput: one device for each stage, none that take samples in turn.",
    )  # fmt: skip

    def read(self) -> "Constraints":
        """The rules of the file, then those of the flags; raises `GdpError` on a bad rule."""
        from gdp.placement.constraints import Constraints, merge, parse_pin, read_constraints

        rules = {}
        for flag, texts in (("--pin", self.pins), ("--forbid", self.forbid)):
            with prefix_errors(flag):
                rules[flag] = tuple(map(parse_pin, texts))
        flags = Constraints(rules["--pin"], rules["--forbid"], self.together, not self.no_replicas)
        file = self.constraints
        return merge([flags] if file is None else [read_constraints(file), flags])


_SEARCHES = (*(f.name for f in fields(MethodOptions)), "checkpoint")
"""Options of searches and of the policy."""


@dataclass(frozen=True)
class Destination:
    """Runtime that a placement is planned for, and the pieces that stay whole."""

    runtime: str | None = option(
        "--for", type=click.Choice(tuple(PLANNERS)),
        help="Answer what this runtime can follow.",
    )  # fmt: skip
    granularity: str | None = option(
        "--granularity", type=click.Choice(["op", "module", "layer"]),
        help=f"What stays in one piece; default: op, for {' and '.join(BY_MODULE)} module.",
    )  # fmt: skip
    offload: str | None = option(
        "--offload", type=click.Choice(["cpu", "disk", "none"]),
        help=f"Where {' and '.join(OFFLOADING)} keeps weights that do not fit; default: cpu.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        row = None if self.runtime is None else PLANNERS[self.runtime]
        if self.offload is not None and (row is None or not row.offloads):
            raise click.UsageError(f"--offload needs --for {' or --for '.join(OFFLOADING)}")
        context = click.get_current_context(silent=True)
        if context is None or row is None or row.searches:
            return
        for name in _SEARCHES:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--for {self.runtime} is planned without a search: leave out --{name}"
                )


search, method = pass_dataclass("search", SearchOptions), pass_dataclass("search", MethodOptions)
trained = pass_dataclass("trained", TrainedFiles)
costs, seed = alone(TrainedFiles, "costs"), alone(SearchOptions, "seed")
constraints = pass_dataclass("constraints", ConstraintOptions)
destination = pass_dataclass("destination", Destination)
