"""Traces of modules, kept between processes; `GDP_KEEP_TRACES=0` turns this off."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from gdp.errors import GdpError
from gdp.files.kept import read_kept, write_kept
from gdp.files.reading import Kind, decode_json
from gdp.graph.file import decode_graph, encode_graph
from gdp.importers.pytorch.model import Traced

TRACES = "traces"
"""Kind of the cache. A trace is named by the configuration, the arguments, the versions of torch
and transformers, and the code of the importer: whatever changes one of them is traced anew."""
_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("graph", "importers/pytorch", "importers", "ops")
_TRACE_KIND = Kind("kept trace", GdpError)


class _KeptTrace(msgspec.Struct):
    graph: msgspec.Raw
    estimated: list[str]
    assumptions: list[str]
    parameters: int | None


def keeps_traces() -> bool:
    """True unless `GDP_KEEP_TRACES` turns keeping off."""
    return os.environ.get("GDP_KEEP_TRACES", "1").strip().lower() not in ("0", "no", "off", "false")


def key_of(config: Mapping[str, Any], arguments: tuple[Any, ...]) -> str:
    """The digest of all that a trace depends on."""
    parts = [config, arguments, *_versions(), _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_trace(key: str) -> Traced | None:
    """The trace of this digest, None where none is kept that can be read."""
    data = read_kept(TRACES, key) if keeps_traces() else None
    if data is None:
        return None
    try:
        entry = decode_json(data, _TRACE_KIND, _KeptTrace, key)
        graph = decode_graph(bytes(entry.graph), key)
    except GdpError:
        return None
    return Traced(graph, tuple(entry.estimated), tuple(entry.assumptions), entry.parameters)


def keep_trace(key: str, traced: Traced) -> None:
    """Keep a trace under its digest."""
    if not keeps_traces():
        return
    entry = _KeptTrace(
        msgspec.Raw(encode_graph(traced.graph)), list(traced.estimated), list(traced.assumptions),
        traced.parameters,
    )  # fmt: skip
    write_kept(TRACES, key, msgspec.json.encode(entry))


def _versions() -> list[str]:
    versions = []
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
    for folder in _CODE:
        for path in sorted((_ROOT / folder).glob("*.py")):
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()
