"""Reading an ONNX file: decoded, checked, its weights left on disk, every failure one line."""

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from gdp.base.errors import ModelError
from gdp.base.files.reading import open_regular
from gdp.importers.onnx.strip import (
    PROTOBUF_LIMIT_BYTES,
    TooDeepError,
    TruncatedError,
    read_stripped,
    why_undecodable,
)
from gdp.importers.onnx.validate import check_fields, check_names, check_text, graphs_of

# Kept of a node's metadata: where it comes from in the source. The other metadata that exporters
# write (stack traces, source text) is nine tenths of a file and of no use to a placement.
_KEPT_METADATA = ("namespace", "pkg.torch.onnx.name_scopes")


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
            proto.ParseFromString(read_stripped(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (DecodeError, TruncatedError, TooDeepError):
        raise ModelError(f"{path}: {why_undecodable(path)}") from None
    if not proto.HasField("graph"):
        raise ModelError(f"{path}: is not an ONNX model: it holds no graph")
    _drop_metadata(proto)
    domains = [opset.domain for opset in proto.opset_import]
    check_text([proto.graph.name, proto.producer_name, *domains], path)
    check_names(proto.graph, path, set())
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
        for graph in graphs_of(node):
            stack.extend(graph.node)


def root_cause(error: BaseException) -> str:
    """The innermost message of a chain of exceptions, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """The text with each run of white space, line breaks too, as one blank."""
    return " ".join(text.split())
