"""FLOPs and memory traffic of ONNX operators.

Traffic is what an unfused kernel reads and writes once: its distinct inputs and its outputs, except
for views, which touch nothing, and for operators that touch a part of an input.
"""

import math
from collections.abc import Callable

from gdp.errors import ModelError
from gdp.importers.onnx.flops import FLOP
from gdp.importers.onnx.shapes.types import Cost, NodeView, Tensor


def node_cost(view: NodeView) -> Cost:
    """What a node costs, once the shapes of what it reads and makes are known."""
    formula = FLOP.get(view.op_type)
    try:
        traffic = _TRAFFIC.get(view.op_type, _all)(view)
        if formula is not None:
            return Cost(float(formula(view)), traffic)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"node {view.name!r} ({view.op_type}) cannot be costed, its inputs or attributes are "
            f"not those of its operator: {error}"
        ) from None
    made = max((fact.elements for fact in view.outputs if fact is not None), default=0)
    return Cost(float(made), traffic, estimated=True)


def _all(view: NodeView) -> float:
    return float(view.read_bytes + view.written_bytes)


def _nothing(view: NodeView) -> float:
    """A view of its input, or what is known before the run."""
    del view
    return 0.0


def _body(view: NodeView) -> float:
    return view.body[1]


def _written_twice(view: NodeView) -> float:
    """As many bytes are read as are written, however large the input is."""
    return 2.0 * view.written_bytes


def _gather(view: NodeView) -> float:
    """The rows that are asked for, their copies, and the indices."""
    return 2.0 * view.written_bytes + _bytes(view, 1)


def _scatter(view: NodeView) -> float:
    """The data copied, and each update read and written over it."""
    return 2.0 * view.written_bytes + _bytes(view, 1) + 2.0 * _bytes(view, 2)


def _tensor_scatter(view: NodeView) -> float:
    """A cache updated in place: only the new part moves."""
    return 2.0 * _bytes(view, 1) + _bytes(view, 2)


def _embedding(view: NodeView) -> float:
    """EmbedLayerNormalization reads rows of its tables, not the tables."""
    made = view.outputs[0]
    return 3.0 * (made.bytes if made is not None else 0) + view.written_bytes + _bytes(view, 0)


def _gather_block(view: NodeView) -> float:
    """Quantised rows: a part of the table as large as the part of its rows that is asked for."""
    table, made = view.tensor(0), view.outputs[0]
    if table is None or not isinstance(made, Tensor):
        return _all(view)
    rows = made.elements / max(made.shape[-1], 1)
    row_bytes = table.bytes / max(math.prod(table.shape[:-1]), 1)
    return made.bytes + rows * row_bytes + _bytes(view, 1)


def _dropout(view: NodeView) -> float:
    """Nothing in inference, where it is the identity; an output mask is written."""
    training = view.data(2)
    if training is not None and training.any():
        return _all(view)
    mask = view.outputs[1] if len(view.outputs) > 1 else None
    return float(mask.bytes) if mask is not None else 0.0


def _cast(view: NodeView) -> float:
    """A cast to the same type is the identity."""
    made, source = view.outputs[0], view.tensor(0)
    same = isinstance(made, Tensor) and source is not None and made.dtype == source.dtype
    return 0.0 if same else _all(view)


def _experts(view: NodeView) -> float:
    """A mixture of experts reads the weights of the experts that its tokens reach, at most all."""
    x = view.tensor(0)
    experts = view.tensor(2)
    if x is None or experts is None:
        return _all(view)
    count, tokens = experts.shape[0], x.elements // max(x.shape[-1], 1)
    reached = min(count, tokens * int(view.attribute("k", 1)))
    weights = view.read_bytes - x.bytes
    return x.bytes + weights * reached / max(count, 1) + view.written_bytes


def _bytes(view: NodeView, index: int) -> int:
    fact = view.inputs[index] if index < len(view.inputs) else None
    return 0 if fact is None else fact.bytes


_TRAFFIC: dict[str, Callable[[NodeView], float]] = {
    **dict.fromkeys(
        ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size", "Constant",
         "BitCast", "SequenceConstruct", "SequenceEmpty", "SequenceAt", "SequenceInsert",
         "SequenceErase", "SequenceLength", "Optional", "OptionalGetElement",
         "OptionalHasElement"),
        _nothing,
    ),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _body),
    "Slice": _written_twice,
    "Gather": _gather,
    "GatherElements": _gather,
    "GatherND": _gather,
    "GatherBlockQuantized": _gather_block,
    "Scatter": _scatter,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "TensorScatter": _tensor_scatter,
    "EmbedLayerNormalization": _embedding,
    "Dropout": _dropout,
    "Cast": _cast,
    "CastLike": _cast,
    "MoE": _experts,
    "QMoE": _experts,
}  # fmt: skip
