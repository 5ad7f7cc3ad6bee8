"""A placement for OpenVINO's HETERO plug-in: affinities by friendly name, and a loader."""

from pathlib import Path

import msgspec

from gdp.errors import PlacementError
from gdp.files.targets import OWN, Permit, new_contents
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement
from gdp.sim.segments import segments

LOADER = '''"""Compile a model with the affinities that gdp chose: python load.py MODEL.onnx

Give OpenVINO device names in `devices.json`, such as {"cpu": "CPU", "gpu0": "GPU.0"}.
"""

import json
import pathlib
import sys

# Before the import: OpenVINO's tools would report to their makers from a process of their own.
sys.modules.setdefault("openvino_telemetry", None)

import openvino

folder = pathlib.Path(__file__).parent
affinity = json.loads((folder / "affinity.json").read_text())
devices = json.loads((folder / "devices.json").read_text())
core = openvino.Core()
model = core.read_model(sys.argv[1])
default = next(iter(devices.values()))
for op in model.get_ops():
    name = affinity.get(op.get_friendly_name())
    op.get_rt_info()["affinity"] = devices[name] if name else default
used = dict.fromkeys([default, *devices.values()])
compiled = core.compile_model(model, "HETERO:" + ",".join(used))
print(compiled.get_property("EXECUTION_DEVICES"))
'''


def export_openvino(
    graph: OpGraph,
    placement: Placement,
    output: Path,
    permit: Permit = OWN,
) -> list[Path]:
    """Write `affinity.json`, `devices.json` and a loader into the folder.

    See `gdp.files.targets` for `permit`. Raises `PlacementError` when a device would be entered
    twice: HETERO's subgraphs must not form a cycle (openvinotoolkit/openvino issue 35750).
    """
    count = len(set(segments(graph, placement.device)[~graph.is_io].tolist()))
    used = {int(d) for d in placement.device[~graph.is_io]}
    if count > len(used):
        raise PlacementError(
            f"the placement enters its {len(used)} devices {count} times, OpenVINO's HETERO needs "
            "one piece per device; place with --objective throughput --method blocks"
        )
    affinity = {
        name: placement.device_names[device]
        for name, device, io in zip(graph.op_names, placement.device, graph.is_io, strict=True)
        if not io
    }
    names = _openvino_names(placement.device_names)
    files = {
        "affinity.json": msgspec.json.format(msgspec.json.encode(affinity), indent=1),
        "devices.json": msgspec.json.format(msgspec.json.encode(names), indent=1),
        "load.py": LOADER.encode(),
    }
    with new_contents(output, "export to openvino", permit) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
    return [output / name for name in files]


def _openvino_names(device_names: tuple[str, ...]) -> dict[str, str]:
    """CPUs are CPU, the others GPU.0, GPU.1 ... in order; the user edits the file where not."""
    names: dict[str, str] = {}
    for name in device_names:
        is_cpu = name.startswith(("cpu", "core"))
        names[name] = "CPU" if is_cpu else f"GPU.{sum(n != 'CPU' for n in names.values())}"
    return names
