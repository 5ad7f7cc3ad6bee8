"""Running and exporting placements: what `gdp run` and `gdp export` call."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gdp import api
from gdp.cluster.load import Machine, load_cluster
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.offload import offload_targets
from gdp.errors import ModelError, PlacementError, of_kind
from gdp.files.targets import Permit
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import (
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
from gdp.placement import Placed, Placement, load_placement, require
from gdp.posed import machine_of, posed_placement, room_bytes
from gdp.runtime.measure import Measuring
from gdp.runtime.prediction import Prediction

if TYPE_CHECKING:
    from gdp.importers.jax.model import JaxModel
    from gdp.runtime.report import RunReport


class Placing(TypedDict, total=False):
    """What `gdp.api.place` takes beside the question."""

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
    """Execute a placement (made first as `placing` says where none is given): predicted beside
    measured times, the baselines of the same run, and whether outputs equal the uncut model's.
    Without `measuring`, inputs are drawn with the seed of the search; without `runtime` (of
    `RUNTIMES`), the first that executes such models. `graph` is that of the model, where it
    has been loaded already."""
    if unknown := placing.keys() - Placing.__annotations__:
        raise TypeError(f"run() got unexpected keywords: {', '.join(sorted(unknown))}")
    bound = with_dims(dims)
    cluster = load_cluster(cluster)
    if graph is None:
        room = None if placement is not None else room_bytes(cluster, placing.get("constraints"))
        graph = load(model, bound, room_bytes=room)
    runner = _runner(model, runtime)
    if placement is not None:
        placed = load_placement(placement)
    else:
        how = runnable(model, placing, runtime)
        placed = api.place(graph, cluster, objective=objective, costs=costs, **how).placement
    if offload_targets(placed.device_names):
        raise PlacementError(
            "the placement offloads weights as accelerate does, which only accelerate executes: "
            "gdp export --to accelerate"
        )
    require(placed, graph, cluster)
    if placed.teams and runner not in REPLICATING:
        raise ModelError(f"{_label(model)!r} cannot be executed so: {_in_turn(placed)}")
    posed, device, _ = posed_placement(graph, placed, cluster, objective, costs=costs)
    report = runner(
        model, graph, cluster, placed.device, dims=bound, objective=objective,
        measuring=measuring or Measuring(seed=placing.get("search", Search()).seed),
        predict=Prediction(posed.problem, device, posed.group_of, placed.teams),
    )  # fmt: skip
    return report.to_json() | {"cluster": cluster.name, "costs": posed.costs}


def _runner(model: Model, runtime: str | None) -> Callable[..., "RunReport"]:
    if runtime is not None and runtime not in RUNTIMES:
        raise ValueError(f"no runtime {runtime!r}; there are {', '.join(RUNTIMES)}")
    can = {name: execute for name, (has, execute) in RUNTIMES.items() if has(model)}
    if not can:
        raise ModelError(
            f"{_label(model)!r} holds a graph only; `gdp run` needs an ONNX file, "
            "a JAX function or a PyTorch module"
        )
    if runtime is not None and runtime not in can:
        raise ModelError(f"{runtime} does not execute {_label(model)!r}; {', '.join(can)} does")
    return next(iter(can.values())) if runtime is None else can[runtime]


def runnable(model: Model, placing: Placing, runtime: str | None = None) -> Placing:
    """The same for a placement that the model's runtime can execute."""
    if _runner(model, runtime) in REPLICATING:
        return placing
    constraints = of_kind(placing.get("constraints"), Constraints, "constraints")
    return {**placing, "constraints": replace(constraints, replicas=False)}


def _run_onnx(*placed: Any, **how: Any) -> "RunReport":
    from gdp.runtime.ort.run import run_onnx

    return run_onnx(*placed, **how)


def _run_openvino(*placed: Any, **how: Any) -> "RunReport":
    from gdp.runtime.openvino_hetero.run import run_openvino

    return run_openvino(*placed, **how)


def _run_traced(model: Model, *placed: Any, dims: Mapping[str, int], **how: Any) -> "RunReport":
    from gdp.importers.pytorch.model import TorchModel

    del dims  # of ONNX models alone
    found = model if isinstance(model, Traceable) else traced_model(spec_of(model))
    if isinstance(found, TorchModel):
        from gdp.runtime.pytorch.run import run_torch

        return run_torch(found, *placed, **how)
    from gdp.runtime.jax.run import run_jax

    return run_jax(_function(model), *placed, **how)


def _label(model: Model) -> str:
    """What a message calls a model."""
    return model.name if isinstance(model, OpGraph | Traceable) else str(model)


RUNTIMES: Mapping[str, tuple[Callable[[Model], bool], Callable[..., "RunReport"]]] = {
    "onnxruntime": (is_onnx, _run_onnx),
    "openvino": (is_onnx, _run_openvino),
    "own": (
        lambda model: isinstance(model, Traceable) or is_traced(spec_of(model)), _run_traced
    ),
}  # fmt: skip
"""Which models a runtime executes, and how: a function as `gdp.runtime.ort.run.run_onnx`; `own` is
that which the model was written in, PyTorch or JAX."""
REPLICATING: Sequence[Callable[..., "RunReport"]] = (_run_onnx,)
"""The runtimes that let devices take samples in turn."""


def _in_turn(placement: Placement) -> str:
    """What of a placement has replicated stages, and the way out."""
    teams = [", ".join(placement.device_names[d] for d in team) for team in placement.teams]
    return (
        f"{' and '.join(teams)} take samples in turn (replicated stages), which only onnxruntime "
        "does here; place again with --no-replicas"
    )


@dataclass(frozen=True)
class Exported:
    """What an exporter writes, and where."""

    model: Model
    graph: OpGraph
    placement: Placement
    cluster: Cluster
    output: Path
    dims: Mapping[str, int]
    permit: Permit


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
    """Write what a runtime needs to execute a placement; returns the paths written.

    Raises `TargetError` where the folder `output` holds anything but such an export, unless
    `force`, or where the model or one of the `sources` would be written over.
    """
    bound = with_dims(dims)
    graph, placement, output = load(model, bound), load_placement(placement), Path(output)
    if target not in EXPORTERS:
        raise ValueError(f"no export target {target!r}; there are {', '.join(EXPORTERS)}")
    if placement.teams and target not in REPLICATING_TARGETS:
        raise PlacementError(f"target {target!r} cannot hold this placement: {_in_turn(placement)}")
    given = None if cluster is None else load_cluster(cluster)
    if target in ("accelerate", "openvino", "pipelining") and given is None:
        raise ValueError(
            f"target {target!r} needs the cluster, which tells CPUs from accelerators: --cluster"
        )
    cluster = _named(graph, placement) if given is None else given
    if target == "accelerate":
        cluster = machine_of(placement, cluster, None)[0]
    require(placement, graph, cluster)
    permit = Permit(lambda: [*source_files(model), *sources], force)
    return EXPORTERS[target](Exported(model, graph, placement, cluster, output, bound, permit))


def _function(model: Model) -> "JaxModel":
    """The JAX function behind a `python:` model; a graph alone cannot be executed."""
    from gdp.importers.jax.model import JaxModel

    found = model if isinstance(model, Traceable) else traced_model(spec_of(model))
    if isinstance(found, OpGraph):
        raise ModelError(
            f"{model!r} returns a graph only; return (function, arguments) to execute it"
        )
    if not isinstance(found, JaxModel):
        raise ModelError(f"{model!r} is a PyTorch module; a JAX function is needed here")
    return found


def _named(graph: OpGraph, placement: Placement) -> Cluster:
    """A cluster with the placement's device names, whose host is where the model's inputs are:
    exporters need no speeds."""
    from gdp.cluster.types import Device, make_cluster

    same_graph = placement.op_names == graph.op_names
    homes = placement.device[graph.is_io] if same_graph else placement.device[:0]
    host = int(homes[0]) if len(homes) else 0

    names = placement.device_names
    kinds = {d: names[team[0]] for team in placement.teams for d in team}  # of one kind, whichever
    devices = [
        Device(name, kinds.get(d, name), {"default": 1.0}, 1.0) for d, name in enumerate(names)
    ]
    return make_cluster("placement", devices, host=host)


def _onnxruntime(job: Exported) -> list[Path]:
    from gdp.exporters.onnxruntime import export_onnxruntime
    from gdp.runtime.ort.source import load_source

    source = load_source(_onnx_spec(job.model, "onnxruntime"))
    return export_onnxruntime(
        source.model, source.folder, job.graph, job.placement, job.output, permit=job.permit
    )


def _onnx(job: Exported) -> list[Path]:
    from gdp.exporters.onnx_devices import export_onnx_devices
    from gdp.importers.onnx.model import prepare, resolve_spec
    from gdp.importers.onnx.read import external_files
    from gdp.runtime.ort.weights import require_weights

    path = resolve_spec(_onnx_spec(job.model, "onnx"))
    require_weights(path, [os.path.relpath(file, path.parent) for file in external_files(path)])
    model = prepare(path, job.dims)
    return export_onnx_devices(model, job.graph, job.placement, job.output, job.permit)


def _openvino(job: Exported) -> list[Path]:
    from gdp.exporters.openvino_plan import export_openvino

    _onnx_spec(job.model, "openvino")
    return export_openvino(job.graph, job.placement, job.cluster, job.output, job.permit)


def _accelerate(job: Exported) -> list[Path]:
    from gdp.commands.accelerate import torch_module
    from gdp.exporters.accelerate import export_accelerate

    return export_accelerate(
        job.graph, job.placement, job.cluster, job.output, job.permit,
        module=torch_module(job.model),
    )  # fmt: skip


def _llamacpp(job: Exported) -> list[Path]:
    from gdp.exporters.llamacpp import export_llamacpp

    return export_llamacpp(job.graph, job.placement, job.cluster, job.output, job.permit)


def _pipelining(job: Exported) -> list[Path]:
    from gdp.commands.pipelining import torch_boundaries
    from gdp.exporters.pipelining import export_pipelining

    if not is_traced(job.model):
        raise ModelError(
            "target 'pipelining' needs python:package.module:function or hf:CONFIG, got "
            f"{_label(job.model)!r}"
        )
    cuts = torch_boundaries(job.model, job.graph, ())
    return export_pipelining(
        spec_of(job.model), job.graph, job.placement, job.cluster, cuts, job.output, job.permit
    )


def _jax(job: Exported) -> list[Path]:
    from gdp.exporters.jax import export_jax

    spec = spec_of(job.model)
    if not spec.startswith(PYTHON_PREFIX):
        raise ModelError(
            f"target 'jax' needs a python:package.module:function, got {_label(job.model)!r}"
        )
    _function(spec)
    return export_jax(spec, job.placement, job.output, job.permit)


def _onnx_spec(model: Model, target: str) -> str:
    if not is_onnx(model):
        raise ModelError(f"target {target!r} needs an ONNX model, got {_label(model)!r}")
    return spec_of(model)


EXPORTERS: dict[str, Callable[[Exported], list[Path]]] = {
    "onnxruntime": _onnxruntime,
    "onnx": _onnx,
    "openvino": _openvino,
    "accelerate": _accelerate,
    "llamacpp": _llamacpp,
    "pipelining": _pipelining,
    "jax": _jax,
}
REPLICATING_TARGETS = ("onnxruntime",)
"""The targets that can say that devices take samples in turn."""
