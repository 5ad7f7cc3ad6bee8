"""A placement inside an ONNX model: the standard's multi-device annotations."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gdp.errors import PlacementError
from gdp.graph import OpGraph
from gdp.placement import Placement
from gdp.sim.segments import segments
from gdp.targets import OWN, Permit, new_contents

if TYPE_CHECKING:
    import onnx_ir as ir

CONFIGURATION = "gdp"
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
    """What is wrong with the annotations of a written file; onnx.checker does not look at them."""
    import onnx

    model = onnx.load(os.fspath(path), load_external_data=False)
    found: list[str] = []
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
            found.append(f"node {node.name!r} has {len(entries)} device configurations")
            continue
        for spec in entries[0].sharding_spec:
            if spec.tensor_name not in node.output:
                found.append(f"node {node.name!r}: {spec.tensor_name!r} is not its output")
            if list(spec.device) != [placement.device[op]] or spec.device[0] >= count:
                found.append(f"node {node.name!r}: devices {list(spec.device)} are wrong")
    return found


def export_onnx_devices(
    model: "ir.Model",
    graph: OpGraph,
    placement: Placement,
    output: Path,
    permit: Permit = OWN,
) -> list[Path]:
    """Write `model.onnx` with the annotations into the folder, checked before it is put there.

    See `gdp.targets` for `permit`.
    """
    import onnx_ir as ir

    annotate(model, graph, placement)
    with new_contents(output, "export to onnx", permit) as folder:
        ir.save(model, folder / "model.onnx")
        if violations := validate(folder / "model.onnx", graph, placement):
            raise PlacementError("; ".join(violations))
    return [output / "model.onnx"]
