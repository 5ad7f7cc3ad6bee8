"""Running with and exporting to the runtimes of `gdp.targets.table`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gdp import solve
from gdp.cluster.file import Machine
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.adapt import AdaptedCosts
from gdp.costs.base import CostModel
from gdp.costs.offload import offload_targets
from gdp.errors import ArgumentError, ModelError, PlacementError, of_kind
from gdp.files.writing import OverwritePolicy
from gdp.graph.op_graph import OpGraph
from gdp.importers.table import importer_of
from gdp.measure.measuring import Measuring
from gdp.measure.plan import ExecutionPlan, Prediction, make_plan
from gdp.measure.report import RunReport, rescaled
from gdp.measure.request import RunRequest
from gdp.methods.base import Search
from gdp.models import (
    HF_PREFIX,
    PYTHON_PREFIX,
    Model,
    Traceable,
    is_onnx,
    is_traced,
    load,
    source_files,
    spec_of,
    traced_model,
    with_dims,
)
from gdp.placement import Placed, Placement, placement_on, read_placed, require
from gdp.prepare import PreparedProblem, asked_of, machine_of, prepare_placement, room_bytes
from gdp.result import Result
from gdp.targets.table import (
    EXPORTERS,
    PLANNING_TARGETS,
    RUNTIMES,
    Exporter,
    ExportJob,
    Runtime,
)

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.pytorch.model import TorchModel


class Placing(TypedDict, total=False):
    """Options of `gdp.place` for a model that `run` places first."""

    method: str
    search: Search
    checkpoint: str | Path | None
    constraints: Constraints | None


def run(
    model: Model | None,
    cluster: Machine | None = None,
    placement: Placed | None = None,
    *,
    dims: Sequence[str] = (),
    objective: str = "latency",
    costs: CostModel | str | Path | None = None,
    measuring: Measuring | None = None,
    runtime: str | None = None,
    graph: OpGraph | None = None,
    **placing: Unpack[Placing],
) -> dict[str, Any]:
    """Execute a placement: predicted and measured times, the baselines, a check of the outputs.

    Args:
        model: ONNX or GGUF file, JAX function or PyTorch module; None for that of the placement.
        cluster: File, preset or `Cluster` whose devices exist on this machine; None for that of the
            placement.
        placement: Placement to execute; without one the model is placed first.
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        objective: "latency" or "throughput": the quantity that contenders compete for.
        costs: Cost model or file that predicts; None for the shipped one.
        measuring: Seconds and precision of the measurement; by default inputs are drawn with the
            seed of the search.
        runtime: Name in `RUNTIMES`; None for the first that executes such models.
        graph: Graph of the model, where it has been loaded already.
        **placing: Options of `gdp.place` for a model without a placement.

    Returns:
        The fields of `gdp.measure.report.RunReport`, the cluster and the label of the costs.

    Raises:
        ModelError: if no runtime, or not the one given, executes the model.
        PlacementError: if the placement is not of the model and the cluster, or offloads weights.
        MeasurementError: if a measured rate is impossible.
    """
    if unknown := placing.keys() - Placing.__annotations__:
        raise TypeError(f"run() got unexpected keywords: {', '.join(sorted(unknown))}")
    placed = None if placement is None else read_placed(placement)
    model, bound, machine = asked_of(placed, model, cluster, with_dims(dims))
    if machine is None:
        raise ArgumentError("give the cluster to run on, or a placement that remembers it")
    if costs is None and isinstance(placed, Placement) and placed.question is not None:
        costs = placed.question.require_costs()
    if graph is None:
        room = None if placed is not None else room_bytes(machine, placing.get("constraints"))
        graph = load(model, bound, room_bytes=room)
    executor = Executor.of(model, graph, machine, objective, bound, runtime)
    if placed is not None:
        placed = placement_on(placed, graph, machine)
    else:
        options = runnable(model, placing, runtime)
        placed = executor.place(costs, options).placement
    ready = executor.prepare(placed, costs)
    seed = placing.get("search", Search()).seed
    report = executor.run(placed, ready, measuring or Measuring(seed=seed))
    if not isinstance(ready.prepared.model, AdaptedCosts):
        report = rescaled(report)
    return report.to_json() | {"cluster": machine.name, "costs": ready.prepared.costs}


@dataclass(frozen=True)
class ReadyPlacement:
    """A placement with its prediction's problem."""

    prediction: Prediction
    prepared: PreparedProblem


@dataclass(frozen=True, eq=False)
class Executor:
    """A model that a runtime executes on a cluster."""

    model: Model
    graph: OpGraph
    cluster: Cluster
    objective: str
    runtime: Runtime
    executable: Any
    dims: Mapping[str, int]  # sizes of symbolic dimensions

    @classmethod
    def of(
        cls, model: Model, graph: OpGraph, cluster: Cluster, objective: str,
        dims: Mapping[str, int], runtime: str | None = None,
    ) -> "Executor":  # fmt: skip
        """The runtime with a name, or the first that executes the model; raises `ModelError`."""
        _require_runtime(runtime)
        kind, executable = executable_model(model)
        row = _runtime(model, (kind,), runtime)
        return cls(model, graph, cluster, objective, row, executable, dims)

    def place(self, costs: CostModel | str | Path | None, placing: Placing) -> Result:
        """A placement that the runtime executes."""
        return place_runnable(
            self.graph, self.cluster, self.runtime, self.objective, costs, placing
        )

    def prepare(self, placed: Placement, costs: CostModel | str | Path | None) -> ReadyPlacement:
        """The prediction of a placement; raises `PlacementError` where it cannot be executed."""
        if offload_targets(placed.device_names):
            raise PlacementError(
                "the placement offloads weights as accelerate does, which only accelerate "
                "executes: gdp export --to accelerate"
            )
        require(placed, self.graph, self.cluster)
        if placed.teams and not self.runtime.replicates:
            label = model_label(self.model)
            raise ModelError(f"{label!r} cannot be executed so: {_replicated(placed)}")
        prepared, device, _ = prepare_placement(
            self.graph, placed, self.cluster, self.objective, costs=costs
        )
        prediction = Prediction(prepared.problem, device, prepared.group_of, placed.teams)
        return ReadyPlacement(prediction, prepared)

    def plan(self, ready: ReadyPlacement) -> ExecutionPlan:
        """The segments as which the runtime executes a placement."""
        # HETERO runs all of a device's ops at one go, as a full pipeline does.
        at_once = self.runtime.name == "openvino"
        return make_plan(ready.prediction, "throughput" if at_once else self.objective)

    def run(
        self, placed: Placement, ready: ReadyPlacement, measuring: Measuring, **more: Any
    ) -> RunReport:
        """Execute it; `more` are `rivals` and `baselines` of `RunRequest`."""
        return self.runtime.run(
            RunRequest(
                self.executable, self.graph, self.cluster, placed.device, self.dims, self.objective,
                measuring, ready.prediction, **more,
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


def executable_model(model: Model) -> "tuple[str, str | JaxModel | TorchModel]":
    """Kind of a model ("onnx", "gguf", "jax" or "torch"), and what runtimes of it execute.

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
    rows = {row.name: row for row in RUNTIMES.values() if row.executes in kinds}
    if name is not None and name not in rows:
        raise ModelError(f"{name} does not execute {model_label(model)!r}; {', '.join(rows)} does")
    return next(iter(rows.values())) if name is None else rows[name]


def runnable(model: Model, placing: Placing, runtime: str | None = None) -> Placing:
    """Options under which `gdp.place` returns placements that the model's runtime executes."""
    row = runtime_of(model, runtime)
    if placing.get("method", "auto") == "auto":
        placing = {**placing, "method": row.method}
    if row.replicates:
        return placing
    constraints = of_kind(placing.get("constraints"), Constraints, "constraints")
    return {**placing, "constraints": replace(constraints, replicas=False)}


def runtime_of(model: Model, name: str | None = None) -> Runtime:
    """Row of the runtime with a name, or of the first that executes such models; of code, which is
    not traced here, the first of all that may."""
    _require_runtime(name)
    require_executable(model)
    kinds = importer_of(spec_of(model)).executables or ("jax", "torch")
    return _runtime(model, kinds, name)


def place_runnable(
    graph: OpGraph, cluster: Cluster, runtime: Runtime, objective: str,
    costs: CostModel | str | Path | None, placing: Placing,
) -> Result:  # fmt: skip
    """A placement that a runtime executes: `solve.place`, or the program of its planning target."""
    if not runtime.target:
        return solve.place(graph, cluster, objective=objective, costs=costs, **placing)
    return (
        PLANNING_TARGETS[runtime.target]
        .plan(
            graph, cluster, objective=objective, costs=costs, constraints=placing.get("constraints")
        )
        .result
    )


def _replicated(placement: Placement) -> str:
    """Replicated stages of a placement, and the way out, for messages."""
    groups = [", ".join(placement.device_names[d] for d in group) for group in placement.teams]
    return (
        f"{' and '.join(groups)} take samples in turn (replicated stages), which only onnxruntime "
        "does here; place again with --no-replicas"
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
    output, placed = Path(output), read_placed(placement)
    if target not in EXPORTERS:
        raise ArgumentError(f"no export target {target!r}; there are {', '.join(EXPORTERS)}")
    row = EXPORTERS[target]
    model, bound, machine = asked_of(placed, model, cluster, with_dims(dims))
    graph = load(model, bound)
    if machine is None:
        raise ArgumentError(
            f"target {target!r} needs the cluster, which tells CPUs from accelerators: --cluster"
        )
    placement = placement_on(placed, graph, machine)
    if placement.teams and not row.replicates:
        raise PlacementError(
            f"target {target!r} cannot hold this placement: {_replicated(placement)}"
        )
    if row.offloads:
        machine = machine_of(placement, machine, None)[0]
    require(placement, graph, machine)
    _require_accepted(row, model)
    overwrite = OverwritePolicy(lambda: [*source_files(model), *sources], force)
    return row.write(ExportJob(model, graph, placement, machine, output, bound, overwrite))


def _require_accepted(row: Exporter, model: Model) -> None:
    """Raise `ModelError` for a model of another kind than a format holds."""
    is_accepted, wanted = _ACCEPTED[row.accepts]
    if not is_accepted(model):
        raise ModelError(f"target {row.name!r} needs {wanted}, got {model_label(model)!r}")
    if row.accepts == "jax" and executable_model(model)[0] != "jax":
        raise ModelError(f"{spec_of(model)!r} is a PyTorch module; a JAX function is needed here")
