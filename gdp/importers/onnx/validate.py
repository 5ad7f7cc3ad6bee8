"""Fields of an ONNX model are checked before onnx_ir and the rules read them.

The libraries behind the importer trust a model's fields: some raise exceptions of any kind, some
end the process.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
from onnx import AttributeProto, TensorProto, TypeProto

from gdp.base.errors import ModelError

_STANDARD = ("", "ai.onnx")
MAX_OPSET = (1 << 31) - 1
MAX_RANK = 64
_TYPES = frozenset(TensorProto.DataType.values())
_KINDS = frozenset(AttributeProto.AttributeType.values()) - {AttributeProto.UNDEFINED}
_POSITIVE = frozenset(("group", "strides", "dilations", "kernel_shape"))
# The kinds whose value is a message, which may be missing where the kind says it is there.
_MESSAGES = {
    AttributeProto.TENSOR: "t", AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor", AttributeProto.TYPE_PROTO: "tp",
}  # fmt: skip


def check_fields(model: onnx.ModelProto) -> None:
    """Raise `ModelError` naming the first field that no valid model has."""
    for opset in (*model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if not 1 <= opset.version <= MAX_OPSET:
            raise ModelError(
                f"opset_import: version {opset.version} of domain {opset.domain!r} does not exist"
            )
    # A function's attributes may refer to those of its call.
    versions = _versions(model.opset_import)
    _check_nodes([("the graph", model.graph)], [], versions, refers=False)
    for function in model.functions:
        _check_nodes([], list(function.node), _versions(function.opset_import), refers=True)


def _versions(opsets: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {opset.domain: opset.version for opset in opsets}


def _check_nodes(
    graphs: list[tuple[str, onnx.GraphProto]],
    nodes: list[onnx.NodeProto],
    versions: Mapping[str, int],
    *,
    refers: bool,
) -> None:
    while graphs or nodes:
        if graphs:
            where, graph = graphs.pop()
            _check_graph(where, graph)
            nodes.extend(graph.node)
        else:
            node = nodes.pop()
            graphs.extend(_checked_attributes(node, refers))
            if node.domain in _STANDARD:
                version = versions.get("", versions.get("ai.onnx", 1))
                _check_against_schema(node, version)


def _check_graph(where: str, graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _check_type(f"value {value.name!r}", value.type)
    for tensor in graph.initializer:
        _check_tensor(f"initialiser {tensor.name!r} of {where}", tensor)
    for sparse in graph.sparse_initializer:
        _check_tensor(f"initialiser {sparse.values.name!r} of {where}", sparse.values)


def _checked_attributes(
    node: onnx.NodeProto, refers: bool
) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Check a node's attributes; yield the graphs in them."""
    for attribute in node.attribute:
        where = f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type})"
        if attribute.ref_attr_name and refers:
            continue
        if attribute.ref_attr_name:
            raise ModelError(f"{where} refers to {attribute.ref_attr_name!r}, outside any function")
        if attribute.type not in _KINDS:
            raise ModelError(f"{where} has no type")
        if (field := _MESSAGES.get(attribute.type)) and not attribute.HasField(field):
            raise ModelError(f"{where} holds nothing")
        if attribute.type == AttributeProto.TENSOR:
            _check_tensor(where, attribute.t)
        for tensor in attribute.tensors:
            _check_tensor(where, tensor)
        if attribute.type == AttributeProto.TYPE_PROTO:
            _check_type(where, attribute.tp)
        if attribute.type == AttributeProto.GRAPH:
            yield where, attribute.g
        yield from ((where, graph) for graph in attribute.graphs)


@functools.lru_cache(maxsize=2048)
def _schema(op_type: str, version: int) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """(kind of each attribute, the attributes that must be there) of a standard operator; nothing
    where there is no such operator, which is said elsewhere."""
    try:
        schema = onnx.defs.get_schema(op_type, max_inclusive_version=version, domain="")
    except onnx.defs.SchemaError:
        return {}, ()
    kinds = {
        name: AttributeProto.AttributeType.Value(a.type.name)  # type: ignore[attr-defined]
        for name, a in schema.attributes.items()
    }
    return kinds, tuple(name for name, a in schema.attributes.items() if a.required)


def _check_against_schema(node: onnx.NodeProto, version: int) -> None:
    """Raise `ModelError` where an attribute is missing or not of the kind in the schema."""
    kinds, required = _schema(node.op_type, version)
    given = {attribute.name: attribute for attribute in node.attribute}
    for name in required:
        if name not in given:
            raise ModelError(f"node {node.name!r} ({node.op_type}) lacks its attribute {name!r}")
    for name, attribute in given.items():
        if name in kinds and attribute.type != kinds[name]:
            wanted = AttributeProto.AttributeType.Name(kinds[name])
            type_name = AttributeProto.AttributeType.Name(attribute.type)
            raise ModelError(
                f"attribute {name!r} of node {node.name!r} ({node.op_type}) is {type_name}, "
                f"{wanted} wanted"
            )
        if name in kinds and name in _POSITIVE:
            numbers = (
                list(attribute.ints) if attribute.type == AttributeProto.INTS else [attribute.i]
            )
            if min(numbers, default=1) < 1:
                raise ModelError(
                    f"attribute {name!r} of node {node.name!r} ({node.op_type}) must be positive, "
                    f"got {numbers[:8]}"
                )


def _check_tensor(where: str, tensor: TensorProto) -> None:
    if tensor.data_type not in _TYPES:
        raise ModelError(f"{where}: {tensor.data_type} is no data type")
    if len(tensor.dims) > MAX_RANK or any(size < 0 for size in tensor.dims):
        raise ModelError(f"{where}: {list(tensor.dims)[:8]} is no shape")


def _check_type(where: str, type_: TypeProto) -> None:
    for _ in range(MAX_RANK):
        kind = type_.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            if getattr(type_, kind).elem_type not in _TYPES:
                raise ModelError(f"{where}: {getattr(type_, kind).elem_type} is no data type")
            if len(getattr(type_, kind).shape.dim) > MAX_RANK:
                raise ModelError(f"{where} has more than {MAX_RANK} axes")
        if kind not in ("sequence_type", "optional_type"):
            return
        type_ = getattr(type_, kind).elem_type


def check_names(graph: onnx.GraphProto, path: Path, outer: set[str]) -> None:
    """Raise when a value is made twice, or is read and made nowhere."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    check_text(_texts(graph), path)
    names |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        for name in node.output:
            if name and name in names:
                raise ModelError(
                    f"{path}: value {name!r} is made twice, the second time by "
                    f"{describe(node.name, node.op_type)}"
                )
            names.add(name)
    visible = names | outer
    for node in graph.node:
        for name in node.input:
            if name and name not in visible:
                reader = describe(node.name, node.op_type)
                raise ModelError(f"{path}: {reader} reads {name!r}, which nothing makes")
        for body in graphs_of(node):
            check_names(body, path, visible)
    for value in graph.output:
        if value.name not in visible:
            raise ModelError(f"{path}: graph output {value.name!r} is made by no node")


def check_text(texts: list, path: Path) -> None:
    """Raise when a text is no UTF-8, which protobuf hands out as bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"{path}: is damaged: the name {text!r} is not UTF-8 text")


def _texts(graph: onnx.GraphProto) -> list:
    """Every name in a graph, those of its subgraphs excepted."""
    texts = [named.name for named in (*graph.input, *graph.output, *graph.value_info)]
    texts += (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        texts += (node.name, node.op_type, node.domain, *node.input, *node.output)
        texts += (attribute.name for attribute in node.attribute)
    for value in (*graph.input, *graph.output, *graph.value_info):
        texts += (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    return texts


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def describe(name: str | None, op_type: str) -> str:
    """A node in an error message.

    >>> describe("conv1", "Conv"), describe("", "Conv")
    ("node 'conv1' (Conv)", 'an unnamed Conv node')
    """
    return f"node {name!r} ({op_type})" if name else f"an unnamed {op_type} node"
