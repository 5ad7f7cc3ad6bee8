"""An `OpGraph` of an ONNX model whose shapes are known and whose constants are folded."""

from dataclasses import dataclass, field

import onnx_ir as ir

from gdp.errors import ModelError
from gdp.graph.op_graph import INPUT, OUTPUT, Attribute, OpDetail, OpGraph, make_graph
from gdp.importers.onnx.costs import node_cost
from gdp.importers.onnx.fold import Roles
from gdp.importers.onnx.normalise import input_op_name, output_op_name, scope_of
from gdp.importers.onnx.shapes.types import Cost, Fact, NodeView, Tensor, TensorList, dtype_name

_FLOATS = {
    ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16,
}  # fmt: skip
# Whatever the type of their scales, these multiply integers.
_INTEGER_ARITHMETIC = {
    "MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul", "QGemm", "QLinearAdd",
    "QLinearMul", "QAttention", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM", "QLinearAveragePool", "QLinearGlobalAveragePool",
}  # fmt: skip


@dataclass
class GraphLists:
    """The columns of an `OpGraph` as they grow, one entry per op or tensor."""

    names: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    flop: list[float] = field(default_factory=list)
    traffic_bytes: list[float] = field(default_factory=list)
    weight_bytes: list[int] = field(default_factory=list)
    weight_id: list[int] = field(default_factory=list)
    scope: list[str] = field(default_factory=list)
    detail: list[OpDetail] = field(default_factory=list)
    node: list[int | None] = field(default_factory=list)  # index in the model's main graph
    tensors: list[tuple[int, int]] = field(default_factory=list)  # producer, bytes
    tensor_names: list[str] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)
    tensor_of: dict[ir.Value, int] = field(default_factory=dict)
    estimated: list[str] = field(default_factory=list)  # ops without a cost formula

    def make(self, value: ir.Value, op: int, size_bytes: int) -> None:
        """Append the tensor that `op` makes for a value."""
        self.tensor_of[value] = len(self.tensors)
        self.tensors.append((op, size_bytes))
        self.tensor_names.append(value.name or "")

    def read(self, value: ir.Value, op: int) -> None:
        """Append a use; the value must have been made before."""
        self.uses.append((self.tensor_of[value], op))

    def add(
        self,
        name: str,
        op_type: str,
        detail: OpDetail,
        *,
        cost: Cost = Cost(0.0, 0.0),  # noqa: B008  # frozen
        weight_bytes: int = 0,
        weight_id: int | None = None,
        scope: str = "",
        node: int | None = None,
    ) -> int:
        """Append an op and return its index; without `weight_id` its weights are its own."""
        op = len(self.names)
        self.names.append(name)
        self.types.append(op_type)
        self.flop.append(cost.flop)
        self.traffic_bytes.append(cost.traffic_bytes)
        self.weight_bytes.append(weight_bytes)
        self.weight_id.append(op if weight_id is None else weight_id)
        self.scope.append(scope)
        self.detail.append(detail)
        self.node.append(node)
        return op


def build(name: str, roles: Roles) -> tuple[OpGraph, GraphLists]:
    """The graph, in the order of the model, with the lists it was made from."""
    facts, lists = roles.facts, GraphLists()
    graph = facts.model.graph
    for value in graph.inputs:
        fact = facts.tensors.get(value)
        if fact is not None and (value.uses() or value.is_graph_output()):
            detail = OpDetail(dtype=_fact_dtype(fact), output_shapes=(_fact_shape(fact),))
            op = lists.add(input_op_name(value.name or ""), INPUT, detail)
            lists.make(value, op, fact.bytes)
    position = {node: index for index, node in enumerate(graph)}
    holder: dict[ir.Value, int] = {}  # of a weight: the first op that holds it
    for node in roles.ops:
        _add_op(lists, roles, node, position[node], holder)
    if all(op_type in (INPUT, OUTPUT) for op_type in lists.types):
        raise ModelError(
            f"model {name!r} has no ops: all of its nodes are constants; there is nothing to place"
        )
    ends: set[str] = set()
    for value in graph.outputs:
        fact = facts.tensors.get(value)
        shapes = () if fact is None else (_fact_shape(fact),)
        dtype = "float32" if fact is None else _fact_dtype(fact)
        op = lists.add(_output_name(value, ends), OUTPUT, OpDetail(dtype, input_shapes=shapes))
        if value in lists.tensor_of:  # else it is a stored weight, which needs no op to make it
            lists.read(value, op)
    made = make_graph(
        name,
        lists.names,
        lists.types,
        lists.tensors,
        lists.uses,
        flop=lists.flop,
        memory_traffic_bytes=lists.traffic_bytes,
        weight_bytes=lists.weight_bytes,
        weight_id=lists.weight_id,
        scope=lists.scope,
        detail=lists.detail,
        tensor_names=lists.tensor_names,
    )
    return made, lists


def _add_op(
    lists: GraphLists, roles: Roles, node: ir.Node, index: int, holder: dict[ir.Value, int]
) -> None:
    facts = roles.facts
    view = facts.view(node)
    cost = node_cost(view)
    weights = roles.weights(node)
    sizes = [facts.bytes(value) for value in weights]
    op = lists.add(
        node.name or "",
        node.op_type,
        _detail(view),
        cost=cost,
        weight_bytes=sum(sizes),
        # Ops share an id when they share the largest thing that they hold: a tied embedding ties,
        # a scalar that a hundred ops happen to share does not.
        weight_id=holder.setdefault(weights[sizes.index(max(sizes))], len(lists.names))
        if weights
        else None,
        scope=scope_of(node),
        node=index,
    )
    if cost.estimated or node in facts.estimated:
        lists.estimated.append(node.name or "")
    for value in roles.activations(node):
        lists.read(value, op)
    for value in node.outputs:
        fact = facts.tensors.get(value)
        if value.name and fact is not None:
            lists.make(value, op, fact.bytes)


def _output_name(value: ir.Value, used: set[str]) -> str:
    """An output's op name; one value may be several outputs, which then are numbered."""
    name = wanted = output_op_name(value.name or "")
    while name in used:
        name = f"{wanted}#{len(used) + 1}"
    used.add(name)
    return name


def _detail(view: NodeView) -> OpDetail:
    return OpDetail(
        dtype=_arithmetic(view),
        # A left-out input is one without elements, so that places keep their meaning.
        input_shapes=tuple((0,) if f is None else _fact_shape(f) for f in view.inputs),
        output_shapes=tuple(_fact_shape(fact) for fact in view.outputs if fact is not None),
        attributes={
            name: plain
            for name, attribute in view.attributes.items()
            if (plain := _plain(attribute)) is not None
        },
    )


def _arithmetic(view: NodeView) -> str:
    """The type that an op computes in: of its first floating input, else of what it makes."""
    if view.op_type in _INTEGER_ARITHMETIC:
        return "int8"
    facts = [*view.inputs, *view.outputs]
    for fact in facts:
        if isinstance(fact, Tensor) and fact.dtype in _FLOATS:
            return dtype_name(fact.dtype)
    first = next((fact for fact in facts if isinstance(fact, Tensor)), None)
    return "float32" if first is None else dtype_name(first.dtype)


def _plain(attribute: ir.Attr) -> Attribute | None:
    """A number, a text or numbers; None for the rest, such as tensors and bodies."""
    value = attribute.value
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, int) for item in value):
            return tuple(int(item) for item in value)
        if all(isinstance(item, float) for item in value):
            return tuple(float(item) for item in value)
    return None


def _fact_shape(fact: Fact) -> tuple[int, ...]:
    """A sequence counts as one axis of tensors."""
    return (fact.count,) if isinstance(fact, TensorList) else fact.shape


def _fact_dtype(fact: Fact) -> str:
    if isinstance(fact, TensorList):
        return dtype_name(fact.runs[0][0].dtype) if fact.runs else "float32"
    return dtype_name(fact.dtype)
