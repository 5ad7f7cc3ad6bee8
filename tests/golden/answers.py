"""Recorded answers: their file, what is kept of a result, and how two answers differ."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("answers.json")
TOLERANCE = 1e-9
"""Relative, of numbers with a fraction; counts, bytes and texts are equal or not."""
LONGEST = 160
"""Characters of a placement that are recorded as they are; of longer ones a digest is."""
UNTOLD = frozenset(
    ("name", "model", "cluster", "format", "schema", "versions", "made_by", "graph_digest",
     "sha256", "file")
)  # fmt: skip
"""Keys of documents that hold names, versions and digests of files, which are no behaviour."""


def load() -> dict[str, Any]:
    """The recorded answers by case; none where nothing was recorded yet."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(answers: Mapping[str, Any]) -> None:
    """Write all answers, sorted, so that a change is a small difference of the file."""
    FILE.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


def numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a result, of its JSON."""
    if "latency_s" not in result:  # of a method without an answer
        return {"feasible": result["feasible"]}
    names = (
        "latency_s", "period_s", "bound_s", "proven_optimal", "feasible", "peak_bytes", "devices",
        "kernels", "teams", "evaluations",
    )  # fmt: skip
    return {name: result[name] for name in names}


def placement_summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """A placement file without names: the device of every op in the order of the model."""
    return {
        "placement": shortened(document["device"]),
        "simplicity_cost": document["simplicity_cost"],
        "streamed_bytes": document["streamed_bytes"],
    }


def shortened(values: Sequence[Any]) -> str:
    """Values with how often each stands in a row, such as "0*3 1", or where that is long a digest.

    >>> shortened([0, 0, 0, 1])
    '0*3 1'
    """
    runs = [(value, len(list(group))) for value, group in itertools.groupby(values)]
    text = " ".join(f"{value}*{count}" if count > 1 else f"{value}" for value, count in runs)
    if len(text) <= LONGEST:
        return text
    return f"{len(values)} values, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def without(value: Any) -> Any:
    """A document without the keys of `UNTOLD`."""
    if isinstance(value, dict):
        return {key: without(kept) for key, kept in value.items() if key not in UNTOLD}
    return [without(kept) for kept in value] if isinstance(value, list) else value


def differences(recorded: Any, found: Any, at: str = "") -> Iterator[str]:
    """One line for each thing that is not as recorded.

    >>> list(differences({"a": {"b": 1.0}, "c": 2}, {"a": {"b": 1.5}, "c": 2}))
    ['a.b: 1.0 -> 1.5 (+50%)']
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in [*recorded, *(key for key in found if key not in recorded)]:
            inner = f"{at}.{key}" if at else str(key)
            yield from differences(recorded.get(key, ABSENT), found.get(key, ABSENT), inner)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, (before, after) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(before, after, f"{at}[{i}]")
    elif not _equal(recorded, found):
        change = ""
        if _is_number(recorded) and _is_number(found) and recorded:
            change = f" ({100 * (found - recorded) / abs(recorded):+.3g}%)"
        yield f"{at}: {recorded!r} -> {found!r}{change}"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
"""Stands for a key that only one of two answers has."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return type(a) is type(b) and a == b
