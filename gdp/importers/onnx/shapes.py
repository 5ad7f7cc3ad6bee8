"""Shapes and types of every value of an ONNX model, in one pass over its nodes.

Nodes that hold graphs (If, Loop, Scan, SequenceMap) are one op each, with the shapes and the cost
of their bodies.
"""

import bisect
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import numpy as np
import onnx_ir as ir

from gdp.base.errors import ModelError
from gdp.importers.onnx.dims import Dimensions, how_to_bind
from gdp.importers.onnx.schema import (
    STANDARD_DOMAINS,
    SchemaInference,
    can_evaluate,
    evaluate,
    find_schema,
    tensor_data,
)
from gdp.importers.onnx.validate import describe
from gdp.ops.onnx_view import Fact, Inferred, NodeView, Partial, Tensor, TensorList, tensor_list
from gdp.ops.onnxruntime import MICROSOFT
from gdp.ops.table import extended_operator, onnx_cost, onnx_shape_rule

logger = logging.getLogger(__name__)

Unknown = Literal["error", "estimate"]
LARGEST = 1 << 50
"""Elements of a tensor from here on are a mistake."""
ENDLESS = 1 << 31
"""A trip count from here on means "until the condition fails"; exporters write 2**63 - 1."""
TRACED_TRIPS = 64
"""A loop whose state keeps growing is followed this far; later iterations cost as the last."""
TRACED_NODES = 100_000
"""Once so many nodes have been visited, loops are followed no further: those within loops would
multiply their trips."""

BodyCost = tuple[float, float]  # FLOPs, bytes of traffic
BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

# The same inputs give another output each time, so nothing of these is constant.
RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial",
}  # fmt: skip


@dataclass(frozen=True)
class ImportOptions:
    """Choices of the user where a model leaves something open."""

    dims: Mapping[str, int] = field(default_factory=dict)
    trips: int | None = None  # of a loop whose trip count is no constant; None: 1, with a note
    unknown: Unknown = "error"  # operators of unknown domains: refuse, or estimate their costs

    def __post_init__(self) -> None:
        if self.trips is not None and self.trips < 0:
            raise ValueError(f"trips must be >= 0, got {self.trips}")
        for name, size in self.dims.items():
            if size < 0:
                raise ValueError(f"dimension {name!r} must be >= 0, got {size}")
        if self.unknown not in ("error", "estimate"):
            raise ValueError(f"unknown must be 'error' or 'estimate', got {self.unknown!r}")


class Facts:
    """Shape, type and small constant data of each value of a model; filled by `infer`."""

    def __init__(self, model: ir.Model, options: ImportOptions) -> None:
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
            self.constant.add(value)
            tensor = value.const_value
            if tensor is not None:
                shape = tuple(size for size in tensor.shape if isinstance(size, int))
                self.tensors[value] = _sized(Tensor(tensor.dtype, shape), value)
                data = tensor_data(tensor)
                if data is not None:
                    self.known[value] = data
        for node in graph:
            self._visit(node)

    def assume(self, text: str) -> None:
        """Record a guess that shapes or costs rest on, and warn of it once."""
        if text not in self.assumptions:
            self.assumptions[text] = None
            logger.warning("%s", text)

    def view(self, node: ir.Node) -> NodeView:
        """A node with the facts of its inputs, and of its outputs where they were visited."""
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
        """Type and shape of a value; raises `ModelError` naming the reader if it is never made."""
        fact = self.tensors.get(value)
        if fact is None:
            raise ModelError(
                f"node {reader.name!r} ({reader.op_type}) reads {value.name!r}, whose shape is not "
                "known there; no node, input or initialiser before it makes the value"
            )
        return fact

    def bytes(self, value: ir.Value) -> int:
        """Stored bytes of a value; 0 if it has no producer."""
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
        inferred = self._infer_control(node, view) if has_body else self._infer(view)
        inner = (value for body in bodies(node) for value in body.outputs)
        if any(value in self.assumed for value in (*inputs, *inner)):
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

    def _infer_control(self, node: ir.Node, view: NodeView) -> list[Inferred]:
        with _malformed(view):
            return infer_control(self, node, view)

    def _infer(self, view: NodeView) -> list[Inferred]:
        rule = onnx_shape_rule(view)
        with _malformed(view):
            if rule is not None:
                return rule(view)
            standard = extended_operator(view)
            if standard is not None:
                return self.schema(standard)
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
                f"{view.domain!r}; add its row to gdp/ops/onnx.py (docs/how-to/extending.md), or "
                "inline it as a model function"
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
            known = (
                (size, self.dims.named(value, axis), also[axis]) for axis, size in enumerate(shape)
            )
            shape = tuple(next((n for n in sizes if n is not None), None) for sizes in known)
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
    """Turn the errors of a rule into a `ModelError` that names the node."""
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


def _sized(fact: Fact, value: ir.Value) -> Fact:
    """The fact; raises `ModelError` for a size that no model has."""
    if fact.elements > LARGEST:
        raise ModelError(
            f"tensor {value.name!r} would have {Decimal(fact.elements):.1e} elements; the model is "
            "damaged, or a dimension is bound to a wrong size"
        )
    return fact


# If, Loop, Scan and SequenceMap: one op each, with the shapes and the cost of their bodies


def infer_control(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    """The outputs of a node with bodies; its cost is noted in `facts.body`."""
    rules = {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}
    if view.domain != "" or view.op_type not in rules:
        return _other(facts, node, view)
    return rules[view.op_type](facts, node, view)


def _if(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    then, other = _body(node, "then_branch"), _body(node, "else_branch")
    condition = view.data(0)
    if condition is not None and condition.size == 1:
        taken = then if condition.reshape(-1)[0] else other
        facts.body[node] = _run(facts, taken)
        return _results(facts, taken, node)
    costs = [_run(facts, branch) for branch in (then, other)]
    results = [_results(facts, branch, node) for branch in (then, other)]
    if results[0] != results[1]:
        facts.assumed.update(node.outputs)
    dearer = 0 if costs[0] >= costs[1] else 1
    facts.body[node] = costs[dearer]
    if costs[0] != costs[1] or results[0] != results[1]:
        facts.assume(
            f"node {view.name!r} (If): the condition depends on data; the "
            f"{'then' if dearer == 0 else 'else'} branch, the dearer one, is assumed"
        )
    return results[dearer]


def _loop(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    body = _body(node, "body")
    trips, certain = _trips(facts, view, body)
    states: list[Fact] = [fact for fact in view.inputs[2:] if fact is not None]
    if len(body.inputs) != 2 + len(states):
        raise ModelError(
            f"node {view.name!r} (Loop) carries {len(states)} values, its body takes "
            f"{len(body.inputs) - 2}"
        )
    total, first = (0.0, 0.0), list(states)
    scanned: list[Inferred] = []
    facts.tensors[body.inputs[0]] = Tensor(ir.DataType.INT64, ())
    facts.tensors[body.inputs[1]] = Tensor(ir.DataType.BOOL, ())
    for trip in range(max(trips, 1)):
        facts.tensors.update(zip(body.inputs[2:], states, strict=True))
        cost = _run(facts, body)
        results = _results(facts, body, node)[1:]
        scanned = results[len(states) :]
        after = [r for r in results[: len(states)] if isinstance(r, Tensor | TensorList)]
        if trips == 0:
            break  # visited for the shapes of its would-be outputs
        traced = trip + 1 == TRACED_TRIPS or facts.visits > TRACED_NODES
        settled = after == states or traced
        times = trips - trip if settled else 1
        total = (total[0] + times * cost[0], total[1] + times * cost[1])
        states = after
        if settled:
            break
    facts.body[node] = total
    if not certain:
        facts.assumed.update(node.outputs[len(states) if states == first else 0 :])
    return [*states, *(_stacked(item, 0, trips) for item in scanned)]


def _trips(facts: Facts, view: NodeView, body: ir.Graph) -> tuple[int, bool]:
    """(trip count of a loop, True if it is certain): a constant, else the user's option, else 1."""
    limit, condition = view.data(0), view.data(1)
    if condition is not None and not condition.reshape(-1)[0]:
        return 0, True
    if limit is not None and int(limit.reshape(-1)[0]) < ENDLESS:
        trips = int(limit.reshape(-1)[0])
        # A condition that is just passed on never ends the loop early.
        certain = _passes_on(body) and not (condition is None and view.has(1))
        if not certain:
            facts.assume(
                f"node {view.name!r} (Loop): its condition may end it early; all {trips} trips "
                "are assumed"
            )
        return max(trips, 0), certain
    if facts.options.trips is not None:
        return facts.options.trips, False
    facts.assume(
        f"node {view.name!r} (Loop): the trip count depends on data; 1 trip is assumed, "
        "give another with trips=N"
    )
    return 1, False


def _passes_on(body: ir.Graph) -> bool:
    value = body.outputs[0]
    maker = value.producer()
    while maker is not None and maker.op_type in ("Identity", "Cast"):
        source = maker.inputs[0]
        if source is None:
            break
        value, maker = source, source.producer()
    constant = maker is not None and maker.op_type == "Constant"
    return value is body.inputs[1] or constant or value.is_initializer()


def _scan(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    """Operator set 8 has a batch axis in front and a first input of sequence lengths."""
    body, batched = _body(node, "body"), view.version < 9
    given = view.inputs[1:] if batched else view.inputs
    count = view.attribute("num_scan_inputs")
    if not isinstance(count, int):
        raise ModelError(f"node {view.name!r} (Scan) lacks its attribute 'num_scan_inputs'")
    tensors = [fact for fact in given if isinstance(fact, Tensor)]
    states, sequences = tensors[: len(tensors) - count], tensors[len(tensors) - count :]
    if len(body.inputs) != len(tensors) or not sequences:
        raise ModelError(
            f"node {view.name!r} (Scan) is given {len(tensors)} tensors, its body takes "
            f"{len(body.inputs)}"
        )
    if not 1 <= count <= len(tensors):
        raise ModelError(
            f"node {view.name!r} (Scan) is given {len(tensors)} tensors, to scan {count} of them"
        )
    axes = list(view.attribute("scan_input_axes") or [0] * count)
    ranks = [len(sequence.shape) for sequence in sequences]
    if len(axes) != count or any(not -r <= a < r for a, r in zip(axes, ranks, strict=True)):
        raise ModelError(
            f"node {view.name!r} (Scan): scan_input_axes {axes} are not one axis of each scanned "
            f"input, which have ranks {ranks}"
        )
    lead = sequences[0].shape[:1] if batched else ()
    trips = sequences[0].shape[1 if batched else axes[0]]
    inner = [Tensor(s.dtype, s.shape[len(lead) :]) for s in states]
    for sequence, axis in zip(sequences, axes, strict=True):
        shape = list(sequence.shape[len(lead) :])
        del shape[0 if batched else axis]
        inner.append(Tensor(sequence.dtype, tuple(shape)))
    facts.tensors.update(zip(body.inputs, inner, strict=True))
    flop, traffic = _run(facts, body)
    times = trips * (lead[0] if batched else 1)
    facts.body[node] = (times * flop, times * traffic)
    results = _results(facts, body, node)
    scanned = results[len(states) :]
    out_axes = view.attribute("scan_output_axes") or [0] * len(scanned)
    stacked = [_stacked(item, axis, trips) for item, axis in zip(scanned, out_axes, strict=True)]
    return [
        Tensor(item.dtype, (*lead, *item.shape)) if isinstance(item, Tensor) else item
        for item in (*results[: len(states)], *stacked)
    ]


def _sequence_map(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    """Visit the body once for each run of tensors that are identical in every sequence."""
    body, first = _body(node, "body"), view.inputs[0]
    count = first.count if isinstance(first, TensorList) else 0
    lists = [fact for fact in view.inputs if isinstance(fact, TensorList)]
    ends = sorted({end for fact in lists for end in _run_ends(fact) if end <= count})
    flop = traffic = 0.0
    columns: list[list[tuple[Tensor, int]]] = [[] for _ in body.outputs]
    start = 0
    for end in ends:
        for value, fact in zip(body.inputs, view.inputs, strict=False):
            if isinstance(fact, TensorList):
                run = bisect.bisect_right(_run_ends(fact), start)
                facts.tensors[value] = fact.runs[run][0]
            elif fact is not None:
                facts.tensors[value] = fact
        cost = _run(facts, body)
        flop, traffic = flop + (end - start) * cost[0], traffic + (end - start) * cost[1]
        for column, result in zip(columns, _results(facts, body, node), strict=True):
            if isinstance(result, Tensor):
                column.append((result, end - start))
        start = end
    facts.body[node] = (flop, traffic)
    return [tensor_list(column) for column in columns]


def _run_ends(fact: TensorList) -> list[int]:
    return list(itertools.accumulate(count for _, count in fact.runs))


def _other(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    """An operator with bodies of some other kind: shaped by its schema, its bodies not costed."""
    facts.body[node] = (0.0, 0.0)
    facts.assume(
        f"node {view.name!r} ({view.op_type}): its {len(list(bodies(node)))} subgraphs are not "
        "costed"
    )
    return facts.schema(view)


def _body(node: ir.Node, name: str) -> ir.Graph:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.type != ir.AttributeType.GRAPH:
        raise ModelError(f"node {node.name!r} ({node.op_type}) has no subgraph {name!r}")
    return attribute.as_graph()


def _run(facts: Facts, body: ir.Graph) -> BodyCost:
    """Visit a body whose inputs are known; the cost of its nodes, constants excepted."""
    facts.infer_graph(body)
    flop = traffic = 0.0
    for node in body:
        if not all(value in facts.constant for value in node.outputs):
            cost = onnx_cost(facts.view(node))
            if not cost.known:
                facts.estimated.add(node)
            flop, traffic = flop + cost.flop, traffic + cost.traffic_bytes
    return flop, traffic


def _results(facts: Facts, body: ir.Graph, reader: ir.Node) -> list[Inferred]:
    return [facts.fact(value, reader) for value in body.outputs]


def _stacked(item: Inferred, axis: int, count: int) -> Inferred:
    """One value per trip, joined along a new axis."""
    if not isinstance(item, Tensor):
        return Partial()
    at = axis if axis >= 0 else len(item.shape) + 1 + axis
    return Tensor(item.dtype, (*item.shape[:at], count, *item.shape[at:]))
