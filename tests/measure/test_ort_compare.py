"""What may differ between a model cut and uncut, and what may not."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.cli.text import run_text
from gdp.measure.compare import Repeatable, compare, judge
from gdp.measure.measuring import Measuring
from gdp.measure.report import Row, measured_fields
from gdp.targets.onnxruntime.run import repeatable

node = helper.make_node


def arrays(dtype: Any = np.float32, **values: list) -> dict[str, np.ndarray]:
    return {name: np.array(given, dtype) for name, given in values.items()}


def model(nodes: list[onnx.NodeProto], weights: dict[str, Any] | None = None) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "y")]
    return helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], stored))


def test_types_of_few_digits_may_differ_by_their_rounding() -> None:
    for dtype, off in ((np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)):
        assert compare(arrays(dtype, a=[1.0]), arrays(dtype, a=[1.0 + off])).equal
        assert not compare(arrays(dtype, a=[1.0]), arrays(dtype, a=[1.0 + 10 * off])).equal
        assert not compare(arrays(a=[1.0]), arrays(a=[1.0 + off])).equal  # of float32


def test_a_step_of_a_quantiser_is_allowed_between_pieces_and_two_are_not() -> None:
    known = Repeatable(step={"q": 0.0, "d": 0.1})
    outputs = ["y"]

    def verdict(one: dict, other: dict) -> tuple[bool, bool | None, bool]:
        found = judge([(one, other)], outputs, known)
        return found.equal, found.outputs_equal, found.inner_equal

    same = arrays(y=[0.5])
    for step, equal in ((1, True), (2, False)):
        one = {**same, **arrays(np.uint8, q=[3, 9]), **arrays(d=[0.3, 0.0])}
        other = {**same, **arrays(np.uint8, q=[3 + step, 9]), **arrays(d=[0.3 + 0.1 * step, 0.0])}
        assert verdict(one, other) == (equal, True, equal)
    # An output is judged by its type alone, and so is a tensor that no quantiser reaches.
    assert verdict(same, arrays(y=[0.6])) == (False, False, True)
    assert verdict({**same, **arrays(e=[0.3])}, {**same, **arrays(e=[0.4])}) == (False, True, False)
    one, other = ({**same, **arrays(np.uint8, ids=[i])} for i in (3, 4))
    assert verdict(one, other) == (False, True, False)


def test_behind_a_quantiser_one_step_of_eight_bits_is_allowed_and_two_are_not() -> None:
    """Of the largest magnitude; only between pieces, and where only the type tells the step."""
    known = Repeatable(step={"d": 0.0})
    one = arrays(d=[1.0, 0.0])
    for steps, equal in ((0.9, True), (2.0, False), (20.0, False)):
        other = arrays(d=[1.0, steps / 128])
        assert compare(one, other, known, is_output=False).equal == equal
        assert not compare(one, other, known).equal
        assert not compare(one, other, is_output=False).equal


def test_random_values_are_left_out() -> None:
    known = Repeatable(("Multinomial 'draw'",), frozenset("y"))
    found = judge([(arrays(y=[1.0], a=[2.0]), arrays(y=[9.0], a=[2.0]))], ["y"], known)
    assert (found.outputs_equal, found.equal, found.tensors) == (None, True, 1)
    found = judge([(arrays(y=[1.0], a=[2.0]), arrays(y=[9.0], a=[2.5]))], ["y"], known)
    assert (found.outputs_equal, found.equal, found.worst) == (None, False, "a")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (node("RandomNormal", [], ["n"], shape=[2], name="draw"), "RandomNormal 'draw'"),
        (node("Bernoulli", ["x"], ["n"]), "Bernoulli"),
        (node("Multinomial", ["x"], ["n"], name="draw"), "Multinomial 'draw'"),
        (node("Dropout", ["x", "half", "on"], ["n"]), "Dropout in training mode"),
        (node("Dropout", ["x", "", "asked"], ["n"]), "Dropout in training mode"),
        (node("Dropout", ["x", "half", "off"], ["n"]), None),
        (node("Dropout", ["x", "none", "on"], ["n"]), None),
        (node("Dropout", ["x"], ["n"]), None),
        (node("Relu", ["x"], ["n"]), None),
    ],
)
def test_random_operators_and_what_reads_them(made: onnx.NodeProto, said: str | None) -> None:
    weights = {"half": np.float32(0.5), "none": np.float32(0), "on": True, "off": False}
    body = helper.make_graph([made], "b", [], [helper.make_empty_tensor_value_info("n")])
    after = [node("Abs", ["n"], ["y"]), node("Abs", ["x"], ["z"])]
    for first in (made, node("If", ["c"], ["n"], then_branch=body, else_branch=body, name="draw")):
        found = repeatable(model([first, *after], weights))
        if said is None:
            assert found == Repeatable()
        else:
            assert len(found.random_ops) == 1
            assert found.random_ops[0].startswith(said.split("'")[0].strip())
            assert found.random == {"n", "y"}
    assert said is None or repeatable(model([made, *after], weights)).random_ops == (said,)


def test_quantisers_reach_what_reads_them() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s"], ["q"]),
        node("DequantizeLinear", ["q", "scales"], ["d"]),
        node("MatMul", ["d", "w"], ["y"]),
        node("DequantizeLinear", ["wq", "s"], ["w"]),
        node("Relu", ["x"], ["r"]),
    ]
    weights = {"s": np.float32(0.5), "scales": np.array([0.1, 0.25], np.float32)}
    assert repeatable(model(nodes, weights)).step == {"q": 0.0, "d": 0.25, "y": 0.0}


def report(**changed: Any) -> dict[str, Any]:
    placed = Row(1.0, (0.9, 1.1), 1.0, (0.9, 1.1), completions=100, is_capped=False, rounds=8)
    return {
        **measured_fields("latency", (1.0, 1.0), placed, {}, Measuring()),
        "model": "m", "cluster": "c", "max_abs_diff": 0.5, "outputs_equal": True,
        "inner_equal": True, "worst_tensor": "q", "random_ops": (), "samples_in_flight": 1,
        **changed,
    }  # fmt: skip


def test_the_text_says_what_was_and_what_could_not_be_compared() -> None:
    assert "outputs equal to the uncut model's" in run_text(report())
    assert "outputs DIFFERENT to the uncut model's" in run_text(report(outputs_equal=False))
    inner = run_text(report(inner_equal=False))
    assert "outputs equal" in inner
    assert "tensors between pieces DIFFERENT, most 'q'" in inner
    noise = run_text(report(outputs_equal=None, random_ops=("Bernoulli 'b'",)))
    assert "outputs cannot be compared, they are other ones at each run: Bernoulli 'b'" in noise
    some = run_text(report(random_ops=("Bernoulli 'b'",)))
    assert "outputs equal" in some
    assert "not compared, as it is another one at each run: what reads Bernoulli 'b'" in some
