"""A placement for OpenVINO's HETERO plug-in: devices by name of op and tensor, and a loader."""

import shutil
from pathlib import Path

import msgspec
import numpy as np

from gdp.cluster.types import Cluster
from gdp.errors import PlacementError
from gdp.files.targets import OWN, Permit, new_contents
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement
from gdp.sim.segments import segment_values, segments


def export_openvino(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    permit: Permit = OWN,
) -> list[Path]:
    """Write `affinity.json`, `devices.json` and a loader into the folder.

    OpenVINO breaks some ops up and renames others, so that tensors are listed beside ops, and the
    loader finds a device for what neither names. See `gdp.files.targets` for `permit`. Raises
    `PlacementError` when a device would be entered twice: HETERO's subgraphs must not form a cycle
    (openvinotoolkit/openvino issue 35750).
    """
    works = ~graph.is_io
    segment = segments(graph, placement.device)
    pieces = np.unique(segment[works])
    used = {int(d) for d in placement.device[works]}
    if len(pieces) > len(used):
        raise PlacementError(
            f"the placement enters its {len(used)} devices {len(pieces)} times, OpenVINO's HETERO "
            "needs one piece per device; place with --objective throughput --method blocks"
        )
    device_of = [placement.device_names[d] for d in placement.device.tolist()]
    order = [placement.device_names[d] for d in segment_values(placement.device, segment)[pieces]]
    plan = {
        "order": order,  # of the pieces; ids of segments are topological
        "ops": {graph.op_names[op]: device_of[op] for op in np.flatnonzero(works).tolist()},
        "tensors": {
            name: device_of[op]
            for name, op in zip(graph.tensor_names, graph.producer.tolist(), strict=True)
            if works[op]
        },
    }
    files = {"affinity.json": plan, "devices.json": _openvino_names(cluster)}
    with new_contents(output, "export to openvino", permit) as folder:
        for name, content in files.items():
            encoded = msgspec.json.format(msgspec.json.encode(content), indent=1)
            (folder / name).write_bytes(encoded)
        shutil.copyfile(Path(__file__).with_name("openvino_loader.py"), folder / "load.py")
    return [output / name for name in (*files, "load.py")]


def _openvino_names(cluster: Cluster) -> dict[str, str]:
    """Processors are CPU, the others GPU.0, GPU.1 ... in order; the user edits the file where not.

    OpenVINO knows one CPU, which stands for all cores.
    """
    names: dict[str, str] = {}
    for device in cluster.devices:
        accelerators = sum(name != "CPU" for name in names.values())
        names[device.name] = "CPU" if device.is_cpu else f"GPU.{accelerators}"
    return names
