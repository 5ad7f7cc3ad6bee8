"""Graph files: an `OpGraph` as strictly decoded, versioned JSON, gzipped where the name says so.

What repeats is stored once: types, scopes and details are tables with one index per op. The bytes
depend on the graph alone, so equal graphs make equal files.
"""

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, decode_json, read_bytes
from gdp.base.files.writing import gzipped, write_atomic
from gdp.graph.groups import indexed
from gdp.graph.op_graph import Attribute, OpDetail, OpGraph, is_storable, make_graph
from gdp.graph.request import UNKNOWN_GROWTH, CacheGrowth, Request
from gdp.graph.source import Source, source_by_ops

SCHEMA = 1
GZIP_SUFFIXES = (".gz", ".gdpgraph")
"""File names that end so are gzipped by `save_graph`; `load_graph` looks at the content."""

_KIND = Kind("graph file", ModelError)
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Id = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # torch slices to 2**63 - 1
# Far beyond what anything computes, and far enough from where float64 ends to be added up.
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]


class _Detail(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    dtype: str = "float32"
    inputs: list[list[_Index]] = []
    outputs: list[list[_Index]] = []
    attributes: dict[str, _Whole | float | str | list[_Whole | float]] = {}


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of `Request` and of `CacheGrowth`."""

    prompt: _Index
    new: _Index
    batch: _Index = 1
    requests: _Index = 0
    context: _Index = 0
    passes: _Index = 0
    is_served: bool = False
    is_draft: bool = False
    pass_tokens: _Index = 0
    cache_tokens: list[_Index] = []
    longest_context: _Index = 0


class _File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON form of a graph; empty fields have their default (zero, or a unique id)."""

    gdp_graph: int  # the schema version; the key tells what kind of file this is
    name: str
    ops: list[str]
    types: list[str]  # table
    type: list[_Index]
    tensor_bytes: list[_Index]
    producer: list[_Index]
    use_tensor: list[_Index]
    use_op: list[_Index]
    flop: list[_Amount] = []
    memory_traffic_bytes: list[_Amount] = []
    weight_bytes: list[_Index] = []
    weight_id: list[_Id] = []
    colocate: list[_Id] = []
    backward: list[_Index] = []  # the ops that are backward
    scopes: list[str] = []  # table
    scope: list[_Index] = []
    details: list[_Detail] = []  # table
    detail: list[_Index] = []
    tensors: list[str] = []
    cache_bytes: list[_Index] = []
    repeats: list[_Index] = []  # empty: 1
    chunks: list[_Index] = []  # empty: 1
    phase: list[_Index] = []  # empty: 0
    source: Source | None = None  # that the ops tell
    request: _Request | None = None


_COUNTS = {"weight_bytes": 0, "cache_bytes": 0, "repeats": 1, "chunks": 1, "phase": 0}
_IDS = ("weight_id", "colocate")
"""Columns that are left out where all of them are usual: this count, or an id for each op."""


def save_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph file; an interrupted write leaves what was there before."""
    data = encode_graph(graph)
    write_atomic(path, gzipped(data) if Path(path).name.endswith(GZIP_SUFFIXES) else data)


def load_graph(path: str | os.PathLike[str]) -> OpGraph:
    """Read a graph file; ops may come in any order. Raises `ModelError` when it is malformed."""
    return decode_graph(read_bytes(path, _KIND), str(path))


def encode_graph(graph: OpGraph) -> bytes:
    """The JSON of a graph, for a file or as part of another document."""
    return msgspec.json.encode(_to_file(graph))


def decode_graph(data: bytes, path: str) -> OpGraph:
    """The graph of its JSON; `path` names where it came from in errors."""
    document = decode_json(data, _KIND, _File, path)
    if document.gdp_graph != SCHEMA:
        raise ModelError(
            f"{path} has graph schema {document.gdp_graph}, this gdp reads {SCHEMA}; "
            "write it again with a matching version"
        )
    if misfit := _misfits(document):
        raise ModelError(f"{path}: {misfit}")
    try:
        return _from_file(document)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _to_file(graph: OpGraph) -> _File:
    for name, detail in zip(graph.op_names, graph.detail, strict=True):
        for key, value in detail.attributes.items():
            if not is_storable(value):
                raise ModelError(
                    f"op {name!r}: attribute {key!r} is {value}; files hold finite numbers, whole "
                    "ones of 64 bits"
                )
    types, type_index = indexed(graph.op_types)
    scopes, scope_index = indexed(graph.scope)
    details, detail_index = indexed([_key(detail) for detail in graph.detail])
    first_of = {index: op for op, index in reversed(list(enumerate(detail_index)))}
    columns = {
        key: getattr(graph, key).tolist()
        for key, usual in {**_COUNTS, **dict.fromkeys(_IDS, np.arange(graph.num_ops))}.items()
        if (getattr(graph, key) != usual).any()
    }
    plain = tuple(f"t{t}" for t in range(graph.num_tensors))
    told = source_by_ops(graph.op_types, (detail.attributes for detail in graph.detail))
    plain_details = details == [_key(OpDetail())]
    return _File(
        gdp_graph=SCHEMA,
        name=graph.name,
        ops=list(graph.op_names),
        types=types,
        type=type_index,
        tensor_bytes=graph.tensor_bytes.tolist(),
        producer=graph.producer.tolist(),
        use_tensor=graph.use_tensor.tolist(),
        use_op=graph.use_op.tolist(),
        flop=_amounts(graph.flop),
        memory_traffic_bytes=_amounts(graph.memory_traffic_bytes),
        backward=np.flatnonzero(graph.is_backward).tolist(),
        scopes=[] if scopes == [""] else scopes,
        scope=[] if scopes == [""] else scope_index,
        details=[]
        if plain_details
        else [_detail(graph.detail[first_of[i]]) for i in range(len(details))],
        detail=[] if plain_details else detail_index,
        tensors=[] if graph.tensor_names == plain else list(graph.tensor_names),
        source=None if graph.source == told else graph.source,
        request=None
        if graph.request is None
        else _Request(*graph.request, list(graph.growth.tokens), graph.growth.longest),
        **columns,
    )


def _from_file(document: _File) -> OpGraph:
    n, t = len(document.ops), len(document.tensor_bytes)
    details = [
        OpDetail(
            dtype=entry.dtype,
            input_shapes=tuple(tuple(shape) for shape in entry.inputs),
            output_shapes=tuple(tuple(shape) for shape in entry.outputs),
            attributes={
                key: tuple(value) if isinstance(value, list) else value
                for key, value in entry.attributes.items()
            },
        )
        for entry in document.details
    ]
    backward, asked = np.zeros(n, dtype=bool), document.request
    backward[document.backward] = True
    # `make_graph` sorts a file whose ops come in another order, and names a cycle.
    return make_graph(
        document.name,
        document.ops,
        [document.types[i] for i in document.type],
        list(zip(document.producer, document.tensor_bytes, strict=True)),
        list(zip(document.use_tensor, document.use_op, strict=True)),
        flop=document.flop or None,
        memory_traffic_bytes=document.memory_traffic_bytes or None,
        is_backward=backward,
        scope=[document.scopes[i] for i in document.scope] or None,
        detail=[details[i] for i in document.detail] or None,
        tensor_names=document.tensors or [f"t{i}" for i in range(t)],
        **{key: getattr(document, key) or None for key in (*_COUNTS, *_IDS)},
        source=document.source,
        request=asked and Request(*(getattr(asked, name) for name in Request._fields)),
        growth=CacheGrowth(tuple(asked.cache_tokens), asked.longest_context)
        if asked
        else UNKNOWN_GROWTH,
    )


def _misfits(document: _File) -> str:
    """The first thing that does not fit together, or an empty string."""
    n, t = len(document.ops), len(document.tensor_bytes)
    lengths = {"type": n, "producer": t, "use_op": len(document.use_tensor)}
    names = ("flop", "memory_traffic_bytes", "scope", "detail", *_COUNTS, *_IDS)
    optional = {**dict.fromkeys(names, n), "tensors": t}
    lengths.update({key: wanted for key, wanted in optional.items() if getattr(document, key)})
    for key, wanted in lengths.items():
        if len(getattr(document, key)) != wanted:
            return f"{key!r} has {len(getattr(document, key))} entries, {wanted} wanted"
    tables = {
        "type": len(document.types), "scope": len(document.scopes),
        "detail": len(document.details), "backward": n, "producer": n, "use_tensor": t,
        "use_op": n,
    }  # fmt: skip
    for key, size in tables.items():
        largest = max(getattr(document, key), default=-1)
        if largest >= size:
            return f"{key!r} holds index {largest}, the largest that exists is {size - 1}"
    return ""


def _key(detail: OpDetail) -> Hashable:
    attributes = tuple(sorted((k, _typed(v)) for k, v in detail.attributes.items()))
    return (detail.dtype, detail.input_shapes, detail.output_shapes, attributes)


def _typed(value: Attribute) -> Hashable:
    """Tells 1 from 1.0, which are equal as keys."""
    kinds = tuple(type(v).__name__ for v in value) if isinstance(value, tuple) else ()
    return (type(value).__name__, str(value), kinds)


def _detail(detail: OpDetail) -> _Detail:
    attributes: Mapping[str, Attribute] = detail.attributes
    return _Detail(
        dtype=detail.dtype,
        inputs=[list(shape) for shape in detail.input_shapes],
        outputs=[list(shape) for shape in detail.output_shapes],
        attributes={
            key: list(value) if isinstance(value, tuple) else value
            for key, value in sorted(attributes.items())
        },
    )


def _amounts(values: np.ndarray) -> list[int | float]:
    """Whole numbers lose their `.0`, which takes up space; zeros alone take none."""
    if not values.any():
        return []
    return [int(v) if v.is_integer() and v < 2**53 else v for v in values.tolist()]
