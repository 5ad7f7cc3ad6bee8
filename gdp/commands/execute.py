"""Planning for, running with and exporting to the runtimes of `gdp.commands.registry`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from gdp import api
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.commands.accelerate import PlannedPlacement, cluster_with_offload, whole_modules
from gdp.commands.code_models import (
    executable_model,
    model_label,
    require_executable,
    torch_module,
)
from gdp.commands.registry import EXPORTERS, PLANNING_TARGETS, RUNTIMES, ExportJob, Runtime
from gdp.constraints import Constraints
from gdp.costs.adapt import AdaptedCosts
from gdp.costs.base import CostModel
from gdp.costs.offload import offload_targets, resident
from gdp.errors import ModelError, PlacementError, of_kind
from gdp.files.writing import OverwritePolicy
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import (
    PYTHON_PREFIX,
    Model,
    is_onnx,
    is_traced,
    load,
    source_files,
    spec_of,
    with_dims,
)
from gdp.placement import Placed, Placement, load_placement, require
from gdp.prepare import PreparedProblem, machine_of, prepare_placement, room_bytes
from gdp.runtime.measure import Measuring
from gdp.runtime.plan import ExecutionPlan, Prediction, make_plan
from gdp.runtime.report import RunReport, rescaled


class Placing(TypedDict, total=False):
    """Options of `gdp.place` for a model that `run` places first."""

    method: str
    search: Search
    checkpoint: str | Path | None
    constraints: Constraints | None


def run(
    model: Model,
    cluster: Machine,
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
        model: ONNX file, JAX function or PyTorch module.
        cluster: File, preset or `Cluster` whose devices exist on this machine.
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
        The fields of `gdp.runtime.report.RunReport`, the cluster and the label of the costs.

    Raises:
        ModelError: if no runtime, or not the one given, executes the model.
        PlacementError: if the placement is not of the model and the cluster, or offloads weights.
        MeasurementError: if a measured rate is impossible.
    """
    if unknown := placing.keys() - Placing.__annotations__:
        raise TypeError(f"run() got unexpected keywords: {', '.join(sorted(unknown))}")
    bound = with_dims(dims)
    cluster = load_cluster(cluster)
    if graph is None:
        room = None if placement is not None else room_bytes(cluster, placing.get("constraints"))
        graph = load(model, bound, room_bytes=room)
    executor = Executor.of(model, graph, cluster, objective, bound, runtime)
    if placement is not None:
        placed = load_placement(placement)
    else:
        options = runnable(model, placing, runtime)
        placed = api.place(graph, cluster, objective=objective, costs=costs, **options).placement
    ready = executor.prepare(placed, costs)
    seed = placing.get("search", Search()).seed
    report = executor.run(placed, ready, measuring or Measuring(seed=seed))
    if not isinstance(ready.prepared.model, AdaptedCosts):
        report = rescaled(report)
    return report.to_json() | {"cluster": cluster.name, "costs": ready.prepared.costs}


@dataclass(frozen=True)
class ReadyPlacement:
    """A placement with what predicts it."""

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
    options: Mapping[str, Any]  # of the runtime's function, of this model

    @classmethod
    def of(
        cls, model: Model, graph: OpGraph, cluster: Cluster, objective: str,
        dims: Mapping[str, int], runtime: str | None = None,
    ) -> "Executor":  # fmt: skip
        """The runtime with a name, or the first that executes the model; raises `ModelError`."""
        _require_runtime(runtime)
        kind, executable = executable_model(model)
        row = _runtime(model, (kind,), runtime)
        options = {"dims": dims} if kind == "onnx" else {}
        return cls(model, graph, cluster, objective, row, executable, options)

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
        """Execute it; `more` are `rivals` and `baselines` of `gdp.runtime.ort.run.run_onnx`."""
        return self.runtime.run(
            self.executable, self.graph, self.cluster, placed.device, objective=self.objective,
            measuring=measuring, predict=ready.prediction, **more, **self.options,
        )  # fmt: skip


def _require_runtime(name: str | None) -> None:
    if name is not None and name not in RUNTIMES:
        raise ValueError(f"no runtime {name!r}; there are {', '.join(RUNTIMES)}")


def _runtime(model: Model, kinds: Sequence[str], name: str | None) -> Runtime:
    """Row of the runtime with a name, or of the first that executes models of these kinds."""
    rows = {row.name: row for row in RUNTIMES.values() if row.executes in kinds}
    if name is not None and name not in rows:
        raise ModelError(f"{name} does not execute {model_label(model)!r}; {', '.join(rows)} does")
    return next(iter(rows.values())) if name is None else rows[name]


def runnable(model: Model, placing: Placing, runtime: str | None = None) -> Placing:
    """Options under which `gdp.place` returns placements that the model's runtime executes."""
    _require_runtime(runtime)
    require_executable(model)
    # Code is not traced here: which runtime of it is the right one is known later.
    row = _runtime(model, ("onnx",) if is_onnx(model) else ("jax", "torch"), runtime)
    if placing.get("method", "auto") == "auto":
        placing = {**placing, "method": row.method}
    if row.replicates:
        return placing
    constraints = of_kind(placing.get("constraints"), Constraints, "constraints")
    return {**placing, "constraints": replace(constraints, replicas=False)}


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
    "python": (
        lambda model: spec_of(model).startswith(PYTHON_PREFIX),
        "a python:package.module:function",
    ),
    "any": (lambda _: True, "a model"),
}


def export(
    placement: Placed,
    model: Model,
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
        placement: Placement, result, or file of a placement.
        model: Model that the placement is of.
        target: Format, a name in `EXPORTERS`.
        output: Folder to write.
        cluster: Cluster of the placement, for formats that tell CPUs from accelerators.
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
    bound = with_dims(dims)
    graph, placement, output = load(model, bound), load_placement(placement), Path(output)
    if target not in EXPORTERS:
        raise ValueError(f"no export target {target!r}; there are {', '.join(EXPORTERS)}")
    row = EXPORTERS[target]
    if placement.teams and not row.replicates:
        raise PlacementError(
            f"target {target!r} cannot hold this placement: {_replicated(placement)}"
        )
    if row.needs_cluster and cluster is None:
        raise ValueError(
            f"target {target!r} needs the cluster, which tells CPUs from accelerators: --cluster"
        )
    cluster = _cluster_by_names(graph, placement) if cluster is None else load_cluster(cluster)
    if row.offloads:
        cluster = machine_of(placement, cluster, None)[0]
    require(placement, graph, cluster)
    is_accepted, wanted = _ACCEPTED[row.accepts]
    if not is_accepted(model):
        raise ModelError(f"target {target!r} needs {wanted}, got {model_label(model)!r}")
    overwrite = OverwritePolicy(lambda: [*source_files(model), *sources], force)
    return row.write(ExportJob(model, graph, placement, cluster, output, bound, overwrite))


def _cluster_by_names(graph: OpGraph, placement: Placement) -> Cluster:
    """A cluster without speeds, which exporters do not need, of the placement's device names; its
    host is where the model's inputs are."""
    same_graph = placement.op_names == graph.op_names
    homes = placement.device[graph.is_io] if same_graph else placement.device[:0]
    names = placement.device_names
    # Replicas are of one kind, whichever.
    kinds = {d: names[group[0]] for group in placement.teams for d in group}
    devices = [
        Device(name, kinds.get(d, name), {"default": 1.0}, 1.0) for d, name in enumerate(names)
    ]
    return make_cluster("placement", devices, host=int(homes[0]) if len(homes) else 0)


def memory_for(
    target: str | None,
    cluster: Cluster,
    offload: str | None = None,
    constraints: Constraints | None = None,
) -> int:
    """Bytes that weights may take on a cluster in placements for a planning target."""
    if target is None:
        return room_bytes(cluster, constraints)
    cluster = for_runtime(cluster, target)
    if PLANNING_TARGETS[target].offloads and offload != "none":
        return room_bytes(cluster_with_offload(cluster, offload), constraints)
    return room_bytes(resident(cluster), constraints)


def place_for(
    target: str | None,
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Model | None = None,
    granularity: str | None = None,
    offload: str | None = None,
    **placing: Any,
) -> PlannedPlacement:
    """Place a graph by `gdp.place`, or by the program of a planning target.

    Args:
        target: Name in `PLANNING_TARGETS`; None for no restriction.
        graph: Graph to place.
        cluster: Cluster to place it on.
        model: Spec of the model, which names the modules that may not be split.
        granularity: Pieces that stay whole: "op", "module" or "layer"; by default that of the
            target.
        offload: "cpu", "disk" or "none": where weights rest that do not fit; for accelerate.
        **placing: Options of `gdp.place`.
    """
    row = None if target is None else PLANNING_TARGETS[target]
    cluster = cluster if target is None else for_runtime(cluster, target)
    granularity = granularity or ("module" if row is not None and row.by_module else "op")
    if row is not None and row.by_module and granularity == "op":
        raise ValueError(f"{target} goes by whole modules: granularity module or layer")
    module = torch_module(model) if granularity != "op" else None
    whole = whole_modules(module, graph, granularity)
    if row is None:
        constraints = of_kind(placing.pop("constraints", None), Constraints, "constraints")
        constraints = replace(constraints, whole=(*constraints.whole, *whole))
        result = api.place(graph, cluster, constraints=constraints, **placing)
        return PlannedPlacement(result, cluster, placing.get("costs"))
    if row.exact and placing.get("method", "auto") != "auto":
        raise ValueError(f"--for {target} is planned by one program, not by {placing['method']!r}")
    return row.plan(
        graph, cluster, model=model, module=module, whole=whole, offload=offload, **placing
    )
