"""Configurations of transformers are checked before its classes see them.

Those build what a file asks for: 2**40 layers never end, and a list of labels that long takes all
memory before the first error.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gdp.errors import ModelError
from gdp.files.reading import Kind, read_bytes

MOST_LAYERS, MOST_EXPERTS, MOST_LABELS = 1000, 10_000, 1 << 20
"""Several times the largest models there are."""
MOST_BYTES = 1 << 24
"""Of a configuration; those with the names of 20,000 classes take 1 MB."""
MOST_DEPTH = 64

_KIND = Kind("configuration of transformers", ModelError)
# Fields that say how often something is built, by name, and the most of it.
_COUNTS = (
    (re.compile(r"layers?$|^depths?$|_depth$|(^|_)(blocks?|stages|hidden_groups|group_num)$"),
     MOST_LAYERS),
    (re.compile(r"experts?$"), MOST_EXPERTS),
    (re.compile(r"^num_labels$|_classes$"), MOST_LABELS),
)  # fmt: skip
_SIZES = ("image_size", "num_channels", "patch_size")
_LARGEST = (1 << 31) - 1


def check_config(path: Path) -> dict[str, Any]:
    """A configuration as it stands in its file; raises `ModelError` where it is no JSON object, or
    names what cannot be built."""
    data = read_bytes(path, _KIND, MOST_BYTES)
    try:
        # As transformers reads it: NaN and infinity stand in some of its configurations.
        document = json.loads(data)
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply for a {_KIND.name}") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more than 4300 digits
        raise ModelError(f"{path} is no {_KIND.name}: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is no {_KIND.name}: it holds no object with a model_type")
    names = document.get("architectures")
    if not (names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))):
        raise ModelError(
            f"{path}: architectures must be a list of class names, got {_short(names)}"
        )
    for key, value in _fields(document, path, 0):
        _check_field(key, value, path)
    return document


def _fields(document: Mapping[str, Any], path: Path, depth: int) -> Iterator[tuple[str, Any]]:
    """Every field, those of configurations within it, too."""
    if depth > MOST_DEPTH:
        raise ModelError(f"{path} is nested too deeply for a {_KIND.name}")
    for key, value in document.items():
        yield key, value
        if isinstance(value, dict):
            yield from _fields(value, path, depth + 1)


def _check_field(key: str, value: Any, path: Path) -> None:
    numbers = value if isinstance(value, list) else [value]
    if key in _SIZES and value is not None:
        pair = not isinstance(value, list) or len(value) == 2
        if not pair or not all(_is_whole(n) and 1 <= n <= _LARGEST for n in numbers):
            raise ModelError(
                f"{path}: {key} must be a positive whole number or two of them, got {_short(value)}"
            )
    for names, most in _COUNTS:
        if names.search(key) and any(_is_whole(n) and not 0 <= n <= most for n in numbers):
            raise ModelError(f"{path}: {key} must be from 0 to {most}, got {_short(value)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4300 digits, a list in lists
        text = "a huge value"
    return text if len(text) < 60 else f"{text[:60]}..."
