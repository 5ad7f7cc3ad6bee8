"""Every broken model is one line that names what is wrong with it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_tiny import BOOL, FLOAT, external, ints, model, node, save, value, zeros

from gdp.base.errors import ModelError
from gdp.importers.onnx.model import load_onnx, load_onnx_model, prepare
from gdp.importers.onnx.spec import resolve_spec


def message(path: Path | str, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_onnx(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path).startswith("onnx:") or str(path) in text
    return text


def valid(folder: Path) -> Path:
    weights = {"w": np.ones((100, 100), np.float32)}
    nodes = [node("MatMul", ["x", "w"], ["y"], name="mul")]
    return save(folder, model(nodes, {"x": [1, 100]}, ["y"], weights))


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "none.onnx")


def test_a_folder(tmp_path: Path) -> None:
    assert "is a folder" in message(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = valid(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gdp.base.files.reading.os.open", refuse)
    assert "Permission denied" in message(path)


def test_an_unknown_packaged_model_lists_those_that_exist() -> None:
    text = message("onnx:light_resnet")
    assert "did you mean 'onnx:light_resnet50'" in text
    assert "light_densenet121" in text


def test_packaged_models_resolve_to_files() -> None:
    assert resolve_spec("onnx:light_vgg19").name == "light_vgg19.onnx"
    assert resolve_spec("onnx:test_Conv2d").name == "model.onnx"


@pytest.mark.parametrize(
    "text", [b"", b"this is no protobuf at all\n", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", b"{}"]
)
@pytest.mark.parametrize("weights", [False, True])
def test_not_an_onnx_file(tmp_path: Path, text: bytes, weights: bool) -> None:
    path = tmp_path / "text.onnx"
    path.write_bytes(text)
    with pytest.raises(ModelError, match="is not an ONNX model"):
        load_onnx_model(path, weights=weights)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("weights", [False, True])
def test_a_truncated_file(tmp_path: Path, kept: float, weights: bool) -> None:
    path = valid(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_onnx_model(path, weights=weights)


def test_damaged_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    """Any single byte of a small model overwritten: it imports or says what is wrong."""
    made = model([node("Relu", ["x"], ["y"], name="relu")], {"x": [2]}, ["y"])
    data = made.SerializeToString()
    path = tmp_path / "damaged.onnx"
    for place in range(len(data)):
        for byte in (0x00, 0x7F, 0xFF):
            path.write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
            try:
                load_onnx(path)
            except ModelError as error:
                assert "\n" not in str(error)  # noqa: PT017 - some prefixes are whole models


def test_another_protobuf_message(tmp_path: Path) -> None:
    path = tmp_path / "tensor.pb"
    path.write_bytes(helper.make_tensor("t", FLOAT, [2], [1.0, 2.0]).SerializeToString())
    assert "is not" in message(path)


def test_a_graph_without_nodes(tmp_path: Path) -> None:
    path = save(tmp_path, model([], {"x": [2]}, [value("x", [2])]))
    assert "has no nodes" in message(path)


def test_a_graph_of_constants_only(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Abs", ["w"], ["y"])], {}, [], {"w": zeros(2)}))
    assert "has no ops" in message(path)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["start"], name="before"),
        node("Add", ["start", "c"], ["a"], name="one"),
        node("Relu", ["a"], ["c"], name="two"),
        node("Relu", ["c"], ["y"], name="after"),
    ]
    text = message(save(tmp_path, model(nodes, {"x": [2]}, ["y"])))
    assert "cycle through node 'two'" in text or "cycle through node 'one'" in text


def test_a_value_that_nothing_makes(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Add", ["x", "ghost"], ["y"], name="a")], {"x": [2]}, ["y"]))
    assert "node 'a' (Add) reads 'ghost', which nothing makes" in message(path)


def test_an_output_that_nothing_makes(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Abs", ["x"], ["y"], name="a")], {"x": [2]}, ["z"]))
    assert "output 'z' is made by no node" in message(path)


def test_a_value_that_is_made_twice(tmp_path: Path) -> None:
    nodes = [node("Abs", ["x"], ["y"], name="a"), node("Neg", ["x"], ["y"], name="b")]
    assert "'y' is made twice" in message(save(tmp_path, model(nodes, {"x": [2]}, ["y"])))


def test_an_operator_of_an_unknown_domain(tmp_path: Path) -> None:
    nodes = [node("Conv9", ["x"], ["y"], name="odd", domain="acme")]
    made = model(nodes, {"x": [2]}, [value("y", [2])], domains={"acme": 1})
    text = message(save(tmp_path, made))
    assert "'odd'" in text
    assert "'acme'" in text


def test_an_operator_that_the_operator_set_does_not_have(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Konv", ["x"], ["y"], name="typo")], {"x": [2]}, ["y"]))
    text = message(path)
    assert "'typo'" in text
    assert "no operator 'Konv'" in text


def test_inputs_that_do_not_fit_together(tmp_path: Path) -> None:
    made = model([node("MatMul", ["a", "b"], ["y"], name="mul")], {"a": [2, 3], "b": [4, 5]}, ["y"])
    text = message(save(tmp_path, made))
    assert "'mul' (MatMul) does not fit its inputs" in text
    assert "[2, 3]" in text


def test_types_that_do_not_fit_together(tmp_path: Path) -> None:
    made = model([node("Add", ["a", "b"], ["y"], name="add")], {"a": [2], "b": (BOOL, [2])}, ["y"])
    assert "'add' (Add) does not fit its inputs" in message(save(tmp_path, made))


def test_a_required_input_that_is_left_out(tmp_path: Path) -> None:
    nodes = [node("BiasGelu", [], ["y"], name="empty", domain="com.microsoft")]
    made = model(nodes, {"x": [2]}, ["y"], domains={"com.microsoft": 1})
    assert "'y'" in message(save(tmp_path, made)) or "'empty'" in message(tmp_path / "tiny.onnx")
    path = save(tmp_path, model([node("Conv", ["x"], ["y"], name="half")], {"x": [1, 1, 2]}, ["y"]))
    assert "'half' (Conv)" in message(path)


def test_an_input_without_a_shape(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Abs", ["x"], ["y"])], {"x": (FLOAT, None)}, ["y"]))
    assert "'x' has an unknown rank" in message(path)
    assert load_onnx(path, {"x:0": 2, "x:1": 3}).tensor_bytes[0] == 24


def test_an_input_that_is_no_tensor(tmp_path: Path) -> None:
    made = model([node("SequenceLength", ["x"], ["y"])], {}, ["y"])
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    made.graph.input.append(helper.make_value_info("x", kind))
    assert "'x' is no tensor but SequenceType" in message(save(tmp_path, made))


def test_functions_that_call_each_other(tmp_path: Path) -> None:
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = [
        helper.make_function(
            "local", one, ["a"], ["b"], [node(two, ["a"], ["b"], domain="local")], opset
        )
        for one, two in (("f", "g"), ("g", "f"))
    ]
    made = model(
        [node("f", ["x"], ["y"], domain="local")], {"x": [2]}, ["y"],
        functions=functions, domains={"local": 1},
    )  # fmt: skip
    assert "functions cannot be inlined" in message(save(tmp_path, made))


def test_a_loop_whose_body_takes_too_few_values(tmp_path: Path) -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"])], "body", [value("i", [], 7), value("go", [], BOOL)],
        [value("on", [], BOOL)],
    )  # fmt: skip
    loop = node("Loop", ["n", "", "x"], ["y"], name="loop", body=body)
    path = save(tmp_path, model([loop], {"x": [2]}, ["y"], {"n": np.array(2)}))
    assert "'loop' (Loop) carries 1 values, its body takes 0" in message(path)


def test_a_slice_of_a_weight_that_is_not_there(tmp_path: Path) -> None:
    made = model([node("Expand", ["x", "to"], ["y"], name="grow")], {"x": [1]}, ["y"])
    made.graph.initializer.append(external("to", onnx.TensorProto.INT64, [2], "gone.bin"))
    assert "gone.bin" in message(save(tmp_path, made))


@pytest.mark.parametrize("option", [{"unknown": "ignore"}, {"trips": -1}])
def test_wrong_arguments_are_value_errors(tmp_path: Path, option: dict[str, object]) -> None:
    path = valid(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        load_onnx_model(path, **option)


def test_prepare_raises_the_same_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        prepare(tmp_path / "none.onnx")
    path = save(tmp_path, model([node("Abs", ["x"], ["y"])], {"x": ["n"]}, ["y"], {"d": ints(1)}))
    with pytest.raises(ModelError, match="--dim n=VALUE"):
        prepare(path)


@pytest.mark.parametrize(
    ("name", "value"), [("group", 0), ("group", -1), ("strides", [0, 1]), ("dilations", [1, -2])]
)
def test_a_convolution_needs_positive_attributes(
    tmp_path: Path, name: str, value: int | list[int]
) -> None:
    nodes = [node("Conv", ["x", "w"], ["y"], name="conv", **{name: value})]
    weights = {"w": np.ones((2, 3, 3, 3), np.float32)}
    said = message(save(tmp_path, model(nodes, {"x": [1, 3, 8, 8]}, ["y"], weights)))
    assert f"attribute {name!r} of node 'conv' (Conv) must be positive, got " in said
