"""Options that several commands share: each decorator passes the command one object."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdp.cli.show import AS_JSON
from gdp.errors import ArgumentError, ClusterError, GdpError
from gdp.files.writing import (
    OverwritePolicy,
    TargetError,
    check_file_writable,
    check_folder_writable,
    is_stream,
)
from gdp.targets.table import PLANNERS

if TYPE_CHECKING:
    from gdp.cluster.types import Cluster
    from gdp.constraints import Constraints
    from gdp.device_maps import DeviceMap
    from gdp.graph.op_graph import OpGraph
    from gdp.methods.base import Search
    from gdp.models import Model
    from gdp.placement import Placement
    from gdp.question import Question
    from gdp.tasks import Engine

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
OFFLOADING = [name for name, row in PLANNERS.items() if row.offloads]
BY_MODULE = [name for name, row in PLANNERS.items() if row.by_module]
_COUNT = click.IntRange(1, 2**31 - 1)


@contextlib.contextmanager
def prefix_errors(flag: str) -> Iterator[None]:
    """Begin errors about the value of an option with its name."""
    try:
        yield
    except (GdpError, ValueError) as error:
        raise type(error)(f"{flag}: {error}") from None


def pass_one(
    argument: str, make: Callable[..., Any], options: Mapping[str, Decorator]
) -> Decorator:
    """Pass a command one `argument`, made from the parameters of these options by name."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def called(**values: Any) -> None:
            value = make(**{name: values.pop(name) for name in options})
            verb(**values, **{argument: value})

        return functools.reduce(lambda f, option: option(f), list(options.values())[::-1], called)

    return decorate


def pass_dataclass(argument: str, kind: type) -> Decorator:
    """Pass a command a dataclass, every field of which is an `option`."""
    return pass_one(argument, kind, {f.name: f.metadata["option"](f.name) for f in fields(kind)})


def option(*flags: str, make: Callable[..., Any] = click.option, **settings: Any) -> Any:
    """A field of a dataclass that is a parameter of the command line."""
    if settings.get("default") not in (None, ""):
        settings["show_default"] = True
    return field(metadata={"option": functools.partial(make, *flags, **settings)})


def _context(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A number of tokens, or "max"."""
    from gdp.models import LONGEST
    from gdp.units import whole_number

    if value is not None and value != LONGEST and whole_number(value) is None:
        raise click.BadParameter(f"{value!r} must be a number of tokens, or max")
    return value


CONTEXT_HELP = (
    "Tokens of each sequence that caches are reserved for, apart from those that are timed; max: "
    "the longest context that fits, in gdp place and gdp fit."
)
context = click.option("--context", metavar="N|max", callback=_context, help=CONTEXT_HELP)
"""Of a command that takes no `ModelOptions`."""


def parse_generate(text: str) -> dict[str, int]:
    """Sizes of a request from its text; raises `ValueError` for a malformed one.

    >>> parse_generate("prompt=2048,new=256")
    {'prompt': 2048, 'new': 256}
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        whole = value.isascii() and value.isdecimal() and len(value) <= 10 and int(value) >= 1
        if name not in ("prompt", "new", "batch", "requests") or name in sizes or not whole:
            raise ValueError(f"{part!r} must look like prompt=2048,new=256,batch=1")
        sizes[name] = int(value)
    if missing := sorted({"prompt", "new"} - sizes.keys()):
        raise ValueError(
            f"{text!r} must look like prompt=2048,new=256,batch=1: {missing[0]} misses"
        )
    return sizes


def load_with_progress(
    model: "Model", dims: "Mapping[str, int] | None" = None, room_bytes: int | None = None
) -> "OpGraph":
    """Import a model by `gdp.models.load`; report the stages of tracing on stderr."""
    from gdp.cli.show import told
    from gdp.models import load

    with told():
        return load(model, dims, room_bytes=room_bytes)


@dataclass(frozen=True)
class ModelOptions:
    """A model, and bindings of its symbolic dimensions."""

    spec: str = option(make=click.argument, metavar="MODEL")
    dims: tuple[str, ...] = option(
        "--dim", multiple=True, metavar="NAME=VALUE", help="Bind a dimension; ONNX models."
    )

    task: str | None = option("--task", metavar="TASK", help="Of hf: models, such as causal-lm.")
    batch: int | None = option("--batch", type=_COUNT, help="Samples; hf: and .gguf models.")
    sequence: int | None = option("--sequence", type=_COUNT, help="Tokens; hf: and .gguf models.")
    decode: bool = option(
        "--decode", is_flag=True, help="One token, with its cache; hf: and .gguf models."
    )
    generate: str | None = option(
        "--generate", metavar="prompt=2048,new=256,batch=1",
        help="A whole request, the prompt read once and so many tokens written; with requests=4, "
        "caches for so many in flight. hf: and .gguf models.",
    )  # fmt: skip

    context: str | None = option("--context", metavar="N|max", callback=_context, help=CONTEXT_HELP)

    quantize: str | None = option(
        "--quantize", metavar="SCHEME",
        help="Store weights so, instead of as the configuration says: nf4, nf4-double, int8, int4, "
        "gptq, awq, fp8, hqq, mxfp4 or none; hf: models.",
    )  # fmt: skip

    mmproj: str | None = option(
        "--mmproj", metavar="FILE",
        help="llama.cpp's image encoder, which gets a device of its own; .gguf models.",
    )  # fmt: skip
    image: int | None = option(
        "--image", type=_COUNT, metavar="PIXELS",
        help="Side of the image that it reads; default: as its file says.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Append task, batch, sequence, quantisation and decoding to the spec of the model."""
        from gdp.models import with_options

        if isinstance(self, NamedModel) and not self.spec:
            if any(getattr(self, f.name) for f in fields(self)):
                raise click.UsageError("options of a model need --model")
            return
        if self.generate is not None:
            self._require_generating()
        try:
            spec = with_options(
                self.spec, task=self.task, batch=self.batch, sequence=self.sequence,
                quantize=self.quantize, mmproj=self.mmproj, image=self.image, decode=self.decode,
            )  # fmt: skip
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        if self.context is not None and self.generate is None:
            raise click.UsageError("--context is for a whole request: give --generate, too")
        if self.generate is not None:
            parts = self.generate.replace(" ", "").split(",")
            parts += [] if self.context is None else [f"context={self.context}"]
            spec += ("&" if "?" in spec else "?") + "&".join(parts)
        object.__setattr__(self, "spec", spec)

    def require_no_sizes(self, beside: str) -> None:
        """Raise `UsageError` where an option says tokens or sequences that another one says."""
        given = ("task", "batch", "sequence", "decode", "generate", "context")
        if name := next((name for name in given if getattr(self, name)), None):
            raise click.UsageError(f"{beside} says all tokens and requests: leave out --{name}")

    def _require_generating(self) -> None:
        from gdp.models import HF_PREFIX, is_gguf

        if not (self.spec.startswith(HF_PREFIX) or is_gguf(self.spec)):
            raise click.UsageError(
                f"--generate is for hf:CONFIG and .gguf models, not for {self.spec!r}"
            )
        given = ("sequence", "batch", "decode")
        if beside := next((name for name in given if getattr(self, name)), None):
            raise click.UsageError(
                f"--generate says all tokens and the batch: leave out --{beside}"
            )
        with prefix_errors("--generate"):
            parse_generate(self.generate or "")

    def load(self, room_bytes: int | None = None) -> "OpGraph":
        """Import the model by `gdp.models.load`; on a terminal, report the stages of tracing."""
        return load_with_progress(self.spec, self.bound(), room_bytes)

    @property
    def given(self) -> str | None:
        """The spec; None where `--model` was left out."""
        return self.spec or None

    @property
    def is_placement(self) -> bool:
        """True where the argument is a placement's file, which remembers its model."""
        from gdp.files.writing import is_written_by_gdp

        path = Path(self.spec)
        return path.is_file() and is_written_by_gdp(path, "placement")

    def bound(self) -> "Mapping[str, int]":
        """Sizes of the symbolic dimensions."""
        from gdp.models import with_dims

        return with_dims(self.dims)

    def beside(self, placement: str | None) -> tuple[str | None, str]:
        """Spec and placement of a verb with the arguments MODEL PLACEMENT, of which the first may
        be left out where the placement's file remembers it."""
        if placement is not None:
            return self.spec, placement
        if not self.is_placement:
            raise click.UsageError(f"{self.spec!r} is no placement: give MODEL PLACEMENT")
        return None, self.spec


@dataclass(frozen=True)
class NamedModel(ModelOptions):
    """A model as an option, where a placement is the argument."""

    spec: str = option(
        "--model", default="", metavar="MODEL",
        help="Default: the one that the placement was made for.",
    )  # fmt: skip


@dataclass(frozen=True)
class ClusterOptions:
    """A cluster, and limits of its memory."""

    cluster: str | None = option(
        "--cluster",
        metavar="CLUSTER",
        help="TOML file, or preset such as cpu+2xt4-pcie4 or 2xcpu-core; default: this machine.",
    )
    max_memory: tuple[str, ...] = option(
        "--max-memory", metavar="0=20GiB,cpu=30GiB", multiple=True,
        help="Memory limits by device; may be repeated.",
    )  # fmt: skip
    reserve: tuple[str, ...] = option(
        "--reserve", metavar="SIZE|0=2GiB,cpu=8GiB", multiple=True,
        help="Memory kept free of each accelerator or device, for drivers and runtimes; default: "
        "what `gdp devices` shows. 0: none.",
    )  # fmt: skip

    def load(self) -> "Cluster":
        """The file, preset or this machine, under the memory limits; raises `ClusterError`."""
        from gdp.cluster.types import Cluster

        return self._limited(Cluster.load(self.cluster))

    def _limited(self, cluster: "Cluster") -> "Cluster":
        return limited([cluster], self.max_memory, self.reserve)[0]

    def of(self, placed: "Placement | DeviceMap") -> "Cluster":
        """The cluster that a placement was made for, this machine where it does not say, under its
        own limits and reserves unless `--max-memory` or `--reserve` set others; raises
        `PlacementError` where another cluster is given."""
        from gdp.cluster.types import Cluster

        question = getattr(placed, "question", None)
        machine = None if question is None else question.machine()
        if question is None or machine is None:
            return self.load()
        if self.cluster is not None:
            question.require_cluster(Cluster.load(self.cluster))
        return self._limited(machine)


def limited(
    clusters: "Iterable[Cluster]", max_memory: Sequence[str], reserve: Sequence[str]
) -> "list[Cluster]":
    """Clusters under the values of `--max-memory` and `--reserve`, each under those of the devices
    that it has; raises `ClusterError` where none has a device that is named."""
    from gdp.cluster.file import parse_max_memory, with_max_memory
    from gdp.cluster.reserve import parse_reserve, with_reserve

    clusters = list(clusters)
    for flag, texts, parse, limit in (
        ("--reserve", reserve, parse_reserve, with_reserve),
        ("--max-memory", max_memory, parse_max_memory, with_max_memory),
    ):
        with prefix_errors(flag):
            sizes = parse(",".join(texts)) if texts else {}
            own = [{key: sizes[key] for key in sizes if _has(c, key)} for c in clusters]
            if unknown := {key: sizes[key] for key in sizes if not any(key in o for o in own)}:
                limit(clusters[0], unknown)  # raises
            clusters = [limit(c, mine) for c, mine in zip(clusters, own, strict=True)]
    return clusters


def _has(cluster: "Cluster", key: str) -> bool:
    """True where a cluster has the device that a key of a limit means."""
    from gdp.cluster.types import devices_of_key

    try:
        return bool(devices_of_key(cluster, key, ""))
    except ClusterError:
        return False


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
    chains: int = option(
        "--chains",
        type=click.IntRange(min=1),
        default=1,
        help="Searches side by side, one a core; answers depend on their number.",
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
    simplicity: float = option(
        "--simplicity", type=float, metavar="PERCENT", default=2.0,
        help="Of the time, that fewer transfers and cuts may cost; 0: the best placement found.",
    )  # fmt: skip

    def search(self, progress: Callable[[float, float], None] | None = None) -> "Search":
        """The budget with the share that fewer cuts may cost, between 0 and 100 percent."""
        if not 0 <= self.simplicity < 100:
            raise ValueError(
                f"--simplicity must be at least 0 and below 100, got {self.simplicity:g}"
            )
        return replace(super().search(progress), simplicity=self.simplicity / 100)


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
        from gdp.constraints import Constraints, merge, parse_pin, read_constraints

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


destination = pass_dataclass("destination", Destination)
model, named_model = pass_dataclass("model", ModelOptions), pass_dataclass("model", NamedModel)
cluster = pass_dataclass("cluster", ClusterOptions)
search, method = pass_dataclass("search", SearchOptions), pass_dataclass("search", MethodOptions)
trained = pass_dataclass("trained", TrainedFiles)
constraints = pass_dataclass("constraints", ConstraintOptions)


def _engine(processes: int | None, ray: str | None) -> "Engine":
    from gdp.cores import num_cores
    from gdp.tasks import Engine

    return Engine(processes or num_cores(), ray)


engine = pass_one("engine", _engine, {
    "processes": click.option("--processes", type=click.IntRange(1),
                              help="On this machine; default: one a core."),
    "ray": click.option("--ray", metavar="ADDRESS",
                        help='A Ray cluster instead: HOST:PORT, "auto", or "local" for one here.'),
})  # fmt: skip
"""Processes or Ray cluster for independent tasks."""


def alone(kind: type, name: str) -> Decorator:
    """One option of a dataclass, for a command that needs no other of it."""
    (match,) = (f for f in fields(kind) if f.name == name)
    return match.metadata["option"](name)


dims, costs, seed = (
    alone(ModelOptions, "dims"), alone(TrainedFiles, "costs"), alone(SearchOptions, "seed"),
)  # fmt: skip
max_memory, reserve = alone(ClusterOptions, "max_memory"), alone(ClusterOptions, "reserve")
"""Of a command that takes several clusters: what `limited` takes."""


class ObjectiveChoice(click.Choice):
    """Objectives of the event simulator, and others; the table is imported at the first use."""

    def __init__(self, *others: str) -> None:
        super().__init__(())
        self.others = others

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the user may write."""
        from gdp.sim.objectives import link_objectives

        return (*link_objectives(), *self.others)

    @choices.setter  # click.Choice sets it
    def choices(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, _: Sequence[str]
    ) -> None: ...


objective = click.option(
    "--objective", type=ObjectiveChoice(), default="latency", show_default=True
)
own_objective = click.option(
    "--objective", type=ObjectiveChoice(), default=None,
    help="Default: the one that the placement was made for, else latency.",
)  # fmt: skip


def read_placement(path: str) -> "Placement | DeviceMap":
    """The placement or device map of a file."""
    from gdp.placement import read_placed

    return read_placed(path)


place_objective = click.option(
    "--objective", type=ObjectiveChoice("max_load"), default="latency", show_default=True,
    help="max_load: seconds per sample where devices meet in host memory and compute and "
    "transfers do not overlap.",
)  # fmt: skip


@dataclass(frozen=True)
class Asking:
    """Options of a question, apart from those of its search."""

    model: ModelOptions
    cluster: ClusterOptions
    objective: str | None  # None: latency
    trained: TrainedFiles
    constraints: ConstraintOptions

    def question(self, model: "Model | None" = None, **parts: Any) -> "Question":
        """The question with further parts; the model is loaded with its progress on stderr.

        Args:
            model: Instead of the one that was given.
            **parts: As `gdp.api.place.ask` takes them.

        Raises:
            GdpError: A file cannot be read, or a part is bad.
        """
        from gdp.api.place import ask

        return ask(
            model or self.model.spec, self.cluster.load(), load=load_with_progress,
            dims=self.model.bound(), objective=self.objective or "latency",
            costs=self.trained.costs, checkpoint=self.trained.checkpoint,
            constraints=self.constraints.read(), **parts,
        )  # fmt: skip

    @property
    def files(self) -> tuple[str | None, ...]:
        """Files that are read beside the model."""
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
        from gdp.question import question_about

        read = read_placement(placement)
        record = getattr(read, "question", None)
        if record is not None and demands is not None:
            record.require_constraints(demands)
            demands = None
        return question_about(
            read, given, self.cluster.of(read), dims=self.model.bound(), objective=self.objective,
            costs=self.costs, constraints=demands, load=load_with_progress,
        )  # fmt: skip


def about(kind: Decorator) -> Decorator:
    """Pass a command `about`, whose model is an argument or an option."""
    return pass_one("about", About, {
        "model": kind, "cluster": cluster, "objective": own_objective, "costs": costs,
    })  # fmt: skip


@dataclass(frozen=True)
class Outputs:
    """Paths that a command writes, by kind; only those asked for."""

    paths: Mapping[str, str]
    force: bool

    def require(
        self, *read: str | os.PathLike[str] | None, folder: str | None = None
    ) -> OverwritePolicy:
        """Check before the work that the paths may be written.

        Args:
            *read: Models and files that the command reads, which are never overwritten.
            folder: Kind of the path that is a folder.

        Raises:
            TargetError: if a path may not be written.
        """
        overwrite = overwrite_policy(*read, force=self.force)
        if folder is not None:
            check_folder_writable(self.paths[folder], folder, overwrite)
        taken: dict[str, str] = {}
        for kind, path in self.paths.items():
            if kind == folder:
                continue
            check_file_writable(path, kind, overwrite)
            place = os.path.realpath(path)
            if place in taken and not is_stream(path):
                raise TargetError(f"{path!r} is given for the {taken[place]} and for the {kind}")
            taken[place] = kind
        return overwrite


def overwrite_policy(*read: str | os.PathLike[str] | None, force: bool) -> OverwritePolicy:
    """Permission to overwrite, for a command that reads these models and files."""

    def sources() -> list[Path]:
        from gdp.models import source_files

        given = [os.fspath(spec) for spec in read if spec is not None]
        return [path for spec in given for path in (Path(spec), *source_files(spec))]

    return OverwritePolicy(sources, force)


def outputs(**options: Callable[..., Decorator]) -> Decorator:
    """Options of paths to write, by kind, and `--force`; passes the command `outputs`."""
    kinds = {f"write_{kind}": kind for kind in options}

    def make(force: bool, **paths: str | None) -> Outputs:
        return Outputs({kinds[name]: p for name, p in paths.items() if p is not None}, force)

    named = {name: options[kind](name) for name, kind in kinds.items()}
    return pass_one("outputs", make, named | {"force": _force})


written = functools.partial(functools.partial, click.option)
"""An option of `outputs`, whose name is still to come."""
required = functools.partial(written, "-o", "--output", required=True)
report = written("--report", metavar="R.html", help="Write an HTML report.")
trace = written("--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule.")
_force = click.option(
    "--force", is_flag=True, help="Write over, or among, files that gdp did not write."
)
as_json = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object on stdout.",
    callback=lambda context, _, value: context.meta.update({AS_JSON: value}),
)  # fmt: skip
