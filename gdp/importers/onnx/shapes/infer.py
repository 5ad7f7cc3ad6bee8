"""One pass over a model, in order, that finds the shape and type of every value."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import numpy as np
import onnx_ir as ir

from gdp.errors import ModelError
from gdp.importers.onnx.dims import Dimensions, how_to_bind
from gdp.importers.onnx.read import describe
from gdp.importers.onnx.shapes.contrib import MICROSOFT, contrib_rule, standard_twin
from gdp.importers.onnx.shapes.schema import STANDARD_DOMAINS, SchemaInference, find_schema
from gdp.importers.onnx.shapes.sequences import sequence_rule
from gdp.importers.onnx.shapes.types import (
    Cost,
    Fact,
    Inferred,
    NodeView,
    Partial,
    Tensor,
    TensorList,
)
from gdp.importers.onnx.shapes.values import can_evaluate, evaluate, tensor_data

logger = logging.getLogger(__name__)

Unknown = Literal["error", "estimate"]
LARGEST = 1 << 50
"""Elements of a tensor from here on are a mistake."""
BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

# The same inputs give another output each time, so nothing of these is constant.
RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial",
}  # fmt: skip


@dataclass(frozen=True)
class ImportOptions:
    """What the user decides about a model that does not say it itself."""

    dims: Mapping[str, int] = field(default_factory=dict)
    trips: int | None = None  # of a loop whose trip count is no constant; None: 1, and said
    unknown: Unknown = "error"  # operators of unknown domains: refuse, or estimate their costs

    def __post_init__(self) -> None:
        if self.trips is not None and self.trips < 0:
            raise ValueError(f"trips must be >= 0, got {self.trips}")
        for name, size in self.dims.items():
            if size < 0:
                raise ValueError(f"dimension {name!r} must be >= 0, got {size}")
        if self.unknown not in ("error", "estimate"):
            raise ValueError(f"unknown must be 'error' or 'estimate', got {self.unknown!r}")


Control = Callable[["Facts", ir.Node, NodeView], list[Inferred]]
"""The outputs of a node with bodies."""


class Facts:
    """What is known of each value of a model. Filled by `infer`, read by everyone after it.

    `control` infers nodes that hold graphs, `cost` is what it counts in them for each node: both
    stand on this class, and so are given to it.
    """

    def __init__(
        self,
        model: ir.Model,
        options: ImportOptions,
        control: "Control",
        cost: Callable[[NodeView], Cost],
    ) -> None:
        self.control, self.cost = control, cost
        self.model = model
        self.options = options
        self.dims = Dimensions(options.dims, model)
        self.schema = SchemaInference(dict(model.opset_imports))
        self.tensors: dict[ir.Value, Fact] = {}
        self.known: dict[ir.Value, np.ndarray] = {}  # data of small constants
        self.constant: set[ir.Value] = set()  # depends on weights and shapes alone
        self.by_shape: set[ir.Value] = set()  # known, and from the shape of an activation
        self.assumed: set[ir.Value] = set()  # of a shape that may be another one when it runs
        self.stored: dict[ir.Value, int] = {}  # bytes of constants kept quantised
        self.body: dict[ir.Node, tuple[float, float]] = {}  # FLOPs and traffic of control flow
        self.visits = 0  # of nodes, those of bodies at each visit
        self.estimated: set[ir.Node] = set()  # nodes of bodies that have no cost formula
        self.assumptions: dict[str, None] = {}  # ordered, each once

    def infer(self) -> None:
        """Find the shape of every value that a node of the main graph reads or makes."""
        for value in self.model.graph.inputs:
            if value.uses() or value.is_graph_output():
                self.tensors[value] = _sized(self._input(value), value)
        self.infer_graph(self.model.graph)

    def infer_graph(self, graph: ir.Graph) -> None:
        """Visit the nodes of a graph whose inputs, and all outer values, are known."""
        for value in graph.initializers.values():
            self._initializer(value)
        for node in graph:
            self._visit(node)

    def assume(self, text: str) -> None:
        """Record a guess that shapes or costs rest on, and warn of it once."""
        if text not in self.assumptions:
            self.assumptions[text] = None
            logger.warning("%s", text)

    def view(self, node: ir.Node) -> NodeView:
        """A node with what is known of its inputs, and of its outputs where they were visited."""
        read = {value for value in node.inputs if value is not None}
        return NodeView(
            name=node.name or "",
            domain=node.domain,
            op_type=node.op_type,
            version=self.version(node.domain),
            attributes=node.attributes,
            inputs=tuple(None if v is None else self.fact(v, node) for v in node.inputs),
            known=tuple(None if v is None else self.known.get(v) for v in node.inputs),
            outputs=tuple(self.tensors.get(value) for value in node.outputs),
            num_outputs=len(node.outputs),
            read_bytes=sum(self.bytes(value) for value in read),
            written_bytes=sum(self.bytes(value) for value in node.outputs),
            body=self.body.get(node, (0.0, 0.0)),
        )

    def version(self, domain: str) -> int:
        """The operator set of a domain; 1 where the model imports none."""
        return self.model.opset_imports.get(domain, 1)

    def fact(self, value: ir.Value, reader: ir.Node) -> Fact:
        """What is known of a value; raises `ModelError`, naming the reader, on one not yet made."""
        fact = self.tensors.get(value)
        if fact is None:
            raise ModelError(
                f"node {reader.name!r} ({reader.op_type}) reads {value.name!r}, whose shape is not "
                "known there; no node, input or initialiser before it makes the value"
            )
        return fact

    def bytes(self, value: ir.Value) -> int:
        """Bytes of a value as it is stored, 0 for one that nobody made."""
        if value in self.stored:
            return self.stored[value]
        fact = self.tensors.get(value)
        return 0 if fact is None else fact.bytes

    def set_known(self, value: ir.Value, data: np.ndarray) -> None:
        """Give a value constant data, and with it type and shape."""
        self.known[value] = data
        self.constant.add(value)
        self.tensors[value] = Tensor(ir.DataType.from_numpy(data.dtype), data.shape)

    def _input(self, value: ir.Value) -> Fact:
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise ModelError(
                f"graph input {value.name!r} is no tensor but {type(value.type).__name__}; "
                "gdp places models whose inputs are tensors"
            )
        if value.dtype is None or value.dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"graph input {value.name!r} has no element type; declare it")
        shape = self.dims.shape(value)
        if shape is None or None in shape:
            raise ModelError(f"graph input {value.name!r} {how_to_bind(value, shape)}")
        return Tensor(value.dtype, tuple(size for size in shape if size is not None))

    def _initializer(self, value: ir.Value) -> None:
        self.constant.add(value)
        tensor = value.const_value
        if tensor is not None:
            shape = tuple(size for size in tensor.shape if isinstance(size, int))
            self.tensors[value] = _sized(Tensor(tensor.dtype, shape), value)
            data = tensor_data(tensor)
            if data is not None:
                self.known[value] = data

    def _visit(self, node: ir.Node) -> None:
        self.visits += 1
        for value in node.outputs:  # a loop's body is visited again as its state grows
            self.known.pop(value, None)
            self.constant.discard(value)
            self.by_shape.discard(value)
            self.assumed.discard(value)
        inputs = [value for value in node.inputs if value is not None]
        has_body = any(a.type in BODIES for a in node.attributes.values())
        constant = (
            not has_body
            and node.op_type not in RANDOM
            and all(value in self.constant for value in inputs)
        )
        view = self.view(node)
        inferred = self._control(node, view) if has_body else self._infer(view)
        if any(value in self.assumed for value in (*inputs, *_body_outputs(node))):
            self.assumed.update(node.outputs)
        if can_evaluate(view) and (data := evaluate(view, inferred)) is not None:
            for value, array in zip(node.outputs, data, strict=False):
                self.set_known(value, array)
                if value in self.assumed:  # what it is when it runs is still to be computed
                    self.constant.discard(value)
                elif not constant or any(source in self.by_shape for source in inputs):
                    self.by_shape.add(value)
            if len(data) >= len(node.outputs):
                return
        for i, value in enumerate(node.outputs):
            if value.name and value not in self.known:
                guess = inferred[i] if i < len(inferred) else Partial()
                fact = self._settle(value, node, view, guess)
                if fact is not None:
                    self.tensors[value] = _sized(fact, value)
        if constant:
            self.constant.update(node.outputs)
            if node.op_type == "DequantizeLinear" and len(inputs) > 0:
                # Runtimes keep such weights quantised and expand them where they are used.
                self.stored[node.outputs[0]] = sum(self.bytes(value) for value in inputs)

    def _control(self, node: ir.Node, view: NodeView) -> list[Inferred]:
        with _malformed(view):
            return self.control(self, node, view)

    def _infer(self, view: NodeView) -> list[Inferred]:
        rule = sequence_rule(view) or contrib_rule(view)
        with _malformed(view):
            if rule is not None:
                return rule(view)
            twin = standard_twin(view)
            if twin is not None:
                return self.schema(twin)
        if view.op_type == "Constant" and view.attribute("value") is not None:
            tensor = view.attribute("value")
            return [Tensor(tensor.dtype, tuple(int(size) for size in tensor.shape))]
        if view.domain in STANDARD_DOMAINS:
            if self.options.unknown == "estimate" and not self._has_schema(view):
                return []
            return self.schema(view)
        if view.domain != MICROSOFT and self.options.unknown == "error":
            raise ModelError(
                f"node {view.name!r} is operator {view.op_type!r} of the unknown domain "
                f"{view.domain!r}; ask for unknown operators to be estimated, or inline them as "
                "model functions"
            )
        return []

    def _has_schema(self, view: NodeView) -> bool:
        return find_schema(view.op_type, view.version, view.domain) is not None

    def _settle(
        self, value: ir.Value, node: ir.Node, view: NodeView, guess: Inferred
    ) -> Fact | None:
        """The full shape of an output: inferred, else bound by the user, else declared in the file;
        None where it stays open but nothing reads the output."""
        if isinstance(guess, Tensor | TensorList):
            return guess
        declared = self.dims.shape(value)
        shape = guess.shape if guess.shape is not None else declared
        if shape is not None:
            also = declared if declared is not None and len(declared) == len(shape) else shape
            shape = tuple(
                _first_known(size, self.dims.named(value, axis), also[axis])
                for axis, size in enumerate(shape)
            )
        if guess.shape is None or None in guess.shape:
            fixed = value.shape is not None and value.shape.is_static()
            if view.domain in STANDARD_DOMAINS and not fixed:
                self.assumed.add(value)  # it depends on data, whatever the user binds
        dtype = guess.dtype
        if dtype == ir.DataType.UNDEFINED:
            dtype = value.dtype or ir.DataType.UNDEFINED
        like = next((fact for fact in view.inputs if isinstance(fact, Tensor)), None)
        if dtype == ir.DataType.UNDEFINED and like is not None:
            dtype = like.dtype
        if shape is not None and None not in shape and dtype != ir.DataType.UNDEFINED:
            return Tensor(dtype, tuple(size for size in shape if size is not None))
        if self._is_foreign(view) and self.options.unknown == "estimate" and like is not None:
            self.assume(
                f"node {view.name!r} ({view.op_type} of domain {view.domain!r}): output "
                f"{value.name!r} is assumed to be like its first input, {list(like.shape)}"
            )
            return Tensor(dtype, like.shape)
        if not value.uses() and not value.is_graph_output():
            return None
        raise ModelError(
            f"tensor {value.name!r}, made by {describe(node.name, node.op_type)}, "
            f"{how_to_bind(value, shape)}{self._missing_data(node)}"
        )

    def _is_foreign(self, view: NodeView) -> bool:
        return view.domain not in STANDARD_DOMAINS or not self._has_schema(view)

    def _missing_data(self, node: ir.Node) -> str:
        """Names the external file when a shape hangs on data that is not there."""
        for value in node.inputs:
            if value is None or value in self.known:
                continue
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                return f" (the data of {value.name!r} is missing: it lies in {tensor.location!r})"
        return ""


@contextmanager
def _malformed(view: NodeView) -> Iterator[None]:
    """A rule that trips over a node says which one."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"node {view.name!r} ({view.op_type}) does not fit its inputs: {error}"
        ) from None


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that a control-flow node holds."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _body_outputs(node: ir.Node) -> Iterator[ir.Value]:
    return (value for body in bodies(node) for value in body.outputs)


def _sized(fact: Fact, value: ir.Value) -> Fact:
    """The fact, if it is of a size that can be."""
    if fact.elements > LARGEST:
        raise ModelError(
            f"tensor {value.name!r} would have {Decimal(fact.elements):.1e} elements; the model is "
            "damaged, or a dimension is bound to a wrong size"
        )
    return fact


def _first_known(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)
