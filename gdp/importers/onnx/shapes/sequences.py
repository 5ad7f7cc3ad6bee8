"""Shapes of ONNX sequences and optional values, followed tensor by tensor."""

import onnx_ir as ir

from gdp.importers.onnx.shapes.types import (
    Fact,
    Inferred,
    NodeView,
    Partial,
    Rule,
    Tensor,
    TensorList,
    need,
)


def sequence_rule(view: NodeView) -> Rule | None:
    """The shape rule of an operator on sequences, None for any other."""
    if view.domain != "":
        return None
    if view.op_type == "Identity" and isinstance(view.inputs[0], TensorList):
        return _same
    return _RULES.get(view.op_type)


def _same(view: NodeView) -> list[Inferred]:
    fact = view.inputs[0] if view.inputs else None
    return [TensorList(()) if fact is None else fact]


def _construct(view: NodeView) -> list[Inferred]:
    return [TensorList(tuple(fact for fact in view.inputs if isinstance(fact, Tensor)))]


def _split_to_sequence(view: NodeView) -> list[Inferred]:
    x, axis = need(view, 0), view.attribute("axis", 0)
    split, size = view.data(1), x.shape[axis]
    if split is None and view.tensor(1) is not None:
        return [Partial()]
    if split is None or split.ndim == 0:
        step = 1 if split is None else int(split)
        sizes = [min(step, size - start) for start in range(0, size, max(step, 1))]
    else:
        sizes = [int(part) for part in split]

    def part(length: int) -> Tensor:
        shape = list(x.shape)
        shape[axis] = length
        if split is None and not view.attribute("keepdims", 1):
            del shape[axis]
        return Tensor(x.dtype, tuple(shape))

    return [TensorList(tuple(part(length) for length in sizes))]


def _sequence_at(view: NodeView) -> list[Inferred]:
    items, place = _items(view), _place(view, 1)
    if place is not None and -len(items) <= place < len(items):
        return [items[place]]
    # Any element will do when all are alike.
    return [items[0] if items and len(set(items)) == 1 else Partial()]


def _sequence_insert(view: NodeView) -> list[Inferred]:
    items, place = list(_items(view)), _place(view, 2)
    items.insert(len(items) if place is None else place, need(view, 1))
    return [TensorList(tuple(items))]


def _sequence_erase(view: NodeView) -> list[Inferred]:
    items, place = list(_items(view)), _place(view, 1)
    if items:
        items.pop(-1 if place is None else place)
    return [TensorList(tuple(items))]


def _concat_from_sequence(view: NodeView) -> list[Inferred]:
    items, axis = _items(view), view.attribute("axis", 0)
    if not items:
        return [Partial()]
    shape = list(items[0].shape)
    if view.attribute("new_axis", 0):
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, len(items))
    else:
        shape[axis] = sum(item.shape[axis] for item in items)
    return [Tensor(items[0].dtype, tuple(shape))]


def _items(view: NodeView) -> tuple[Tensor, ...]:
    fact: Fact | None = view.inputs[0]
    return fact.items if isinstance(fact, TensorList) else ()


def _place(view: NodeView, index: int) -> int | None:
    data = view.data(index)
    return None if data is None else int(data.reshape(-1)[0])


_RULES: dict[str, Rule] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": lambda view: [TensorList(())],
    "SplitToSequence": _split_to_sequence,
    "SequenceAt": _sequence_at,
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceLength": lambda view: [Tensor(ir.DataType.INT64, ())],
    "ConcatFromSequence": _concat_from_sequence,
    # An optional value that is there is taken as the value itself.
    "Optional": _same,
    "OptionalGetElement": _same,
    "OptionalHasElement": lambda view: [Tensor(ir.DataType.BOOL, ())],
}
