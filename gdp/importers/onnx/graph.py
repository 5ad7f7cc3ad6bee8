"""An `OpGraph` of an ONNX model whose shapes are known, once its constants are folded."""

from collections.abc import Iterator

import onnx_ir as ir

from gdp.base.errors import ModelError
from gdp.graph.op_graph import (
    INPUT,
    OUTPUT,
    Attribute,
    GraphBuilder,
    OpDetail,
    OpGraph,
    is_storable,
)
from gdp.importers.onnx.normalise import input_op_name, output_op_name, scope_of
from gdp.importers.onnx.shapes import Facts, bodies
from gdp.ops.onnx_view import Fact, NodeView, Tensor, TensorList, dtype_name
from gdp.ops.table import ONNX, onnx_cost

_FLOATS = {
    ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16,
}  # fmt: skip
# The output holds the numbers of the input under another shape. A transpose counts too: a product
# can read the transposed weight in place, as where an embedding is also the output layer.
_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"}


def fold(facts: Facts) -> None:
    """Replace values computed from shapes of activations by initialisers and drop nodes that then
    feed nothing. Nodes that make graph outputs stay, unread by others.

    Such values are constants once the dimensions are bound; left in place, they would tie ops to
    tensors whose data they never read.
    """
    graph = facts.model.graph
    for node in list(graph):
        if all(value in facts.by_shape for value in node.outputs):
            for value in node.outputs:
                if value.uses():
                    _store(facts, value)
    for node in reversed(list(graph)):
        if not _makes_output(node) and not any(value.uses() for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def annotate(facts: Facts) -> None:
    """Write the types that were found onto the values of the main graph, and the shapes, except
    those that are assumed: a runtime would refuse any other."""
    graph = facts.model.graph
    for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
        fact = facts.tensors.get(value)
        if isinstance(fact, Tensor):
            value.type = ir.TensorType(fact.dtype)
            if value not in facts.assumed:
                value.shape = ir.Shape(fact.shape)
            elif value.shape is not None and not value.is_graph_output():
                value.shape = None


class Roles:
    """The nodes of a folded model that are ops, and the weights that each op holds."""

    def __init__(self, facts: Facts) -> None:
        graph = facts.model.graph
        self.facts = facts
        self.weight_nodes = {
            node
            for node in graph
            if all(value in facts.constant for value in node.outputs) and not _makes_output(node)
        }
        self.ops = [node for node in graph if node not in self.weight_nodes]

    def is_weight(self, value: ir.Value) -> bool:
        """Stored, or computed from stored values alone."""
        maker = value.producer()
        if maker is None:
            return value.is_initializer()
        if maker.graph is self.facts.model.graph:
            return maker in self.weight_nodes
        return value in self.facts.constant

    def weights(self, node: ir.Node) -> list[ir.Value]:
        """The distinct weights that an op reads, those of its bodies included, in reading order."""
        roots: dict[ir.Value, None] = {}
        for value in self._read(node):
            if self.is_weight(value):
                roots[self.root(value)] = None
        return list(roots)

    def activations(self, node: ir.Node) -> list[ir.Value]:
        """The distinct values of the main graph, other than weights, that an op reads."""
        main = self.facts.model.graph
        values: dict[ir.Value, None] = {}
        for value in self._read(node):
            maker = value.producer()
            owner = value.graph if maker is None else maker.graph
            if owner is main and not self.is_weight(value):
                values[value] = None
        return list(values)

    def root(self, value: ir.Value) -> ir.Value:
        """The weight that a chain of views shows; tied weights meet in it."""
        while (maker := value.producer()) is not None and maker.op_type in _VIEWS:
            source = maker.inputs[0]
            if source is None or not self.is_weight(source):
                break
            value = source
        return value

    def _read(self, node: ir.Node) -> Iterator[ir.Value]:
        for value in node.inputs:
            if value is not None:
                yield value
        for body in bodies(node):
            for inner in body:
                if not all(value in self.facts.constant for value in inner.outputs):
                    yield from self._read(inner)
            yield from body.outputs


def _makes_output(node: ir.Node) -> bool:
    return any(value.is_graph_output() for value in node.outputs)


def _store(facts: Facts, value: ir.Value) -> None:
    """Let the readers of a node's output read an initialiser in its place."""
    data = facts.known[value]
    # Two values of a graph cannot share a name, and a graph output must keep its own.
    name = f"{value.name}.constant"
    while name in facts.model.graph.initializers:
        name = f"{name}_"
    stored = ir.Value(
        name=name,
        shape=ir.Shape(data.shape),
        type=ir.TensorType(ir.DataType.from_numpy(data.dtype)),
        const_value=ir.Tensor(data, name=name),
    )
    for reader, index in value.uses():
        reader.replace_input_with(index, stored)
    facts.model.graph.register_initializer(stored)
    facts.set_known(stored, data)


def build_graph(name: str, roles: Roles) -> tuple[OpGraph, list[int | None], list[str]]:
    """The graph of a folded model, in the order of its nodes.

    Returns:
        The graph; for each of its ops the index of its node in the model's main graph, None for
        graph inputs and outputs; the names of ops without a cost formula.
    """
    facts, builder = roles.facts, GraphBuilder()
    graph = facts.model.graph
    tensor_of: dict[ir.Value, int] = {}
    node_of_op: list[int | None] = []
    for value in graph.inputs:
        fact = facts.tensors.get(value)
        if fact is not None and (value.uses() or value.is_graph_output()):
            detail = OpDetail(dtype=_fact_dtype(fact), output_shapes=(_fact_shape(fact),))
            op = builder.add_op(input_op_name(value.name or ""), INPUT, detail=detail)
            tensor_of[value] = builder.make_tensor(op, fact.bytes, value.name or "")
            node_of_op.append(None)
    position = {node: index for index, node in enumerate(graph)}
    holder: dict[ir.Value, int] = {}  # of a weight: the first op that holds it
    estimated: list[str] = []
    for node in roles.ops:
        view = facts.view(node)
        cost = onnx_cost(view)
        weights = roles.weights(node)
        sizes = [facts.bytes(value) for value in weights]
        op = builder.add_op(
            node.name or "", node.op_type,
            reads=[tensor_of[value] for value in roles.activations(node)],
            flop=cost.flop, traffic_bytes=cost.traffic_bytes, weight_bytes=sum(sizes),
            # Ops share an id when they share the largest thing that they hold: a tied embedding
            # ties, a scalar that a hundred ops happen to share does not.
            weight_id=holder.setdefault(weights[sizes.index(max(sizes))], len(node_of_op))
            if weights
            else None,
            scope=scope_of(node), detail=_detail(view),
        )  # fmt: skip
        node_of_op.append(position[node])
        if not cost.known or node in facts.estimated:
            estimated.append(node.name or "")
        for value in node.outputs:
            fact = facts.tensors.get(value)
            if value.name and fact is not None:
                tensor_of[value] = builder.make_tensor(op, fact.bytes, value.name)
    if all(op_type in (INPUT, OUTPUT) for op_type in builder.op_types):
        raise ModelError(
            f"model {name!r} has no ops: all of its nodes are constants; there is nothing to place"
        )
    ends: set[str] = set()
    for value in graph.outputs:
        fact = facts.tensors.get(value)
        detail = OpDetail() if fact is None else OpDetail(_fact_dtype(fact), (_fact_shape(fact),))
        # A stored weight needs no op to make it.
        reads = [tensor_of[value]] if value in tensor_of else []
        builder.add_op(_output_name(value, ends), OUTPUT, reads=reads, detail=detail)
        node_of_op.append(None)
    return builder.build(name, "onnx"), node_of_op, estimated


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
            if (plain := _plain(attribute)) is not None and is_storable(plain)
        },
    )


def _arithmetic(view: NodeView) -> str:
    """The type that an op computes in: of its first floating input, else of its output."""
    if (rule := ONNX.get(view.op_type)) is not None and rule.integer:
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
