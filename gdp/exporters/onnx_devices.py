"""A placement inside an ONNX model: the standard's multi-device annotations."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gdp.errors import ModelError, PlacementError
from gdp.files.writing import OWN_FILES_ONLY, OverwritePolicy, new_contents
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement
from gdp.sim.segments import segments

if TYPE_CHECKING:
    import onnx_ir as ir

CONFIGURATION = "gdp"
MODEL = "model.onnx"
DATA = "model.onnx.data"
# DeviceConfigurationProto came with IR 11; ONNX Runtime 1.31 rejects IR 14.
IR_VERSION = 11


def annotate(model: "ir.Model", graph: OpGraph, placement: Placement) -> None:
    """Add the device and pipeline stage of every node to the model, in place.

    The standard names a node's device only through its tensors: every output gets one unsharded
    ShardingSpec with the device's index, and the node the stage of its segment (docs/proposals/
    ONNXMultiDeviceProposal.md of onnx 1.18). Raises `PlacementError` when a node has no device.
    """
    import onnx_ir as ir

    if any(c.name == CONFIGURATION for c in model.device_configurations):
        model.remove_device_configuration(CONFIGURATION)
    configuration = model.add_device_configuration(
        CONFIGURATION, device_names=placement.device_names
    )
    stage = _stages(graph, placement)
    index = graph.op_index
    for node in model.graph:
        op = index.get(node.name or "")
        if op is not None:
            device = int(placement.device[op])
            node.device_configurations = (
                ir.NodeDeviceConfiguration(
                    configuration,
                    sharding_specs=tuple(
                        ir.ShardingSpec(value, (device,)) for value in node.outputs if value.name
                    ),
                    pipeline_stage=int(stage[op]),
                ),
            )
    model.ir_version = max(model.ir_version, IR_VERSION)
    names = {node.name for node in model.graph}
    missing = [
        n for n, io in zip(graph.op_names, graph.is_io, strict=True) if not io and n not in names
    ]
    if missing:
        raise PlacementError(
            f"the model lacks {len(missing)} nodes of the placement, first {missing[0]!r}"
        )


def _stages(graph: OpGraph, placement: Placement) -> np.ndarray:
    """Stage numbers from 0 of the ops that do work; stages run one after the other."""
    segment = segments(graph, placement.device)
    stage = np.zeros(graph.num_ops, dtype=np.int64)
    real = ~graph.is_io
    stage[real] = np.unique(segment[real], return_inverse=True)[1]
    return stage


def validate(path: Path, graph: OpGraph, placement: Placement) -> list[str]:
    """Faults in the annotations of a written file, which onnx.checker does not check."""
    import onnx

    model = onnx.load(os.fspath(path), load_external_data=False)
    faults: list[str] = []
    configurations = {c.name: c for c in model.configuration}
    if CONFIGURATION not in configurations:
        return [f"no device configuration {CONFIGURATION!r}"]
    count = configurations[CONFIGURATION].num_devices
    for node in model.graph.node:
        op = graph.op_index.get(node.name)
        if op is None:
            continue
        entries = [c for c in node.device_configurations if c.configuration_id == CONFIGURATION]
        if len(entries) != 1:
            faults.append(f"node {node.name!r} has {len(entries)} device configurations")
            continue
        for spec in entries[0].sharding_spec:
            if spec.tensor_name not in node.output:
                faults.append(f"node {node.name!r}: {spec.tensor_name!r} is not its output")
            if list(spec.device) != [placement.device[op]] or spec.device[0] >= count:
                faults.append(f"node {node.name!r}: devices {list(spec.device)} are wrong")
    return faults


def export_onnx_devices(
    model: "ir.Model",
    graph: OpGraph,
    placement: Placement,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `model.onnx` with the annotations into the folder, checked before it is put there;
    weights that the model keeps in other files go into `model.onnx.data` beside it.

    See `gdp.files.writing` for `overwrite`. Raises `ModelError` when a file of weights is missing,
    `PlacementError` when it would be overwritten.
    """
    import onnx_ir as ir

    annotate(model, graph, placement)
    sources = {Path(tensor.path) for tensor in _external_tensors(model)}
    for source in sorted(sources):
        if not source.is_file():
            raise ModelError(
                f"the weights of {graph.name!r} are missing, no file {str(source)!r}; fetch it: "
                "placing needs no weights, exporting does"
            )
        if (output / DATA).exists() and source.samefile(output / DATA):
            raise PlacementError(
                f"{str(output / DATA)!r} holds the weights of the model that is exported; give "
                "another folder"
            )
    with new_contents(output, "export to onnx", overwrite) as folder:
        if sources:
            _keep_attributes(model)
            ir.save(model, folder / MODEL, external_data=DATA)
        else:
            ir.save(model, folder / MODEL)
        if violations := validate(folder / MODEL, graph, placement):
            raise PlacementError("; ".join(violations))
        beside = folder / DATA
        if beside.exists() and not beside.stat().st_size:
            beside.unlink()
        written = sorted(path.name for path in folder.iterdir())
    return [output / name for name in written]


def _external_tensors(model: "ir.Model") -> "Iterator[ir.ExternalTensor]":
    """External tensors of a model, of its subgraphs and attributes too."""
    import onnx_ir as ir

    stored = (v.const_value for graph in model.graphs() for v in graph.initializers.values())
    given = (
        attribute.value
        for graph in model.graphs()
        for node in graph
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.TENSOR
    )
    return (t for t in (*stored, *given) if isinstance(t, ir.ExternalTensor))


def _keep_attributes(model: "ir.Model") -> None:
    """Put the data of attributes into the model: only initialisers are written beside it."""
    import onnx_ir as ir

    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if isinstance(attribute.value, ir.ExternalTensor):
                    held = ir.Tensor(attribute.value.numpy(), name=attribute.value.name)
                    node.attributes[name] = ir.AttrTensor(name, held)
