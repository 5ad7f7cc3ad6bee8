"""Operators of ai.onnx.ml have the shapes and types that ONNX Runtime makes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gdp

TREE = {
    "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
}  # fmt: skip
TARGETS = {
    "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 1],
    "target_weights": [1.0, 2.0],
}  # fmt: skip
CLASSES = {
    "class_treeids": [0, 0], "class_nodeids": [1, 2], "class_ids": [0, 1],
    "class_weights": [1.0, 2.0],
}  # fmt: skip
SVM = {
    "kernel_type": "LINEAR",
    "kernel_params": [1.0, 0.0, 3.0],
    "coefficients": [1.0, 2.0, 3.0],
    "rho": [0.5],
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("Scaler", {"offset": [0.5], "scale": [2.0]}, 1),
    ("Normalizer", {"norm": "L2"}, 1),
    ("Imputer", {"imputed_value_floats": [1.0], "replaced_value_float": 0.0}, 1),
    ("Binarizer", {"threshold": 0.5}, 1),
    ("FeatureVectorizer", {"inputdimensions": [3, 3]}, 1),
    ("LabelEncoder", {"keys_floats": [0.0], "values_int64s": [7]}, 1),
    ("LinearRegressor", {"coefficients": [1.0] * 6, "targets": 2}, 1),
    ("LinearClassifier", {"coefficients": [1.0] * 6, "intercepts": [0.0] * 2,
                          "classlabels_ints": [4, 5]}, 2),
    ("SVMRegressor", SVM, 1),
    ("TreeEnsembleRegressor", {**TREE, **TARGETS, "n_targets": 2}, 1),
    ("TreeEnsembleClassifier", {**TREE, **CLASSES, "classlabels_int64s": [4, 5]}, 2),
]  # fmt: skip


def model_of(
    op_type: str, attributes: dict[str, Any], outputs: int, path: Path, version: int
) -> None:
    count = 2 if op_type == "FeatureVectorizer" else 1
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(
        op_type, ["x"] * count, names, name="n", domain="ai.onnx.ml", **attributes
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])
    made = [helper.make_empty_tensor_value_info(name) for name in names]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    graph = helper.make_graph([node], "g", [x], made)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("op_type", "attributes", "outputs"), CASES)
def test_outputs_are_those_of_onnx_runtime(
    op_type: str, attributes: dict[str, Any], outputs: int, version: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    model_of(op_type, attributes, outputs, path, version)
    graph = gdp.load(path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    made = session.run(None, {"x": np.zeros((4, 3), np.float32)})
    mine = graph.producer == graph.op_index["n"]
    assert graph.tensor_bytes[mine].tolist() == [array.nbytes for array in made]


def test_a_classifier_that_ends_in_maps_is_read(tmp_path: Path) -> None:
    """As converters from scikit-learn write it: labels, and a map of scores for each example."""
    path = tmp_path / "m.onnx"
    model_of("LinearClassifier", CASES[7][1], 2, path, 3)
    model = onnx.load(path)
    model.graph.node.append(
        helper.make_node(
            "ZipMap", ["y1"], ["z"], name="zip", domain="ai.onnx.ml", classlabels_int64s=[4, 5]
        )
    )
    maps = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    model.graph.output[1].CopyFrom(
        helper.make_value_info("z", helper.make_sequence_type_proto(maps))
    )
    onnx.save(model, path)
    graph = gdp.load(path)
    assert graph.tensor_bytes[graph.producer == graph.op_index["zip"]].tolist() == [4 * 2 * 4]


def test_inputs_that_are_maps_are_refused_in_one_line(tmp_path: Path) -> None:
    node = helper.make_node(
        "DictVectorizer", ["x"], ["y"], name="n", domain="ai.onnx.ml", int64_vocabulary=[1, 2]
    )
    maps = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    graph = helper.make_graph(
        [node], "g", [helper.make_value_info("x", maps)], [helper.make_empty_tensor_value_info("y")]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    with pytest.raises(gdp.ModelError, match="graph input 'x' is no tensor but a map") as caught:
        gdp.load(path)
    assert "\n" not in str(caught.value)
