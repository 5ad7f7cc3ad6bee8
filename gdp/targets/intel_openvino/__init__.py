"""OpenVINO: executes placements of ONNX models by its affinities of ops."""

import sys

from gdp.targets.target import Exporter, Planner, Runtime, Target


def _devices() -> list[str]:
    # At import its tools report to their makers, from a forked process, where this module is.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino.Core().available_devices


TARGET = Target(
    "openvino",
    Runtime(
        "OpenVINO", "openvino", "onnx", "gdp.targets.intel_openvino.run:run_openvino", _devices,
        method="blocks", at_once=True,
    ),
    Exporter("OpenVINO", "gdp.targets.intel_openvino.export:export", "onnx"),
    Planner("gdp.targets.intel_openvino.plan:plan_openvino", exact=True),
)  # fmt: skip
