"""ONNX files without their long tensor data, taken out before protobuf decodes them: shapes alone
are read of models larger than memory."""

import mmap
import os
from pathlib import Path
from typing import Any

import onnx

from gdp.base.files.reading import open_regular

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


class TruncatedError(Exception):
    """A field that reaches past the end of its message, or a malformed key."""


class TooDeepError(Exception):
    """Messages within messages beyond `PROTOBUF_DEPTH`."""


def read_stripped(path: Path, longer_than: int = STRIP_BYTES) -> bytes:
    """Bytes of a model without tensor data above `limit` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return _stripped(data, _MODEL, longer_than, 0)


def _stripped(data: memoryview, fields: dict[int, Any], longer_than: int, depth: int) -> bytes:
    """A message without its long tensor data; all else is copied unchanged."""
    if depth > PROTOBUF_DEPTH:
        raise TooDeepError
    parts: list[bytes] = []
    copied = position = 0  # everything before `copied` is in `parts`
    dropped = False
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        wire = key & 7
        if not key >> 3:  # no field has number 0, of which a file of zeros is full
            raise TruncatedError
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
            raise TruncatedError
        if position > len(data):
            raise TruncatedError
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
    raise TruncatedError


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def why_undecodable(path: Path) -> str:
    """Likely reason why protobuf rejects a file."""
    try:
        read_stripped(path, longer_than=0)  # every message is looked into
    except TooDeepError:
        return (
            f"is nested too deeply: protobuf decodes {PROTOBUF_DEPTH} messages within each other, "
            f"which are {PROTOBUF_DEPTH // 3} subgraphs within each other"
        )
    except TruncatedError:
        pass
    with open_regular(path) as file:
        head = file.read(2)
    # Every writer starts with field 1, ir_version, a small varint.
    if len(head) == 2 and head[0] == 0x08 and head[1] < 0x80:
        return "is truncated or damaged, or is not an ONNX model: protobuf cannot decode it"
    return "is not an ONNX model: it is no protobuf message"
