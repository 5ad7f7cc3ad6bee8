"""The three tables of operators as one: fusion classes by op type, and the cost of an op.

Graphs do not say which framework an op type is of, so that a name has one class in all of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gdp.base.errors import ModelError
from gdp.ops.aten import ATEN
from gdp.ops.jax import JAX
from gdp.ops.onnx import STANDARD, all_bytes
from gdp.ops.onnx_ml import ML
from gdp.ops.onnx_view import NodeView, ShapeRule
from gdp.ops.onnxruntime import CONTRIB, MICROSOFT
from gdp.ops.rule import ELEMENTWISE, REDUCTION, VIEW, OpCost, OpRule, Shapes

ONNX: dict[str, OpRule] = {**STANDARD, **ML, **CONTRIB}
_TABLES = (ONNX, JAX, ATEN)


def _of_class(op_class: str) -> frozenset[str]:
    return frozenset(
        n for rules in _TABLES for n, rule in rules.items() if rule.op_class == op_class
    )


VIEWS = _of_class(VIEW)
"""Ops that move or relabel data without arithmetic."""
ELEMENTWISE_OPS = _of_class(ELEMENTWISE)
"""Ops whose outputs need the same element of their inputs only."""
REDUCTIONS = _of_class(REDUCTION)
"""Ops that read a whole axis: a compiler fuses them with element-wise ops, not with a matmul."""


def kernel_of(op_type: str) -> str:
    """Class of the kernel of an op type, "" for one without a row or a class.

    >>> kernel_of("MatMul"), kernel_of("addmm"), kernel_of("Relu")
    ('product', 'product', '')
    """
    return next((rules[op_type].kernel for rules in _TABLES if op_type in rules), "")


def jax_cost(name: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpCost:
    """The cost of a JAX primitive without sub-programs.

    >>> from gdp.ops.rule import Shape
    >>> square = Shape((8, 8), 4)
    >>> dims = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    >>> jax_cost("dot_general", dims, [square, square], [square])
    OpCost(flop=1024.0, traffic_bytes=768.0, known=True)
    """
    return _cost(JAX.get(name, OpRule()), name, params, ins, outs)


def aten_cost(name: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpCost:
    """The cost of an op by its ATen name without the overload.

    Args:
        name: of the op, such as "linear".
        params: its arguments that are no tensors, by the names of its schema.
        ins: the tensors that it reads.
        outs: the tensors that it makes.

    >>> from gdp.ops.rule import Shape
    >>> x, weight, out = Shape((2, 8), 4), Shape((16, 8), 4), Shape((2, 16), 4)
    >>> aten_cost("linear", {}, [x, weight], [out])
    OpCost(flop=512.0, traffic_bytes=704.0, known=True)
    """
    return _cost(ATEN.get(name, OpRule()), name, params, ins, outs)


def _cost(rule: OpRule, name: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> OpCost:
    """By the rule's formulas, else one operation per element read by a reduction, per element made
    by any other op."""
    moved = float(sum(s.nbytes for s in ins) + sum(s.nbytes for s in outs))
    size = float(max((s.size for s in outs), default=0))
    if rule.traffic is not None:
        moved = float(rule.traffic(ins, outs))
    if callable(rule.flop):
        return OpCost(float(rule.flop(params, ins, outs)), moved)
    if rule.flop is not None or name in VIEWS:
        return OpCost((rule.flop or 0) * size, moved)
    if name in REDUCTIONS or name.startswith("cum"):
        return OpCost(float(ins[0].size if ins else size), moved)
    return OpCost(size, moved, known=name in ELEMENTWISE_OPS)


def onnx_cost(view: NodeView) -> OpCost:
    """The cost of an ONNX node whose inputs and outputs have known shapes.

    Raises:
        ModelError: its inputs or attributes are not those of its operator.
    """
    rule = ONNX.get(view.op_type, OpRule())
    try:
        traffic = float((rule.traffic or all_bytes)(view))
        if callable(rule.flop):
            return OpCost(float(rule.flop(view)), traffic)
        if rule.flop is not None:
            return OpCost(float(rule.flop * view.out_elements), traffic)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"node {view.name!r} ({view.op_type}) cannot be costed, its inputs or attributes are "
            f"not those of its operator: {error}"
        ) from None
    elements = max((fact.elements for fact in view.outputs if fact is not None), default=0)
    return OpCost(float(elements), traffic, known=False)


def onnx_shape_rule(view: NodeView) -> ShapeRule | None:
    """The shape rule of a node's operator; None where a schema infers it, or nothing does."""
    rule = ONNX.get(view.op_type)
    return rule.shape if rule is not None and view.domain in rule.domains else None


def extended_operator(view: NodeView) -> NodeView | None:
    """A contrib node as the standard operator that it extends; None where it extends none."""
    rule = ONNX.get(view.op_type) if view.domain == MICROSOFT else None
    if rule is None or rule.extends is None:
        return None
    standard = rule.extends
    return dataclasses.replace(
        view,
        domain="",
        op_type=standard.op_type,
        version=standard.version,
        inputs=view.inputs[: standard.num_inputs],
        known=view.known[: standard.num_inputs],
        attributes={k: v for k, v in view.attributes.items() if k in standard.attributes},
    )
