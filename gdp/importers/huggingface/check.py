"""Configurations of transformers are checked before its classes see them, and lose the code that
they name.

The classes build what a file asks for: 2**40 layers never end, and a list of labels that long takes
all memory before the first error.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, read_bytes

LOG = logging.getLogger(__name__)

ATTENTION = ("sdpa", "eager")
"""The implementations of attention that a configuration may ask for: torch's own."""
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_REMOVED = {
    *_ATTENTION_KEYS, "_attn_implementation_autoset", "auto_map", "trust_remote_code",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "use_kernels", "kernel_config",
}  # fmt: skip
"""Keys of a configuration that transformers never sees: code, and kernels by name."""

MOST_LAYERS, MOST_EXPERTS, MOST_LABELS = 1000, 1 << 15, 1 << 20
"""Several times the largest models there are."""
MOST_BYTES = 1 << 24
"""Of a configuration; those with the names of 20,000 classes take 1 MB."""
MOST_DEPTH = 64

_KIND = Kind("configuration of transformers", ModelError)
# Fields that say how often something is built, by name, and the most of it.
_COUNTS = (
    (re.compile(r"layers$|^n_layer$|^depths?$|_depth$|(^|_)(blocks?|stages|hidden_groups|group_num)$"),
     MOST_LAYERS),
    (re.compile(r"experts?$"), MOST_EXPERTS),
    (re.compile(r"^num_labels$|_classes$"), MOST_LABELS),
)  # fmt: skip
# One layer of several, which may be counted from the last: -1 is that.
_LAYER = re.compile(r"(?<!^n)_layer$|_feature_layers$")
_SIZES = {"image_size": 2, "num_channels": 2, "patch_size": MOST_DEPTH}
"""Fields that are a positive whole number, or a list of at most so many."""
LARGEST = (1 << 31) - 1


def check_config(path: Path) -> dict[str, Any]:
    """A configuration as read from its file; raises `ModelError` if it is no JSON object, or names
    something that cannot be built."""
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
        several = {2: "two of them"}.get(_SIZES[key], "a list of them, one of each stage")
        fits = not isinstance(value, list) or 2 <= len(value) <= _SIZES[key]
        if not fits or not all(is_whole(n) and 1 <= n <= LARGEST for n in numbers):
            raise ModelError(
                f"{path}: {key} must be a positive whole number or {several}, got {_short(value)}"
            )
    if _LAYER.search(key):
        if any(is_whole(n) and abs(n) > MOST_LAYERS for n in numbers):
            raise ModelError(
                f"{path}: {key} must be from {-MOST_LAYERS} to {MOST_LAYERS}, got {_short(value)}"
            )
        return
    for names, most in _COUNTS:
        if names.search(key) and any(is_whole(n) and not 0 <= n <= most for n in numbers):
            raise ModelError(f"{path}: {key} must be from 0 to {most}, got {_short(value)}")


def is_whole(value: Any) -> bool:
    """True for a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4300 digits, a list in lists
        text = "a huge value"
    return text if len(text) < 60 else f"{text[:60]}..."


def without_code(value: Any) -> Any:
    """A configuration, and those nested in it, without the keys in `_REMOVED`."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k not in _REMOVED}
        asked = next((value[k] for k in _ATTENTION_KEYS if k in value), None)
        if asked in ATTENTION:
            kept["attn_implementation"] = asked
        return {k: without_code(v) for k, v in kept.items()}
    return [without_code(part) for part in value] if isinstance(value, list) else value


def attention_of(given: Mapping[str, Any], path: Path) -> str | None:
    """Attention implementation named in a configuration; None if it names none or one that is not
    supported."""
    asked = next((given[k] for k in _ATTENTION_KEYS if given.get(k) is not None), None)
    if asked is not None and asked not in ATTENTION:
        LOG.warning(
            "%s: attention %r is no part of torch; %s is placed instead", path, asked,
            " or ".join(ATTENTION),
        )  # fmt: skip
        return None
    return asked


def without_quantisation(document: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those within it, without its quantisation."""
    return {
        key: without_quantisation(value) if isinstance(value, Mapping) else value
        for key, value in document.items()
        if key != "quantization_config"
    }
