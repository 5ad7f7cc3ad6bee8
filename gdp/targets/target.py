"""One runtime: how it executes placements, how they are written for it, how they are planned.

A folder of `gdp/targets` holds all of one runtime; its `__init__.py` is the row of
`gdp.targets.table`. Rows import what they need when they are used, so that `gdp --help` is quick.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from gdp.base.errors import PlacementError, refused_by
from gdp.base.rows import imported

if TYPE_CHECKING:
    from pathlib import Path

    from gdp.base.files.writing import OverwritePolicy
    from gdp.cluster.types import Cluster
    from gdp.graph.op_graph import OpGraph
    from gdp.measure.report import RunReport
    from gdp.measure.request import RunRequest
    from gdp.placement.placement import Placement
    from gdp.question.models import Model
    from gdp.question.question import Question
    from gdp.question.result import Result


@dataclass(frozen=True)
class Runtime:
    """Execution of placements by a library."""

    title: str
    distribution: str  # that has to be installed
    executes: Literal["onnx", "jax", "torch", "gguf"]  # kind of models
    function: str  # "module:function"; takes a `RunRequest` and returns a `RunReport`
    devices: Callable[[], list[str]]  # that the library sees on this machine
    replicates: bool = False  # lets devices take samples in turn
    divided: str = ""  # as `function`, of placements whose ops several devices divide
    method: str = "auto"  # for `auto`, where only placements of another one can be executed
    planner: str = ""  # target whose placements alone can be executed; "": any
    at_once: bool = False  # runs all ops of a device at one go
    # "module:function" of (graph, cluster): a plan with a part on every device, for runtimes whose
    # own plans may leave one out for good.
    scout: str = ""
    refusals: Callable[[], tuple[type[Exception], ...]] = tuple  # that the library alone raises

    def run(self, request: "RunRequest") -> "RunReport":
        """Execute a placement.

        Raises:
            RefusedError: if the library does not execute it, for lack of memory for instance.
            ModelError: if the model does not run uncut either.
            MeasurementError: if a measured rate is impossible.
        """
        with refused_by(self.title, *self.refusals()):
            return imported(self.divided if request.splits else self.function)(request)


@dataclass(frozen=True)
class ExportJob:
    """The arguments of one export."""

    question: "Question"  # with the model, its graph and the cluster
    placement: "Placement"
    output: "Path"
    overwrite: "OverwritePolicy"

    @property
    def spec(self) -> str:
        """The model as the command line names it."""
        from gdp.question.models import spec_of

        return "" if self.question.model is None else spec_of(self.question.model)

    @property
    def plan(self) -> "tuple[OpGraph, Placement, Cluster, Path, OverwritePolicy]":
        """Positional arguments of exporters that need no model."""
        question = self.question
        return question.graph, self.placement, question.cluster, self.output, self.overwrite


class StartCommand(NamedTuple):
    """A line for a shell that starts a runtime by a placement."""

    command: str
    machine: str = ""  # where it is started, if the plan uses several
    role: str = ""  # "prefill" or "decode" of disaggregated serving


@dataclass(frozen=True)
class Exporter:
    """Files with which a runtime follows a placement."""

    title: str  # as the README lists it, without a comma
    function: str  # "module:function"; takes an `ExportJob` and returns the paths written
    accepts: Literal["onnx", "traced", "jax", "hf", "any"] = "any"  # kind of models
    offloads: bool = False  # holds weights that rest in host memory or on disk
    replicates: bool = False  # holds replicated stages
    splits: bool = False  # holds ops that devices divide
    machines: bool = False  # its runtime is started on several machines
    commands: str = ""  # "module:function" of an `ExportJob`: `StartCommand`s, for a shell

    def write(self, job: ExportJob) -> "list[Path]":
        """Write the files of a placement; returns their paths.

        Raises:
            PlacementError: Devices of several machines are used, and the runtime is one process, or
                it cannot follow the placement for another reason.
        """
        if not self.machines:
            require_one_machine(job, self.title)
        return imported(self.function)(job)


def require_one_machine(job: ExportJob, title: str) -> None:
    """Raise `PlacementError` where a placement uses devices of another machine than the host's."""
    from gdp.cluster.machines import machines

    cluster, placement = job.question.cluster, job.placement
    used = {*placement.device[~job.question.graph.is_io].tolist(), *placement.homes}
    at = machines(cluster)
    far = [d for d in sorted(used) if at[d] != at[cluster.host]]
    if far:
        raise PlacementError(
            f"{title}: one process computes it all, and {cluster.device_names[far[0]]!r} is on the "
            f"machine of {cluster.device_names[at[far[0]]]!r}; place the model on one machine, or "
            "--for llamacpp, vllm, pipelining or tensor-parallel"
        )


ONE_PROCESS = (
    "one process computes the model, so that devices of other machines than the host's are left out"
)


@dataclass(frozen=True)
class Planner:
    """Search of `gdp place --for` for placements that a runtime can follow."""

    function: str  # "module:function"; takes a `Question` and returns a `Result`
    by_module: bool = False  # whole modules, where granularity "op" is not possible
    exact: bool = False  # one program instead of a method: `--method` is refused
    offloads: bool = False  # weights may rest in host memory or on disk
    searches: bool = True  # else the options of the search (`--evaluations`, `--seed`) are refused
    computes: str = ""  # "module:function" of (model, cluster): the model as it computes it
    replicates: bool = False  # lets devices take samples in turn; as the exporter says
    divides: bool = False  # lets devices compute each op together
    machines: bool = False  # uses several machines; as the exporter says

    def plan(self, question: "Question") -> "Result":
        """Answer a question, with replicated stages only where the runtime has them, and on the
        host's machine alone where it is one process."""
        from gdp.cluster.machines import on_hosts_machine, several_machines

        if not self.replicates:
            one = replace(question.constraints, replicas=False)
            question = replace(question, constraints=one)
        if self.machines or not several_machines(question.cluster):
            return imported(self.function)(question)
        alone = replace(question, cluster=on_hosts_machine(question.cluster))
        result = imported(self.function)(alone)
        return replace(result, notes=(*result.notes, ONE_PROCESS))

    def model(self, model: "Model", cluster: "Cluster") -> "Model":
        """The model as the runtime computes it on a cluster, where its ops are others."""
        return imported(self.computes)(model, cluster) if self.computes else model


@dataclass(frozen=True)
class Target:
    """A runtime; a part that it lacks is None."""

    name: str  # on the command line
    runtime: Runtime | None = None  # `gdp run`
    exporter: Exporter | None = None  # `gdp export --to`
    planner: Planner | None = None  # `gdp place --for`
    scheduler: str = ""  # "module:class" of the `gdp.sim.scheduling.Scheduler` that serves traffic
    measured: tuple[str, ...] = ()  # "module:reader" of the files that its benchmarks write
    # "module:function" of (`ExportJob`, `Traffic` or None, `Path`): the line for a shell that
    # measures this traffic, or the request of the job, and writes such a file.
    benchmark: str = ""
