"""Checks of a `quantization_config` before a scheme reads it: the type of every field that one
reads, wherever it stands."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gdp.base.errors import ModelError

MOST_DEPTH = 16


class Wanted(NamedTuple):
    """A type, and its name in a message."""

    said: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FLAG = Wanted("true or false", lambda v: isinstance(v, bool))
_TEXT = Wanted("a text", _is_text)
_BITS = Wanted("a whole number from 1 to 16", lambda v: _is_whole(v) and 1 <= v <= 16)
_GROUP = Wanted("-1 or a positive whole number", lambda v: _is_whole(v) and (v == -1 or v > 0))
_NAMES = Wanted("a list of names", lambda v: _all(v, _is_text))
_BLOCKS = Wanted("a list of lists of names", lambda v: _all(v, lambda part: _all(part, _is_text)))
_PAIR = Wanted(
    "two positive whole numbers",
    lambda v: _all(v, lambda n: _is_whole(n) and n > 0) and len(v) == 2,
)
_OBJECT = Wanted("an object", lambda v: isinstance(v, Mapping))
# Of gptqmodel patterns of modules, of compressed-tensors when scales are made, "local" for some.
_DYNAMIC = Wanted("an object, a flag or a text", lambda v: isinstance(v, Mapping | bool | str))
_TYPE = Wanted("a text or an object", lambda v: isinstance(v, str | Mapping))

FIELDS: Mapping[str, Wanted] = {
    "quant_method": _TEXT, "load_in_4bit": _FLAG, "load_in_8bit": _FLAG,
    "bnb_4bit_use_double_quant": _FLAG, "llm_int8_skip_modules": _NAMES,
    "modules_to_not_convert": _NAMES, "skip_modules": _NAMES, "bits": _BITS, "w_bit": _BITS,
    "nbits": _BITS, "num_bits": _BITS, "group_size": _GROUP, "lm_head": _FLAG,
    "modules_in_block_to_quantize": _BLOCKS, "dynamic": _DYNAMIC, "weight_block_size": _PAIR,
    "block_structure": _PAIR, "scale_fmt": _TEXT, "activation_scheme": _TEXT,
    "quant_config": _OBJECT, "weight_quant_params": _OBJECT, "quant_type": _TYPE,
    "quant_type_kwargs": _OBJECT, "_data": _OBJECT, "_type": _TEXT, "ignore": _NAMES,
    "exclude_modules": _NAMES,
    "config_groups": _OBJECT, "targets": _NAMES, "weights": _OBJECT,
    "input_activations": _OBJECT, "strategy": _TEXT, "symmetric": _FLAG, "dequantize": _FLAG,
    "axis": Wanted("0 or 1", lambda v: _is_whole(v) and v in (0, 1)),
}  # fmt: skip
"""Types of the fields that schemes read; null is always as if the field were left out."""
_GROUPS = ("config_groups",)
GROUPED = ("compressed-tensors", "modelopt")
"""Methods whose modules are in groups, each stored in its own way."""


def check_quantization(config: Mapping[str, Any], where: str) -> None:
    """Raise `ModelError` for a field of another type."""
    _check(config, f"{where}: quantization_config", 0)


def _check(config: Mapping[str, Any], path: str, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise ModelError(f"{path} is nested too deeply")
    for key, value in config.items():
        own = f"{path}.{key}"
        wanted = FIELDS.get(key)
        if wanted and value is not None and not wanted.fits(value):
            raise ModelError(f"{own} must be {wanted.said}, got {_short(value)}")
        if key in _GROUPS and any(not isinstance(v, Mapping) for v in (value or {}).values()):
            raise ModelError(f"{own} must be an object of objects, got {_short(value)}")
        if isinstance(value, Mapping):
            _check(value, own, depth + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
