"""Tables of runtimes, export formats and planning targets: adding one is a file and a row here.

The choices of the command line, the rows of `gdp doctor` and the tables of the documentation are
those of these tables. Rows import what they need when they are used, so that `gdp --help` is quick.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from gdp.errors import refused_by

if TYPE_CHECKING:
    from pathlib import Path

    from gdp.cluster.types import Cluster
    from gdp.files.writing import OverwritePolicy
    from gdp.graph.op_graph import OpGraph
    from gdp.measure.report import RunReport
    from gdp.measure.request import RunRequest
    from gdp.models import Model
    from gdp.placement import Placement
    from gdp.question import Question
    from gdp.result import Result


@dataclass(frozen=True)
class Runtime:
    """A library that executes placements."""

    name: str
    title: str
    distribution: str
    executes: Literal["onnx", "jax", "torch", "gguf"]  # kind of models
    function: str  # "module:function"; takes a `RunRequest` and returns a `RunReport`
    devices: Callable[[], list[str]]  # that the library sees on this machine
    replicates: bool = False  # lets devices take samples in turn
    method: str = "auto"  # for `auto`, where only placements of another one can be executed
    target: str = ""  # in `PLANNING_TARGETS`, where only its placements can be executed
    refusals: Callable[[], tuple[type[Exception], ...]] = tuple  # that the library alone raises

    def run(self, request: "RunRequest") -> "RunReport":
        """Execute a placement.

        Raises:
            RefusedError: if the library does not execute it, for lack of memory for instance.
            ModelError: if the model does not run uncut either.
            MeasurementError: if a measured rate is impossible.
        """
        with refused_by(self.title, *self.refusals()):
            return _imported(self.function)(request)


def _imported(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def _onnxruntime_devices() -> list[str]:
    from gdp.targets.onnxruntime.telemetry import ort

    return ort.get_available_providers()


def _jax_devices() -> list[str]:
    import jax

    return [f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()]


def _openvino_devices() -> list[str]:
    # At import its tools report to their makers, from a forked process, where this module is.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino.Core().available_devices


def _torch_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))]


def _onnxruntime_refusals() -> tuple[type[Exception], ...]:
    from gdp.targets.onnxruntime.telemetry import own_errors

    return own_errors()


def _jax_refusals() -> tuple[type[Exception], ...]:
    import jax

    return (jax.errors.JaxRuntimeError,)


def _torch_refusals() -> tuple[type[Exception], ...]:
    import torch

    # What else torch raises is a plain RuntimeError, which pieces tell apart themselves.
    named = (getattr(torch, name, None) for name in ("OutOfMemoryError", "AcceleratorError"))
    return tuple(kind for kind in named if kind is not None)


def _llamacpp_devices() -> list[str]:
    import llama_cpp

    return ["CPU", *(["cores lent by RPC"] if llama_cpp.llama_supports_rpc() else [])]


RUNTIMES: Mapping[str, Runtime] = {
    row.name: row
    for row in (
        Runtime("onnxruntime", "ONNX Runtime", "onnxruntime", "onnx",
                "gdp.targets.onnxruntime.run:run_onnx", _onnxruntime_devices, replicates=True,
                refusals=_onnxruntime_refusals),
        Runtime("jax", "JAX", "jax", "jax", "gdp.targets.jax.run:run_jax", _jax_devices,
                refusals=_jax_refusals),
        Runtime("openvino", "OpenVINO", "openvino", "onnx",
                "gdp.targets.openvino.run:run_openvino", _openvino_devices, method="blocks"),
        Runtime("torch", "PyTorch", "torch", "torch",
                "gdp.targets.torch.run:run_torch", _torch_devices, refusals=_torch_refusals),
        Runtime("llamacpp", "llama.cpp", "llama-cpp-python", "gguf",
                "gdp.targets.llamacpp.run:run_llamacpp", _llamacpp_devices, target="llamacpp"),
    )
}  # fmt: skip
"""By name; of those that execute a model, the first is the default."""


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
        from gdp.models import spec_of

        return "" if self.question.model is None else spec_of(self.question.model)

    @property
    def plan(self) -> "tuple[OpGraph, Placement, Cluster, Path, OverwritePolicy]":
        """Positional arguments of exporters that need no model."""
        question = self.question
        return question.graph, self.placement, question.cluster, self.output, self.overwrite


@dataclass(frozen=True)
class Exporter:
    """A format that a placement is exported to."""

    name: str
    title: str  # as the README lists it
    write: "Callable[[ExportJob], list[Path]]"  # returns the paths written
    accepts: Literal["onnx", "traced", "jax", "hf", "any"] = "any"  # kind of models
    offloads: bool = False  # holds weights that rest in host memory or on disk
    replicates: bool = False  # holds replicated stages


def _onnxruntime(job: ExportJob) -> "list[Path]":
    from gdp.targets.onnxruntime.export import export_onnxruntime
    from gdp.targets.onnxruntime.source import load_source

    source = load_source(job.spec, job.question.dims)
    graph, placement, cluster, output, overwrite = job.plan
    return export_onnxruntime(
        source.model, source.folder, graph, placement, cluster, output, overwrite=overwrite
    )


def _openvino(job: ExportJob) -> "list[Path]":
    from gdp.targets.openvino.export import export_openvino

    return export_openvino(*job.plan)


def _accelerate(job: ExportJob) -> "list[Path]":
    from gdp.targets.accelerate.device_map import export_accelerate
    from gdp.targets.modules import torch_module

    return export_accelerate(*job.plan, module=torch_module(job.question.model))


def _pipelining(job: ExportJob) -> "list[Path]":
    from gdp.errors import PlacementError
    from gdp.targets.modules import torch_boundaries
    from gdp.targets.pipelining.export import export_pipelining

    graph, placement, cluster, output, overwrite = job.plan
    cuts, reason = torch_boundaries(job.question.model, graph, ())
    if not cuts:
        raise PlacementError(f"there is nothing to export: {reason}")
    return export_pipelining(job.spec, graph, placement, cluster, cuts, output, overwrite)


def _llamacpp(job: ExportJob) -> "list[Path]":
    from gdp.targets.llamacpp.flags import export_llamacpp

    return export_llamacpp(*job.plan)


def _vllm(job: ExportJob) -> "list[Path]":
    from gdp import solve
    from gdp.cluster.reserve import for_runtime
    from gdp.importers.pytorch.config_check import check_config
    from gdp.importers.pytorch.config_spec import config_file, parse_config_spec
    from gdp.targets.vllm.export import export_vllm

    peak_bytes = solve.simulate(job.question, job.placement).peak_bytes
    config = check_config(config_file(job.spec))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    machine = for_runtime(job.question.cluster, "vllm")
    job = replace(job, question=replace(job.question, cluster=machine))
    spec = parse_config_spec(job.spec)
    scheme = "" if spec.quantize == "none" else spec.quantize
    return export_vllm(
        *job.plan, peak_bytes=peak_bytes, longest=longest, quantize=scheme,
        at_once=spec.max_num_batched_tokens,
    )  # fmt: skip


def _jax(job: ExportJob) -> "list[Path]":
    from gdp.targets.jax.export import export_jax

    _, placement, cluster, output, overwrite = job.plan
    return export_jax(job.spec, placement, cluster, output, overwrite)


EXPORTERS: Mapping[str, Exporter] = {
    row.name: row
    for row in (
        Exporter("onnxruntime", "ONNX Runtime sub-models", _onnxruntime, "onnx",
                 replicates=True),
        Exporter("openvino", "OpenVINO", _openvino, "onnx"),
        Exporter("accelerate", "device maps for accelerate (with offloading)", _accelerate,
                 offloads=True),
        Exporter("llamacpp", "flags of llama.cpp", _llamacpp),
        Exporter("vllm", "an uneven pipeline of vLLM (untried)", _vllm, "hf"),
        Exporter("pipelining", "split points for torch.distributed.pipelining", _pipelining,
                 "traced"),
        Exporter("jax", "JAX", _jax, "jax"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class PlanningTarget:
    """A runtime whose own form of placements `gdp place --for` searches."""

    name: str
    function: str  # "module:function"; takes a `Question` and returns a `Result`
    by_module: bool = False  # whole modules, where granularity "op" is not possible
    exact: bool = False  # one program over blocks, instead of a method
    offloads: bool = False  # weights may rest in host memory or on disk
    searches: bool = True  # heeds some option of the search
    computes: str = ""  # "module:function" of (model, cluster): the model as it computes it
    replicates: bool = False  # lets devices take samples in turn

    def plan(self, question: "Question") -> "Result":
        """Answer a question, with replicated stages only where the runtime has them."""
        if not self.replicates:
            one = replace(question.constraints, replicas=False)
            question = replace(question, constraints=one)
        return _imported(self.function)(question)

    def model(self, model: "Model", cluster: "Cluster") -> "Model":
        """The model as the runtime computes it on a cluster, where its ops are others."""
        return _imported(self.computes)(model, cluster) if self.computes else model


PLANNING_TARGETS: Mapping[str, PlanningTarget] = {
    row.name: row
    for row in (
        PlanningTarget("accelerate", "gdp.targets.accelerate.plan:plan_accelerate", by_module=True,
                       offloads=True),
        PlanningTarget("llamacpp", "gdp.targets.llamacpp.plan:plan_llamacpp", exact=True,
                       searches=False),
        PlanningTarget("onnxruntime", "gdp.targets.free:plan_freely", replicates=True),
        PlanningTarget("openvino", "gdp.targets.chain:plan_openvino", exact=True),
        PlanningTarget("pipelining", "gdp.targets.chain:plan_pipelining", by_module=True,
                       exact=True),
        PlanningTarget("vllm", "gdp.targets.chain:plan_vllm", exact=True, searches=False,
                       computes="gdp.targets.chain:vllm_model"),
    )
}  # fmt: skip
