"""A placement for OpenVINO's HETERO plug-in: devices by name of op and tensor, and a loader."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.sim.segments import segment_values, segments
from gdp.targets.target import ExportJob


def export_openvino(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `affinity.json`, `devices.json` and a loader into the folder.

    See `gdp.base.files.writing` for `overwrite`. Raises `PlacementError` as `hetero_plan` does.
    """
    plan = hetero_plan(graph, placement.device, placement.device_names)
    # CPU stands for all cores, accelerators are GPU.0, GPU.1 ...; the user may edit the file.
    numbers = zip(cluster.device_names, numbers_on_machine(cluster), strict=True)
    names = {name: "CPU" if number is None else f"GPU.{number}" for name, number in numbers}
    files = {"affinity.json": plan, "devices.json": names}
    with new_contents(output, "export to openvino", overwrite) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(indented_json(content))
        shutil.copyfile(Path(__file__).with_name("loader.py"), folder / "load.py")
    return [output / name for name in (*files, "load.py")]


def hetero_plan(
    graph: OpGraph, device: Int[np.ndarray, "N"], device_names: Sequence[str]
) -> dict[str, Any]:
    """Devices of pieces (in order), ops and tensors, from which the loader sets affinities.

    OpenVINO breaks some ops up and renames others, so tensors are listed in addition to ops, and
    the loader finds a device for nodes that neither names.

    Raises:
        PlacementError: if a device would be entered twice: HETERO's subgraphs must not form a cycle
            (openvinotoolkit/openvino issue 35750).
    """
    works = ~graph.is_io
    segment = segments(graph, device)
    pieces = np.unique(segment[works])
    used = {int(d) for d in device[works]}
    if len(pieces) > len(used):
        raise PlacementError(
            f"the placement enters its {len(used)} devices {len(pieces)} times, OpenVINO's HETERO "
            "needs one piece per device; place again with --for openvino"
        )
    device_of = [device_names[d] for d in device.tolist()]
    return {
        # Ids of segments are topological.
        "order": [device_names[d] for d in segment_values(device, segment)[pieces]],
        "ops": {graph.op_names[op]: device_of[op] for op in np.flatnonzero(works).tolist()},
        "tensors": {
            name: device_of[op]
            for name, op in zip(graph.tensor_names, graph.producer.tolist(), strict=True)
            if works[op]
        },
    }


def export(job: ExportJob) -> list[Path]:
    """Write the plan of a placement; see `export_openvino`."""
    return export_openvino(*job.plan)
