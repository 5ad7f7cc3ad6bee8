"""Traffic from a file: a table (CSV) with a row for each request."""

import csv
import io
import math
import os
import re
from typing import Any

from gdp.base.errors import ArgumentError
from gdp.base.files.reading import Kind, read_text
from gdp.base.units import whole_number
from gdp.sim.traffic import Arrival, Traffic

SUFFIX = ".csv"
COLUMNS = ("at_s", "prompt", "new")
_KIND = Kind("table of requests", ArgumentError)
_MOST = 1_000_000  # rows, and tokens of one request


def read_traffic(path: str | os.PathLike[str]) -> Traffic:
    """The requests of a file in the order of their arrival.

    Its first row names the columns: `at_s`, seconds since the first request (without it all arrive
    at once), `prompt` and `new`, tokens that are read and written. Requests of one time are in the
    order of their rows. A row needs as many cells as there are columns, and a column of times this
    name.

    Raises:
        ArgumentError: The file cannot be read, or a row is no request; the message names the row.
    """
    rows = csv.DictReader(io.StringIO(read_text(path, _KIND)))
    try:
        named = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        if wrong := [name for name in COLUMNS if named.count(name) > 1]:
            raise ArgumentError(f"{path}: the first row names {wrong[0]} twice")
        if "at_s" not in named and (times := [name for name in named if _is_time(name)]):
            raise ArgumentError(f"{path}: the column of times must be called at_s, not {times[0]}")
        if missing := [name for name in COLUMNS[1:] if name not in named]:
            found = ", ".join(named)[:80] or "nothing"
            raise ArgumentError(
                f"{path}: the first row must name the columns {', '.join(COLUMNS)}; {missing[0]} "
                f"misses, found {found}"
            )
        arrivals = [_arrival(path, rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ArgumentError(f"{path}: {error}") from None
    if not 1 <= len(arrivals) <= _MOST:
        raise ArgumentError(f"{path} has {len(arrivals)} requests; give 1 to {_MOST}")
    return Traffic(tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)))


def _is_time(name: str) -> bool:
    """True for a column that probably holds the times of the requests."""
    plain = "_".join(re.findall("[a-z]+", name.lower()))
    return plain in ("as", "at", "ats", "a_s", "t") or any(
        word in plain for word in ("at_s", "at_m", "time", "arriv", "second", "start", "sent")
    )


def _arrival(path: str | os.PathLike[str], line: int, row: dict[Any, Any]) -> Arrival:
    """The request of a row."""
    if None in row or None in row.values():
        raise ArgumentError(
            f"{path}, line {line}: the row has not as many cells as there are columns"
        )
    prompt, new = (whole_number((row[name] or "").strip()) for name in COLUMNS[1:])
    try:
        at_s = float(row["at_s"] or "") if "at_s" in row else 0.0
    except ValueError:
        at_s = math.nan
    if prompt is None or new is None or max(prompt, new) > _MOST or not 0 <= at_s < math.inf:
        raise ArgumentError(
            f"{path}, line {line}: a request needs at_s of at least 0, and prompt and new from 1 "
            f"to {_MOST} tokens"
        )
    return Arrival(at_s, prompt, new, line)
