"""Sizes as people write them: 20GiB, 300MB."""

import re
from decimal import Decimal
from typing import SupportsFloat

from gdp.base.errors import ArgumentError

_SCALE = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


MAX_SIZE_BYTES = 1 << 62
"""The largest size there is: two of them still add up in 64 bits."""


def whole_number(text: str) -> int | None:
    """A whole number from 1 to 2**31 - 1; None for other texts, such as one in other digits."""
    plain = text.isascii() and text.isdecimal() and len(text) <= 10
    return int(text) if plain and 1 <= int(text) < 1 << 31 else None


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as "20GiB", "300MB" or 1024; GB is 10^9 and GiB 2^30.

    Raises `ValueError` on anything else, and on sizes beyond `MAX_SIZE_BYTES`.

    >>> parse_bytes("1.5GiB"), parse_bytes("2GB"), parse_bytes(7)
    (1610612736, 2000000000, 7)
    """
    if isinstance(text, int):
        return _bounded(text, text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SCALE:
        raise ArgumentError(f"not a size: {text!r}; write it like 20GiB, 300MB or 1024")
    return _bounded(float(match[1]) * _SCALE[match[2].lower()], text)


def _bounded(size: float, text: str | int) -> int:
    if abs(size) > MAX_SIZE_BYTES:
        shown = text if isinstance(text, str) else f"{Decimal(size):.4g}"
        raise ArgumentError(f"{shown} is too large for a size: at most 4EiB, which is 2**62 bytes")
    return int(size)


def format_bytes(size: SupportsFloat) -> str:
    """A size in the largest binary unit that leaves at least 1.

    >>> format_bytes(3 * 2**30), format_bytes(700)
    ('3.00 GiB', '700 B')
    """
    left = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(left) < 1024:
            return f"{left:.0f} B" if unit == "B" else f"{left:.2f} {unit}"
        left /= 1024
    return f"{left:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that reads best.

    >>> format_seconds(0.00123)
    '1.230 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3f} {unit}"
    return f"{seconds / 1e-6:.3f} us"
