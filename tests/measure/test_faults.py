"""What a user's model raises, what a runtime refuses, and faults of gdp are told apart."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import onnx
import pytest
from onnx import TensorProto, helper

import gdp
from gdp.base.errors import MeasurementError, ModelError, RefusedError, reason_of
from gdp.importers.program import executed
from gdp.targets.table import RUNTIMES
from gdp.targets.target import Runtime

SHORT = gdp.Measuring(seconds=0.05)


def embedding() -> tuple[Any, tuple[Any, ...]]:
    """A module that can be traced, and whose index is out of range when it runs."""
    torch = pytest.importorskip("torch")

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 3)

        def forward(self, x: Any) -> Any:
            return self.table(x + 10)

    return Late(), (torch.zeros(2, dtype=torch.long),)


def raises_when_called(x: Any) -> Any:
    """A function that can be traced, and that calls back what raises."""

    def called(x: Any) -> Any:
        raise RuntimeError("the callback says no")

    return jax.pure_callback(called, jax.ShapeDtypeStruct((2,), jnp.float32), x) + 1


def raises_when_traced(x: Any) -> Any:
    raise RuntimeError("no such\nshape")


def reshape(folder: Path) -> str:
    """A model whose input says the shape: no made-up number fits."""
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "to"], ["r"]), helper.make_node("Relu", ["r"], ["y"])],
        "reshape",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 7]),
         helper.make_tensor_value_info("to", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [14])],
        value_info=[helper.make_tensor_value_info("r", TensorProto.FLOAT, [14])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, folder / "reshape.onnx")
    return str(folder / "reshape.onnx")


def profile_torch(folder: Path) -> None:
    from gdp.importers.pytorch.model import TorchModel
    from gdp.targets.pytorch.profile import profile_modules

    module, args = embedding()
    profile_modules([("m", "m", TorchModel("m", module, args))], seconds=0.05)


def profile_jax(function: Callable[[Any], Any]) -> Callable[[Path], None]:
    def profiled(folder: Path) -> None:
        from gdp.targets.jax.profile import profile_functions

        profile_functions([("m", "m", function, (jnp.ones(2),))], seconds=0.05)

    return profiled


def profile_onnx(folder: Path) -> None:
    from gdp.targets.onnxruntime.profile import ProfileConfig, profile_models

    profile_models([("m", "m", reshape(folder))], ProfileConfig(seconds=0.05), overheads=False)


def run_torch(folder: Path) -> None:
    from gdp.importers.pytorch.model import TorchModel

    module, args = embedding()
    gdp.run(TorchModel("m", module, args), "1xcpu-core", measuring=SHORT, method="single")


def run_jax(folder: Path) -> None:
    from gdp.importers.jax.trace import JaxModel

    model = JaxModel("m", raises_when_called, (jnp.ones(2),))
    gdp.run(model, "1xcpu-core", measuring=SHORT, method="single")


def tune_jax(folder: Path) -> None:
    from gdp.importers.jax.trace import JaxModel

    model = JaxModel("m", raises_when_called, (jnp.ones(2),))
    gdp.tune(model, "1xcpu-core", runs=1, measuring=SHORT, method="single", keep=False)


@pytest.mark.parametrize(
    ("execute", "reason"),
    [
        (profile_torch, "'m' does not run, uncut, .*index out of range"),
        (profile_jax(raises_when_called), "'m' does not run, uncut, .*the callback says no"),
        (profile_jax(raises_when_traced), "'m' does not run, uncut, .*RuntimeError: no such$"),
        (profile_onnx, "'m' does not run, uncut, on inputs that are made up"),
        (run_torch, "'m' does not run, uncut, .*index out of range"),
        (run_jax, "'m' does not run, uncut, .*the callback says no"),
        (tune_jax, "'m' does not run, uncut, .*the callback says no"),
    ],
)
def test_a_model_that_raises_when_it_runs_is_an_error_of_the_model(
    execute: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        execute(tmp_path)
    assert re.search(reason, str(caught.value))
    assert "\n" not in str(caught.value)


def fault() -> Exception:
    return RuntimeError("a fault of gdp")


def refusal_of_jax() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def refusal_of_onnxruntime() -> Exception:
    from gdp.targets.onnxruntime.telemetry import own_errors

    return own_errors()[0]("[ONNXRuntimeError] : 1 : FAIL : no room")


def refusal_of_torch() -> Exception:
    torch = pytest.importorskip("torch")
    return torch.OutOfMemoryError("CUDA out of memory")


raised: list[Exception] = []
PLAIN: Any = SimpleNamespace(splits=())
"""Of a request all that a row looks at."""


def raising(request: object) -> None:
    """What a runtime's row names."""
    raise raised.pop()


def row(name: str) -> Runtime:
    return replace(RUNTIMES[name], function=f"{__name__}:raising")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("jax", refusal_of_jax), ("onnxruntime", refusal_of_onnxruntime),
        ("torch", refusal_of_torch),
    ],
)  # fmt: skip
def test_a_runtimes_own_errors_are_refusals_and_others_stay(
    name: str, error: Callable[[], Exception]
) -> None:
    raised.append(error())
    with pytest.raises(RefusedError, match=f"{RUNTIMES[name].title} does not execute this: "):
        row(name).run(PLAIN)
    for other in (fault(), MeasurementError("above what busy times allow")):
        raised.append(other)
        with pytest.raises(type(other)) as caught:
            row(name).run(PLAIN)
        assert caught.value is other


def test_a_runtime_without_errors_of_its_own_refuses_nothing() -> None:
    raised.append(fault())
    with pytest.raises(RuntimeError, match="a fault of gdp"):
        row("llamacpp").run(PLAIN)


def test_a_piece_that_torch_does_not_execute_is_refused_and_gdps_own_errors_are_not() -> None:
    torch = pytest.importorskip("torch")
    from gdp.measure.async_execution import ProgramSegment
    from gdp.targets.pytorch.program import SegmentedTorchProgram, Workers

    def lacks_memory() -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")

    pool = Workers([torch.device("cpu")], [None])
    try:
        pieces = [ProgramSegment(0, 0, 1, lacks_memory, (), ("y",))]
        with pytest.raises(RefusedError, match="can't allocate memory"):
            SegmentedTorchProgram(pieces, pool, {}, ["y"], 0).run()
    finally:
        pool.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        SegmentedTorchProgram(pieces, pool, {}, ["y"], 0).run()


def test_errors_about_input_and_a_lack_of_memory_pass_the_first_run_unchanged() -> None:
    for error in (ModelError("weights are missing"), MemoryError()):
        with pytest.raises(type(error)) as caught, executed("m"):
            raise error
        assert caught.value is error
    with (
        pytest.raises(ModelError, match="'m' does not run, uncut, on its inputs: it refuses"),
        executed("m"),
    ):
        raise RefusedError("it refuses")


def test_a_reason_is_one_line_with_its_kind() -> None:
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(ValueError("\nfirst\nsecond")) == "ValueError: first"
    told = "INTERNAL: Traceback (most recent call last):\n  File x\nTypeError: last"
    assert reason_of(RuntimeError(told)) == "RuntimeError: TypeError: last"
