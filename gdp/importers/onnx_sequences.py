"""Shapes of ONNX sequences and optional values, followed tensor by tensor."""

import onnx_ir as ir

from gdp.importers.onnx_types import (
    Fact,
    Inferred,
    NodeView,
    Partial,
    Rule,
    Tensor,
    TensorList,
    need,
    tensor_list,
)

Runs = tuple[tuple[Tensor, int], ...]


def sequence_rule(view: NodeView) -> Rule | None:
    """The shape rule of an operator on sequences, None for any other."""
    if view.domain != "":
        return None
    if view.op_type == "Identity" and isinstance(view.inputs[0], TensorList):
        return _same
    return _RULES.get(view.op_type)


def _same(view: NodeView) -> list[Inferred]:
    fact = view.inputs[0] if view.inputs else None
    return [TensorList() if fact is None else fact]


def _construct(view: NodeView) -> list[Inferred]:
    return [tensor_list((fact, 1) for fact in view.inputs if isinstance(fact, Tensor))]


def _split_to_sequence(view: NodeView) -> list[Inferred]:
    x, axis = need(view, 0), view.attribute("axis", 0)
    split, size = view.data(1), x.shape[axis]
    if split is None and view.tensor(1) is not None:
        return [Partial()]
    lengths: list[tuple[int, int]]  # (length, how many of it)
    if split is None or split.ndim == 0:
        step = 1 if split is None else int(split)
        if step < 1:
            raise ValueError(f"parts of length {step}")
        lengths = [(step, size // step), (size % step, 1 if size % step else 0)]
    else:
        lengths = [(int(part), 1) for part in split]

    def part(length: int) -> Tensor:
        shape = list(x.shape)
        shape[axis] = length
        if split is None and not view.attribute("keepdims", 1):
            del shape[axis]
        return Tensor(x.dtype, tuple(shape))

    return [tensor_list((part(length), count) for length, count in lengths)]


def _sequence_at(view: NodeView) -> list[Inferred]:
    runs, count, place = _runs(view), _list(view).count, _place(view, 1)
    if place is not None and -count <= place < count:
        return [_split_runs(runs, place)[1][0][0]]
    # Any element will do when all are alike.
    return [runs[0][0] if len(runs) == 1 else Partial()]


def _sequence_insert(view: NodeView) -> list[Inferred]:
    place = _place(view, 2)
    before, after = (_runs(view), ()) if place is None else _split_runs(_runs(view), place)
    return [tensor_list([*before, (need(view, 1), 1), *after])]


def _sequence_erase(view: NodeView) -> list[Inferred]:
    place = _place(view, 1)
    before, after = _split_runs(_runs(view), -1 if place is None else place)
    rest = ((after[0][0], after[0][1] - 1), *after[1:]) if after else ()
    return [tensor_list([*before, *rest])]


def _concat_from_sequence(view: NodeView) -> list[Inferred]:
    runs, axis = _runs(view), view.attribute("axis", 0)
    if not runs:
        return [Partial()]
    first = runs[0][0]
    shape = list(first.shape)
    if view.attribute("new_axis", 0):
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, _list(view).count)
    else:
        shape[axis] = sum(item.shape[axis] * count for item, count in runs)
    return [Tensor(first.dtype, tuple(shape))]


def _list(view: NodeView) -> TensorList:
    fact: Fact | None = view.inputs[0]
    return fact if isinstance(fact, TensorList) else TensorList()


def _runs(view: NodeView) -> Runs:
    return _list(view).runs


def _split_runs(runs: Runs, place: int) -> tuple[Runs, Runs]:
    """What stands before a position and what from it on; negative positions count from the end."""
    left = place if place >= 0 else max(place + sum(count for _, count in runs), 0)
    for i, (item, count) in enumerate(runs):
        if left < count:
            return (*runs[:i], (item, left)), ((item, count - left), *runs[i + 1 :])
        left -= count
    return runs, ()


def _place(view: NodeView, index: int) -> int | None:
    data = view.data(index)
    return None if data is None else int(data.reshape(-1)[0])


_RULES: dict[str, Rule] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": lambda view: [TensorList()],
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
