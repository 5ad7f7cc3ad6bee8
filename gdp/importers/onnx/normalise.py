"""One form for every ONNX model: functions inlined, nodes in order and named, weights no inputs."""

import ast
from decimal import Decimal

import numpy as np
import onnx_ir as ir

from gdp.base.errors import ModelError
from gdp.graph.op_graph import topological_order
from gdp.importers.onnx.read import one_line, root_cause
from gdp.importers.onnx.validate import describe

FIRST_IR_WITHOUT_WEIGHT_INPUTS = 4
"""Older IR versions demand that every initialiser is a graph input too."""

MAX_NODES = 5_000_000
"""Of a model whose functions are inlined: beyond it, memory ends before the import does."""

SCOPE_KEY = "pkg.torch.onnx.name_scopes"
NAMESPACE_KEY = "namespace"


def normalise(model: ir.Model, source: str) -> None:
    """Inline functions, drop initialisers from the inputs, sort topologically, give every node of
    the main graph a name of its own. In place; `source` names the file in errors."""
    if model.functions:
        _inline(model, source)
    graph = model.graph
    if len(graph) == 0:
        raise ModelError(f"{source}: the graph has no nodes; there is nothing to place")
    real = [value for value in graph.inputs if not value.is_initializer()]
    if len(real) < len(graph.inputs):
        graph.inputs.clear()
        graph.inputs.extend(real)
        model.ir_version = max(model.ir_version, FIRST_IR_WITHOUT_WEIGHT_INPUTS)
    try:
        graph.sort()
    except ValueError:
        node = _node_on_cycle(graph)
        raise ModelError(
            f"{source}: the graph has a cycle through {describe(node.name, node.op_type)}, "
            f"which makes {node.outputs[0].name!r}"
        ) from None
    _name_nodes(graph)


def input_op_name(value: str) -> str:
    """The op that stands for a graph input; no node is named so."""
    return f"input:{value}"


def output_op_name(value: str) -> str:
    """The op that stands for a graph output."""
    return f"output:{value}"


def scope_of(node: ir.Node) -> str:
    """The module path of a node, dotted; "" where unknown.

    From the metadata that PyTorch's exporter writes, else from a name with slashes.
    """
    scopes = node.metadata_props.get(SCOPE_KEY)
    if scopes:
        return _from_scopes(scopes)
    namespace = node.metadata_props.get(NAMESPACE_KEY)
    if namespace:
        # The innermost module of ": Bert/encoder: Encoder/encoder.layer.0: Layer/view: aten.view".
        inside = namespace.split("/")
        return inside[-2].partition(":")[0].strip() if len(inside) > 1 else ""
    return scope_of_name(node.name or "")


def scope_of_name(name: str) -> str:
    """The part of a node's name before the last slash.

    >>> scope_of_name("/model/layers.0/attn/MatMul")
    'model.layers.0.attn'
    """
    return ".".join(part for part in name.split("/")[:-1] if part)


def _from_scopes(text: str) -> str:
    """The innermost module of "['', 'model', 'model.layers.0', 'linear']": the last entry is the
    node itself."""
    try:
        scopes = ast.literal_eval(text)
    # Nesting gives the last two, a list as the key of a dict or a member of a set TypeError.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""
    if not isinstance(scopes, list) or len(scopes) < 2:
        return ""
    return str(scopes[-2])


def _inline(model: ir.Model, source: str) -> None:
    from onnx_ir.passes.common import InlinePass

    try:
        inline = InlinePass()
        inline.requires(model)  # that no function calls itself
        if (nodes := _inlined_nodes(model)) > MAX_NODES:
            raise ValueError(
                f"they would become {Decimal(nodes):.1e} nodes; {MAX_NODES:,} are the most gdp "
                "reads"
            )
        inline(model)
    except Exception as error:  # the pass wraps what went wrong in its own errors
        raise ModelError(
            f"{source}: its functions cannot be inlined: {root_cause(error)}"
        ) from None


def _inlined_nodes(model: ir.Model) -> int:
    """Number of nodes of a model once every call is replaced by the function's nodes: a chain
    of functions that each call the next one twice doubles with every one of them."""
    size: dict[ir.OperatorIdentifier, int] = {}

    def nodes(graph: ir.Graph | ir.Function) -> int:
        # In all subgraphs too. A function is counted once, whoever calls it.
        called = (called_nodes(node) for node in graph.all_nodes())
        return sum(1 if count is None else count for count in called)

    def called_nodes(node: ir.Node) -> int | None:
        call = node.op_identifier()
        if call in model.functions and call not in size:
            size[call] = nodes(model.functions[call])
        return size.get(call)

    return nodes(model.graph)


def _node_on_cycle(graph: ir.Graph) -> ir.Node:
    """Find a node on a cycle by walking predecessors of the unsorted nodes."""
    nodes = list(graph)
    index = {node: i for i, node in enumerate(nodes)}
    edges = [
        (index[maker], index[node])
        for node in nodes
        for value in node.inputs
        if value is not None and (maker := value.producer()) in index
    ]
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    stuck = set(range(len(nodes))) - set(topological_order(len(nodes), src, dst).tolist())
    makers: dict[int, int] = {j: i for i, j in edges if i in stuck}
    here = min(stuck, default=0)
    seen: set[int] = set()
    while here not in seen and here in makers:
        seen.add(here)
        here = makers[here]
    return nodes[here]


def _name_nodes(graph: ir.Graph) -> None:
    """Names that are given and unique stay; an unnamed node takes the name of its first output; a
    repeated name gets the first free suffix _2, _3 and so on, in graph order."""
    used = {input_op_name(value.name or "") for value in graph.inputs}
    used |= {output_op_name(value.name or "") for value in graph.outputs}
    given = {node.name for node in graph if node.name}
    suffix: dict[str, int] = {}
    for node in graph:
        wanted = node.name or next((v.name for v in node.outputs if v.name), "") or node.op_type
        wanted = one_line(wanted) or node.op_type
        name = wanted
        # A name that some other node was given belongs to that node.
        while name in used or (name != node.name and name in given):
            suffix[wanted] = suffix.get(wanted, 1) + 1
            name = f"{wanted}_{suffix[wanted]}"
        used.add(name)
        node.name = name
