"""Executes a placement of an ONNX model with OpenVINO's HETERO, and measures it beside baselines.

It is compiled by the loader that `gdp export --to openvino` writes: what runs is what is exported.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from gdp.base.errors import ClusterError, ModelError, refused_by
from gdp.base.version import install_command
from gdp.cluster.types import CORE_KIND, Cluster
from gdp.importers.program import executed
from gdp.measure.async_execution import AsyncExecution, measured_rows, versions
from gdp.measure.compare import Arrays, OutputCheck, judge
from gdp.measure.plan import ExecutionPlan, make_plan
from gdp.measure.report import DEFAULT, PLACED, SINGLE, RunReport, SegmentTime
from gdp.measure.request import RunRequest
from gdp.sim.segments import segments
from gdp.targets.intel_openvino.export import hetero_plan
from gdp.targets.onnx_inputs import MADE_UP, make_inputs, repeatable
from gdp.targets.onnx_source import Source, load_source, randomised

PLUGIN = "openvino_intel_cpu_plugin"
"""OpenVINO has one device CPU; further processors of a cluster are its plug-in once more."""


def run_openvino(request: RunRequest) -> RunReport:
    """Execute a placement: one sub-model of HETERO per device, in float32, several samples on
    their way.

    Raises `ClusterError` where OpenVINO sees fewer devices, `PlacementError` where a device would
    be entered twice, and `RefusedError` where OpenVINO does not compile the placement, or cuts the
    model into other pieces.
    """
    graph, cluster, device = request.graph, request.cluster, request.device
    measuring = request.measuring
    core = _core()
    names = openvino_devices(core, cluster)
    source = randomised(load_source(request.model, request.dims), measuring.seed)
    feeds = make_inputs(source.model, graph, measuring.seed)
    plan = make_plan(request.prediction, "throughput")  # HETERO runs a device's ops at one go
    split = hetero_plan(graph, device, cluster.device_names)
    host = names[cluster.host]

    measuring.say("compiling the placement and its baselines with OpenVINO")

    def placed(split: Mapping[str, Any], **more: bool) -> Any:
        read = _read(core, source, feeds)
        with refused_by("OpenVINO", RuntimeError):  # all that it raises is of this kind
            return _placed(core, read, cluster, names, split, more)

    with executed(source.model.graph.name, MADE_UP):
        single = core.compile_model(
            _read(core, source, feeds), host, _settings(cluster, names)[host]
        )
    compiled = {PLACED: placed(split), SINGLE: single}
    check = _check(source, compiled, feeds)
    if request.baselines:
        compiled[DEFAULT] = core.compile_model(_read(core, source, feeds), host, _F32)
    else:
        del compiled[SINGLE]
    for name, other in request.rival_plans.items():
        compiled[name] = placed(hetero_plan(graph, other.device, cluster.device_names))
    slots = len(split["order"]) + 1
    rows = measured_rows({n: _issued(m, feeds, slots) for n, m in compiled.items()}, measuring)
    return request.report(
        plan,
        rows,
        check,
        random_weights=bool(source.weights),
        segments=_segments(placed(split, PERF_COUNT=True), feeds, request, plan),
        samples_in_flight=slots,
        cores=tuple(-1 for _ in names),
        pinned=False,
        note=f"HETERO over {', '.join(names)}; predictions are those for ONNX Runtime",
        versions=versions("openvino", "onnx", "numpy"),
    )  # fmt: skip


def _core() -> Any:
    # OpenVINO's tools would report to their makers from a process of their own.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise ModelError(
            f"executing with OpenVINO needs openvino: {install_command('openvino')}"
        ) from error
    return openvino.Core()


def openvino_devices(core: Any, cluster: Cluster) -> list[str]:
    """OpenVINO's name of each device of a cluster: processors are CPU, accelerators those that it
    sees, in its order. Raises `ClusterError` where it sees fewer of them."""
    accelerators = [name for name in core.available_devices if not name.startswith("CPU")]
    wanted = sum(not device.is_cpu for device in cluster.devices)
    if wanted > len(accelerators):
        raise ClusterError(
            f"cluster {cluster.name!r} has {wanted} accelerators, OpenVINO sees "
            f"{len(accelerators)} here; name a cluster that fits"
        )
    free = iter(accelerators)
    cpus = (f"CPU{i}" if i else "CPU" for i in itertools.count())
    names = [next(cpus if device.is_cpu else free) for device in cluster.devices]
    for name in names:
        if name.startswith("CPU") and name not in ("CPU", *core.available_devices):
            core.register_plugin(PLUGIN, name)
    return names


_F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def _settings(cluster: Cluster, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each device by OpenVINO's name."""
    threads = {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}
    return {
        name: _F32 | (threads if device.kind == CORE_KIND else {})
        for name, device in zip(names, cluster.devices, strict=True)
    }


def _read(core: Any, source: Source, feeds: Arrays) -> Any:
    """The model with the shapes of the inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    for tensor in model.graph.initializer:
        if tensor.name in source.weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(source.weights[tensor.name], tensor.name))
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(source.folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
    if model.ByteSize() >= 1 << 31:
        raise ModelError(
            f"model {model.graph.name!r}: OpenVINO is handed models in memory, of below 2 GiB with "
            "weights; export it (gdp export --to openvino)"
        )
    read = core.read_model(model.SerializeToString(), b"")
    read.reshape({name: list(array.shape) for name, array in feeds.items()})
    return read


def _placed(
    core: Any, model: Any, cluster: Cluster, names: Sequence[str], split: Mapping[str, Any],
    more: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The model compiled as placed, every op proven to be where it was placed."""
    from gdp.targets.intel_openvino import loader as loader

    of = dict(zip(cluster.device_names, names, strict=True))
    loader.place(model, split, of)
    settings, used = _settings(cluster, names), [of[d] for d in split["order"]]
    if len(used) == 1:
        return core.compile_model(model, used[0], {**settings[used[0]], **more})
    compiled = core.compile_model(
        model, "HETERO:" + ",".join(used),
        {"DEVICE_PROPERTIES": {name: settings[name] for name in used}, **more},
    )  # fmt: skip
    loader.prove(compiled, split, of)
    return compiled


def _issued(compiled: Any, feeds: Arrays, slots: int) -> AsyncExecution:
    """Requests that take samples round-robin, as many as are in flight."""
    turns = itertools.cycle([compiled.create_infer_request() for _ in range(slots)])

    def issue() -> Any:
        request = next(turns)
        request.start_async(dict(feeds), share_inputs=True)
        return request

    return AsyncExecution((issue,), slots, lambda request: request.wait())


def _check(source: Source, compiled: Mapping[str, Any], feeds: Arrays) -> OutputCheck:
    """Compare the outputs of the placed model with those of the uncut one on the host."""
    names = [value.name for value in source.model.graph.output]

    def outputs(model: Any) -> dict[str, np.ndarray]:
        results = model(dict(feeds))
        return {name: np.array(results[i]) for i, name in enumerate(names)}

    with executed(source.model.graph.name, MADE_UP):
        expected = outputs(compiled[SINGLE])
    with refused_by("OpenVINO", RuntimeError):
        computed = outputs(compiled[PLACED])
    return judge([(expected, computed)], names, repeatable(source.model))


def _segments(
    compiled: Any, feeds: Arrays, run: RunRequest, plan: ExecutionPlan, rounds: int = 5
) -> tuple[SegmentTime, ...]:
    """Every sub-model: seconds by OpenVINO's own counters, medians over some samples."""
    request = compiled.create_infer_request()
    spent: list[dict[int, float]] = []
    for _ in range(rounds):
        request.infer(dict(feeds))
        seconds: dict[int, float] = {}
        for op in request.profiling_info:
            # HETERO names its sub-models in front of the op, a single device does not.
            head = op.node_name.partition(":")[0]
            number = int(head[8:]) if head.startswith("subgraph") and head[8:].isdigit() else 0
            seconds[number] = seconds.get(number, 0.0) + op.real_time.total_seconds()
        spent.append(seconds)
    graph = run.graph
    works, segment = ~graph.is_io, segments(graph, run.device)
    rows = []
    for number, piece in enumerate(np.unique(segment[works]).tolist()):
        own = works & (segment == piece)
        measured_s = float(np.median([seconds.get(number, 0.0) for seconds in spent]))
        first = int(plan.segment[own][0])
        rows.append(plan.segment_time(graph, run.cluster, first, own, measured_s))
    return tuple(rows)
