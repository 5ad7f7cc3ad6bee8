"""Running with and exporting to the runtimes of `gdp.targets.table`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp.api.answer import answer
from gdp.api.ask import ask
from gdp.base.errors import ArgumentError, ModelError, PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy
from gdp.base.rows import imported
from gdp.cluster.file import Machine
from gdp.costs.adapt import AdaptedCosts
from gdp.costs.base import CostModel, roofline
from gdp.costs.offload import offload_targets
from gdp.graph.op_graph import OpGraph
from gdp.importers.table import importer_of
from gdp.measure.measuring import Measuring
from gdp.measure.plan import ExecutionPlan, make_plan, too_large_alone
from gdp.measure.report import RunReport, rescaled, without_rivals
from gdp.measure.request import RunRequest
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import DIVIDED, Placed, Placement, require
from gdp.question.models import (
    HF_PREFIX,
    PYTHON_PREFIX,
    Model,
    Traceable,
    is_onnx,
    is_traced,
    source_files,
    spec_of,
    traced_model,
    with_dims,
)
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question, question_about
from gdp.question.result import Result
from gdp.sim.prediction import Prediction
from gdp.targets.table import EXPORTERS, RUNTIMES
from gdp.targets.target import ExportJob, Runtime, StartCommand


def run(
    model: Model | None,
    cluster: Machine | None = None,
    placement: Placed | None = None,
    *,
    dims: Sequence[str] = (),
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
    measuring: Measuring | None = None,
    runtime: str | None = None,
    method: str = "auto",
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """Execute a placement: predicted and measured times, the baselines, a check of the outputs.

    Args:
        model: ONNX or GGUF file, JAX function or PyTorch module; None for that of the placement.
        cluster: File, preset or `Cluster` whose devices exist on this machine; None for that of the
            placement.
        placement: Placement to execute; without one the model is placed first.
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        objective: "latency" or "throughput": the quantity that contenders compete for; None for
            that of the placement, else latency.
        costs: Cost model or file that predicts; None for those of the placement, else the shipped
            ones.
        measuring: Seconds and precision of the measurement; by default inputs are drawn with the
            seed of the search.
        runtime: Name in `RUNTIMES`; None for the first that executes such models.
        method: As in `gdp.place`, for a model without a placement; so are those below.
        search: Budget, seed and simplicity.
        checkpoint: A folder with weights of the policy.
        constraints: Demands on the placement.

    Returns:
        The fields of `gdp.measure.report.RunReport`, the cluster and the label of the costs.

    Raises:
        ModelError: if no runtime, or not the one given, executes the model.
        PlacementError: if the placement is not of the model and the cluster, or offloads weights.
        MeasurementError: if a measured rate is impossible.
    """
    sizes = with_dims(dims)
    if placement is not None:
        question, placed = question_about(
            placement, model, cluster, dims=sizes, objective=objective, costs=costs
        )
    elif model is None or cluster is None:
        raise ArgumentError("give model and cluster to run on, or a placement that remembers them")
    else:
        placed = None
        question = ask(
            model, cluster, dims=sizes, objective=objective or "latency", costs=costs,
            method=method, search=search, checkpoint=checkpoint, constraints=constraints,
        )  # fmt: skip
    if search is not None:  # whose seed draws the inputs of a given placement, too
        question = replace(question, search=search)
    return execute(question, placed, measuring, runtime)


def execute(
    question: Question,
    placed: Placement | None,
    measuring: Measuring | None = None,
    runtime: str | None = None,
) -> dict[str, Any]:
    """Execute a placement of a question, or without one the answer to it; see `run`."""
    executor = Executor.of(question, runtime)
    if placed is None:
        placed = answer(executor.question).placement
    prediction = executor.predict(placed)
    seed = question.search.seed
    report = executor.run(placed, prediction, measuring or Measuring(seed=seed))
    origin = prediction.problem.origin
    if not isinstance(origin.model, AdaptedCosts):
        report = rescaled(report)
    alone = executor.predict(replace(placed, splits=())) if placed.splits else prediction
    if note := too_large_alone(alone):
        report = without_rivals(report, note)
    return report.to_json() | {"cluster": question.cluster.name, "costs": origin.costs}


@dataclass(frozen=True, eq=False)
class Executor:
    """A runtime that executes the model of a question on its cluster."""

    question: Question  # as the runtime can follow its answer
    runtime: Runtime
    executable: Any

    @classmethod
    def of(cls, question: Question, runtime: str | None = None) -> "Executor":
        """The runtime with a name, or the first that executes the model; raises `ModelError`."""
        _require_runtime(runtime)
        model = question.graph if question.model is None else question.model
        kind, executable = executable_model(model)
        row = _runtime(model, (kind,), runtime)
        return cls(runnable(question, row), row, executable)

    def predict(self, placed: Placement, costs: CostModel | str | Path | None = None) -> Prediction:
        """The prediction of a placement by some costs, by default those of the question.

        Raises:
            PlacementError: The placement cannot be executed.
        """
        question = self.question if costs is None else replace(self.question, costs=costs)
        if offload_targets(placed.device_names):
            raise PlacementError(
                "the placement offloads weights as accelerate does, which only accelerate "
                "executes: gdp export --to accelerate"
            )
        require(placed, question.graph, question.cluster)
        if placed.splits and not self.runtime.divided:
            raise PlacementError(f"{self.runtime.title} does not execute this: {DIVIDED}")
        if placed.teams and not self.runtime.replicates:
            label = question.graph.name if question.model is None else model_label(question.model)
            raise ModelError(f"{label!r} cannot be executed so: {_replicated(placed)}")
        return prepare_placement(question, placed)

    def plan(self, prediction: Prediction) -> ExecutionPlan:
        """The segments as which the runtime executes a placement."""
        # One piece a device, as a full pipeline has, where all its ops run at one go.
        at_once = self.runtime.at_once
        return make_plan(prediction, "throughput" if at_once else self.question.objective)

    def run(
        self, placed: Placement, prediction: Prediction, measuring: Measuring, **more: Any
    ) -> RunReport:
        """Execute it; `more` are `rivals` and `baselines` of `RunRequest`."""
        question = self.question
        uncut = self.predict(replace(placed, splits=())) if placed.splits else None
        return self.runtime.run(
            RunRequest(
                self.executable, question.graph, question.cluster, placed.device, question.dims,
                question.objective, measuring, prediction, splits=placed.splits, uncut=uncut,
                **more,
            )
        )  # fmt: skip


def model_label(model: Model) -> str:
    """Name of a model in messages."""
    return model.name if isinstance(model, OpGraph | Traceable) else str(model)


def require_executable(model: Model) -> None:
    """Raise `ModelError` for a graph without anything to execute; traces nothing."""
    if not (importer_of(spec_of(model)).executables or isinstance(model, Traceable)):
        raise ModelError(
            f"{model_label(model)!r} holds a graph only; `gdp run` needs an ONNX file, a GGUF "
            "file, a JAX function or a PyTorch module"
        )


def executable_model(model: Model) -> tuple[str, Any]:
    """Kind of a model ("onnx", "gguf", "jax" or "torch"), and the object that its runtimes execute.

    Raises:
        ModelError: if the model is a graph without anything to execute.
    """
    require_executable(model)
    code = model if isinstance(model, Traceable) else traced_model(spec_of(model))
    if isinstance(code, OpGraph):
        raise ModelError(
            f"{model!r} returns a graph only; return (function, arguments) to execute it"
        )
    if isinstance(code, str):
        return importer_of(code).executables[0], code
    from gdp.importers.jax.trace import JaxModel

    return "jax" if isinstance(code, JaxModel) else "torch", code


def _require_runtime(name: str | None) -> None:
    if name is not None and name not in RUNTIMES:
        raise ArgumentError(f"no runtime {name!r}; there are {', '.join(RUNTIMES)}")


def _runtime(model: Model, kinds: Sequence[str], name: str | None) -> Runtime:
    """Row of the runtime with a name, or of the first that executes models of these kinds."""
    rows = {key: row for key, row in RUNTIMES.items() if row.executes in kinds}
    if name is not None and name not in rows:
        raise ModelError(f"{name} does not execute {model_label(model)!r}; {', '.join(rows)} does")
    return next(iter(rows.values())) if name is None else rows[name]


def runnable(question: Question, runtime: Runtime) -> Question:
    """The question restricted to answers that a runtime executes: those of its own program, if it
    has one."""
    if runtime.planner:
        question = replace(question, target=runtime.planner, method="auto")
    elif question.method == "auto":
        question = replace(question, method=runtime.method)
    if runtime.replicates:
        return question
    return replace(question, constraints=replace(question.constraints, replicas=False))


def runtime_of(model: Model, name: str | None = None) -> Runtime:
    """Row of the runtime with a name, or of the first that executes such models; of code, which is
    not traced here, the first of all that may."""
    _require_runtime(name)
    require_executable(model)
    kinds = importer_of(spec_of(model)).executables or ("jax", "torch")
    return _runtime(model, kinds, name)


def _replicated(placement: Placement) -> str:
    """Replicated stages of a placement, and the remedy, for messages."""
    groups = [", ".join(placement.device_names[d] for d in group) for group in placement.teams]
    return (
        f"{' and '.join(groups)} take samples in turn (replicated stages), which only onnxruntime "
        "executes here; place again with --no-replicas"
    )


_ACCEPTED = {
    "onnx": (is_onnx, "an ONNX model"),
    "traced": (is_traced, "python:package.module:function or hf:CONFIG"),
    "jax": (
        lambda model: spec_of(model).startswith(PYTHON_PREFIX),
        "a python:package.module:function",
    ),
    "hf": (lambda model: spec_of(model).startswith(HF_PREFIX), "hf:CONFIG"),
    "any": (lambda _: True, "a model"),
}


def export(
    placement: Placed,
    model: Model | None,
    target: str,
    output: str | Path,
    cluster: Machine | None = None,
    dims: Sequence[str] = (),
    *,
    sources: Sequence[Path] = (),
    force: bool = False,
) -> list[Path]:
    """Write the files with which a runtime executes a placement.

    Args:
        placement: Placement, result, device map, or file of one.
        model: Model that the placement is of; None for the one that it was made for.
        target: Format, a name in `EXPORTERS`.
        output: Folder to write.
        cluster: Cluster of the placement, whose kinds tell CPUs from accelerators; None for the
            one that it was made for.
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        sources: Further files that must not be overwritten.
        force: Overwrite whatever the folder holds, except the model and `sources`.

    Returns:
        The paths written.

    Raises:
        TargetError: if the folder holds anything but such an export, unless `force`, or if a
            source would be overwritten.
        ModelError: if the format cannot hold models of this kind.
        PlacementError: if the format cannot express the placement.
    """
    if target not in EXPORTERS:
        raise ArgumentError(f"no export target {target!r}; there are {', '.join(EXPORTERS)}")
    row = EXPORTERS[target]
    # Exports ask for no times, so that other costs than at the time of placing do not matter.
    question, placed = question_about(
        placement, model, cluster, dims=with_dims(dims), costs=roofline
    )
    if placed.teams and not row.replicates:
        raise PlacementError(f"target {target!r} cannot hold this placement: {_replicated(placed)}")
    if placed.splits and not row.splits:
        raise PlacementError(f"target {target!r} cannot hold this placement: {DIVIDED}")
    if offload_targets(placed.device_names) and not row.offloads:
        raise PlacementError(
            f"target {target!r} cannot hold this placement: it offloads weights as accelerate does"
        )
    asked = question.graph if question.model is None else question.model
    _require_accepted(target, asked)
    overwrite = OverwritePolicy(lambda: [*source_files(asked), *sources], force)
    return row.write(ExportJob(question, placed, Path(output), overwrite))


def start_commands(result: Result) -> list[StartCommand]:
    """Lines for a shell that start the runtime which an answer is for, as `export` writes them,
    those of GPUs that prefill first; none for runtimes without a command, and for models that no
    specification names."""
    if result.traffic is not None and result.traffic.prefill is not None:
        own = replace(result, traffic=None)
        return [*start_commands(result.traffic.prefill.result), *start_commands(own)]
    row, job = EXPORTERS.get(result.question.target or ""), export_job(result)
    if row is None or not row.commands or job is None:
        return []
    return imported(row.commands)(job)


def export_job(result: Result) -> ExportJob | None:
    """The export of an answer on the machine that was asked about: the answer's has only the memory
    that the runtime leaves. None for models that no specification names."""
    graph, model = result.question.graph, result.question.model
    record = result.placement.question
    if model is None or record is None:
        return None
    question, placed = question_about(
        result.placement, model, record.machine() or result.question.cluster, costs=roofline,
        load=lambda *_: graph,
    )  # fmt: skip
    return ExportJob(question, placed, Path(), OWN_FILES_ONLY)


def _require_accepted(target: str, model: Model) -> None:
    """Raise `ModelError` for a model of another kind than a format holds."""
    row = EXPORTERS[target]
    is_accepted, wanted = _ACCEPTED[row.accepts]
    if not is_accepted(model):
        raise ModelError(f"target {target!r} needs {wanted}, got {model_label(model)!r}")
    if row.accepts == "jax" and executable_model(model)[0] != "jax":
        raise ModelError(f"{spec_of(model)!r} is a PyTorch module; a JAX function is needed here")
