"""Traces of modules, cached on disk; `GDP_KEEP_TRACES=0` turns this off."""

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from gdp.base.errors import GdpError
from gdp.base.files.disk_cache import read_cached, write_cached
from gdp.base.files.reading import Kind, decode_json
from gdp.graph.file import decode_graph, encode_graph
from gdp.importers.program import Op, Traced, Value
from gdp.importers.pytorch.quantised import StoredWeight
from gdp.importers.pytorch.repeated import Listed
from gdp.importers.pytorch.unread import Unread
from gdp.ops.rule import Shape

TRACES = "traces"
"""Kind of the cache. A trace is named by the configuration, the arguments, the versions of Python,
torch and transformers, and the importer's code: whatever changes one of them is traced anew."""
_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("base/units.py", "graph/*.py", "importers/*.py", "importers/diffusers/*.py",
         "importers/huggingface/*.py", "importers/pytorch/*.py", "ops/*.py",
         "placement/constraints.py")  # fmt: skip
_TRACE_KIND = Kind("cached trace", GdpError)


class _CachedTrace(msgspec.Struct):
    graph: msgspec.Raw
    estimated: list[str]
    assumptions: list[str]
    parameters: int | None


_Dims = tuple[int, ...]
_CachedValue = tuple[_Dims, str, int, int, int, _Dims | None]
_CachedShape = tuple[_Dims, int, int | None]
_CachedOp = tuple[
    str, str, list[int], list[int], float, float, str, tuple[_Dims, ...],
    Mapping[str, int | float | str | tuple[int | float, ...]], str,
    tuple[tuple[_CachedShape, ...], tuple[_CachedShape, ...]],
]  # fmt: skip


class _CachedProgram(msgspec.Struct):
    """Values by number, and ops that read and make them, as the fields of `Value` and `Op`."""

    values: list[_CachedValue]
    ops: list[_CachedOp]
    weights: list[int]
    paths: dict[str, int]
    caches: list[int]
    estimated: list[str]
    assumptions: list[str]
    parameters: int
    cache_at: dict[int, list[int]]
    contexts: list[int]


class ModelFacts(msgspec.Struct):
    """All of a model that generates but its programs, so that graphs of other sizes are made
    without it."""

    name: str  # of its class
    task: str
    longest: int  # tokens of context that it was made for; 0 where nothing says it
    options: dict[str, Any]  # of how its weights are stored
    unread: Unread


def keeps_traces() -> bool:
    """True unless `GDP_KEEP_TRACES` turns the cache off."""
    return os.environ.get("GDP_KEEP_TRACES", "1").strip().lower() not in ("0", "no", "off", "false")


def key_of(config: Mapping[str, Any], arguments: tuple[Any, ...]) -> str:
    """The digest of all that a trace depends on."""
    parts = [config, arguments, *_versions(), _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_trace(key: str) -> Traced | None:
    """The cached trace of this digest; None for a miss."""
    data = read_cached(TRACES, key) if keeps_traces() else None
    if data is None:
        return None
    try:
        entry = decode_json(data, _TRACE_KIND, _CachedTrace, key)
        graph = decode_graph(bytes(entry.graph), key)
    except GdpError:
        return None
    return Traced(graph, tuple(entry.estimated), tuple(entry.assumptions), entry.parameters)


def cache_trace(key: str, traced: Traced) -> None:
    """Write a trace to the cache under its digest."""
    if not keeps_traces():
        return
    entry = _CachedTrace(
        msgspec.Raw(encode_graph(traced.graph)), list(traced.estimated), list(traced.assumptions),
        traced.parameters,
    )  # fmt: skip
    write_cached(TRACES, key, msgspec.json.encode(entry))


def find_program(key: str) -> Listed | None:
    """The cached program of this digest; None for a miss."""
    data = read_cached(TRACES, key) if key and keeps_traces() else None
    if data is None:
        return None
    try:
        return _decoded(decode_json(data, _TRACE_KIND, _CachedProgram, key))
    except (GdpError, IndexError):
        return None


def cache_program(key: str, listed: Listed) -> None:
    """Write a program to the cache under its digest, unless it has state."""
    if not key or not keeps_traces() or listed.state:
        return
    values: dict[int, int] = {}
    rows: list[_CachedValue] = []

    def number(value: Value) -> int:
        if id(value) not in values:
            values[id(value)] = len(rows)
            rows.append((
                value.dims, value.dtype, value.itemsize, value.maker, value.out, value.weight,
            ))  # fmt: skip
        return values[id(value)]

    ops: list[_CachedOp] = [
        (
            op.op_type, op.scope, [*map(number, op.ins)], [*map(number, op.outs)], op.flop,
            op.traffic_bytes, op.dtype, op.in_dims, op.attributes, op.name,
            (tuple(map(_row, op.shapes[0])), tuple(map(_row, op.shapes[1]))),
        )
        for op in listed.ops
    ]  # fmt: skip
    weights = [*map(number, listed.weights)]
    paths = {path: number(value) for path, value in listed.paths.items()}
    entry = _CachedProgram(
        rows, ops, weights, paths, sorted(listed.caches), sorted(listed.estimated),
        listed.assumptions, listed.parameters,
        {leaf: list(sizes) for leaf, sizes in listed.cache_at.items()}, list(listed.contexts),
    )  # fmt: skip
    write_cached(TRACES, key, msgspec.json.encode(entry))


def find_facts(key: str) -> ModelFacts | None:
    """Cached facts of a model under this digest; None for a miss."""
    data = read_cached(TRACES, key) if keeps_traces() else None
    if data is None:
        return None
    try:
        facts = decode_json(data, _TRACE_KIND, ModelFacts, key)
        # Stored weights with their types.
        stored = msgspec.convert(facts.options.get("stored", {}), dict[str, StoredWeight])
        facts.options |= {"stored": stored} if stored else {}
    except (GdpError, msgspec.ValidationError):
        return None
    return facts


def cache_facts(key: str, facts: ModelFacts) -> None:
    """Write facts of a model to the cache under their digest."""
    if keeps_traces():
        write_cached(TRACES, key, msgspec.json.encode(facts))


def _row(shape: Shape) -> _CachedShape:
    return shape.dims, shape.itemsize, shape.stored_bytes


def _decoded(cached: _CachedProgram) -> Listed:
    values = [Value(*row) for row in cached.values]
    ops = [
        Op(
            op_type, scope, [values[i] for i in ins], [values[i] for i in outs], flop, traffic,
            False, dtype, in_dims, dict(attributes), name,
            shapes=(tuple(Shape(*row) for row in read), tuple(Shape(*row) for row in made)),
        )
        for (
            op_type, scope, ins, outs, flop, traffic, dtype, in_dims, attributes, name,
            (read, made),
        ) in cached.ops
    ]  # fmt: skip
    paths = {path: values[i] for path, i in cached.paths.items()}
    return Listed(
        ops, [values[i] for i in cached.weights], set(cached.estimated), cached.assumptions,
        set(cached.caches), {leaf: tuple(sizes) for leaf, sizes in cached.cache_at.items()}, None,
        cached.parameters, [], paths, tuple(cached.contexts),
    )  # fmt: skip


@functools.cache
def _versions() -> list[str]:
    versions = [f"python {platform.python_version()}"]
    for name in ("torch", "transformers"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(name)
    return versions


@functools.cache
def _code() -> str:
    """The digest of the code that makes graphs of modules."""
    total = hashlib.sha256()
    for path in code_files():
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def code_files() -> list[Path]:
    """The files that shape a trace."""
    return [path for pattern in _CODE for path in sorted(_ROOT.glob(pattern))]
