"""Values of the shared options of a command, and the question that they ask."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdp.base.errors import ArgumentError, ClusterError, GdpError
from gdp.base.files.writing import (
    OverwritePolicy,
    TargetError,
    check_file_writable,
    check_folder_writable,
    is_stream,
    is_written_by_gdp,
)
from gdp.cli.show import reporting_stages
from gdp.targets.table import PLANNERS

if TYPE_CHECKING:
    from gdp.cluster.types import Cluster
    from gdp.methods.base import Search
    from gdp.placement.constraints import Constraints, Pin
    from gdp.placement.device_maps import DeviceMap
    from gdp.placement.placement import Placement
    from gdp.question.question import Question

NO_BACKEND = "--backend is of llama.cpp alone: it is for .gguf models, leave it out for others"
_SEARCHES = (
    "seconds", "evaluations", "seed", "chains", "method", "simplicity", "checkpoint",
)  # fmt: skip
"""Options of searches and of the policy."""


@dataclass(frozen=True)
class Asking:
    """Values of the lists of `gdp.cli.options`; those that a command lacks are as if not given."""

    spec: str = ""
    dims: tuple[str, ...] = ()
    task: str | None = None
    batch: int | None = None
    sequence: int | None = None
    decode: bool = False
    generate: Mapping[str, int] | None = None
    context: int | str | None = None
    quantize: str | None = None
    mmproj: str | None = None
    image: int | str | None = None

    cluster: str | None = None
    max_memory: tuple[Mapping[str, int], ...] = ()
    reserve: tuple[Mapping[str, int], ...] = ()
    backend: str | None = None
    power_limit: tuple[Mapping[str, float], ...] = ()

    objective: str | None = None  # None: that of a placement, else latency
    checkpoint: str | None = None
    costs: str | None = None
    pins: "tuple[Pin, ...]" = ()
    forbid: "tuple[Pin, ...]" = ()
    together: tuple[str, ...] = ()
    constraints: str | None = None
    no_replicas: bool = False

    seconds: float = 5.0
    evaluations: int | None = None
    seed: int = 0
    chains: int | None = None
    method: str = "auto"
    simplicity: float | None = None

    target: str | None = None
    granularity: str | None = None
    offload: str | None = None

    @functools.cached_property
    def model(self) -> str | None:
        """The spec of the model with its options; None where `--model` was left out."""
        from gdp.importers.spec import ModelSpec
        from gdp.question.models import spec_of, with_options

        options = {name: getattr(self, name) for name in _OF_MODEL}
        if not self.spec:
            if any(options.values()) or self.dims or self.generate or self.context:
                raise click.UsageError("options of a model need --model")
            return None
        if self.generate is not None:
            self._require_generating()
        elif self.context is not None:
            raise click.UsageError(
                "--context is for a whole request: give --generate, too; requests of --traffic say "
                "their tokens themselves"
            )
        try:
            spec = with_options(self.spec, **options)
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        if self.generate is not None:
            context = {} if self.context is None else {"context": self.context}
            spec = ModelSpec.of(spec).having(**self.generate, **context)
        return spec_of(spec)

    def _require_generating(self) -> None:
        from gdp.question.models import HF_PREFIX, is_gguf

        if not (self.spec.startswith(HF_PREFIX) or is_gguf(self.spec)):
            raise click.UsageError(
                f"--generate is for hf:CONFIG and .gguf models, not for {self.spec!r}"
            )
        beside = ("sequence", "batch", "decode")
        if name := next((name for name in beside if getattr(self, name)), None):
            raise click.UsageError(f"--generate says all tokens and the batch: leave out --{name}")

    @property
    def is_placement(self) -> bool:
        """True where the argument is a placement's file, which remembers its model."""
        path = Path(self.spec)
        return path.is_file() and is_written_by_gdp(path, "placement")

    @property
    def holds_models(self) -> bool:
        """True where the argument is a TOML file of several models."""
        if not self.spec.endswith(".toml"):
            return False
        from gdp.api.box.models import holds_models

        return holds_models(self.spec)

    @property
    def makes_media(self) -> bool:
        """True where the argument is a pipeline that makes images or videos."""
        if not self.spec.startswith(("hf:", "diffusers:")):
            return False
        from gdp.importers.diffusers.spec import is_pipeline

        return is_pipeline(self.spec)

    def beside(self, placement: str | None) -> tuple[str | None, str]:
        """Spec and placement of a verb with the arguments MODEL PLACEMENT, of which the first may
        be left out where the placement's file remembers it."""
        model = self.model
        if placement is not None:
            return model, placement
        if not self.is_placement:
            raise click.UsageError(f"{model!r} is no placement: give MODEL PLACEMENT")
        return None, self.spec

    def machine(self, placed: "Placement | DeviceMap | None" = None) -> "Cluster":
        """The cluster of a file or preset, of a placement, or this machine, under the limits of
        `--max-memory` and `--reserve`; raises `PlacementError` for another one than a placement's.
        """
        from gdp.cluster.types import Cluster

        record = getattr(placed, "question", None)
        machine = None if record is None else record.machine()
        if record is None or machine is None:
            machine = Cluster.load(self.cluster)
        elif self.cluster is not None:
            record.require_cluster(Cluster.load(self.cluster))
        return limited([machine], self.max_memory, self.reserve, self.backend, self.power_limit)[0]

    def demands(self) -> "Constraints":
        """The rules of the file, then those of the flags."""
        from gdp.placement.constraints import Constraints, merge, read_constraints

        flags = Constraints(self.pins, self.forbid, self.together, not self.no_replicas)
        file = self.constraints
        return merge([flags] if file is None else [read_constraints(file), flags])

    def search(self, progress: Callable[[float, float], None] | None = None) -> "Search":
        """The search budget; `progress` gets the share of it that is used and the best value."""
        from gdp.methods.base import Search

        percent = self.simplicity
        if percent is not None and not 0 <= percent < 100:
            raise ValueError(f"--simplicity must be at least 0 and below 100, got {percent:g}")
        try:
            search = Search(
                self.seed, self.seconds, self.evaluations, chains=self.chains, progress=progress
            )
        except ValueError as error:  # begins with the field, which the option is called by
            raise ValueError(f"--{error}") from None
        return search if percent is None else replace(search, simplicity=percent / 100)

    @property
    def files(self) -> tuple[str | None, ...]:
        """Files read in addition to the model."""
        return self.cluster, self.checkpoint, self.costs, self.constraints

    def parts(self) -> dict[str, Any]:
        """The question without its model and search, as the arguments of `gdp.api.ask`."""
        from gdp.question.models import is_gguf, with_dims

        if self.backend is not None and not is_gguf(self.spec):
            raise click.UsageError(NO_BACKEND)
        self._require_search()
        return {
            "cluster": self.machine(), "dims": with_dims(self.dims),
            "objective": self.objective or "latency", "costs": self.costs,
            "checkpoint": self.checkpoint, "constraints": self.demands(), "method": self.method,
            "target": self.target, "granularity": self.granularity, "offload": self.offload,
        }  # fmt: skip

    def question(self, **parts: Any) -> "Question":
        """The question with further parts; the model is loaded with its progress on stderr."""
        from gdp.api.ask import ask

        with reporting_stages():
            return ask(self.model or "", **self.parts(), **parts)

    def about(
        self, placement: str, model: str | None, demands: "Constraints | None" = None
    ) -> "tuple[Question, Placement]":
        """The question that the file of a placement answers, and the placement.

        Args:
            placement: The file.
            model: Spec of the model; None for that of the placement.
            demands: Constraints that have to be those of the placement, or none.

        Raises:
            PlacementError: Other demands are given than the placement was made with.
        """
        from gdp.placement.placement import read_placed
        from gdp.question.models import with_dims
        from gdp.question.question import question_about

        read = read_placed(placement)
        record = getattr(read, "question", None)
        if record is not None and demands is not None:
            record.require_constraints(demands)
            demands = None
        with reporting_stages():
            question, placed = question_about(
                read, model, self.machine(read), dims=with_dims(self.dims),
                objective=self.objective, costs=self.costs, constraints=demands,
            )  # fmt: skip
        if self.backend is not None and question.graph.source != "gguf":
            raise click.UsageError(NO_BACKEND)
        return question, placed

    def _require_search(self) -> None:
        """Raise `UsageError` for options of a search where the runtime is planned without one."""
        context = click.get_current_context()
        if self.target is None or PLANNERS[self.target].searches:
            return
        for name in _SEARCHES:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--for {self.target} is planned without a search: leave out --{name}"
                )


_OF_MODEL = ("task", "batch", "sequence", "quantize", "mmproj", "image", "decode")
"""Fields that are options of a model."""


def limited(
    clusters: "Iterable[Cluster]", max_memory: Sequence[Mapping[str, int]],
    reserve: Sequence[Mapping[str, int]], backend: str | None = None,
    power_limit: Sequence[Mapping[str, float]] = (),
) -> "list[Cluster]":  # fmt: skip
    """Clusters under the values of `--max-memory`, `--reserve`, `--backend`, `--power-limit`, each
    under those of its devices; raises `ClusterError` where none has a device that is named."""
    from gdp.cluster.file import with_backend, with_max_memory, with_power_limit
    from gdp.cluster.reserve import with_reserve

    clusters = list(clusters)
    for flag, given, limit in (
        ("--reserve", reserve, with_reserve), ("--max-memory", max_memory, with_max_memory),
        ("--power-limit", power_limit, with_power_limit),
    ):  # fmt: skip
        sizes: dict[str, Any] = {key: size for part in given for key, size in part.items()}
        with _prefix_errors(flag):
            own = [{key: sizes[key] for key in sizes if _has(c, key)} for c in clusters]
            if unknown := {key: sizes[key] for key in sizes if not any(key in o for o in own)}:
                limit(clusters[0], unknown)  # raises
            clusters = [limit(c, mine) for c, mine in zip(clusters, own, strict=True)]
    with _prefix_errors("--backend"):
        return [with_backend(c, backend) for c in clusters]


def _has(cluster: "Cluster", key: str) -> bool:
    """True where a cluster has the device that a key of a limit means."""
    from gdp.cluster.types import devices_of_key

    try:
        return bool(devices_of_key(cluster, key, ""))
    except ClusterError:
        return False


@contextlib.contextmanager
def _prefix_errors(flag: str) -> Iterator[None]:
    """Begin errors about the value of an option with its name."""
    try:
        yield
    except (GdpError, ValueError) as error:
        raise type(error)(f"{flag}: {error}") from None


def require_writable(
    force: bool, *read: str | os.PathLike[str] | None, folder: str | None = None,
    **paths: str | None,
) -> OverwritePolicy:  # fmt: skip
    """Check before the work that paths may be written.

    Args:
        force: Whatever they hold.
        *read: Models and files that the command reads, which are never overwritten.
        folder: Kind of the path that is a folder.
        **paths: The paths by kind; None is not written.

    Raises:
        TargetError: if a path may not be written.
    """

    def sources() -> list[Path]:
        from gdp.question.models import source_files

        given = [os.fspath(spec) for spec in read if spec]
        return [path for spec in given for path in (Path(spec), *source_files(spec))]

    overwrite, taken = OverwritePolicy(sources, force), dict[str, str]()
    for kind, path in paths.items():
        if path is None:
            continue
        if kind == folder:
            check_folder_writable(path, kind, overwrite)
            continue
        check_file_writable(path, kind, overwrite)
        place = os.path.realpath(path)
        if place in taken and not is_stream(path):
            raise TargetError(f"{path!r} is given for the {taken[place]} and for the {kind}")
        taken[place] = kind
    return overwrite
