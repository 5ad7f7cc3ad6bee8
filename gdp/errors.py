"""The errors that a caller of gdp may catch; wrong arguments are `ValueError`, too."""

from typing import TypeVar

T = TypeVar("T")


def of_kind(value: T | None, kind: type[T], name: str) -> T:
    """An argument, or one of its kind by default where it is None; else `ArgumentError`.

    >>> of_kind(None, int, "seed")
    0
    """
    if value is not None and not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return kind() if value is None else value


def one_line(text: str) -> str:
    r"""The text without line breaks: names in files may hold any.

    >>> one_line("no op 'a\\nb'")
    "no op 'a b'"
    """
    return " ".join(text.splitlines())


class GdpError(Exception):
    """Base of every error that gdp raises about its input; the message is one line."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ArgumentError(GdpError, ValueError):
    """An argument that is unknown, out of range, or contradicts another."""


class ModelError(GdpError):
    """A model or graph file that cannot be read, with the node or tensor at fault."""


class ClusterError(GdpError):
    """A cluster description that is malformed or inconsistent."""


class PlacementError(GdpError):
    """A placement file that is malformed or belongs to another graph or cluster."""


class InfeasibleError(GdpError):
    """No placement satisfies the memory, kernel and user constraints."""


class MeasurementError(GdpError):
    """A measurement that contradicts itself, such as a rate above what busy times allow."""


class MissingExtraError(GdpError):
    """An optional library is not installed; the message names the extra."""
