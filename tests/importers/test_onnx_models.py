"""Whole models: the nine light ones, every operator's own test, every operator set."""

import dataclasses
import doctest
import functools
import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_tiny import FLOAT, ints, model, node, save, value, zeros

from gdp.base.errors import ModelError
from gdp.graph.file import decode_graph, encode_graph
from gdp.importers.onnx.model import ImportedOnnx, load_onnx, load_onnx_model, prepare
from gdp.importers.onnx.normalise import normalise
from gdp.importers.onnx.read import read_model
from gdp.importers.onnx.schema import COMPUTED
from gdp.importers.onnx.shapes import Facts, ImportOptions
from gdp.question.models import summary

# Billions of multiply-accumulates of the convolutions and fully connected layers, and millions of
# parameters, as published: torchvision's model table (AlexNet with two groups, VGG, ResNet,
# DenseNet, GoogLeNet, SqueezeNet 1.1), Ioffe and Szegedy 2015, Zhang et al. 2017 (ShuffleNet g = 3,
# 137 million). The light models also count normalisation statistics as parameters.
PUBLISHED = {
    "bvlc_alexnet": (0.66, 61.0),
    "densenet121": (2.83, 8.0),
    "inception_v1": (1.43, 7.0),
    "inception_v2": (2.02, 11.2),
    "resnet50": (4.09, 25.6),
    "shufflenet": (0.137, 1.4),
    "squeezenet": (0.349, 1.24),
    "vgg19": (19.63, 143.67),
    "zfnet512": (1.48, 87.3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_light_models_cost_what_was_published(name: str) -> None:
    found = load_onnx_model(f"onnx:light_{name}")
    totals, types = summary(found.graph), Counter(found.graph.op_types)
    macs, parameters = PUBLISHED[name]
    assert totals["flop"] == pytest.approx(2e9 * macs, rel=0.05)
    assert totals["weight_bytes"] == pytest.approx(4e6 * parameters, rel=0.03)
    assert not found.estimated
    assert not found.assumptions
    assert types["Input"] == types["Output"] == 1
    assert {"ConstantOfShape", "Unsqueeze"}.isdisjoint(types)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_light_models_have_the_shapes_that_the_runtime_makes(name: str) -> None:
    """Every tensor of the graph beside what ONNX Runtime computes for it."""
    found = load_onnx_model(f"onnx:light_{name}", weights=True)
    graph, made = found.graph, found.model
    readable = [value for nod in made.graph for value in nod.outputs if value.dtype == 1]
    tensors = {value.name: value for value in readable if value.name in graph.tensor_names}
    made.graph.outputs.extend(v for v in tensors.values() if not v.is_graph_output())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString(), options)
    wanted = [output.name for output in session.get_outputs()]
    image = np.zeros((1, 3, 224, 224), np.float32)
    results = session.run(wanted, {session.get_inputs()[0].name: image})
    sizes = dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True))
    assert len(results) > 60
    for output, result in zip(wanted, results, strict=True):
        assert sizes[output] == result.nbytes


def test_the_importer_starts_without_onnx() -> None:
    code = (
        "import sys; import gdp.importers.onnx.model; "
        "assert not {'onnx', 'onnx_ir', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_of_old_models_are_no_inputs() -> None:
    """IR version 3 lists them as inputs too; from 4 on they need not be."""
    found = load_onnx_model("onnx:light_squeezenet")
    assert [(v.name, tuple(v.shape or ())) for v in found.model.graph.inputs] == [
        ("data_0", (1, 3, 224, 224))
    ]
    assert (found.model.ir_version, found.model.opset_imports) == (4, {"": 9})
    assert summary(found.graph)["op_types"][0]["op_type"] == "Conv"


def classifier(opset: int) -> onnx.ModelProto:
    """Convolution, norm, pool, product and softmax in the spelling of an operator set. FLOPs: 4*16
    outputs of 27 multiply-adds, 2 * 64, 64, 64, 2*4*5 + 5, and 5 * 5."""
    squeeze = (
        node("Squeeze", ["p", "axes"], ["q"], name="squeeze")
        if opset >= 13
        else node("Squeeze", ["p"], ["q"], name="squeeze", axes=[2, 3])
    )
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "g", "g", "g", "g"], ["n"], name="norm"),
        node("Relu", ["n"], ["r"], name="relu"),
        node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        squeeze,
        node("Gemm", ["q", "v", "b"], ["l"], name="gemm"),
        node("Softmax", ["l"], ["y"], name="softmax", axis=1),
    ]
    weights = {"w": zeros(4, 3, 3, 3), "g": zeros(4), "v": zeros(4, 5), "b": zeros(5)}
    if opset >= 13:
        weights["axes"] = ints(2, 3)
    return model(nodes, {"x": ["n", 3, 4, 4]}, ["y"], weights, opset=opset)


@pytest.mark.parametrize("opset", range(7, 29))
@pytest.mark.parametrize("ir_version", [3, 14])
def test_every_operator_set_and_ir_version(opset: int, ir_version: int, tmp_path: Path) -> None:
    made = classifier(opset)
    made.ir_version = ir_version
    if ir_version == 3:  # weights are inputs too
        for tensor in made.graph.initializer:
            made.graph.input.append(value(tensor.name, list(tensor.dims), tensor.data_type))
    graph = load_onnx(save(tmp_path, made), {"n": 1})
    assert graph.flop.sum() == 64 * 54 + 128 + 64 + 64 + 45 + 25
    assert graph.weight_bytes.sum() == 4 * (108 + 4 + 20 + 5) + (16 if opset >= 13 else 0)
    assert graph.num_ops == 9


@functools.cache
def node_tests() -> list:
    """The tests that the onnx package has of every operator: models with inputs and results."""
    import onnx.backend.test.loader as loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for case in loader.load_model_tests(kind="node") if case.model is not None]


def imported(case: object, folder: Path) -> ImportedOnnx | None:
    """The model of a test; None where it is refused because its shapes are open."""
    path = folder / "case.onnx"
    path.write_bytes(case.model.SerializeToString())
    try:
        return load_onnx_model(path)
    except ModelError as error:
        if not any(reason in str(error) for reason in ("open shape", "unknown rank", "no tensor")):
            raise
        return None


@pytest.mark.slow
def test_operators_import_with_the_shapes_of_their_results(tmp_path: Path) -> None:
    """An eighth of onnx's operator tests: the outputs' shapes are those of the stored results."""
    cases = sorted(node_tests(), key=lambda case: case.name)[::8]
    refused = 0
    for case in cases:
        found = imported(case, tmp_path)
        refused += found is None
        if found is None:
            continue
        assert decode_graph(encode_graph(found.graph), case.name).digest == found.graph.digest
        if not case.data_sets:
            continue
        ends = [
            d
            for d, t in zip(found.graph.detail, found.graph.op_types, strict=True)
            if t == "Output"
        ]
        for detail, result in zip(ends, case.data_sets[0][1], strict=True):
            if isinstance(result, np.ndarray) and not found.assumptions:
                assert detail.input_shapes[0] == result.shape, case.name
    assert len(cases) > 200
    assert refused < 0.08 * len(cases)


@pytest.mark.slow
def test_small_constants_are_computed_as_the_operator_tests_say(tmp_path: Path) -> None:
    """onnx's tests of the operators that shapes are made of, with their inputs as weights: what is
    computed while importing equals the stored results."""
    checked = set()
    for case in node_tests():
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type not in COMPUTED or not case.data_sets:
            continue
        given, results = case.data_sets[0]
        made = onnx.ModelProto()
        made.CopyFrom(case.model)
        arrays = [item for item in given if isinstance(item, np.ndarray)]
        if len(arrays) != len(made.graph.input) or any(a.dtype.kind not in "biuf" for a in arrays):
            continue
        for info, array in zip(made.graph.input, arrays, strict=True):
            made.graph.initializer.append(numpy_helper.from_array(array, info.name))
        path = save(tmp_path, made)
        prepared = read_model(path, weights=True)
        normalise(prepared, "case")
        facts = Facts(prepared, ImportOptions())
        facts.infer()
        for out, result in zip(prepared.graph.outputs, results, strict=True):
            if out in facts.known and isinstance(result, np.ndarray):
                got = facts.known[out]
                assert got.dtype == result.dtype, case.name
                np.testing.assert_allclose(got, result, rtol=1e-6, err_msg=case.name)
                checked.add(nodes[0].op_type)
    assert len(checked) >= 45, sorted(set(COMPUTED) - checked)


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "import_speed.py"


def test_a_large_model_with_missing_weights_imports(tmp_path: Path) -> None:
    """Two layers of the benchmark's Llama: its shape chains leave, its FLOPs are those by hand."""
    spec = importlib.util.spec_from_file_location("import_speed", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    speed = importlib.util.module_from_spec(spec)
    sys.modules["import_speed"] = speed
    spec.loader.exec_module(speed)
    found = load_onnx_model(save(tmp_path, speed.llama(2)), {"batch": 1, "seq": 8})
    hidden, inner, tokens = 8192, 28672, 8
    per_layer = 2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * inner
    products = 2 * (2 * per_layer + hidden * 128256) * tokens
    scores = 2 * 2 * 64 * tokens * tokens * (2 * 128)  # both layers, Q K^T and the mix of V
    rows = {row["op_type"]: row for row in summary(found.graph)["op_types"]}
    assert rows["MatMul"]["flop"] == products + scores
    assert {"Shape", "Gather", "Where", "Range"} & set(rows) == {"Gather"}
    assert rows["Gather"]["count"] == 1  # the embedding
    assert found.graph.scope[found.graph.op_names.index("/lm_head/MatMul")] == "lm_head"


def test_a_cut_model_takes_its_weight_nodes_along(tmp_path: Path) -> None:
    """onnx_ir's extract of the second half computes what the whole model does."""
    fill = helper.make_tensor("v", FLOAT, [1], [0.5])
    nodes = [
        node("ConstantOfShape", ["s"], ["w"], value=fill, name="fill"),
        node("MatMul", ["x", "w"], ["h"], name="one"),
        node("MatMul", ["h", "w"], ["y"], name="two"),
    ]
    path = save(tmp_path, model(nodes, {"x": [2, 3]}, ["y"], {"s": ints(3, 3)}))
    whole = prepare(path)
    part = ir.Model(ir.convenience.extract(whole.graph, ["h"], ["y"]), ir_version=8)
    assert {nod.name for nod in part.graph} == {"fill", "two"}
    h = np.arange(6, dtype=np.float32).reshape(2, 3)
    session = onnxruntime.InferenceSession(ir.to_proto(part).SerializeToString())
    np.testing.assert_allclose(session.run(None, {"h": h})[0], h @ np.full((3, 3), 0.5))


CONTRIB_MODELS = {
    "FastGelu": ([[2, 3, 8], zeros(8)], {}),
    "SkipLayerNormalization": ([[2, 3, 8], [2, 3, 8], zeros(8), zeros(8), zeros(8)], {}),
    "FusedMatMul": ([[2, 4, 3], [2, 5, 4]], {"transA": 1, "transB": 1}),
    "MultiHeadAttention": ([[2, 3, 8], [2, 5, 8], [2, 5, 8]], {"num_heads": 2}),
    "Attention": ([[2, 3, 8], zeros(8, 24), zeros(24)], {"num_heads": 2}),
    "EmbedLayerNormalization": (
        [(6, [2, 3]), (6, [2, 3]), zeros(9, 8), zeros(5, 8), zeros(2, 8), zeros(8), zeros(8)],
        {},
    ),
    "MatMulNBits": (
        [[2, 3, 32], np.zeros((4, 2, 8), np.uint8), zeros(8)],
        {"K": 32, "N": 4, "bits": 4, "block_size": 16},
    ),
    "DynamicQuantizeMatMul": (
        [[2, 3], np.zeros((3, 5), np.int8), np.ones(1, np.float32)], {},
    ),
    "QuickGelu": ([[2, 3]], {}),
    "FusedConv": ([[1, 2, 5, 5], zeros(3, 2, 3, 3)], {"activation": "Relu"}),
}  # fmt: skip


@pytest.mark.parametrize("op_type", CONTRIB_MODELS)
def test_runtime_operators_have_the_shapes_that_the_runtime_makes(
    op_type: str, tmp_path: Path
) -> None:
    given, attributes = CONTRIB_MODELS[op_type]
    inputs = {f"x{i}": spec for i, spec in enumerate(given) if not isinstance(spec, np.ndarray)}
    weights = {f"x{i}": spec for i, spec in enumerate(given) if isinstance(spec, np.ndarray)}
    names = [f"x{i}" for i in range(len(given))]
    operator = node(op_type, names, ["y"], domain="com.microsoft", name="op", **attributes)
    kinds = {"EmbedLayerNormalization": ["y", "mask"]}
    operator.output[:] = kinds.get(op_type, ["y"])
    made = model([operator], inputs, [value("y", None)], weights, domains={"com.microsoft": 1})
    path = save(tmp_path, made)
    found = load_onnx(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path.read_bytes(), options)
    kind = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
    feeds = {i.name: np.zeros(i.shape, kind[i.type]) for i in session.get_inputs()}
    (result,) = session.run(["y"], feeds)
    assert found.detail[-1].input_shapes[0] == result.shape


@pytest.mark.parametrize(
    "name", ["ops.rule", "ops.onnx_view", "ops.onnxruntime", "ops.table", "importers.onnx.dims"]
)
def test_docstrings_hold(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"gdp.{name}"))
    assert tried.attempted
    assert not tried.failed


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ImportOptions().trips = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("graph_name", "name"),
    [
        ("resnet50", "resnet50"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        ("model_b", "model_b"),
        ("", "model"),
        ("g", "model"),
        ("main_graph", "model"),
        ("torch_jit", "model"),
        ("torch-jit-export", "model"),
        ("main_graph_optimized", "model"),
        ("3f2b8c1e-9d0a-4b7c-8a55-0c1d2e3f4a5b", "model"),
    ],
)
def test_a_model_is_called_by_its_graph_or_its_file(
    graph_name: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = onnx.helper.make_tensor_value_info
    kinds = [value(n, onnx.TensorProto.FLOAT, [2]) for n in "xy"]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    made = onnx.helper.make_graph(nodes, graph_name or "g", kinds[:1], kinds[1:])
    made.name = graph_name
    onnx.save(onnx.helper.make_model(made), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    for spec in ("model.onnx", Path("model.onnx"), f"../{tmp_path.name}/model.onnx"):
        assert load_onnx(spec).name == name
