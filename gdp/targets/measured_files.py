"""Result files of benchmarks, read once and recognised by their keys."""

import codecs
import csv
import io
import json
import os
import re
from typing import Any

from gdp.base.files.reading import MAX_VALUES, Kind, read_bytes
from gdp.base.rows import imported
from gdp.corrections.run import MeasuredRun, MeasurementFileError
from gdp.targets.measured import Reader, Record
from gdp.targets.table import TARGETS

FILE = Kind("result file of a benchmark", MeasurementFileError)
ANY_SERVER = (
    "gdp.targets.measured_servers:GUIDE", "gdp.targets.measured_servers:PERF",
    "gdp.targets.measured_servers:OWN",
)  # fmt: skip
"""Readers of tools that ask any server; those of engines are in their rows."""
MAX_RECORDS = 100_000
CUT = re.compile(r"[\w.+-]*\s*\Z")
"""The rest of a file behind an error where the file ends within a value."""


def readers() -> list[Reader]:
    """All readers, those of engines first."""
    rows = [name for target in TARGETS.values() for name in target.measured]
    return [imported(name) for name in (*rows, *ANY_SERVER)]


def read_runs(path: str | os.PathLike[str]) -> list[MeasuredRun]:
    """The measured runs of a result file, whatever its name is.

    Raises:
        MeasurementFileError: It cannot be read, is broken off, is of no form that gdp knows, has
            requests that failed, or says what cannot be.
    """
    where, records = str(path), records_of_file(path)
    known = readers()
    fitting = [reader for reader in known if all(map(reader.knows, records))]
    if not fitting:
        some = [reader.title for reader in known if any(map(reader.knows, records))]
        if some:
            raise FILE.exception(
                f"{where} mixes records of {some[0]} with others; give one file for each"
            )
        keys = ", ".join(sorted(map(str, records[0]))[:6]) or "none"
        raise FILE.exception(
            f"{where} is of no form that gdp knows (its keys: {keys[:200]}); give a result file of "
            f"{'; '.join(reader.title for reader in known)}"
        )
    return fitting[0].read(records, where)


def records_of_file(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file, as `records_of` reads them."""
    return records_of(read_bytes(path, FILE), str(path))


def records_of(data: bytes, where: str) -> list[Record]:
    """The JSON objects of a file: one, those of its array, those of its lines, or rows of a table.

    Raises:
        MeasurementFileError: The file is none of these, or ends within one.
    """
    text = _text(data, where)
    if not text.strip():
        raise FILE.exception(f"{where} is empty; let the benchmark write its file again")
    if text.count(",") + text.count("[") + text.count("{") > MAX_VALUES:
        raise FILE.exception(f"{where} holds more than {MAX_VALUES} values, which is too much")
    if text.lstrip()[0] not in "[{":
        return _table(text, where)
    value, error = _json(text, where)
    if error is None:
        records = value if isinstance(value, list) else [value]
    elif error.msg == "Extra data" and text.lstrip().startswith("{"):
        records = _lines(text, where)
    elif _is_cut(error):
        raise FILE.exception(f"{where} is cut short: it ends within a value; copy the whole file")
    else:
        raise FILE.exception(f"{where} is not JSON: {error}; give the file as the tool wrote it")
    if not records or not all(isinstance(record, dict) for record in records):
        raise FILE.exception(
            f"{where} holds no records of a benchmark; give the file of its results"
        )
    if len(records) > MAX_RECORDS:
        raise FILE.exception(f"{where} holds {len(records)} records, more than {MAX_RECORDS}")
    return records


def _text(data: bytes, where: str) -> str:
    """The text of a file; a shell on Windows writes UTF-16."""
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise FILE.exception(f"{where} is no text: {error}; give a file of results") from None


def _json(text: str, where: str) -> tuple[Any, json.JSONDecodeError | None]:
    """A value, or the reason why the text is none. Python's decoder takes `Infinity`, which
    `sglang.bench_serving` writes."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        return None, error
    except RecursionError:
        raise FILE.exception(f"{where} is nested too deeply for a {FILE.name}") from None
    except ValueError as error:  # a number of thousands of digits
        raise FILE.exception(f"{where} is not JSON: {error}") from None


def _is_cut(error: json.JSONDecodeError) -> bool:
    """True where a text ends within a value."""
    return error.msg.startswith("Unterminated") or CUT.match(error.doc, error.pos) is not None


def _lines(text: str, where: str) -> list[Any]:
    """The values of a file of one JSON object a line."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    values = []
    for i, line in lines:
        value, error = _json(line, where)
        if error is not None and i == lines[-1][0] and _is_cut(error):
            raise FILE.exception(
                f"{where} is cut short: its last line ends within a value; remove line {i}, or "
                "copy the whole file"
            )
        if error is not None:
            raise FILE.exception(
                f"{where}: line {i} is not JSON: {error.msg}; give the file as the tool wrote it"
            )
        values.append(value)
    return values


def _table(text: str, where: str) -> list[Record]:
    """The rows of a table of llama-bench, or of kernels, by their columns."""
    try:
        header, *rows = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise FILE.exception(
            f"{where} is no table, or is cut short: {error}; copy the whole file"
        ) from None
    if not {"build_commit", "dtype"} & set(header) or not rows:
        raise FILE.exception(
            f"{where} is neither JSON nor a table of llama-bench or of kernels with rows; give a "
            "file of results in JSON"
        )
    for i, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise FILE.exception(
                f"{where} is cut short: row {i} has {len(row)} of {len(header)} columns; copy the "
                "whole file"
            )
    return [dict(zip(header, row, strict=True)) for row in rows]
