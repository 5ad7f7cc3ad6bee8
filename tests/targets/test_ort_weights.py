"""Light models get random weights, real models keep theirs."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.api.run import export, run
from gdp.base.cores import usable_cores
from gdp.base.errors import ModelError
from gdp.cluster.presets import device_preset
from gdp.cluster.types import make_cluster
from gdp.importers.onnx.model import load_onnx
from gdp.placement.placement import make_placement
from gdp.targets.onnx_source import (
    Source,
    external_locations,
    load_source,
    randomise_weights,
    randomised,
    with_weights,
)
from gdp.targets.onnxruntime.sessions import make_session

CORE = f"core{usable_cores()[0]}"


def model_of(nodes: list, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def light() -> onnx.ModelProto:
    """y = gemm(x, w) * unsqueeze(s), with w and s made by ConstantOfShape."""
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.25])
    nodes = [
        helper.make_node("ConstantOfShape", ["ws"], ["w"], name="w", value=value),
        helper.make_node("ConstantOfShape", ["ss"], ["s"], name="s", value=value),
        helper.make_node("Gemm", ["x", "w"], ["a"], name="gemm"),
        helper.make_node("Unsqueeze", ["s", "axes"], ["t"], name="unsqueeze"),
        helper.make_node("Mul", ["a", "t"], ["y"], name="mul"),
    ]
    shapes = {"ws": np.array([3, 400]), "ss": np.array([400]), "axes": np.array([0])}
    return model_of(nodes, shapes)


def test_weights_are_scaled_by_what_they_feed() -> None:
    found = randomise_weights(light(), 0)
    assert {name: array.shape for name, array in found.items()} == {"w": (3, 400), "s": (400,)}
    assert found["w"].std() == pytest.approx(np.sqrt(1 / 3), rel=0.1)
    assert found["s"].min() >= 0.5
    assert found["s"].max() <= 1.0
    assert len(np.unique(found["w"])) > 1000


def test_same_seed_same_weights() -> None:
    first, second, other = (randomise_weights(light(), seed)["w"] for seed in (1, 1, 2))
    assert (first == second).all()
    assert (first != other).any()


def test_a_model_with_weights_of_its_own_is_left_alone() -> None:
    """Its ConstantOfShape makes a mask, not a weight."""
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["mask"], name="mask", value=value),
        helper.make_node("MatMul", ["x", "w"], ["a"], name="matmul"),
        helper.make_node("Add", ["a", "mask"], ["y"], name="add"),
    ]
    weights = {"shape": np.array([2, 4]), "w": np.ones((3, 4), np.float32)}
    model = model_of(nodes, weights)
    assert randomise_weights(model, 0) == {}
    source = Source(model, Path())
    assert randomised(source, 0) is source


def test_values_are_handed_to_the_session_and_not_stored_in_the_model(tmp_path: Path) -> None:
    model = light()
    weights = randomise_weights(model, 0)
    filled = with_weights(model, weights)
    assert external_locations(filled) == []
    assert filled.ByteSize() < 1000
    assert [n.op_type for n in filled.graph.node] == ["Gemm", "Unsqueeze", "Mul"]
    session = make_session(filled, Source(filled, tmp_path, weights))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = x @ weights["w"] * weights["s"]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["light_squeezenet", "light_shufflenet", "light_inception_v1", "light_resnet50"]
)
def test_light_models_stay_finite_and_tell_channels_apart(name: str) -> None:
    source = randomised(load_source(f"onnx:{name}"), 0)
    assert source.weights
    session = make_session(source.model, source)
    (entry,) = session.get_inputs()
    x = np.random.default_rng(0).standard_normal(entry.shape, dtype=np.float32)
    (y,) = session.run(None, {entry.name: x})
    assert np.isfinite(y).all()
    assert len(np.unique(y)) > 0.5 * y.size


def beside(folder: Path) -> Path:
    """y = x @ w, with w in a file of its own."""
    folder.mkdir()
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    model = model_of([node], {"w": np.ones((3, 4), np.float32)})
    outside = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save_model(model, folder / "model.onnx", **outside)
    return folder / "model.onnx"


@pytest.mark.parametrize("link", ["hard", "symbolic", "above"])
def test_weights_that_may_be_anothers_are_neither_executed_nor_exported(
    link: str, tmp_path: Path
) -> None:
    path, secret = beside(tmp_path / "model"), tmp_path / "secret"
    graph = load_onnx(path)
    assert load_source(path).folder == path.parent
    weights = path.parent / "w.bin"
    weights.rename(secret)
    if link == "hard":
        weights.hardlink_to(secret)
    elif link == "symbolic":
        weights.symlink_to(secret)
    else:
        above = onnx.load(path, load_external_data=False)
        (entry,) = [e for e in above.graph.initializer[0].external_data if e.key == "location"]
        entry.value = "../secret"
        path.write_bytes(above.SerializeToString())
    machine = make_cluster("one", [device_preset("cpu-core", CORE)])
    placement = make_placement(graph, machine, np.zeros(graph.num_ops, int))
    said = "a hard link" if link == "hard" else "outside of its folder or behind a link"
    calls = {
        "load": lambda: load_source(path),
        "run": lambda: run(path, machine, placement),
        "onnxruntime": lambda: export(placement, path, "onnxruntime", tmp_path / "out", machine),
    }
    for call in calls.values():
        with pytest.raises(ModelError, match=said):
            call()
    assert not (tmp_path / "out").exists()
