"""Lists the ops of a functional FX graph of ATen ops: views are their base, weights are held.

A node whose result lies in the memory of one of its arguments is a view: no op, and what reads it
reads the base. So do the runtime and the importer agree: views are taken where they are read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gdp.base.errors import ModelError
from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.importers.program import Op, ProgramOps, Value, attributes_of
from gdp.ops.rule import OpCost, Shape
from gdp.ops.table import aten_cost

_CALL = re.compile(r"@\d+$")
"""A module that is called a second time has `@1` behind its path."""


@dataclass
class ExportedOps(ProgramOps):
    """The ops of an exported FX graph, and the values of its nodes. Nodes are appended."""

    # The base of every tensor node, or of every element of a node that makes several; None where
    # it makes no tensor.
    value_of: dict[Any, Any] = field(default_factory=dict)
    op_of: dict[Any, int] = field(default_factory=dict)  # of the nodes that are ops
    by_storage: dict[int, Value] = field(default_factory=dict)
    weight_of: dict[object, Value] = field(default_factory=dict)  # by its identity
    parameters: int = 0  # numbers in all parameters, tied ones once
    prefix: str = ""  # of module paths, cut off
    open_sizes: set[str] = field(default_factory=set)  # symbols of sizes that depend on data


def list_inputs(listing: ExportedOps, nodes: Sequence[Any], weights: Mapping[Any, object]) -> None:
    """The placeholders: weights by their identity (tied ones share it), the others are
    inputs, or no tensors."""
    leaf = listing.weight_of
    for node in nodes:
        tensor = node.meta.get("val")
        if not _is_tensor(tensor):
            listing.value_of[node] = None
            continue
        _require_dense(tensor, f"input {node.name!r} is")
        if node in weights:
            identity = weights[node]
            if identity not in leaf:
                leaf[identity] = _new_weight(listing, tensor)
            value = leaf[identity]
        else:
            value = _value(tensor, len(listing.ops))
            listing.ops.append(Op(INPUT, "", [], [value], 0.0, 0.0, False, value.dtype))
            listing.ops[-1].name = str(node.name)
            listing.op_of[node] = value.maker
        listing.value_of[node] = value
        listing.by_storage[_storage(tensor)] = value


def list_call(listing: ExportedOps, node: Any, backward: bool = False) -> None:
    """One `call_function` node: an op, a view, a piece of a result, or nothing to compute."""
    import operator

    if node.target is operator.getitem:
        source = listing.value_of.get(node.args[0])
        listing.value_of[node] = source[node.args[1]] if isinstance(source, list) else None
        return
    result = node.meta.get("val")
    tensors = list(result) if isinstance(result, list | tuple) else [result]
    if not any(map(_is_tensor, tensors)):
        listing.value_of[node] = None
        return
    _require_sizes(listing, node, tensors)
    bases = [
        listing.by_storage.get(_storage(tensor)) if _is_tensor(tensor) else None
        for tensor in tensors
    ]
    if _does_nothing(node):
        bases = [listing.value_of[node.args[0]]]
    values = list(bases)
    fresh = [i for i, t in enumerate(tensors) if _is_tensor(t) and bases[i] is None]
    if fresh:
        maker = len(listing.ops)
        outs = []
        for i in fresh:
            storage = _storage(tensors[i])
            if storage not in listing.by_storage:
                value = _value(tensors[i], maker, len(outs))
                value.backward = backward
                listing.by_storage[storage] = value
                outs.append(value)
            values[i] = listing.by_storage[storage]
        listing.ops.append(_op(listing, node, [tensors[i] for i in fresh], outs, backward))
        listing.op_of[node] = maker
    listing.value_of[node] = values if isinstance(result, list | tuple) else values[0]


def _does_nothing(node: Any) -> bool:
    """Dropout outside of training, which torch keeps as an op."""
    drops = op_name(node.target) in ("dropout", "alpha_dropout", "feature_dropout")
    return drops and _parameters(node).get("train") is False


def list_output(listing: ExportedOps, name: str, value: Value) -> None:
    """An output that some op or input makes; a weight passed through needs none."""
    if value.maker >= 0:
        listing.ops.append(Op(OUTPUT, "", [value], [], 0.0, 0.0, False, value.dtype))
        listing.ops[-1].name = name


def bases_read(listing: ExportedOps, node: Any) -> list[Value]:
    """The values that a node reads, views as their bases."""
    bases: dict[int, Value] = {}
    for source in node.all_input_nodes:
        value = listing.value_of.get(source)
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                bases[id(part)] = part
    return list(bases.values())


def _op(
    listing: ExportedOps, node: Any, tensors: Sequence[Any], outs: list[Value], backward: bool
) -> Op:
    ins = _shapes_read(node)
    outputs = [_shape(tensor) for tensor in tensors]
    name = op_name(node.target)
    params = _parameters(node)
    cost = _cost(node, name, params, ins, outputs)
    if not cost.known:
        listing.estimated.add(name)
    return Op(
        op_type=name,
        scope=scope_of(node, listing.prefix),
        ins=bases_read(listing, node),
        outs=outs,
        flop=cost.flop,
        traffic_bytes=cost.traffic_bytes,
        backward=backward,
        dtype=_dtype([*_tensor_arguments(node), *tensors]),
        in_dims=tuple(shape.dims for shape in ins),
        attributes=attributes_of(params),
        shapes=(tuple(ins), tuple(outputs)),
    )


def op_name(target: Any) -> str:
    """The name of an op without namespace and overload: "linear" of `aten.linear.default`."""
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet, "__name__", None) or getattr(target, "__name__", str(target))
    return str(name)


def module_calls(node: Any) -> list[tuple[str, int]]:
    """The modules in whose code a node is, outermost first: path, and which call of it, from 0."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    calls = []
    for key, (path, *_) in stack.items():
        call = _CALL.search(str(key)) or _CALL.search(str(path))
        path = _CALL.sub("", str(path)).removeprefix("L['self'].")
        calls.append((path, int(call[0][1:]) if call else 0))
    return calls


def scope_of(node: Any, prefix: str = "") -> str:
    """The path of the module whose code a node belongs to; backward nodes have that of the forward
    node that they belong to."""
    calls = module_calls(node)
    if not calls:
        return ""
    path = calls[-1][0]
    if prefix and (path == prefix or path.startswith(prefix + ".")):
        path = path[len(prefix) + 1 :]
    return path


def _parameters(node: Any) -> dict[str, Any]:
    """The arguments that are no tensors, by the names of the op's schema."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    named = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {key: value for key, value in named.items() if not _nodes(value)}


def _nodes(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_nodes(part) for part in value)
    return hasattr(value, "all_input_nodes")


def _cost(
    node: Any, name: str, params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> OpCost:
    """By torch's own formula where it has one, with the traffic of ours."""
    from torch.fx.node import map_arg
    from torch.utils.flop_counter import flop_registry

    inner = _graphs_called(node)
    if inner:
        return _sum_of(inner)
    ours = aten_cost(name, params, ins, outs)
    packet = getattr(node.target, "overloadpacket", node.target)
    # The kernels for CPUs have the arguments of the others, but no formula of their own.
    formula = flop_registry.get(packet) or flop_registry.get(_without_cpu(packet))
    if formula is not None:

        def value(n: Any) -> Any:
            return _at_most(n.meta.get("val"))

        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        flop = formula(*args, **kwargs, out_val=value(node))
        return OpCost(
            max(float(hinted(flop)), ours.flop if ours.known else 0.0), ours.traffic_bytes
        )
    return ours


def _without_cpu(packet: Any) -> Any:
    import torch

    name = str(getattr(packet, "__name__", ""))
    return getattr(torch.ops.aten, name.replace("_for_cpu", ""), None) if "_for_cpu" in name else ""


def _graphs_called(node: Any) -> list[Any]:
    """The graphs that a higher-order op (a condition, a loop) runs."""
    owner = node.graph.owning_module
    graphs = []
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            graph = getattr(getattr(owner, str(source.target), None), "graph", None)
            if graph is not None:
                graphs.append(graph)
    return graphs


def _sum_of(graphs: Iterable[Any]) -> OpCost:
    """All that the graphs compute, each once: branches and bodies of unknown count."""
    flop = traffic = 0.0
    for graph in graphs:
        for node in graph.nodes:
            result = node.meta.get("val")
            tensors = list(result) if isinstance(result, list | tuple) else [result]
            if node.op != "call_function" or not all(map(_is_tensor, tensors)):
                continue
            cost = _cost(
                node, op_name(node.target), _parameters(node), _shapes_read(node),
                [*map(_shape, tensors)],
            )  # fmt: skip
            flop, traffic = flop + cost.flop, traffic + cost.traffic_bytes
    return OpCost(flop, traffic, known=False)


def _tensor_arguments(node: Any) -> list[Any]:
    """Tensors in the order of the arguments; one that is given twice appears twice."""
    from torch.fx.node import map_arg

    sources: list[Any] = []
    map_arg((node.args, node.kwargs), lambda source: sources.append(source) or source)
    tensors = []
    for source in sources:
        value = source.meta.get("val")
        parts = value if isinstance(value, list | tuple) else [value]
        tensors += [part for part in parts if _is_tensor(part)]
    return tensors


def _shapes_read(node: Any) -> list[Shape]:
    """Of every tensor argument; of one that is given twice, only the last is read from memory."""
    tensors = _tensor_arguments(node)
    last = {id(tensor): place for place, tensor in enumerate(tensors)}
    return [
        _shape(tensor) if last[id(tensor)] == place else replace(_shape(tensor), stored_bytes=0)
        for place, tensor in enumerate(tensors)
    ]


def _require_dense(tensor: Any, what: str) -> None:
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        raise ModelError(
            f"{what} a sparse tensor ({layout}), which cannot be placed; compute with a dense "
            "one, as `to_dense` makes it"
        )


def _require_sizes(listing: ExportedOps, node: Any, tensors: Sequence[Any]) -> None:
    """Refuse sparse tensors and sizes that nothing bounds; note sizes whose bound is taken."""
    scope = scope_of(node, listing.prefix)
    what = f"{op_name(node.target)!r}{f' in module {scope!r}' if scope else ''}"
    for tensor in filter(_is_tensor, tensors):
        _require_dense(tensor, f"op {what} makes")
        symbols = {str(s) for size in tensor.shape if _is_open(size) for s in _symbols(size)}
        if not symbols:
            continue
        if any(upper_bound(size) is None for size in tensor.shape if _is_open(size)):
            raise ModelError(
                f"op {what} makes a tensor whose size depends on data and has no upper bound; "
                "give it a fixed size, bound it with `torch._check(size <= ...)`, or choose "
                "between fixed sizes with `torch.where` or `torch.cond`"
            )
        if not symbols <= listing.open_sizes:
            listing.open_sizes |= symbols
            dims = "x".join(str(hinted(size)) for size in tensor.shape)
            listing.assumptions.append(
                f"the size of what {what} makes depends on data; its upper bound {dims} is taken"
            )


def _new_weight(listing: ExportedOps, tensor: Any) -> Value:
    value = _value(tensor)
    # A single number is a constant to a device, not something that ties ops together.
    if tensor.dim():
        value.weight = (len(listing.weights),)
    listing.weights.append(value)
    return value


def _value(tensor: Any, maker: int = -1, out: int = 0) -> Value:
    shape = _shape(tensor)
    return Value(shape.dims, dtype_name(tensor.dtype), shape.itemsize, maker, out)


def _shape(tensor: Any) -> Shape:
    dims = tuple(hinted(size) for size in tensor.shape)
    stored = hinted(tensor.untyped_storage().nbytes())
    return Shape(dims, int(tensor.element_size()), None if stored is None else int(stored))


def hinted(size: Any) -> Any:
    """A symbolic size as the number that the example inputs have; one that depends on data as its
    upper bound."""
    node = getattr(size, "node", None)
    if node is None:
        return size
    return upper_bound(size) if _is_open(size) else node.hint


def _symbols(size: Any) -> set[Any]:
    """The symbols that a symbolic size is an expression of."""
    return set(getattr(size.node.expr, "free_symbols", ()))


def _is_open(size: Any) -> bool:
    """True for a size that depends on data, so that the example inputs do not give it."""
    node = getattr(size, "node", None)
    if node is None:
        return False
    return any(map(node.shape_env.is_unbacked_symint, _symbols(size)))


def upper_bound(size: Any) -> int | None:
    """The largest that a size which depends on data can be, where that is known."""
    from torch.utils._sympy.numbers import int_oo

    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    # Torch's own word for "any size" is the largest integer, or a little less.
    return None if upper == int_oo or int(upper) >= _ANY_SIZE else int(upper)


_ANY_SIZE = 1 << 48


def _at_most(value: Any) -> Any:
    """A value for torch's FLOP formulas, with sizes that depend on data at their upper bound."""
    import torch

    if isinstance(value, list | tuple):
        return type(value)(map(_at_most, value))
    if _is_tensor(value) and any(map(_is_open, value.shape)):
        return torch.empty([hinted(d) for d in value.shape], dtype=value.dtype, device="meta")
    return hinted(value) if _is_open(value) else value


def dtype_name(dtype: Any) -> str:
    """A torch dtype as gdp names it.

    >>> dtype_name("torch.bfloat16")
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _dtype(tensors: Sequence[Any]) -> str:
    """Of the arithmetic: the first floating type of inputs and outputs, else the last type."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            return dtype_name(tensor.dtype)
    return dtype_name(tensors[-1].dtype)


def _is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "element_size")


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def require_function(node: Any, label: str) -> None:
    """Refuse nodes that a functional graph of ATen ops does not hold."""
    if node.op not in ("placeholder", "call_function", "get_attr", "output"):
        raise ModelError(f"{label}: node {node.name!r} is a {node.op}, which cannot be placed")
