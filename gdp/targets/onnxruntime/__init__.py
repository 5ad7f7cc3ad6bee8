"""ONNX Runtime: executes any placement of an ONNX model in sub-models."""

from gdp.targets.target import Exporter, Planner, Runtime, Target


def _devices() -> list[str]:
    from gdp.targets.onnxruntime.telemetry import ort

    return ort.get_available_providers()


def _refusals() -> tuple[type[Exception], ...]:
    from gdp.targets.onnxruntime.telemetry import own_errors

    return own_errors()


TARGET = Target(
    "onnxruntime",
    Runtime(
        "ONNX Runtime", "onnxruntime", "onnx", "gdp.targets.onnxruntime.run:run_onnx", _devices,
        replicates=True, refusals=_refusals,
    ),
    Exporter(
        "ONNX Runtime sub-models", "gdp.targets.onnxruntime.export:export", "onnx", replicates=True
    ),
    Planner("gdp.targets.onnxruntime.plan:plan", replicates=True),
)  # fmt: skip
