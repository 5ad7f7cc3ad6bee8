"""Reading an ONNX file: found, decoded, checked, its weights left on disk, every failure one line.

The libraries behind the importer trust a model's fields: some raise exceptions of any kind, some
end the process. So fields that every valid model has are checked before onnx_ir and the rules read
them.
"""

import difflib
import functools
import importlib.util
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, TypeProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from gdp.errors import ModelError
from gdp.files.reading import is_folder, is_there, open_regular

STRIP_BYTES = 32 * 1024
"""Tensor data longer than this is skipped when only shapes are wanted; it is far more than the
data of the small tensors that shape inference reads."""
PROTOBUF_LIMIT_BYTES = (1 << 31) - 1
PROTOBUF_DEPTH = 100
"""Messages within messages that protobuf decodes; a graph within a graph takes three."""

DROP = "drop"
# Which fields of which message lead to tensor data, by field number of onnx.proto; DROP marks the
# data itself. The numbers are fixed for ever by the format.
_TENSOR: dict[int, Any] = dict.fromkeys((4, 5, 6, 7, 9, 10, 11), DROP)
_ATTRIBUTE: dict[int, Any] = {5: _TENSOR, 10: _TENSOR}  # t, tensors; graphs are added below
_NODE: dict[int, Any] = {5: _ATTRIBUTE}
_GRAPH: dict[int, Any] = {1: _NODE, 5: _TENSOR, 15: {1: _TENSOR, 2: _TENSOR}}
_ATTRIBUTE.update({6: _GRAPH, 11: _GRAPH, 22: {1: _TENSOR, 2: _TENSOR}})
_MODEL: dict[int, Any] = {7: _GRAPH, 25: {7: _NODE}}

# What marks a tensor as stored elsewhere: data_location (14) EXTERNAL and one entry of
# external_data (13), {location: stripped}. The last value of a scalar field wins.
_STRIPPED = onnx.TensorProto(
    data_location=onnx.TensorProto.EXTERNAL,
    external_data=[onnx.StringStringEntryProto(key="location", value="stripped")],
).SerializeToString()

# Kept of a node's metadata: where it comes from in the source. The other metadata that exporters
# write (stack traces, source text) is nine tenths of a file and of no use to a placement.
_KEPT_METADATA = ("namespace", "pkg.torch.onnx.name_scopes")


def resolve_spec(spec: str | os.PathLike[str]) -> Path:
    """The file of `onnx:NAME`, a model that the installed onnx package carries, or the path itself.

    Raises `ModelError` when there is no such file; for `onnx:NAME`, with the names that exist.
    """
    text = os.fspath(spec)
    if not text.startswith("onnx:"):
        path = Path(text)
        if is_folder(path):
            raise ModelError(
                f"{text}: is a folder, not an ONNX file; give the .onnx file inside it"
            )
        if not is_there(path):
            raise ModelError(f"{text}: no such file; give the path of an ONNX model")
        return path
    name = text.removeprefix("onnx:")
    models = packaged_models()
    if name in models:
        return models[name]
    light = [known for known in models if known.startswith("light_")]
    near = difflib.get_close_matches(name, models, n=1)
    raise ModelError(
        f"no model {text!r} in the onnx package; "
        + (f"did you mean 'onnx:{near[0]}'? " if near else "")
        + f"there are {', '.join(light)} and {len(models) - len(light)} operator tests"
    )


def packaged_models() -> dict[str, Path]:
    """The models inside the installed onnx package by name: a file's stem, or the folder of a file
    called model.onnx."""
    package = importlib.util.find_spec("onnx")
    if package is None or not package.submodule_search_locations:
        raise ModelError("the onnx package is not installed: pip install onnx")
    data = Path(package.submodule_search_locations[0]) / "backend" / "test" / "data"
    return {
        (path.parent.name if path.stem == "model" else path.stem): path
        for path in sorted(data.glob("**/*.onnx"))
    }


def read_model(path: Path, *, weights: bool) -> ir.Model:
    """The model of a file. External data is never loaded; without `weights`, larger tensors inside
    the file are skipped as well and stand there by type and shape only."""
    proto = onnx.ModelProto()
    try:
        if weights:
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_size > PROTOBUF_LIMIT_BYTES:
                    raise ModelError(
                        f"{path}: is larger than the 2 GiB that protobuf can read; save it with "
                        "external data (onnx.save_model(..., save_as_external_data=True))"
                    )
                proto.ParseFromString(file.read(PROTOBUF_LIMIT_BYTES))
        else:
            proto.ParseFromString(_read_stripped(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (DecodeError, _Truncated, _TooDeep):
        raise ModelError(f"{path}: {_why_undecodable(path)}") from None
    if not proto.HasField("graph"):
        raise ModelError(f"{path}: is not an ONNX model: it holds no graph")
    _drop_metadata(proto)
    domains = [opset.domain for opset in proto.opset_import]
    _check_text([proto.graph.name, proto.producer_name, *domains], path)
    _check_names(proto.graph, path, set())
    try:
        check_fields(proto)
        _drop_maps(proto.graph)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir re-raises whatever went wrong as SerdeError
        raise ModelError(f"{path}: is not a valid ONNX model: {root_cause(error)}") from None
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def _drop_maps(graph: onnx.GraphProto) -> None:
    """Take the declared types of maps, which onnx_ir cannot hold, off outputs and values: classical
    models end in them. Raises `ModelError` for an input that is one."""

    def is_map(value: onnx.ValueInfoProto) -> bool:
        kind = value.type
        while kind.HasField("sequence_type"):
            kind = kind.sequence_type.elem_type
        return kind.HasField("map_type")

    if maps := [value.name for value in graph.input if is_map(value)]:
        raise ModelError(
            f"graph input {maps[0]!r} is no tensor but a map; gdp places models whose inputs are "
            "tensors"
        )
    for value in (*graph.output, *graph.value_info):
        if is_map(value):
            value.ClearField("type")


def external_files(path: Path) -> list[Path]:
    """The files beside a model that hold its weights; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            graph = onnx.load(file, load_external_data=False).graph
    except (OSError, DecodeError):
        return []
    names = {
        ExternalDataInfo(tensor).location
        for tensor in _tensors(graph)
        if uses_external_data(tensor)
    }
    return [path.parent / name for name in sorted(names)]


def foreign_data(folder: Path, location: str) -> str:
    """Reason why a file that a model in `folder` names as its weights may be another's; "" for its
    own: a regular file in that folder, no link, and without a second name (a hard link)."""
    file, home = folder / location, Path(os.path.realpath(folder))
    place = home / os.path.normpath(location)
    if Path(os.path.realpath(file)) != place or not place.is_relative_to(home):
        return "lie outside of its folder or behind a link"
    if not file.is_file():
        return "are no regular file"
    return "have a second name elsewhere (a hard link)" if file.stat().st_nlink > 1 else ""


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def root_cause(error: BaseException) -> str:
    """The innermost message of a chain of exceptions, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """The text with each run of white space, line breaks too, as one blank."""
    return " ".join(text.split())


class _Truncated(Exception):
    """A field that reaches past the end of its message, or a malformed key."""


class _TooDeep(Exception):
    """Messages within messages beyond `PROTOBUF_DEPTH`."""


def _read_stripped(path: Path, longer_than: int = STRIP_BYTES) -> bytes:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return _stripped(data, _MODEL, longer_than, 0)


def _stripped(data: memoryview, fields: dict[int, Any], longer_than: int, depth: int) -> bytes:
    """A message without its long tensor data; what is not tensor data is copied as it stands."""
    if depth > PROTOBUF_DEPTH:
        raise _TooDeep
    parts: list[bytes] = []
    copied = position = 0  # everything before `copied` is in `parts`
    dropped = False
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        wire = key & 7
        if not key >> 3:  # no field has number 0, of which a file of zeros is full
            raise _Truncated
        if wire == 2:
            size, begin = _varint(data, position)
            position = begin + size
            inner = fields.get(key >> 3)
            if position <= len(data) and inner is not None and size > longer_than:
                parts.append(bytes(data[copied:start]))
                copied = position
                if inner == DROP:
                    dropped = True
                else:
                    with data[begin:position] as body:
                        kept = _stripped(body, inner, longer_than, depth + 1)
                    parts += [_varint_bytes(key), _varint_bytes(len(kept)), kept]
        elif wire == 0:
            _, position = _varint(data, position)
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        else:
            raise _Truncated
        if position > len(data):
            raise _Truncated
    parts.append(bytes(data[copied:]))
    return b"".join([*parts, _STRIPPED] if dropped else parts)


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """A base-128 number and the position after it."""
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            break
    raise _Truncated


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _why_undecodable(path: Path) -> str:
    """Likely reason why protobuf rejects a file."""
    try:
        _read_stripped(path, longer_than=0)  # every message is looked into
    except _TooDeep:
        return (
            f"is nested too deeply: protobuf decodes {PROTOBUF_DEPTH} messages within each other, "
            f"which are {PROTOBUF_DEPTH // 3} subgraphs within each other"
        )
    except _Truncated:
        pass
    with open_regular(path) as file:
        head = file.read(2)
    # Every writer starts with field 1, ir_version, a small varint.
    if len(head) == 2 and head[0] == 0x08 and head[1] < 0x80:
        return "is truncated or damaged, or is not an ONNX model: protobuf cannot decode it"
    return "is not an ONNX model: it is no protobuf message"


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _drop_metadata(proto: onnx.ModelProto) -> None:
    proto.graph.doc_string = ""
    stack = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while stack:
        node = stack.pop()
        node.doc_string = ""
        if node.metadata_props:
            # A text that is no UTF-8 is handed out as bytes.
            kept = [
                (p.key, p.value)
                for p in node.metadata_props
                if p.key in _KEPT_METADATA and isinstance(p.value, str)
            ]
            del node.metadata_props[:]
            for key, value in kept:
                node.metadata_props.add(key=key, value=value)
        for graph in _graphs(node):
            stack.extend(graph.node)


def _check_names(graph: onnx.GraphProto, path: Path, outer: set[str]) -> None:
    """Raise when a value is made twice, or is read and made nowhere."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    _check_text(_texts(graph), path)
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
        for body in _graphs(node):
            _check_names(body, path, visible)
    for value in graph.output:
        if value.name not in visible:
            raise ModelError(f"{path}: graph output {value.name!r} is made by no node")


def _check_text(texts: list, path: Path) -> None:
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


def describe(name: str | None, op_type: str) -> str:
    """A node in an error message.

    >>> describe("conv1", "Conv"), describe("", "Conv")
    ("node 'conv1' (Conv)", 'an unnamed Conv node')
    """
    return f"node {name!r} ({op_type})" if name else f"an unnamed {op_type} node"


# Fields that every valid ONNX model has


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
    """The graphs in a node's attributes, which are checked on the way."""
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
