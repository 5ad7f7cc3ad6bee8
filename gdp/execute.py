"""Running and exporting placements: what `gdp run` and `gdp export` call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp import api
from gdp.cluster import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.errors import ModelError
from gdp.graph import OpGraph
from gdp.methods.base import Search
from gdp.models import PYTHON_PREFIX, is_onnx, load, python_model, source_files
from gdp.placement import Placement, require
from gdp.sim.problem import Objective
from gdp.targets import Permit

if TYPE_CHECKING:
    from gdp.importers.jaxpr_model import JaxModel


def run(
    model: str,
    cluster: Cluster,
    placement: Placement | None = None,
    *,
    dims: Sequence[str] = (),
    objective: Objective = "latency",
    method: str = "auto",
    costs: CostModel | str | Path | None = None,
    checkpoint: str | Path | None = None,
    search: Search | None = None,
    constraints: Constraints | None = None,
    rounds: int = 5,
    measure_seconds: float | None = None,
) -> dict[str, Any]:
    """Execute a placement (made first where none is given): predicted beside measured times, the
    baselines of the same run, and whether outputs equal the uncut model's. `measure_seconds` caps
    what the timing takes; `gdp.runtime.measure.MEASURE_SECONDS` by default."""
    from gdp.runtime.measure import MEASURE_SECONDS

    cap_s = MEASURE_SECONDS if measure_seconds is None else measure_seconds
    bound = api.with_dims(dims)
    graph = load(model, bound)
    if placement is None:
        placement = api.place(
            graph, cluster, objective=objective, method=method, costs=costs, search=search,
            checkpoint=checkpoint, constraints=constraints,
        ).placement  # fmt: skip
    require(placement, graph, cluster)
    posed, device, _ = api.posed_placement(graph, placement, cluster, objective, costs=costs)
    if is_onnx(model):
        from gdp.runtime.onnxruntime import run_onnx

        report = run_onnx(
            model, graph, cluster, placement.device,
            dims=bound, objective=objective, rounds=rounds, seconds=cap_s,
            seed=(search or Search()).seed,
            predict=(posed.problem, device, posed.group_of),
        )  # fmt: skip
        return report.to_json() | {"cluster": cluster.name, "costs": posed.costs}
    if model.startswith(PYTHON_PREFIX):
        from gdp.runtime.jax import run_jax

        report = run_jax(
            _function(model), graph, cluster, placement.device,
            objective=objective, rounds=rounds, seconds=cap_s,
            seed=(search or Search()).seed,
            predict=(posed.problem, device, posed.group_of),
        )  # fmt: skip
        return report.to_json() | {"cluster": cluster.name, "costs": posed.costs}
    raise ModelError(
        f"{model!r} holds a graph only; `gdp run` needs an ONNX file or a JAX function"
    )


def export(
    placement: Placement,
    model: str,
    target: str,
    output: Path,
    cluster: Cluster | None = None,
    dims: Sequence[str] = (),
    *,
    sources: Sequence[Path] = (),
    force: bool = False,
) -> list[Path]:
    """Write what a runtime needs to execute a placement; returns the paths written.

    Raises `TargetError` where the folder `output` holds anything but such an export, unless
    `force`, or where the model or one of the `sources` would be written over.
    """
    bound = api.with_dims(dims)
    graph = load(model, bound)
    cluster = cluster or _named(placement)
    require(placement, graph, cluster)
    if target not in EXPORTERS:
        raise ValueError(f"no export target {target!r}; there are {', '.join(EXPORTERS)}")
    permit = Permit(lambda: [*source_files(model), *sources], force)
    return EXPORTERS[target](model, graph, placement, output, bound, permit)


def _function(model: str) -> "JaxModel":
    """The JAX function behind a `python:` model; a graph alone cannot be executed."""
    found = python_model(model)
    if isinstance(found, OpGraph):
        raise ModelError(
            f"{model!r} returns a graph only; return (function, arguments) to execute it"
        )
    return found


def _named(placement: Placement) -> Cluster:
    """A cluster with the placement's device names: exporters need no speeds."""
    from gdp.cluster import Device, make_cluster

    devices = [Device(name, name, {"default": 1.0}, 1.0) for name in placement.device_names]
    return make_cluster("placement", devices)


def _onnxruntime(
    model: str,
    graph: OpGraph,
    placement: Placement,
    output: Path,
    dims: Mapping[str, int],
    permit: Permit,
) -> list[Path]:
    from gdp.exporters.onnxruntime import export_onnxruntime
    from gdp.runtime.ort_source import load_source

    del dims
    _require_onnx(model, "onnxruntime")
    source = load_source(model)
    return export_onnxruntime(source.model, source.folder, graph, placement, output, permit=permit)


def _onnx(
    model: str,
    graph: OpGraph,
    placement: Placement,
    output: Path,
    dims: Mapping[str, int],
    permit: Permit,
) -> list[Path]:
    from gdp.exporters.onnx_devices import export_onnx_devices
    from gdp.importers.onnx import prepare

    _require_onnx(model, "onnx")
    return export_onnx_devices(prepare(model, dims), graph, placement, output, permit)


def _openvino(
    model: str,
    graph: OpGraph,
    placement: Placement,
    output: Path,
    dims: Mapping[str, int],
    permit: Permit,
) -> list[Path]:
    from gdp.exporters.openvino import export_openvino

    del dims
    _require_onnx(model, "openvino")
    return export_openvino(graph, placement, output, permit)


def _accelerate(
    model: str,
    graph: OpGraph,
    placement: Placement,
    output: Path,
    dims: Mapping[str, int],
    permit: Permit,
) -> list[Path]:
    from gdp.exporters.accelerate import export_accelerate

    del model, dims
    return export_accelerate(graph, placement, output, permit)


def _jax(
    model: str,
    graph: OpGraph,
    placement: Placement,
    output: Path,
    dims: Mapping[str, int],
    permit: Permit,
) -> list[Path]:
    from gdp.exporters.jax import export_jax

    del graph, dims
    if not model.startswith(PYTHON_PREFIX):
        raise ModelError(f"target 'jax' needs a python:package.module:function, got {model!r}")
    _function(model)
    return export_jax(model, placement, output, permit)


def _require_onnx(model: str, target: str) -> None:
    if not is_onnx(model):
        raise ModelError(f"target {target!r} needs an ONNX model, got {model!r}")


Exporter = Callable[[str, OpGraph, Placement, Path, Mapping[str, int], Permit], list[Path]]
EXPORTERS: dict[str, Exporter] = {
    "onnxruntime": _onnxruntime,
    "onnx": _onnx,
    "openvino": _openvino,
    "accelerate": _accelerate,
    "jax": _jax,
}
