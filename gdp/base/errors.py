"""The errors that a caller of gdp may catch; wrong arguments are `ValueError`, too."""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def of_kind(value: T | None, kind: type[T], name: str) -> T:
    """The argument if it is of the kind, a default of that kind if it is None; else
    `ArgumentError`.

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


def reason_of(error: BaseException) -> str:
    """Kind and message of an exception of somebody else's code, in one line: the first line of the
    message, of one that holds a traceback the last.

    >>> reason_of(KeyError("x"))
    "KeyError: 'x'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        lines = lines[-1:]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".removesuffix(": ")


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


class RefusedError(PlacementError):
    """A placement that a runtime does not execute, in the runtime's own words."""


@contextlib.contextmanager
def refused_by(library: str, *kinds: type[Exception]) -> Iterator[None]:
    """Context in which exceptions of these kinds, raised by a library, become `RefusedError`; all
    others are faults and pass unchanged."""
    try:
        yield
    except GdpError:
        raise
    except kinds as error:
        raise RefusedError(f"{library} does not execute this: {reason_of(error)}") from error


class InfeasibleError(GdpError):
    """No placement satisfies the memory, kernel and user constraints."""


class MeasurementError(GdpError):
    """A measurement that contradicts itself, such as a rate above what busy times allow."""


class MissingExtraError(GdpError):
    """An optional library is not installed; the message names the extra."""
