"""Options that several verbs share: each decorator hands the verb one object."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdp.cli.show import AS_JSON
from gdp.files.targets import Permit, TargetError, require_file, require_folder
from gdp.files.writing import is_stream

if TYPE_CHECKING:
    from gdp.cluster.types import Cluster
    from gdp.constraints import Constraints
    from gdp.graph.op_graph import OpGraph
    from gdp.methods.base import Search

EVENT_OBJECTIVES = ("latency", "throughput")
PLACE_OBJECTIVES = (*EVENT_OBJECTIVES, "max_load")
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def handing(
    argument: str, make: Callable[..., Any], *options: Decorator, names: Sequence[str] = ()
) -> Decorator:
    """Hands a verb one `argument`, made from the parameters that these options have: those `names`,
    or what `make` calls its own."""
    names = names or list(inspect.signature(make).parameters)

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def called(**values: Any) -> None:
            made = make(**{name: values.pop(name) for name in names})
            verb(**values, **{argument: made})

        return functools.reduce(lambda f, option: option(f), reversed(options), called)

    return decorate


@dataclass(frozen=True)
class ModelOptions:
    """A model, and what its symbolic dimensions are bound to."""

    spec: str
    dims: tuple[str, ...]

    def load(self) -> "OpGraph":
        from gdp.api import with_dims
        from gdp.models import load

        return load(self.spec, with_dims(self.dims))


dims = click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension.")
model = handing("model", ModelOptions, click.argument("spec", metavar="MODEL"), dims)
named_model = handing(
    "model", ModelOptions, click.option("--model", "spec", required=True, metavar="MODEL"), dims
)


@dataclass(frozen=True)
class ClusterOptions:
    """A machine, and what of its memory may be used."""

    cluster: str | None
    max_memory: str | None

    def load(self) -> "Cluster":
        from gdp.cluster.file import parse_max_memory, with_max_memory
        from gdp.cluster.types import Cluster

        found = Cluster.local() if self.cluster is None else Cluster.load(self.cluster)
        limits = self.max_memory
        return found if limits is None else with_max_memory(found, parse_max_memory(limits))


cluster = handing(
    "cluster", ClusterOptions,
    click.option(
        "--cluster", metavar="CLUSTER", help="TOML file or preset; default: this machine."
    ),
    click.option("--max-memory", metavar="0=20GiB,cpu=30GiB", help="Memory limits by device."),
)  # fmt: skip
objective = click.option(
    "--objective", type=click.Choice(EVENT_OBJECTIVES), default="latency", show_default=True
)
place_objective = click.option(
    "--objective", type=click.Choice(PLACE_OBJECTIVES), default="latency",
    show_default=True,
    help="max_load: seconds per sample where devices meet in host memory and compute and "
    "transfers do not overlap.",
)  # fmt: skip


@dataclass(frozen=True)
class SearchOptions:
    """A search budget."""

    seconds: float
    evaluations: int | None
    seed: int

    def search(self, progress: Callable[[float, float], None] | None = None) -> "Search":
        from gdp.methods.base import Search

        return Search(self.seed, self.seconds, self.evaluations, progress=progress)


@dataclass(frozen=True)
class MethodOptions(SearchOptions):
    """A method with its budget."""

    method: str


seed = click.option("--seed", type=int, default=0, show_default=True)
_budget = (
    click.option("--seconds", type=float, default=5.0, show_default=True, help="Search budget."),
    click.option("--evaluations", type=int, default=None, help="Budget in simulated placements."),
    seed,
)
search = handing("search", SearchOptions, *_budget)
method = handing(
    "search", MethodOptions,
    click.option("--method", default="auto", show_default=True, help="See `gdp compare`."),
    *_budget,
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Files of what was learned; None means the shipped ones."""

    checkpoint: str | None
    costs: str | None


costs = click.option("--costs", metavar="FILE", help="Cost model; default: the shipped one.")
trained = handing(
    "trained", Trained,
    click.option("--checkpoint", metavar="CK", help="Policy checkpoint; default: the shipped one."),
    costs,
)  # fmt: skip


@dataclass(frozen=True)
class ConstraintOptions:
    """What the user demands of a placement."""

    pins: tuple[str, ...]
    forbid: tuple[str, ...]
    together: tuple[str, ...]
    constraints: str | None

    def read(self) -> "Constraints":
        from gdp.constraints import Constraints, merge, parse_pin, read_constraints

        flags = Constraints(
            tuple(map(parse_pin, self.pins)), tuple(map(parse_pin, self.forbid)), self.together
        )
        file = self.constraints
        return merge([flags] if file is None else [read_constraints(file), flags])


constraints = handing(
    "constraints", ConstraintOptions,
    click.option("--pin", "pins", multiple=True, metavar="GLOB=DEVICE", help="Fix ops to devices."),
    click.option("--forbid", multiple=True, metavar="GLOB=DEVICE", help="Keep ops off devices."),
    click.option("--together", multiple=True, metavar="GLOB", help="Keep ops on one device."),
    click.option("--constraints", metavar="FILE", help="The same in a TOML file."),
)  # fmt: skip


@dataclass(frozen=True)
class Outputs:
    """What a verb writes: paths by kind, of those that are asked for."""

    paths: Mapping[str, str]
    force: bool

    def require(self, *read: str | os.PathLike[str] | None, folder: str | None = None) -> Permit:
        """Asks before the work: `TargetError` where the folder of this kind, or a file, may not be
        written. `read` are the models and files that the verb reads, which it writes over never.
        """
        permit = permit_of(*read, force=self.force)
        if folder is not None:
            require_folder(self.paths[folder], folder, permit)
        taken: dict[str, str] = {}
        for kind, path in self.paths.items():
            if kind == folder:
                continue
            require_file(path, kind, permit)
            place = os.path.realpath(path)
            if place in taken and not is_stream(path):
                raise TargetError(f"{path!r} is given for the {taken[place]} and for the {kind}")
            taken[place] = kind
        return permit


def permit_of(*read: str | os.PathLike[str] | None, force: bool) -> Permit:
    """What a verb that reads these models and files may write over."""

    def sources() -> list[Path]:
        from gdp.models import source_files

        given = [os.fspath(spec) for spec in read if spec is not None]
        return [path for spec in given for path in (Path(spec), *source_files(spec))]

    return Permit(sources, force)


def outputs(**options: Callable[..., Decorator]) -> Decorator:
    """Options that name what to write, by kind, and `--force`; hands the verb `outputs`."""
    kinds = {f"write_{kind}": kind for kind in options}

    def make(force: bool, **paths: str | None) -> Outputs:
        return Outputs({kinds[name]: p for name, p in paths.items() if p is not None}, force)

    named = [options[kind](name) for name, kind in kinds.items()]
    return handing("outputs", make, *named, _force, names=[*kinds, "force"])


written = functools.partial(functools.partial, click.option)
"""An option of `outputs`, whose name is still to come."""
required = functools.partial(written, "-o", "--output", required=True)
trace = written("--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule.")
_force = click.option(
    "--force", is_flag=True, help="Write over, or among, files that gdp did not write."
)
as_json = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object on stdout.",
    callback=lambda context, _, value: context.meta.update({AS_JSON: value}),
)  # fmt: skip
