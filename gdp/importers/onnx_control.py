"""If, Loop, Scan and SequenceMap: one op each, with the shapes and the cost of their bodies."""

import bisect
import itertools

import onnx_ir as ir

from gdp.errors import ModelError
from gdp.importers.onnx_costs import node_cost
from gdp.importers.onnx_shapes import Facts, bodies
from gdp.importers.onnx_types import (
    Fact,
    Inferred,
    NodeView,
    Partial,
    Tensor,
    TensorList,
    tensor_list,
)

ENDLESS = 1 << 31
"""A trip count from here on means "until the condition fails"; exporters write 2**63 - 1."""
TRACED_TRIPS = 64
"""A loop whose state keeps growing is followed this far; later iterations cost as the last."""
TRACED_NODES = 100_000
"""Once so many nodes have been visited, loops are followed no further: those within loops would
multiply their trips."""

Cost = tuple[float, float]  # FLOPs, bytes of traffic


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
            break  # visited for the shapes of what it would have made
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
    """How often a loop runs: its constant trip count, the user's word, or once; and whether that
    is certain."""
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
    made = results[len(states) :]
    out_axes = view.attribute("scan_output_axes") or [0] * len(made)
    stacked = [_stacked(item, axis, trips) for item, axis in zip(made, out_axes, strict=True)]
    return [_led(item, lead) for item in (*results[: len(states)], *stacked)]


def _sequence_map(facts: Facts, node: ir.Node, view: NodeView) -> list[Inferred]:
    """The body is visited once for each run of tensors that are alike in every sequence."""
    body, first = _body(node, "body"), view.inputs[0]
    count = first.count if isinstance(first, TensorList) else 0
    lists = [fact for fact in view.inputs if isinstance(fact, TensorList)]
    ends = sorted({end for fact in lists for end in _run_ends(fact) if end <= count})
    flop = traffic = 0.0
    columns: list[list[tuple[Tensor, int]]] = [[] for _ in body.outputs]
    start = 0
    for end in ends:
        for value, fact in zip(body.inputs, view.inputs, strict=False):
            if fact is not None:
                facts.tensors[value] = _item(fact, start) if isinstance(fact, TensorList) else fact
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


def _item(fact: TensorList, place: int) -> Tensor:
    return fact.runs[bisect.bisect_right(_run_ends(fact), place)][0]


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


def _run(facts: Facts, body: ir.Graph) -> Cost:
    """Visit a body whose inputs are known; the cost of its nodes, constants excepted."""
    facts.infer_graph(body)
    flop = traffic = 0.0
    for node in body:
        if not all(value in facts.constant for value in node.outputs):
            cost = node_cost(facts.view(node))
            if cost.estimated:
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


def _led(item: Inferred, lead: tuple[int, ...]) -> Inferred:
    return Tensor(item.dtype, (*lead, *item.shape)) if isinstance(item, Tensor) else item
