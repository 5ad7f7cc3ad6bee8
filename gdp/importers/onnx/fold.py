"""The constant part of a model taken out: shape arithmetic stored, dead nodes dropped, weights
told from ops."""

from collections.abc import Iterator

import onnx_ir as ir

from gdp.importers.onnx.shapes.infer import Facts, bodies
from gdp.importers.onnx.shapes.types import Tensor

# The output holds the numbers of the input under another shape. A transpose counts too: a product
# can read the transposed weight in place, as where an embedding is also the output layer.
_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"}


def fold(facts: Facts) -> None:
    """Turn what is computed from the shapes of activations into initialisers and drop what then
    feeds nothing. Nodes that make graph outputs stay, but nothing else reads them.

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
    """Which nodes of a folded model are ops, and which weights each op holds."""

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
        """Stored, or computed from what is stored alone."""
        maker = value.producer()
        if maker is None:
            return value.is_initializer()
        if maker.graph is self.facts.model.graph:
            return maker in self.weight_nodes
        return value in self.facts.constant

    def weights(self, node: ir.Node) -> list[ir.Value]:
        """The distinct weights that an op reads, those of its bodies included, in reading order."""
        found: dict[ir.Value, None] = {}
        for value in self._read(node):
            if self.is_weight(value):
                found[self.root(value)] = None
        return list(found)

    def activations(self, node: ir.Node) -> list[ir.Value]:
        """The distinct values of the main graph, other than weights, that an op reads."""
        main = self.facts.model.graph
        found: dict[ir.Value, None] = {}
        for value in self._read(node):
            maker = value.producer()
            owner = value.graph if maker is None else maker.graph
            if owner is main and not self.is_weight(value):
                found[value] = None
        return list(found)

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
