"""What a proof says: no placement is faster than this."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """No placement is faster than this, in whatever order it runs."""

    value_s: float
    argument: str  # what proves it, in words with figures
