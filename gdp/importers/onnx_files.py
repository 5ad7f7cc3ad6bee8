"""Which files an ONNX model is made of."""

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data


def external_files(path: Path) -> list[Path]:
    """The files beside a model that hold its weights; none where it cannot be read."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError):
        return []
    names = {
        ExternalDataInfo(tensor).location
        for tensor in _tensors(graph)
        if uses_external_data(tensor)
    }
    return [path.parent / name for name in sorted(names)]


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
