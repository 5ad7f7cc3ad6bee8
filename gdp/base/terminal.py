"""Names from models and files, as a terminal may show them, and output of native libraries."""

import contextlib
import html
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar

_on_stage: ContextVar[Callable[[str], object] | None] = ContextVar("on_stage", default=None)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    r"""The text with everything that a terminal would obey written out.

    These are control characters (escape sequences, newlines), characters that turn the direction of
    writing or hide (Unicode's category C), and separators other than the space (Z): what
    `str.isprintable` is false of. A name in a model may hold any of them.

    >>> print(printable("a\x1b[31mb\n\u202ec"))
    a\x1b[31mb\n\u202ec
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(lines: Iterable[str]) -> str:
    """Lines joined into a text, each of them made printable."""
    return "\n".join(map(printable, lines))


def _escaped(letter: str) -> str:
    code = ord(letter)
    if letter in _SHORT:
        return _SHORT[letter]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PrintableFormatter(logging.Formatter):
    """Log messages on one line each; tracebacks below them keep theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def log_to_stderr() -> None:
    """Log warnings, and records at the root logger's level, to standard error, each text once."""
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return text not in shown and not shown.add(text)

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_new)
    handler.setFormatter(PrintableFormatter("gdp: %(message)s"))
    logging.basicConfig(handlers=[handler])


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A small table for notebooks, every cell escaped."""
    lines = [("th", header), *(("td", row) for row in rows)]
    body = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in cells) + "</tr>"
        for tag, cells in lines
    )
    return f"<table>{body}</table>"


def stage(text: str) -> None:
    """Report the start of a stage to the listener, if there is one."""
    listener = _on_stage.get()
    if listener is not None:
        listener(text)


@contextlib.contextmanager
def listening(listener: Callable[[str], object]) -> Iterator[None]:
    """Context in which the starts of stages are reported to the listener."""
    token = _on_stage.set(listener)
    try:
        yield
    finally:
        _on_stage.reset(token)


@contextlib.contextmanager
def redirect_native_stdout() -> Iterator[None]:
    """Discard output to file descriptor 1: METIS and HiGHS report details there, no errors."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
